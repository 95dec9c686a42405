"""The race of a round: which groups are kept, and in which order they are trained.

Every entrant is *running* (it has a lower bound: the tokens of its longest response so far) or
*complete* (it has its key). Each entrant in the end becomes a winner or a loser, once, unless it is
withdrawn.

`TokenRace`: the order is (longest response in tokens, launch order). An entrant is ranked when it
is complete and no running entrant can still come before it; so winners, losers and their order are
a pure function of the responses, whatever the timing, the number of replicas or a crash between.
A running entrant loses as soon as enough complete ones are certain to be ahead of it.

`ArrivalRace`: the order is that of completion (the paper's rule).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Protocol

from rollpacker.types import DrawId

_Rank = tuple[int, int]  # (tokens, launch order)
_BEHIND_ALL = 1 << 62  # tokens, as it were
_AHEAD_OF_ALL: _Rank = (-1, -1)


class Race(Protocol):
    """Decides winners and losers."""

    def progress(self, draw: DrawId, tokens: int) -> None:
        """The longest response of a running entrant has at least so many tokens."""
        ...

    def complete(self, draw: DrawId, key: int) -> None:
        """An entrant has all its responses; `key` is the longest one in tokens."""
        ...

    def would_lose(self, draw: DrawId, key: int) -> list[DrawId]:
        """Who would lose by what is known now, in launch order, if `draw` completed with `key`:
        for whoever wants to look at them before they go. Nothing changes."""
        ...

    def add(self, draw: DrawId) -> None:
        """One more entrant, in the place of one that was withdrawn: it wins unless it is withdrawn.
        It is trained behind the first entrants, which may have won before it was added."""
        ...

    def withdraw(self, draw: DrawId) -> None:
        """A running entrant leaves: it becomes neither a winner nor a loser. A protected one
        leaves its place to one that is added."""
        ...

    def take_winners(self) -> list[DrawId]:
        """Entrants that have become certain winners since the last call, in training order."""
        ...

    def take_losers(self) -> list[DrawId]:
        """Entrants that have become certain losers since the last call, in launch order."""
        ...

    @property
    def deciding_tokens(self) -> int | None:
        """Running entrants with more tokens than this have lost; None while nothing is decided."""
        ...

    def cut(self, draw: DrawId) -> int | None:
        """An entrant that has lost has more tokens than this: one less than the last place if it
        stands behind it, so that as many lose. None: length did not decide."""
        ...


class TokenRace:
    """See the top of the file. An event costs the logarithm of the number of entrants."""

    def __init__(
        self, entrants: Sequence[DrawId], places: int, protected: frozenset[DrawId] = frozenset()
    ) -> None:
        self._ids = list(entrants)
        self._order = {draw: order for order, draw in enumerate(entrants)}
        self._protected = protected & self._order.keys()
        self._free_places = max(0, places - len(self._protected))
        self._bounds = dict.fromkeys(entrants, 0)
        self._running = set(entrants)
        self._lost: set[DrawId] = set()
        self._new_losers: list[DrawId] = []
        self._places = _LastFirst()  # complete ones that hold a free place
        self._contenders = _LastFirst()  # running ones, as they were at each news, once all is held
        # Ranks of entrants that are not ranked yet; a running one may stand too far ahead.
        self._heap: list[_Rank] = [(0, order) for order in range(len(self._ids))]
        if not self._free_places:
            self._watch_contenders()
            self._lose_contenders_behind(_AHEAD_OF_ALL)

    def progress(self, draw: DrawId, tokens: int) -> None:
        if draw not in self._running or tokens <= self._bounds[draw]:
            return
        self._bounds[draw] = tokens
        last = self._last_place()
        if last is None or draw in self._protected:
            return
        if self._rank(draw) > last:
            self._lose(draw)
        elif len(self._contenders) > 2 * len(self._running):
            self._watch_contenders()  # most are outdated
        else:
            self._contenders.push(self._rank(draw))

    def complete(self, draw: DrawId, key: int) -> None:
        if draw not in self._running:
            return
        self._running.discard(draw)
        self._bounds[draw] = max(key, self._bounds[draw])
        if draw in self._protected:
            return
        were_held = self._last_place() is not None
        self._places.push(self._rank(draw))
        if len(self._places) > self._free_places:
            self._lose(self._ids[self._places.pop()[1]])
        last = self._last_place()
        if last is not None:
            if not were_held:
                self._watch_contenders()
            self._lose_contenders_behind(last)

    def would_lose(self, draw: DrawId, key: int) -> list[DrawId]:
        if draw not in self._running or draw in self._protected:
            return []
        rank = (max(key, self._bounds[draw]), self._order[draw])
        last = self._places.last_with(rank, self._free_places)
        if last is None:
            return []
        if self._last_place() is None:
            self._watch_contenders()
        losers = self._contenders_behind(last)
        for loser in losers:
            self._contenders.push(self._rank(loser))
        return sorted(losers - {draw}, key=self._order.__getitem__)

    def add(self, draw: DrawId) -> None:
        self._order[draw] = len(self._ids)
        self._ids.append(draw)
        self._bounds[draw] = _BEHIND_ALL
        self._protected |= {draw}
        self._running.add(draw)
        heapq.heappush(self._heap, self._rank(draw))

    def withdraw(self, draw: DrawId) -> None:
        if draw not in self._running:
            return
        self._running.discard(draw)
        self._lost.add(draw)  # nobody is told

    def take_winners(self) -> list[DrawId]:
        winners = []
        while self._heap:
            rank = self._heap[0]
            draw = self._ids[rank[1]]
            if draw in self._lost:
                heapq.heappop(self._heap)
            elif rank != self._rank(draw):
                heapq.heapreplace(self._heap, self._rank(draw))
            elif draw in self._running:
                break
            else:
                heapq.heappop(self._heap)
                winners.append(draw)
        return winners

    def take_losers(self) -> list[DrawId]:
        losers = sorted(self._new_losers, key=self._order.__getitem__)
        self._new_losers = []
        return losers

    @property
    def deciding_tokens(self) -> int | None:
        last = self._last_place()
        return None if last is None else last[0]

    def cut(self, draw: DrawId) -> int | None:
        last = self._last_place()
        if last is None or last == _AHEAD_OF_ALL:
            return None
        tokens, order = last
        return tokens - (self._order[draw] > order)

    def _rank(self, draw: DrawId) -> _Rank:
        return (self._bounds[draw], self._order[draw])

    def _last_place(self) -> _Rank | None:
        """The rank of the last free place, once enough entrants are complete to fill them."""
        if not self._free_places:
            return _AHEAD_OF_ALL
        return self._places.last() if len(self._places) == self._free_places else None

    def _watch_contenders(self) -> None:
        """From now on whoever falls behind the last place is found."""
        contenders = self._running - self._protected
        self._contenders = _LastFirst(self._rank(draw) for draw in contenders)

    def _lose_contenders_behind(self, last: _Rank) -> None:
        for draw in self._contenders_behind(last):
            self._lose(draw)

    def _contenders_behind(self, last: _Rank) -> set[DrawId]:
        """Those that are behind this rank; they are not watched any more."""
        found = set()
        while len(self._contenders) and self._contenders.last() > last:
            draw = self._ids[self._contenders.pop()[1]]
            if draw in self._running:
                found.add(draw)
        return found

    def _lose(self, draw: DrawId) -> None:
        self._lost.add(draw)
        self._running.discard(draw)
        self._new_losers.append(draw)


class _LastFirst:
    """A heap of ranks; the last of them is at hand."""

    def __init__(self, ranks: Iterable[_Rank] = ()) -> None:
        self._heap = [(-tokens, -order) for tokens, order in ranks]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, rank: _Rank) -> None:
        heapq.heappush(self._heap, (-rank[0], -rank[1]))

    def last(self) -> _Rank:
        tokens, order = self._heap[0]
        return (-tokens, -order)

    def last_with(self, rank: _Rank, size: int) -> _Rank | None:
        """The last of the first `size`, once `rank` is among them; None if they are fewer."""
        if len(self._heap) < size - 1:
            return None
        dropped = len(self._heap) + 1 - size
        last_ones = [(-tokens, -order) for tokens, order in self._heap[:3]]
        return sorted([rank, *last_ones], reverse=True)[dropped]

    def pop(self) -> _Rank:
        tokens, order = heapq.heappop(self._heap)
        return (-tokens, -order)


class ArrivalRace:
    """See the top of the file."""

    def __init__(
        self, entrants: Sequence[DrawId], places: int, protected: frozenset[DrawId] = frozenset()
    ) -> None:
        self._open = dict.fromkeys(entrants)  # in launch order
        self._protected = protected & self._open.keys()
        self._free_places = places - len(self._protected)
        self._winners: list[DrawId] = []
        self._losers: list[DrawId] = []
        self._close_if_full()

    def progress(self, draw: DrawId, tokens: int) -> None:
        """Tokens do not matter."""

    def complete(self, draw: DrawId, key: int) -> None:  # noqa: ARG002  the order is that of calls
        if draw not in self._open:
            return
        del self._open[draw]
        self._winners.append(draw)
        if draw not in self._protected:
            self._free_places -= 1
            self._close_if_full()

    def would_lose(self, draw: DrawId, key: int) -> list[DrawId]:  # noqa: ARG002
        if draw not in self._open or draw in self._protected or self._free_places != 1:
            return []
        return [other for other in self._open if other != draw and other not in self._protected]

    def add(self, draw: DrawId) -> None:
        self._open[draw] = None
        self._protected |= {draw}

    def withdraw(self, draw: DrawId) -> None:
        self._open.pop(draw, None)

    def take_winners(self) -> list[DrawId]:
        winners, self._winners = self._winners, []
        return winners

    def take_losers(self) -> list[DrawId]:
        losers, self._losers = self._losers, []
        return losers

    @property
    def deciding_tokens(self) -> int | None:
        return None

    def cut(self, draw: DrawId) -> int | None:  # noqa: ARG002
        return None

    def _close_if_full(self) -> None:
        if self._free_places <= 0:
            self._losers += [draw for draw in self._open if draw not in self._protected]
            self._open = {draw: None for draw in self._open if draw in self._protected}
