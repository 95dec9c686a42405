"""The order in which prompts are launched, and a cursor that resumes it exactly.

The order of an epoch is a function of (run seed, epoch, prompt ids) alone: the ids sorted by their
hash, or the order of the file. A cursor is a place in the endless row of epochs, `epochs` of which
exist. Taking moves a cursor; the data set itself never changes, so the same cursor always gives
the same prompts: after a crash the committed cursor is all that is needed.

With weights, each domain is passed over in its own order, as often as its share asks for, and
`mix` says which domain is next. An epoch of the cursor is then as many prompts as all domains have
together; the epoch of a draw is the pass over its domain, so a draw still comes once.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from rollpacker.data.mix import WeightedMix
from rollpacker.types import DrawId, Prompt


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
        self,
        prompts: Iterable[Prompt],
        *,
        seed: int,
        epochs: int = 1,
        shuffle: bool = True,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """`seed` is the run's; `weights` by domain, for each that occurs.

        Raises ValueError for no prompts, repeated ids, epochs < 1 or weights that do not fit.
        """
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
        self._by_domain: dict[str, list[Prompt]] = {}
        for prompt in self._prompts:
            self._by_domain.setdefault(prompt.domain, []).append(prompt)
        if weights is not None and weights.keys() != self._by_domain.keys():
            raise ValueError(
                f"weights: of {sorted(weights)}, the prompts are of {sorted(self._by_domain)}"
            )
        self._domains = tuple(weights or ())
        self._mix = WeightedMix(tuple(weights.values())) if weights else None
        self._counts = [(0,) * len(self._domains)]  # taken of each domain before each epoch
        self._order = functools.lru_cache(maxsize=2)(self._order_of_epoch)

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
            taken += chosen
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

    def ahead(self, cursor: DataCursor, draws: Collection[DrawId]) -> set[DrawId]:
        """Those of these draws that come behind the cursor."""
        if not draws:
            return set()
        epochs = set(range(cursor.epoch, self.epochs))
        if self._mix is None:
            epochs &= {draw.epoch for draw in draws}
        found: set[DrawId] = set()
        for epoch in sorted(epochs):
            taken = cursor.position if epoch == cursor.epoch else 0
            for number, prompt in self._order(epoch)[taken:]:
                if (draw := DrawId(number, prompt.prompt_id)) in draws:
                    found.add(draw)
        return found

    @functools.cached_property
    def digest(self) -> str:
        """Of ids, domains and tokens in the order of the files: what a cursor is a place in."""
        hashed = hashlib.blake2b(digest_size=16)
        for prompt in self._prompts:
            hashed.update(repr((prompt.prompt_id, prompt.domain, prompt.token_ids)).encode())
        return hashed.hexdigest()

    def domain_of(self, prompt_id: str) -> str:
        """The domain of a prompt; "" where it has none, and for an id that is not of the data."""
        prompt = self._by_id.get(prompt_id)
        return prompt.domain if prompt else ""

    @property
    def domains(self) -> Mapping[str, int]:
        """Prompts of each domain; "" is the one without a name."""
        return {domain: len(prompts) for domain, prompts in self._by_domain.items()}

    def _order_of_epoch(self, epoch: int) -> tuple[tuple[int, Prompt], ...]:
        """Draws of one epoch of the cursor: (epoch of the draw, prompt)."""
        if self._mix is None:
            return tuple((epoch, prompt) for prompt in self._shuffled(self._prompts, epoch))
        while len(self._counts) <= epoch:
            before = self._counts[-1]
            sources = self._mix.following(before, len(self))
            self._counts.append(tuple(count + sources.count(i) for i, count in enumerate(before)))
        return tuple(self._mixed(self._mix, list(self._counts[epoch])))

    def _mixed(self, mix: WeightedMix, counts: list[int]) -> Iterator[tuple[int, Prompt]]:
        passes: dict[tuple[int, int], Sequence[Prompt]] = {}
        for source in mix.following(counts, len(self)):
            prompts = self._by_domain[self._domains[source]]
            number, place = divmod(counts[source], len(prompts))
            if (source, number) not in passes:
                passes[source, number] = self._shuffled(prompts, number)
            counts[source] += 1
            yield number, passes[source, number][place]

    def _shuffled(self, prompts: Sequence[Prompt], epoch: int) -> Sequence[Prompt]:
        if not self._shuffle:
            return prompts
        return sorted(prompts, key=lambda prompt: _rank(self._seed, epoch, prompt.prompt_id))


def _rank(seed: int, epoch: int, prompt_id: str) -> bytes:
    """A prompt's place in an epoch: 128 hash bits, the same on every machine."""
    text = f"order\x1f{seed}\x1f{epoch}\x1f{prompt_id}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
