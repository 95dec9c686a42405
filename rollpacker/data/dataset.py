"""The order in which prompts are launched, and a cursor that resumes it exactly.

The order of an epoch is a function of (run seed, epoch, prompt ids) alone: the ids sorted by their
hash, or the order of the file. A cursor is a place in the endless row of epochs, `epochs` of which
exist. Taking moves a cursor; the data set itself never changes, so the same cursor always gives
the same prompts: after a crash the committed cursor is all that is needed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from rollpacker.types import Prompt


@dataclass(frozen=True, slots=True, order=True)
class DataCursor:
    """Where the next prompt comes from."""

    epoch: int = 0  # from 0; `epochs` when everything is taken
    position: int = 0  # prompts already taken of this epoch, below the size of the data set

    def to_json(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    @classmethod
    def from_json(cls, values: Mapping[str, int]) -> DataCursor:
        """The inverse of `to_json`. Raises KeyError for a missing field."""
        return cls(epoch=int(values["epoch"]), position=int(values["position"]))


class PromptDataset(Sequence[Prompt]):
    """The prompts of a run, in the order of the file, and the order of their launches."""

    def __init__(
        self, prompts: Iterable[Prompt], *, seed: int, epochs: int = 1, shuffle: bool = True
    ) -> None:
        """`seed` is the run's. Raises ValueError for no prompts, repeated ids or epochs < 1."""
        self._prompts = tuple(prompts)
        self._by_id = {prompt.prompt_id: prompt for prompt in self._prompts}
        self._seed = seed
        self._shuffle = shuffle
        self.epochs = epochs
        if not self._prompts:
            raise ValueError("prompts: none given; a data set needs at least one")
        if len(self._by_id) != len(self._prompts):
            raise ValueError("prompts: an id occurs twice; each prompt needs its own")
        if epochs < 1:
            raise ValueError(f"epochs: must be at least 1, got {epochs}")
        self._order = functools.lru_cache(maxsize=2)(self._sorted_for_epoch)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def by_id(self, prompt_id: str) -> Prompt:
        """The prompt of a draw. Raises KeyError for an unknown id."""
        return self._by_id[prompt_id]

    def take(self, cursor: DataCursor, count: int) -> tuple[list[tuple[int, Prompt]], DataCursor]:
        """The next `count` prompts with their epochs, and the cursor behind them.

        Goes on into the next epoch, and gives fewer only at the end of the last one.
        Raises ValueError for a cursor outside the data set or a negative count.
        """
        if count < 0:
            raise ValueError(f"count: must be at least 0, got {count}")
        taken: list[tuple[int, Prompt]] = []
        left = min(count, self.remaining(cursor))
        epoch, position = cursor.epoch, cursor.position
        while left:
            chosen = self._order(epoch)[position : position + left]
            taken += [(epoch, prompt) for prompt in chosen]
            left -= len(chosen)
            position += len(chosen)
            if position == len(self):
                epoch, position = epoch + 1, 0
        return taken, DataCursor(epoch, position)

    def remaining(self, cursor: DataCursor) -> int:
        """Prompts from the cursor to the end of the last epoch.

        Raises ValueError for a cursor outside the data set.
        """
        inside = 0 <= cursor.epoch < self.epochs and 0 <= cursor.position < len(self)
        if not inside and cursor != DataCursor(self.epochs, 0):
            raise ValueError(
                f"cursor: epoch {cursor.epoch}, position {cursor.position} is outside"
                f" {self.epochs} epochs of {len(self)} prompts; was the data file changed?"
            )
        return (self.epochs - cursor.epoch) * len(self) - cursor.position

    def _sorted_for_epoch(self, epoch: int) -> tuple[Prompt, ...]:
        if not self._shuffle:
            return self._prompts
        return tuple(
            sorted(self._prompts, key=lambda prompt: _rank(self._seed, epoch, prompt.prompt_id))
        )


def _rank(seed: int, epoch: int, prompt_id: str) -> bytes:
    """A prompt's place in an epoch: 128 hash bits, the same on every machine."""
    text = f"order\x1f{seed}\x1f{epoch}\x1f{prompt_id}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
