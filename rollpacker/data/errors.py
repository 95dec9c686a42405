"""The one exception of data loading: the files of a run cannot be used as they are."""

from __future__ import annotations

from pathlib import Path


class DataError(ValueError):
    """A file is wrong; the message names the place, the value and how to mend it."""

    def __init__(
        self, path: Path, problem: str, *, row: int | None = None, field: str = ""
    ) -> None:
        """`row` counts from 1; in JSONL it is the line."""
        self.path = path
        self.row = row
        self.field = field
        self.problem = problem
        place = [str(path), f"row {row}" if row is not None else "", field]
        super().__init__(", ".join(part for part in place if part) + f": {problem}")


class OverlongPromptError(DataError):
    """A prompt has more tokens than data.max_prompt_tokens."""


def shorten(value: object, limit: int = 80) -> str:
    """A value for an error message, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
