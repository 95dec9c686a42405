"""Everything that a run reads from files before it starts, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollpacker.data.dataset import PromptDataset
from rollpacker.data.rows import LoadedPrompts, PromptRules, load_prompts
from rollpacker.data.tokenizer import TextTokenizer, read_object
from rollpacker.settings import RunSettings
from rollpacker.types import GraderKind, Prompt


@dataclass(frozen=True, slots=True)
class RunData:
    """Tokenizer, training prompts and held-out prompts of a run."""

    tokenizer: TextTokenizer
    dataset: PromptDataset
    validation: Mapping[str, tuple[Prompt, ...]]  # by held-out set, at most `validation.prompts`
    overlong: int = 0  # prompts that were left out
    context_tokens: int = 0  # of the longest sequence that the model was made for; 0: not said

    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, held-out ones included."""
        sets = (self.dataset, *self.validation.values())
        return max((len(prompt.token_ids) for prompts in sets for prompt in prompts), default=0)


def load_run_data(settings: RunSettings) -> RunData:
    """Read what the settings name. Raises DataError."""
    tokenizer = load_tokenizer(settings)
    rules = prompt_rules(settings)
    training = [load_prompts(source, tokenizer, rules) for source in settings.data.resolved_sources]
    held_out = {
        source.name: load_prompts(source.model_copy(update={"name": ""}), tokenizer, rules)
        for source in settings.held_out_sets
    }
    return assemble(settings, tokenizer, training, held_out)


def assemble(
    settings: RunSettings,
    tokenizer: TextTokenizer,
    training: Sequence[LoadedPrompts],
    held_out: Mapping[str, LoadedPrompts],
) -> RunData:
    """The data of a run from what its sources hold; `held_out` by set."""
    data = settings.data
    weights = {source.name: source.weight for source in data.sources if source.weight}
    dataset = PromptDataset(
        [prompt for loaded in training for prompt in loaded.prompts],
        seed=settings.seed,
        epochs=data.epochs,
        shuffle=data.shuffle,
        weights=weights or None,
    )
    most = settings.validation.prompts or None
    return RunData(
        tokenizer,
        dataset,
        {name: loaded.prompts[:most] for name, loaded in held_out.items()},
        sum(loaded.overlong for loaded in (*training, *held_out.values())),
        _context_tokens(Path(settings.model)),
    )


def _context_tokens(model: Path) -> int:
    tokens = read_object(model / "config.json").get("max_position_embeddings")
    return tokens if isinstance(tokens, int) else 0


def load_tokenizer(settings: RunSettings) -> TextTokenizer:
    """The run's tokenizer, with the model's stop tokens. Raises DataError."""
    model = Path(settings.model)
    directory = Path(settings.data.tokenizer) if settings.data.tokenizer else model
    return TextTokenizer.load(directory, model)


def prompt_rules(settings: RunSettings) -> PromptRules:
    """How the run's rows become prompts."""
    data = settings.data
    return PromptRules(
        default_grader=GraderKind(settings.reward.grader),
        apply_chat_template=data.apply_chat_template,
        chat_template_kwargs=data.chat_template_kwargs,
        max_prompt_tokens=data.max_prompt_tokens,
        skip_overlong=data.overlong_prompts == "skip",
        reward_function=settings.reward.function,
    )
