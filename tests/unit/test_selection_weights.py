"""Weighed, what is trained has the law of groups that nobody selects: by enumeration, exactly."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.response_drift import Unchanged
from rollpacker.policy.selection_weights import Selection, WeighedSums, stay_probability
from rollpacker.settings import RunSettings, SettingsError, parse_run_settings
from rollpacker.types import DeferredDraw, Draw, DrawId, LostRace
from services.coordinator.modes import tail_batching_rules

Law = dict[tuple[int, ...], float]
LENGTHS = range(1, 6)


def again(
    length: int, law: dict[int, float], unchanged: Callable[[int], float]
) -> dict[int, float]:
    """What a response of that length comes out as: it keeps its tokens before the first changed
    one, and ends somewhere behind them."""
    found: dict[int, float] = defaultdict(float)
    found[length] += unchanged(length)
    for first_changed in range(length):
        share = unchanged(first_changed) - unchanged(first_changed + 1)
        behind = {n: p for n, p in law.items() if n > first_changed}
        for n, p in behind.items():
            found[n] += share * p / sum(behind.values())
    return found


def selected(
    sample: Sequence[int],
    size: int,
    cuts: Sequence[int],
    unchanged: Callable[[int], float],
    weigh: bool,
) -> Law:
    """The law of what is trained: groups within the cut of their level, the others as they come
    out of the next one; the last level keeps all."""
    law = {n: sample.count(n) / len(sample) for n in set(sample)}
    one = {n: again(n, law, unchanged) for n in law}
    trained: Law = defaultdict(float)
    waiting: Law = {g: math.prod(law[n] for n in g) for g in product(law, repeat=size)}
    for level, cut in enumerate((*cuts, max(sample))):
        lost: Law = defaultdict(float)
        for group, mass in waiting.items():
            if max(group) <= cut:
                trained[group] += mass
                continue
            for after in product(*(one[n] for n in group)):
                moved = mass * math.prod(one[n][m] for n, m in zip(group, after, strict=True))
                if weigh and max(after) <= cuts[level]:
                    continue  # counts nothing
                stays = stay_probability(after, cut, unchanged, sample) if weigh else 1.0
                lost[after] += moved / stays
        waiting = lost
    return trained


def by_response(share: float) -> Callable[[int], float]:
    return lambda tokens: share if tokens else 1.0


def by_token(rate: float) -> Callable[[int], float]:
    return lambda tokens: math.exp(-rate * tokens)


def parsed(**tail: Any) -> RunSettings:
    values = {"model": "/m", "data": {"path": "/d.jsonl"}, "tail_batching": tail}
    return parse_run_settings(values)


UNCHANGED = st.floats(0.0, 1.0).map(by_response) | st.floats(0.0, 3.0).map(by_token)


@given(
    st.lists(st.sampled_from(LENGTHS), min_size=2, max_size=6),
    st.integers(1, 2),
    st.data(),
    UNCHANGED,
)
def test_weighed_groups_have_the_law_of_groups_that_nobody_selects(
    sample: list[int], size: int, data: st.DataObject, unchanged: Callable[[int], float]
) -> None:
    cuts = data.draw(st.lists(st.integers(1, max(1, max(sample) - 1)), min_size=1, max_size=2))
    trained = selected(sample, size, sorted(cuts), unchanged, weigh=True)
    for group in product(set(sample), repeat=size):
        wanted = math.prod(sample.count(n) / len(sample) for n in group)
        assert trained[group] == pytest.approx(wanted, abs=1e-9)


def test_without_weights_long_ones_are_missing() -> None:
    sample = [1, 1, 2, 5]
    for unchanged in (by_response(0.5), by_token(0.3)):
        trained = selected(sample, 2, [2], unchanged, weigh=False)
        mean = sum(p * sum(group) for group, p in trained.items()) / 2
        assert mean < 0.95 * sum(sample) / len(sample)


def of_updates(share: float) -> Unchanged:
    """A share of the responses is another one, the more the more updates are between."""
    return lambda updates, _tokens: share**updates


HALF = of_updates(0.5)

DRAW = Draw(0, "a", (1, 2, 3))


def lost(
    tokens: Sequence[int],
    cut: int | None,
    before: LostRace | None = None,
    *,
    step: int = 5,
    finished: Sequence[bool] = (),
    unchanged: Unchanged = HALF,
) -> LostRace | None:
    """What is known of a draw behind the race of `step`."""
    selection = Selection(step, {DRAW.id: before} if before else {}, unchanged)
    ended = tuple(finished) or (True,) * len(tokens)
    cuts = () if cut is None else (cut,)
    (item,) = selection.after_race([DeferredDraw(DRAW, tuple(tokens), ended)], cuts)
    assert (item.draw, item.response_tokens) == (DRAW, tuple(tokens))
    return item.lost


def weight(
    before: LostRace, lengths: Sequence[int], step: int, unchanged: Unchanged = HALF
) -> float:
    return Selection(step, {DRAW.id: before}, unchanged).weight(DRAW.id, lengths)


@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=8),
    st.integers(1, 99),
    st.floats(0.0, 1.0),
    st.integers(1, 40),
)
def test_a_weight_is_0_or_1_at_least(
    lengths: list[int], cut: int, share: float, updates: int
) -> None:
    found = weight(LostRace(cut, 3), lengths, 3 + updates, of_updates(share))
    if max(lengths) <= cut:
        assert found == 0.0
    else:
        assert 1.0 - 1e-12 <= found < math.inf


def test_who_never_lost_counts_1() -> None:
    selection = Selection(4, {DrawId(0, "other"): LostRace(3, 1)}, of_updates(0.5))
    assert selection.weight(DRAW.id, [1, 2]) == 1.0


def test_weights_that_do_not_move_weigh_nothing() -> None:
    before = lost([3, 11, 40], 10, unchanged=of_updates(1.0))
    assert before == LostRace(10, 5)
    assert weight(before, [3, 11, 40], 9, of_updates(1.0)) == 1.0


def test_the_weight_grows_with_the_updates_in_between() -> None:
    weights = [weight(LostRace(10, 5), [3, 4, 40], step) for step in (6, 7, 10)]
    assert 1.0 < weights[0] < weights[1] < weights[2]


def test_races_multiply_each_with_its_own_cut_and_updates() -> None:
    first = lost([3, 3, 40], 4)
    assert first == LostRace(4, 5)
    second = lost([3, 3, 40], 8, first, step=7)
    once = weight(LostRace(4, 5), [3, 3, 40], 7)
    assert second == LostRace(8, 7, once)
    again = weight(LostRace(8, 7), [3, 3, 40], 10)
    assert weight(second, [3, 3, 40], 10) == pytest.approx(once * again)


def test_nothing_is_weighed_while_nothing_was_compared() -> None:
    selection = Selection(6, {DRAW.id: LostRace(10, 5)}, None)
    assert selection.weight(DRAW.id, [3, 4, 5]) == 1.0
    assert selection.weight(DRAW.id, [3, 4, 50]) == 1.0
    (item,) = selection.after_race([DeferredDraw(DRAW, (3, 4, 50), (True,) * 3)], [20])
    assert item.lost == LostRace(20, 6)


def test_a_loser_that_a_crash_kept_from_being_launched_says_nothing_new() -> None:
    never = {"finished": (False, False, False)}
    assert lost([0, 0, 0], 8, **never) == LostRace(8, 5)
    before = LostRace(6, 2, 1.5)
    assert lost([0, 0, 0], 8, before, **never) == before


def test_a_race_that_does_not_go_by_length_says_nothing() -> None:
    assert lost([3, 3, 8], None) is None
    before = LostRace(6, 2, 1.5)
    assert lost([3, 3, 8], None, before) == before


def test_a_lower_cut_selects_no_further() -> None:
    before = LostRace(20, 2, 1.5)
    stays = lost([3, 3, 30], 10, before)
    assert stays == LostRace(20, 5, 1.5 * weight(LostRace(20, 2), [3, 3, 30], 5))
    assert lost([3, 3, 15], 10, before) == LostRace(20, 2, 0.0)
    running = lost([3, 15, 15], 10, before, finished=(True, False, False))
    assert running == before  # it may yet get past the older cut


def test_responses_that_were_cut_again_are_longer_than_the_cut() -> None:
    """Also where the report of a group's progress is the mean of its running responses."""
    before = LostRace(20, 2)
    found = lost([3, 19, 19], 24, before, finished=(True, False, False))
    assert found is not None
    assert (found.cut, found.step) == (24, 5)
    assert found.weight == pytest.approx(weight(LostRace(20, 2), [3, 24, 24], 5))


def test_responses_to_other_prompts_say_how_many_that_get_far_get_farther() -> None:
    """Of its own there is one long one, and all that get that far would stay."""
    lengths, cut, unchanged = [3, 3, 40], 10, by_token(0.05)
    alone = stay_probability(lengths, cut, unchanged, lengths)
    among_short = stay_probability(lengths, cut, unchanged, lengths, [5, 6, 7, 8, 9, 11])
    among_long = stay_probability(lengths, cut, unchanged, lengths, [20, 30])
    assert among_short < alone < among_long
    # Past 3 tokens one of its own and two others; of six others that get there one stays.
    changes_late = unchanged(3) - unchanged(10)
    changes_early = 1.0 - unchanged(3)
    early = 1.0 - (1 + 2 / 6) / (3 + 2)
    late = 1.0 - (1 + 2 / 6) / (1 + 2)
    turns_short = changes_early * early + changes_late * late
    others_stay_short = (changes_early * early + unchanged(3)) ** 2
    assert among_short == pytest.approx(1.0 - turns_short * others_stay_short)


@given(st.lists(st.tuples(st.just(0.0) | st.floats(1.0, 4.0), st.integers(1, 9)), max_size=9))
def test_sums_count_each_group_by_its_weight(groups: list[tuple[float, int]]) -> None:
    sums = WeighedSums()
    for one, tokens in groups:
        sums = sums.plus(one, [tokens, tokens + 2])
    weights = [one for one, _ in groups]
    assert sums.groups == len(groups)
    assert sums.zero_weight_groups == weights.count(0.0)
    if not sum(weights):
        assert (sums.mean_length, sums.effective_share) == (0.0, 1.0)
        return
    mean = sum(one * (tokens + 1) for one, tokens in groups) / sum(weights)
    assert sums.mean_length == pytest.approx(mean)
    assert 0.0 < sums.effective_share <= 1.0 + 1e-12


def test_equal_weights_say_as_much_as_no_weights() -> None:
    sums = WeighedSums().plus(1.0, [3]).plus(1.0, [5])
    assert (sums.effective_share, sums.zero_weight_share, sums.mean_length) == (1.0, 0.0, 4.0)
    assert sums.mean_weight == 1.0
    with_one_that_counts_nothing = sums.plus(0.0, [7])
    assert with_one_that_counts_nothing.effective_share == pytest.approx(2 / 3)
    assert with_one_that_counts_nothing.zero_weight_share == pytest.approx(1 / 3)
    assert with_one_that_counts_nothing.mean_weight == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("tail", "weighs"),
    [
        ({"mode": "auto"}, False),  # to begin with
        ({"mode": "auto", "selection_weights": True}, True),
        ({"mode": "exact"}, False),
        ({"mode": "exact", "selection_weights": True}, True),
        ({"mode": "paper"}, False),
        ({"mode": "synchronous", "selection_weights": False}, False),
    ],
)
def test_a_run_weighs_its_groups_where_its_mode_or_its_settings_say_so(
    tail: dict[str, Any], weighs: bool
) -> None:
    assert tail_batching_rules(parsed(**tail)).selection_weights == weighs


@pytest.mark.parametrize("mode", ["paper", "synchronous", "overlap"])
def test_modes_that_defer_nothing_by_length_refuse_weights(mode: str) -> None:
    with pytest.raises(SettingsError, match=f"selection_weights: true with mode {mode}, where no"):
        parsed(mode=mode, selection_weights=True)
