"""`check`: everything that a run needs, looked at before anything is started.

Settings, the model's files, the data, and the arithmetic of a step. Needs no coordinator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.cli.console import print_table, printable
from rollpacker.cli.failures import told_in_one_line
from rollpacker.cli.runs import Config, Overrides
from rollpacker.data import RunData, load_run_data
from rollpacker.policy.tail_batching import TailBatchingRules
from rollpacker.settings import RunSettings, SettingsError, load_run_settings
from rollpacker.types import Prompt

_LONGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors format


def check(config: Config, overrides: Overrides = None) -> None:
    """Check settings, model and data of a run file; print its arithmetic and its first prompt."""
    with told_in_one_line():
        settings = load_run_settings(config, overrides or ())
        model = inspect_model(Path(settings.model))
        data = load_run_data(settings)
        refuse_what_does_not_fit(settings, model, data)
        print_table(("", ""), [*_rows(settings, model, data), *step_rows(settings, data)], "")
        first = data.dataset[0]
        print(f"\nfirst prompt ({first.prompt_id}, {len(first.token_ids)} tokens):")
        for line in first.text.split("\n"):
            print(f"  {printable(line)}")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the files of a model directory say."""

    architecture: str
    parameters: int  # numbers stored in the safetensors files
    context_tokens: int | None  # longest sequence it was made for; None: not said


def inspect_model(directory: Path) -> ModelFacts:
    """Read config.json and the headers of *.safetensors. Raises SettingsError."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        files = sorted(directory.glob("*.safetensors"))
        parameters = sum(_count_parameters(path) for path in files)
    except (OSError, ValueError) as error:
        raise SettingsError([("model", f"{directory} cannot be read: {error}")]) from error
    if not files:
        raise SettingsError([("model", f"{directory} holds no *.safetensors file")])
    names = config.get("architectures") or [config.get("model_type", "unknown")]
    return ModelFacts(str(names[0]), parameters, config.get("max_position_embeddings"))


def _count_parameters(path: Path) -> int:
    """Raises OSError, ValueError when the file is no whole safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"{path.name} is no safetensors file")
        header: dict[str, Any] = json.loads(file.read(length))
        size = file.seek(0, 2)
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size != 8 + length + end:
        raise ValueError(f"{path.name} has {size} bytes, its header says {8 + length + end}")
    return sum(math.prod(tensor["shape"]) for tensor in header.values())


def refuse_what_does_not_fit(settings: RunSettings, model: ModelFacts, data: RunData) -> None:
    """Raises SettingsError when the longest prompt and the cap exceed the model's context."""
    longest = max(len(prompt.token_ids) for prompt in all_prompts(data))
    cap = settings.sampling.max_response_tokens
    if model.context_tokens is not None and longest + cap > model.context_tokens:
        raise SettingsError(
            [
                (
                    "sampling.max_response_tokens",
                    f"{cap}, and the longest prompt of {longest} tokens, exceed the model's"
                    f" context of {model.context_tokens}; at most"
                    f" {model.context_tokens - longest} fit",
                )
            ]
        )


def all_prompts(data: RunData) -> list[Prompt]:
    """Training and held-out prompts."""
    return [*data.dataset, *(p for prompts in data.validation.values() for p in prompts)]


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


def _rows(settings: RunSettings, model: ModelFacts, data: RunData) -> list[tuple[str, str]]:
    return [
        ("mode", f"{settings.tail_batching.mode}, seed {settings.seed}"),
        ("model", f"{model.architecture}, {model.parameters:,} parameters, {settings.model}"),
        (
            "data",
            f"{len(data.dataset)} prompts of {_token_range(data.dataset)} tokens,"
            f" {data.dataset.epochs} epochs",
        ),
        *(
            (f"held-out {name}", f"{len(prompts)} prompts of {_token_range(prompts)} tokens")
            for name, prompts in data.validation.items()
        ),
        ("stop tokens", _stop_tokens(settings, data)),
    ]


def _token_range(prompts: Sequence[Prompt]) -> str:
    counts = [len(prompt.token_ids) for prompt in prompts]
    return f"{min(counts)} to {max(counts)}"


def _stop_tokens(settings: RunSettings, data: RunData) -> str:
    ids = settings.sampling.stop_token_ids or data.tokenizer.eos_token_ids
    return ", ".join(map(str, ids)) or "none: every response runs to its cap"
