"""What is wrong with a run's model, tokenizer, data and arithmetic: findings, each with its fix.

Reads files, starts nothing. `look_at_source` reads every row and goes on behind a wrong one, so
that one look tells all of them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollpacker.cli.doctor import Finding
from rollpacker.cli.model_files import ModelFacts
from rollpacker.data import DataError, RunData, TextTokenizer
from rollpacker.data.errors import OverlongPromptError
from rollpacker.data.rows import LoadedPrompts, PromptRules, read_prompts
from rollpacker.data_settings import DataSource
from rollpacker.policy.tail_batching import TailBatchingRules
from rollpacker.settings import RunSettings
from rollpacker.types import Prompt

_ROWS_NAMED = 5


@dataclass(frozen=True, slots=True)
class SourceLook:
    """What the rows of one source are."""

    name: str  # for people: the source's name, or what it is for
    path: Path
    prompts: tuple[Prompt, ...]
    errors: tuple[DataError, ...] = ()  # of rows, over-long ones apart
    overlong: tuple[DataError, ...] = ()
    unreadable: DataError | None = None  # the source as a whole
    rules: PromptRules = field(repr=False, kw_only=True)

    def loaded(self) -> LoadedPrompts:
        return LoadedPrompts(self.prompts, len(self.overlong))


def look_at_source(
    name: str, source: DataSource, tokenizer: TextTokenizer, rules: PromptRules
) -> SourceLook:
    """Read every row."""
    prompts: list[Prompt] = []
    errors: list[DataError] = []
    unreadable = None
    try:
        for item in read_prompts(source, tokenizer, rules):
            (errors if isinstance(item, DataError) else prompts).append(item)  # type: ignore[arg-type]
    except DataError as error:
        unreadable = error
    return SourceLook(
        name,
        Path(source.path),
        tuple(prompts),
        tuple(error for error in errors if not isinstance(error, OverlongPromptError)),
        tuple(error for error in errors if isinstance(error, OverlongPromptError)),
        unreadable,
        rules=rules,
    )


def source_findings(look: SourceLook) -> Iterator[Finding]:
    """Wrong rows by column, over-long prompts and what becomes of them, repeated prompts."""
    subject = f"data {look.name}".strip()
    if look.unreadable is not None:
        yield _bad(subject, str(look.unreadable))
    by_column: dict[str, list[DataError]] = defaultdict(list)
    for error in look.errors:
        by_column[error.field].append(error)
    for column, errors in by_column.items():
        what, fix = _parted(errors[0].problem)
        yield Finding(subject, "bad", f"{_rows(errors)}, {column}: {what}", fix)
    if look.overlong:
        what, fix = _parted(look.overlong[0].problem)
        skipped = look.rules.skip_overlong
        policy = "left out" if skipped else "refused"
        yield Finding(
            subject,
            "note" if skipped else "bad",
            f"over-long, {policy}: {_rows(look.overlong)}; the first {what}",
            "" if skipped else fix,
        )
    if not look.prompts and not look.errors and not look.overlong and not look.unreadable:
        yield Finding(subject, "bad", f"{look.path} holds no rows", "write some")
    repeated = sum(count - 1 for count in Counter(p.token_ids for p in look.prompts).values())
    if repeated:
        what = f"{repeated} prompts are the same text as another one"
        yield Finding(subject, "note", what, "leave them out, unless they should weigh more")


def leak_findings(data: RunData) -> Iterator[Finding]:
    """Held-out prompts that are trained on too."""
    trained = {prompt.token_ids for prompt in data.dataset}
    for name, prompts in data.validation.items():
        known = sum(prompt.token_ids in trained for prompt in prompts)
        if known:
            what = f"{known} of {len(prompts)} prompts are in the training data too"
            yield Finding(f"held-out {name}", "note", what, "take them out of one of the two")


def tokenizer_findings(
    settings: RunSettings, model: ModelFacts, tokenizer: TextTokenizer
) -> Iterator[Finding]:
    """Whether tokenizer, stop tokens, chat template and model belong together."""
    size, known = model.vocabulary_size, tokenizer.vocabulary_size
    if size is not None and known > size:
        what = f"{tokenizer.directory} has {known} token ids, the model only {size}"
        yield Finding("tokenizer", "bad", what, "give the model's own as data.tokenizer")
    stops = settings.sampling.stop_token_ids or tokenizer.eos_token_ids
    if not stops:
        what = "none: every response runs to its cap"
        yield Finding("stop tokens", "note", what, "set sampling.stop_token_ids")
    outside = [token for token in stops if token >= (size or known)]
    if outside:
        what = f"{outside[0]} is no token id of the model, which has {size or known}"
        yield Finding(
            "stop tokens", "bad", what, "set sampling.stop_token_ids, or mend config.json"
        )
    chat = settings.data.apply_chat_template
    if chat and not tokenizer.has_chat_template:
        what = f"{tokenizer.directory} has none, and data.apply_chat_template is set"
        yield Finding("chat template", "bad", what, "add chat_template.jinja, or unset it")
    if not chat and tokenizer.has_chat_template:
        what = (
            "the model has one, and data.apply_chat_template is not set: prompts go in as they are"
        )
        yield Finding("chat template", "note", what, "set data.apply_chat_template: true")


def batch_findings(settings: RunSettings, data: RunData) -> Iterator[Finding]:
    """Steps that are never full, groups that teach nothing."""
    kept = settings.tail_batching.prompts_per_step
    prompts, epochs = len(data.dataset), data.dataset.epochs
    draws = prompts * epochs
    if draws < kept:
        what = f"{prompts} prompts x {epochs} epochs = {draws} draws"
        what += f", fewer than prompts_per_step {kept}"
        yield Finding("batch", "bad", what, "lower prompts_per_step, or give more data or epochs")
    elif draws % kept and not settings.max_steps:
        what = f"{prompts} prompts x {epochs} epochs = {draws // kept} steps of {kept}"
        what += f" + {draws % kept} in the last one"
        fix = f"max_steps: {draws // kept}, or data that {kept} divides"
        yield Finding("batch", "note", what, fix)
    if settings.tail_batching.responses_per_prompt == 1:
        what = "1 response per prompt: reward - mean of the group = 0, so nothing is learned"
        yield Finding("batch", "bad", what, "tail_batching.responses_per_prompt: 2 or more")


def length_findings(settings: RunSettings, model: ModelFacts, data: RunData) -> Iterator[Finding]:
    """Sequences that the model or a forward pass does not hold."""
    longest = max(len(prompt.token_ids) for prompt in all_prompts(data))
    cap = settings.sampling.max_response_tokens
    if model.context_tokens is not None and longest + cap > model.context_tokens:
        what = (
            f"sampling.max_response_tokens {cap} + the longest prompt {longest} ="
            f" {longest + cap} tokens, above the model's context of {model.context_tokens}"
        )
        fix = f"at most {model.context_tokens - longest} fit"
        yield Finding("context", "bad", what, fix)
    budget = settings.trainer.micro_batch_tokens
    if longest + cap > budget:
        what = f"prompt {longest} + response {cap} = {longest + cap} > micro_batch_tokens {budget}"
        yield Finding(
            "memory", "note", f"{what}: such a sequence goes alone", "raise it if it fits"
        )


def step_rows(settings: RunSettings, data: RunData) -> list[tuple[str, str]]:
    """The arithmetic of a step: responses and tokens, launches per level, steps in all."""
    batching = settings.tail_batching
    kept, responses = batching.prompts_per_step, batching.responses_per_prompt
    rules = TailBatchingRules(kept, responses, batching.resolved_speculation_factors)
    tokens = kept * responses * settings.sampling.max_response_tokens
    rows = [
        (
            "step",
            f"{kept} prompts x {responses} responses = {kept * responses} responses,"
            f" at most {tokens:,} tokens",
        )
    ]
    for level in range(rules.levels + 1):
        launched = rules.launch_count(level)
        fate = f"defers {launched - kept}" if level < rules.levels else "defers none"
        rows.append((f"level {level}", f"launches {launched}, keeps {kept}, {fate}"))
    draws = len(data.dataset) * data.dataset.epochs
    steps = math.ceil(draws / kept)
    limited = min(steps, settings.max_steps) if settings.max_steps else steps
    last = draws - (steps - 1) * kept
    smaller = f"; the last one has {last} prompts" if limited == steps and last < kept else ""
    rows.append(("run", f"{limited} steps of {steps} that the data allow{smaller}"))
    return rows


def domain_rows(settings: RunSettings, data: RunData) -> list[tuple[str, str]]:
    """Size and share of each domain, and how often the run passes over it."""
    weights: Mapping[str, float] = {s.name: s.weight for s in settings.data.sources if s.weight}
    total, whole = sum(weights.values()), len(data.dataset)
    rows = []
    for domain, size in sorted(data.dataset.domains.items()):
        if domain:
            share = weights[domain] / total if weights else size / whole
            passes = share * whole * data.dataset.epochs / size
            what = f"{size} prompts, {share:.1%} of the draws, {passes:.2g} passes"
            rows.append((f"domain {domain}", what))
    return rows


def all_prompts(data: RunData) -> list[Prompt]:
    """Training and held-out prompts."""
    return [*data.dataset, *(p for prompts in data.validation.values() for p in prompts)]


def _rows(errors: Sequence[DataError]) -> str:
    named = [str(error.row) for error in errors[:_ROWS_NAMED]]
    more = f" and {len(errors) - len(named)} more" if len(errors) > len(named) else ""
    return f"row{'s' if len(errors) > 1 else ''} {', '.join(named)}{more}"


def _bad(subject: str, message: str) -> Finding:
    return Finding(subject, "bad", *_parted(message))


def _parted(message: str) -> tuple[str, str]:
    """(what is wrong, the fix) of a message that names the fix last."""
    what, mark, fix = message.rpartition("; ")
    return (what, fix) if mark else (message, "")


def named_sources(settings: RunSettings) -> Iterable[tuple[str, DataSource]]:
    """Every source of a run with its name for people."""
    for source in settings.data.resolved_sources:
        yield source.name, source
    for source in settings.held_out_sets:
        yield f"held-out {source.name}", source.model_copy(update={"name": ""})
