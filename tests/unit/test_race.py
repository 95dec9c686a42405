"""A race in tokens is the rule at the top of its file, whatever is told and asked, and when.

`PlainRace` is that rule: it sorts all entrants each time it is asked.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.policy.race import TokenRace
from rollpacker.types import DrawId


@dataclass
class PlainRace:
    entrants: list[DrawId]
    free_places: int
    protected: set[DrawId]
    tokens: dict[DrawId, float] = field(default_factory=dict)  # at least so many
    complete_ones: set[DrawId] = field(default_factory=set)
    gone: set[DrawId] = field(default_factory=set)
    told: set[DrawId] = field(default_factory=set)

    def rank(self, draw: DrawId) -> tuple[float, int]:
        return self.tokens.get(draw, 0), self.entrants.index(draw)

    def is_running(self, draw: DrawId) -> bool:
        return draw not in self.complete_ones | self.gone and not self.has_lost(draw)

    def has_lost(self, draw: DrawId) -> bool:
        racing = self.complete_ones - self.protected
        ahead = sum(self.rank(other) < self.rank(draw) for other in racing)
        return draw not in self.protected and ahead >= self.free_places

    def progress(self, draw: DrawId, tokens: int) -> None:
        if self.is_running(draw):
            self.tokens[draw] = max(tokens, self.tokens.get(draw, 0))

    def complete(self, draw: DrawId, key: int) -> None:
        if self.is_running(draw):
            self.progress(draw, key)
            self.complete_ones.add(draw)

    def add(self, draw: DrawId) -> None:
        self.entrants.append(draw)
        self.protected.add(draw)
        self.tokens[draw] = math.inf

    def withdraw(self, draw: DrawId) -> None:
        if self.is_running(draw):
            self.gone.add(draw)

    def would_lose(self, draw: DrawId, key: int) -> list[DrawId]:
        after = copy.deepcopy(self)
        after.complete(draw, key)
        others = [other for other in self.entrants if self.is_running(other) and other != draw]
        return [other for other in others if after.has_lost(other)]

    def take_winners(self) -> list[DrawId]:
        left = [draw for draw in self.entrants if draw not in self.gone and not self.has_lost(draw)]
        winners = []
        for draw in sorted(left, key=self.rank):
            if draw not in self.complete_ones:
                break
            winners.append(draw)
        return self._news(winners)

    def take_losers(self) -> list[DrawId]:
        return self._news([d for d in self.entrants if d not in self.gone and self.has_lost(d)])

    def _news(self, draws: list[DrawId]) -> list[DrawId]:
        news = [draw for draw in draws if draw not in self.told]
        self.told.update(news)
        return news

    @property
    def deciding_tokens(self) -> float | None:
        racing = sorted(map(self.rank, self.complete_ones - self.protected))
        if self.free_places <= 0:
            return -1
        return racing[self.free_places - 1][0] if len(racing) >= self.free_places else None


def assert_cuts_part_losers_from_the_others(race: TokenRace, plain: PlainRace) -> None:
    """Who holds a free place has as many tokens as its cut, or less; who has lost has more."""
    for draw in [draw for draw in plain.entrants if draw not in plain.gone | plain.protected]:
        cut = race.cut(draw)
        if plain.free_places <= 0 or race.deciding_tokens is None:
            assert cut is None
            continue
        assert cut is not None
        if plain.has_lost(draw):
            assert plain.rank(draw)[0] > cut
        elif draw in plain.complete_ones:
            assert plain.rank(draw)[0] <= cut


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_token_race_is_its_rule_after_any_calls(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    entrants = [DrawId(0, str(number)) for number in range(count)]
    protected = data.draw(st.frozensets(st.sampled_from(entrants), max_size=2))
    places = data.draw(st.integers(0, count))
    race = TokenRace(entrants, places, protected)
    plain = PlainRace(list(entrants), places - len(protected), set(protected))
    draws, tokens = st.integers(0, count + 1), st.integers(0, 9)  # few tokens, for ties
    names = st.sampled_from(["progress"] * 8 + ["complete"] * 6 + ["add", "withdraw"])
    calls = st.lists(st.tuples(names, draws, tokens), min_size=count, max_size=60)
    for name, number, at_least in data.draw(calls):
        draw = DrawId(0, str(len(plain.entrants) if name == "add" else number))
        if draw not in plain.entrants and name != "add":
            continue
        arguments = (draw, at_least) if name in ("progress", "complete") else (draw,)
        if name == "complete":
            assert race.would_lose(draw, at_least) == plain.would_lose(draw, at_least)
        getattr(race, name)(*arguments)
        getattr(plain, name)(*arguments)
        assert race.deciding_tokens == plain.deciding_tokens
        assert_cuts_part_losers_from_the_others(race, plain)
        assert race.take_losers() == plain.take_losers()
        if at_least % 2:  # now and then, so that several are taken at once
            assert race.take_winners() == plain.take_winners()
