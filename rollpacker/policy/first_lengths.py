"""How long the first launches of the draws would have become, for the bias meter.

A draw has launches: the first one, and one more for each time that it was deferred. In each, a
response either ended by itself or was cut off when its group lost the race; in the last one, which
is trained, all ended. A response that comes out again is the same only as far as seeds are kept and
weights agree; what is trained may be shorter than what had been cut off. So the length of a first
launch is put together from the last launch backwards:

    ended                                  its tokens
    cut off; the next launch got as far    what stands for the next launch
    cut off; the next launch fell short    its tokens and a rest: longer than that, by how much
                                           nobody saw

The rest is the mean of what was seen of responses of the same *cell*: of the same launch, with as
many responses of their next launch that got as far. That number says how much the prompt decides.
A cell that has few takes the mean of its launch, a launch that has none that of all, and where
nothing was seen the rest is 0, a lower bound. Draws in the queue have no next launch yet: their
rest is the mean of their launch.

What is kept are sums of whole numbers, so neither order nor a resume changes anything: trained
lengths of draws that were launched more than once, how many responses more or fewer than were
trained have a length (none, while responses come out as they were), and the sums of the cells. A
rest may wait for the rest of a deeper launch's cell; the mean is linear in it, so the cell keeps
how many do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollpacker.types import DeferredDraw, DrawId

_FEW = 5  # responses that a cell must know to have a mean of its own


class Launch(NamedTuple):
    """The responses of one launch of a draw, in the same order in all of its launches."""

    tokens: tuple[int, ...]
    ended: tuple[bool, ...]  # by themselves; the others were cut off


class Cell(NamedTuple):
    """Responses that were cut off, and whose rests are taken to be alike."""

    launch: int  # 0: the draw's first
    reached: int  # responses of the next launch that got as far, at least 1; 0: it is to come


class Stand(NamedTuple):
    """What stands for a response: so many tokens, and the rest of a cell."""

    tokens: int
    waits_for: Cell | None = None


class Sight(NamedTuple):
    """A response of a cell whose next launch got as far: its rest, and more of another cell's."""

    cell: Cell
    rest: int
    waits_for: Cell | None


@dataclass(slots=True)
class CellSums:
    """What is known of a cell; tokens and responses."""

    seen: int = 0  # responses whose next launch got as far
    rest: int = 0  # tokens of their rests
    waits: Counter[Cell] = field(default_factory=Counter)  # of them, with more of that cell's
    missing: int = 0  # trained ones whose first launch has this cell's rest
    base: int = 0  # tokens before it


class Rests:
    """Mean rests in tokens, by cell; `Cell(launch, 0)` is that of a launch."""

    def __init__(self) -> None:
        self._of: dict[Cell, float] = {}
        self._seen, self._tokens = 0, 0.0  # of all launches

    def __getitem__(self, cell: Cell) -> float:
        of_launch = self._of.get(Cell(cell.launch, 0), self._tokens / max(1, self._seen))
        return self._of.get(cell, of_launch)

    def add_launch(self, launch: int, cells: Mapping[Cell, CellSums]) -> None:
        """The cells of a launch; deeper ones came before."""
        tokens = {
            cell: math.fsum([sums.rest, *(n * self[deeper] for deeper, n in sums.waits.items())])
            for cell, sums in cells.items()
        }
        seen, total = sum(sums.seen for sums in cells.values()), math.fsum(tokens.values())
        self._seen, self._tokens = self._seen + seen, self._tokens + total
        mean = total / seen if seen else self._tokens / max(1, self._seen)
        for cell, sums in cells.items():
            self._of[cell] = tokens[cell] / sums.seen if sums.seen >= _FEW else mean
            seen, total = seen + sums.missing, total + sums.missing * self._of[cell]
        self._of[Cell(launch, 0)] = total / max(1, seen)


class FirstLengths:
    """What trained draws and the queue say of first launches; begins with a run."""

    def __init__(self) -> None:
        self.redrawn: Counter[int] = Counter()  # trained: tokens -> responses of deferred draws
        self.moved: Counter[int] = Counter()  # tokens -> responses beyond the trained ones
        self.cells: dict[Cell, CellSums] = {}
        self.cut_before = 0  # trained responses that an earlier launch had cut off
        self.shorter_again = 0  # of them, those with fewer tokens than they had had
        self.earlier: dict[DrawId, tuple[Launch, ...]] = {}  # of queued draws, all but the newest

    def add_trained(self, item: DeferredDraw, trained: Mapping[int, int]) -> None:
        """A deferred draw is trained: tokens of its responses, by index."""
        self.redrawn.update(trained.values())
        both = [index for index in sorted(trained) if index < len(item.response_tokens)]
        before = [
            Launch(tuple(tokens[index] for index in both), tuple(ended[index] for index in both))
            for tokens, ended in self._launches(item)
        ]
        last = Launch(tuple(trained[index] for index in both), (True,) * len(both))
        stands, sights = _stands([*before, last])
        for sight in sights:
            self._add_sight(sight)
        for tokens, stand in zip(last.tokens, stands, strict=True):
            self._add_stand(tokens, stand)
        for place, tokens in enumerate(last.tokens):
            cuts = [launch.tokens[place] for launch in before if not launch.ended[place]]
            self.cut_before += bool(cuts)
            self.shorter_again += tokens < max(cuts, default=0)

    def keep_queue(
        self, before: Mapping[DrawId, DeferredDraw], deferred: Iterable[DeferredDraw]
    ) -> None:
        """After a round: `before` is the queue without the draws that the round trained or dropped,
        `deferred` are those that it put off."""
        again = [before[item.draw.id] for item in deferred if item.draw.id in before]
        put_off = {item.draw.id: self._launches(item) for item in again}
        still = {draw: past for draw, past in self.earlier.items() if draw in before}
        self.earlier = still | put_off

    def lengths(self, trained: Mapping[int, int], queue: Iterable[DeferredDraw]) -> Counter[float]:
        """Of the first launches of all draws that are trained or queued: tokens -> responses."""
        rests = self._rests()
        found: Counter[float] = Counter(trained)
        for tokens, count in self.moved.items():
            found[tokens] += count
        for cell, sums in self.cells.items():
            if sums.missing:
                found[sums.base / sums.missing + rests[cell]] += sums.missing
        for item in queue:
            for tokens, waits_for in _stands(self._launches(item))[0]:
                found[tokens + (rests[waits_for] if waits_for else 0)] += 1
        return +found  # without the lengths that nothing has

    def _launches(self, item: DeferredDraw) -> tuple[Launch, ...]:
        newest = Launch(item.response_tokens, item.finished)
        return (*self.earlier.get(item.draw.id, ()), newest)

    def _add_sight(self, sight: Sight) -> None:
        sums = self._sums(sight.cell)
        sums.seen += 1
        sums.rest += sight.rest
        if sight.waits_for is not None:
            self._sums(sight.waits_for)
            sums.waits[sight.waits_for] += 1

    def _add_stand(self, trained: int, stand: Stand) -> None:
        """A trained response, and what stands for its first launch."""
        self._move(trained, -1)
        if stand.waits_for is None:
            self._move(stand.tokens, 1)
        else:
            sums = self._sums(stand.waits_for)
            sums.missing += 1
            sums.base += stand.tokens

    def _sums(self, cell: Cell) -> CellSums:
        return self.cells.setdefault(cell, CellSums())

    def _move(self, tokens: int, count: int) -> None:
        self.moved[tokens] += count
        if not self.moved[tokens]:
            del self.moved[tokens]

    def _rests(self) -> Rests:
        rests = Rests()
        for launch in sorted({cell.launch for cell in self.cells}, reverse=True):
            own = {cell: self.cells[cell] for cell in sorted(self.cells) if cell.launch == launch}
            rests.add_launch(launch, own)
        return rests


def first_lengths_to_json(lengths: FirstLengths) -> dict[str, Any]:
    """As JSON values."""
    return {
        "redrawn": [[tokens, count] for tokens, count in lengths.redrawn.items()],
        "moved": [[tokens, count] for tokens, count in lengths.moved.items()],
        "cells": [
            [
                *cell,
                *(sums.seen, sums.rest, sums.missing, sums.base),
                [[*deeper, count] for deeper, count in sums.waits.items()],
            ]
            for cell, sums in lengths.cells.items()
        ],
        "cut_before": lengths.cut_before,
        "shorter_again": lengths.shorter_again,
        "earlier": [
            [*draw, [[list(tokens), list(ended)] for tokens, ended in launches]]
            for draw, launches in lengths.earlier.items()
        ],
    }


def first_lengths_from_json(values: Mapping[str, Any]) -> FirstLengths:
    """The inverse of `first_lengths_to_json`; nothing where there is nothing."""
    lengths = FirstLengths()
    if not values:
        return lengths
    lengths.redrawn.update(dict(values["redrawn"]))
    lengths.moved.update(dict(values["moved"]))
    for launch, reached, seen, rest, missing, base, waits in values["cells"]:
        deeper = Counter({Cell(*cell): count for *cell, count in waits})
        lengths.cells[Cell(launch, reached)] = CellSums(seen, rest, deeper, missing, base)
    lengths.cut_before = values["cut_before"]
    lengths.shorter_again = values["shorter_again"]
    lengths.earlier = {
        DrawId(epoch, prompt): tuple(Launch(tuple(t), tuple(e)) for t, e in launches)
        for epoch, prompt, launches in values["earlier"]
    }
    return lengths


def _stands(launches: Sequence[Launch]) -> tuple[list[Stand], list[Sight]]:
    """What stands for each response of the first launch, and what was seen on the way."""
    newest = len(launches) - 1
    stands = [
        Stand(tokens, None if ended else Cell(newest, 0))
        for tokens, ended in zip(*launches[newest], strict=True)
    ]
    sights = []
    for number in reversed(range(newest)):
        launch = launches[number]
        cut = max((t for t, ended in zip(*launch, strict=True) if not ended), default=0)
        cell = Cell(number, max(1, sum(stand.tokens >= cut for stand in stands)))
        for index, (tokens, ended) in enumerate(zip(*launch, strict=True)):
            again = stands[index]
            if ended:
                stands[index] = Stand(tokens)
            elif again.tokens >= tokens:
                sights.append(Sight(cell, again.tokens - tokens, again.waits_for))
            else:
                stands[index] = Stand(tokens, cell)
    return stands, sights
