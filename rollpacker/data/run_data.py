"""Everything that a run reads from files before it starts, in one call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollpacker.data.dataset import PromptDataset
from rollpacker.data.rows import load_prompts
from rollpacker.data.tokenizer import TextTokenizer
from rollpacker.settings import RunSettings
from rollpacker.types import GraderKind, Prompt


@dataclass(frozen=True, slots=True)
class RunData:
    """Tokenizer, training prompts and held-out prompts of a run."""

    tokenizer: TextTokenizer
    dataset: PromptDataset
    validation: tuple[Prompt, ...]  # the first `validation.prompts` rows; may be empty


def load_run_data(settings: RunSettings) -> RunData:
    """Read what the settings name. Raises DataError."""
    data = settings.data
    model = Path(settings.model)
    tokenizer = TextTokenizer.load(Path(data.tokenizer) if data.tokenizer else model, model)

    def load(path: str) -> list[Prompt]:
        return load_prompts(
            Path(path),
            tokenizer,
            default_grader=GraderKind(settings.reward.grader),
            apply_chat_template=data.apply_chat_template,
            max_prompt_tokens=data.max_prompt_tokens,
        )

    validation = load(data.validation_path) if data.validation_path else []
    if settings.validation.prompts:
        validation = validation[: settings.validation.prompts]
    dataset = PromptDataset(
        load(data.path), seed=settings.seed, epochs=data.epochs, shuffle=data.shuffle
    )
    return RunData(tokenizer, dataset, tuple(validation))
