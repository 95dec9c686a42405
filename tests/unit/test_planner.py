"""The planner: a pure function of what was measured."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise, product
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.policy.engine_forecast import EngineMeasure
from rollpacker.policy.group_law import GroupLaw, ObservedGroup
from rollpacker.policy.ladder_forecast import PlannerRules, forecast, level_rounds, weighed
from rollpacker.policy.planner import LadderChoice, choose_ladder
from rollpacker.policy.response_drift import Unchanged
from rollpacker.policy.reward_forecast import GraderMeasure

RULES = PlannerRules(16, 4, 8192)
ENGINE = EngineMeasure(4, 0.01, 2e-4, 1e-8, 1_000_000, 100)
ENGINES = {0: ENGINE}  # which keep their size


def groups(count: int, tail: float, seed: int = 0) -> list[ObservedGroup]:
    """Responses of 100 to 500 tokens, and a share `tail` that runs into the cap."""
    rng = random.Random(seed)

    def tokens() -> int:
        return 8192 if rng.random() < tail else rng.randint(100, 500)

    return [ObservedGroup(tuple(tokens() for _ in range(4)), complete=True) for _ in range(count)]


def chosen(
    rules: PlannerRules, seen: list[ObservedGroup], present: tuple[float, ...]
) -> LadderChoice:
    return choose_ladder(rules, ENGINES, seen, present, (0,) * (len(present) + 1))


def test_it_keeps_the_ladder_until_enough_groups_are_complete() -> None:
    choice = chosen(RULES, groups(63, 0.05), (1.5,))
    assert choice.factors == (1.5,)
    assert "63 groups seen" in choice.reason


def test_it_keeps_the_ladder_while_nobody_has_seen_a_long_group_to_its_end() -> None:
    """Else the tail looks as short as the longest winner of a race, and deferring looks useless."""
    whole = [group for group in groups(400, 0.05) if group.longest < 8192]
    cut = [ObservedGroup((500,) * 4, complete=False)] * (400 - len(whole))
    choice = chosen(RULES, [*whole, *cut], (2.0,))
    assert choice.factors == (2.0,)
    assert "the tail is a guess" in choice.reason
    seen = [ObservedGroup((8192,) * 4, complete=True)] * (len(cut) // 2)
    choice = chosen(RULES, [*whole, *cut[len(seen) :], *seen], (2.0,))
    assert "guess" not in choice.reason


def test_it_defers_where_there_is_a_tail_and_does_not_where_there_is_none() -> None:
    assert chosen(RULES, groups(400, 0.03), ()).factors
    equal = [ObservedGroup((300,) * 4, complete=True) for _ in range(100)]
    assert chosen(RULES, equal, ()).factors == ()


def test_the_same_measurements_give_the_same_choice_and_say_why_in_one_line() -> None:
    first, second = (chosen(RULES, groups(200, 0.05), ()) for _ in range(2))
    assert first == second
    assert "\n" not in first.reason
    assert "instead of no deferral" in first.reason


def test_no_draw_may_get_older_than_allowed() -> None:
    young = replace(RULES, max_deferral_age=3)
    law = GroupLaw(groups(300, 0.05), 8192)
    factors = chosen(young, groups(300, 0.05), ()).factors
    assert forecast(young, ENGINES, law, factors).max_age <= 3


def test_it_does_not_defer_what_would_come_out_shorter() -> None:
    drifting = replace(RULES, unchanged=lambda updates, tokens: 0.0)
    law = GroupLaw(groups(300, 0.05), 8192)
    assert forecast(drifting, ENGINES, law, (1.5,)).length_ratio < 0.98
    assert chosen(drifting, groups(300, 0.05), (1.5,)).factors == ()


def changing(unchanged: float) -> PlannerRules:
    """So likely a response is the same again; groups may count by what deferral selects."""
    return replace(RULES, unchanged=lambda _updates, _tokens: unchanged, selection_weights=None)


def test_where_nothing_changes_weights_promise_nothing() -> None:
    law = GroupLaw(groups(300, 0.05), 8192)
    for factors in ((1.5,), (2.0, 1.25)):
        plain = forecast(changing(1.0), ENGINES, law, factors)
        assert plain.effective_share == pytest.approx(1.0)
        found = weighed(plain)
        assert found.length_ratio == pytest.approx(plain.length_ratio)
        assert 0.9 * plain.tokens_per_second < found.tokens_per_second < plain.tokens_per_second
    assert not chosen(changing(1.0), groups(300, 0.05), ()).selection_weights


@pytest.mark.parametrize("unchanged", [0.0, 0.5, 0.9])
def test_of_weighed_groups_those_count_that_stay_long(unchanged: float) -> None:
    """Of those that are drawn afresh, as many as of all groups, where prompts do not differ."""
    rules, law = changing(unchanged), GroupLaw(groups(2000, 0.05), 8192)
    first, second = level_rounds(rules, law, (1.5,))
    assert first.stays == 1.0
    assert second.stays == pytest.approx(unchanged + (1.0 - unchanged) / 3.0, abs=0.03)
    plain = forecast(rules, ENGINES, law, (1.5,))
    effective = 1.0 / (first.rate + second.rate / second.stays)
    assert plain.effective_share == pytest.approx(effective)
    found = weighed(plain)
    assert abs(found.length_ratio - 1.0) < 0.5 * abs(plain.length_ratio - 1.0)
    counted = effective * found.length_ratio * law.tokens(0.0, 1.0) * RULES.prompts_per_step
    assert 0.9 * counted < found.tokens_per_second * found.step_seconds < counted


def test_with_weights_it_defers_what_it_would_not_without_them() -> None:
    seen, rules = groups(300, 0.05), changing(0.8)
    assert chosen(replace(rules, selection_weights=False), seen, ()).factors == ()
    choice = chosen(rules, seen, ())
    assert choice.factors
    assert choice.selection_weights
    assert "by weights" in choice.reason
    assert forecast(rules, ENGINES, GroupLaw(seen, 8192), choice.factors).length_ratio < 0.98
    nothing_stays = chosen(changing(0.0), seen, ())  # too much would be missing with them too
    assert (nothing_stays.factors, nothing_stays.selection_weights) == ((), False)


@pytest.mark.parametrize("asked", [False, True])
def test_it_weighs_where_it_has_to_and_does_not_where_it_may_not(asked: bool) -> None:
    for unchanged in (0.8, 1.0):
        rules = replace(changing(unchanged), selection_weights=asked)
        choice = chosen(rules, groups(300, 0.05), ())
        assert choice.selection_weights == (asked and bool(choice.factors))


def test_weights_stay_while_nothing_else_pays() -> None:
    seen, rules = groups(300, 0.05), changing(0.8)
    first = chosen(rules, seen, ())
    sizes = (0,) * (len(first.factors) + 1)
    again = choose_ladder(rules, ENGINES, seen, first.factors, sizes, first.selection_weights)
    assert again.selection_weights
    assert again.factors == first.factors
    without = choose_ladder(rules, ENGINES, seen, first.factors, sizes)
    assert without.selection_weights  # the same ladder is not allowed without


def test_drafts_make_deferral_cheaper() -> None:
    law = GroupLaw(groups(300, 0.05), 8192)
    plain = forecast(RULES, ENGINES, law, (2.0,))
    drafts = forecast(replace(RULES, acceptance=lambda age: 0.9), ENGINES, law, (2.0,))
    assert drafts.rollout_seconds < plain.rollout_seconds


def graded(seen: list[ObservedGroup], *kinds: str) -> list[ObservedGroup]:
    """Groups whose kinds of grader take turns."""
    return [replace(group, grader=kinds[n % len(kinds)]) for n, group in enumerate(seen)]


def graded_at(**seconds: float) -> PlannerRules:
    """Graders that are waited for, by what a response costs."""
    return replace(RULES, graders={kind: GraderMeasure(cost) for kind, cost in seconds.items()})


def test_no_round_is_over_before_its_graders_have_scored_what_it_keeps() -> None:
    law = GroupLaw(graded(groups(300, 0.05), "judge"), 8192)
    plain = forecast(RULES, ENGINES, law, (2.0, 2.0))
    work = RULES.prompts_per_step * RULES.responses_per_prompt
    for seconds in (0.1, 1.0, 1e4):
        slow = forecast(graded_at(judge=seconds), ENGINES, law, (2.0, 2.0))
        assert slow.decode_seconds == plain.decode_seconds == pytest.approx(plain.rollout_seconds)
        assert slow.rollout_seconds >= max(plain.rollout_seconds, seconds * work)
    assert slow.rollout_seconds == pytest.approx(1e4 * work, rel=1e-3)


def test_kinds_of_grader_work_side_by_side_each_on_its_own() -> None:
    rules = graded_at(judge=1e4, math=1e4)
    one = GroupLaw(graded(groups(300, 0.05), "judge"), 8192)
    two = GroupLaw(graded(groups(300, 0.05), "judge", "math"), 8192)
    alone, both = (forecast(rules, ENGINES, law, (2.0,)).rollout_seconds for law in (one, two))
    assert both == pytest.approx(alone / 2.0, rel=0.2)  # the shares of a level vary
    unknown = GroupLaw(graded(groups(300, 0.05), "code"), 8192)
    plain = forecast(RULES, ENGINES, unknown, (2.0,))
    assert forecast(rules, ENGINES, unknown, (2.0,)) == plain


def test_rounds_that_keep_more_of_a_slow_kind_take_longer() -> None:
    """A judge's responses are short here: short rounds keep more of them than long ones do."""
    rng = random.Random(0)
    seen = [
        ObservedGroup(tuple(rng.randint(low, high) for _ in range(4)), complete=True, grader=kind)
        for _ in range(150)
        for kind, low, high in (("judge", 50, 300), ("math", 200, 2000))
    ]
    rules = graded_at(judge=10.0)
    law = GroupLaw(seen, 8192)
    short, long_ = (
        item.seconds(rules, ENGINE, law)[0] for item in level_rounds(rules, law, (2.0,))
    )
    assert short > 2.0 * long_
    assert short == pytest.approx(10.0 * 16 * 4, rel=0.1)


def test_where_rewards_decide_how_long_a_round_is_the_least_decoding_is_best() -> None:
    slow = replace(graded_at(judge=1e6), min_gain=-1.0)
    seen = graded(groups(400, 0.03), "judge")
    choice = chosen(slow, seen, ())
    law = GroupLaw(seen, 8192)
    best = forecast(slow, ENGINES, law, choice.factors).decode_seconds
    for factors in ((), (1.25,), (1.5,), (2.0,), (1.5, 1.5), (2.0, 2.0, 2.0)):
        assert best <= forecast(slow, ENGINES, law, factors).decode_seconds


@pytest.mark.parametrize(
    ("tolerance", "stays", "comes"), [(1.2, True, True), (1.1, True, False), (0.9, False, False)]
)
def test_a_ladder_at_the_edge_of_the_tolerance_is_neither_left_nor_taken(
    tolerance: float, stays: bool, comes: bool
) -> None:
    drifting = replace(RULES, unchanged=lambda updates, tokens: 0.5, min_gain=0.2)
    seen = groups(400, 0.03)
    law = GroupLaw(seen, 8192)
    loss = 1.0 - forecast(drifting, ENGINES, law, (1.25,)).length_ratio
    assert loss > 0.0
    edge = replace(drifting, length_tolerance=tolerance * loss)
    assert (chosen(edge, seen, (1.25,)).factors == (1.25,)) is stays
    other = chosen(replace(edge, min_gain=-1.0), seen, ())
    found = forecast(drifting, ENGINES, law, other.factors).length_ratio
    assert (abs(1.0 - found) > 0.9 * loss) is comes


def test_a_full_kv_cache_makes_long_rounds_slower() -> None:
    law = GroupLaw(groups(300, 0.2), 8192)
    tight = replace(ENGINE, kv_capacity=20_000)
    assert (
        forecast(RULES, {0: tight}, law, (2.0,)).rollout_seconds
        > forecast(RULES, ENGINES, law, (2.0,)).rollout_seconds
    )


def test_groups_that_were_cut_off_count_as_longer_ones() -> None:
    short = [ObservedGroup((100,) * 4, complete=True)] * 50
    long_ = [ObservedGroup((1000,) * 4, complete=True)] * 25
    cut = [ObservedGroup((200,) * 4, complete=False)] * 25
    law = GroupLaw([*short, *cut, *long_], 8192)
    assert law.key_at(0.49) == 100
    assert law.key_at(0.51) == 1000
    assert law.tokens(0.0, 1.0) == pytest.approx(4 * 550)


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_come_out_shorter_are_missed_among_those_of_their_prompts(seed: int) -> None:
    """Responses of long prompts are long again, so groups of these are seen whole more often."""
    rng = random.Random(seed)
    seen, first = [], []
    for _ in range(4000):
        usual = rng.choice((100.0, 800.0))

        def draw(usual: float = usual) -> list[int]:
            return [1 + round(usual * rng.lognormvariate(0.0, 0.7)) for _ in range(4)]

        row, again = draw(), draw()
        first.append(sum(row))
        if max(row) <= 300:
            seen.append(ObservedGroup(tuple(row), complete=True))
        elif max(again) >= 300:
            seen.append(ObservedGroup(tuple(again), complete=True))
        else:
            cut = tuple(min(300, tokens) for tokens in row)
            seen.append(ObservedGroup(cut, complete=False))
    assert GroupLaw(seen, 8192).tokens(0.0, 1.0) == pytest.approx(fmean(first), rel=0.02)


def test_the_shares_of_a_ladder_add_up_to_the_mean_length() -> None:
    law = GroupLaw(groups(300, 0.05), 8192)
    low, high = law.tokens(0.0, 0.6), law.tokens(0.6, 1.0)
    assert 0.6 * low + 0.4 * high == pytest.approx(law.tokens(0.0, 1.0))
    for factors in ((1.5,), (1.75, 2.0), (2.0, 2.0, 2.0)):
        assert forecast(RULES, ENGINES, law, factors).length_ratio == pytest.approx(1.0)


def test_responses_that_change_late_stay_longer_than_such_that_change_at_once() -> None:
    """What follows a changed token is not shorter than what was before it."""
    law = GroupLaw(groups(400, 0.05), 8192)

    def ratio(unchanged: Unchanged) -> float:
        return forecast(replace(RULES, unchanged=unchanged), ENGINES, law, (2.0,)).length_ratio

    at_once = ratio(lambda updates, tokens: 0.2)
    late = ratio(lambda updates, tokens: 1.0 if tokens < 8192 else 0.2)
    by_token = ratio(lambda updates, tokens: math.exp(-2e-4 * tokens))
    assert at_once < by_token < 1.0
    assert late == pytest.approx(1.0, abs=0.002)


def test_draws_that_come_back_sooner_keep_more_of_their_length() -> None:
    drifting = replace(RULES, unchanged=lambda updates, tokens: 0.8**updates)
    law = GroupLaw(groups(300, 0.05), 8192)
    ratios = [
        forecast(drifting, ENGINES, law, factors).length_ratio
        for factors in ((2.0,), (2.0, 2.0), (2.0, 2.0, 2.0))
    ]
    assert 1.0 > ratios[0] > ratios[1] > ratios[2]


def sized(size: int) -> EngineMeasure:
    """16 GPUs of engines of this size: faster each, fewer, and with more room in all."""
    return EngineMeasure(16 // size, 0.02 / size, 1e-3, 1e-8, 12_000 * (2 * size - 1), 100)


SIZED = {size: sized(size) for size in (1, 2, 4)}


def test_long_levels_get_larger_engines_where_their_kv_does_not_fit() -> None:
    """A level that holds short responses wants many small engines."""
    law = GroupLaw(groups(400, 0.03), 8192)
    best = forecast(RULES, SIZED, law, (2.0, 2.0))
    assert best.sizes[0] < best.sizes[-1]
    choice = choose_ladder(RULES, SIZED, groups(400, 0.03), (2.0, 2.0), (1, 1, 1))
    assert choice.sizes[0] < choice.sizes[-1]
    assert f"on engines of size {', '.join(map(str, choice.sizes))}" in choice.reason
    assert "\n" not in choice.reason


def test_a_resize_that_takes_long_leaves_one_size_for_all_levels() -> None:
    law = GroupLaw(groups(400, 0.03), 8192)
    slow = replace(RULES, resize_seconds=1e4)
    sizes = forecast(slow, SIZED, law, (2.0, 2.0)).sizes
    assert len(set(sizes)) == 1
    quick = forecast(RULES, SIZED, law, (2.0, 2.0))
    assert quick.rollout_seconds < forecast(slow, SIZED, law, (2.0, 2.0)).rollout_seconds < 1e4


@given(st.floats(0.0, 0.2), st.sampled_from([(), (1.5,), (2.0, 1.75)]), st.floats(0.0, 50.0))
@settings(max_examples=20, deadline=None)
def test_no_sizes_of_the_levels_are_better_than_the_best(
    tail: float, factors: tuple[float, ...], resize_seconds: float
) -> None:
    rules = replace(RULES, resize_seconds=resize_seconds)
    law = GroupLaw(groups(200, tail), 8192)
    best = forecast(rules, SIZED, law, factors)
    others = [
        forecast(rules, SIZED, law, factors, sizes=sizes)
        for sizes in product(SIZED, repeat=len(factors) + 1)
    ]
    assert best.rollout_seconds == min(other.rollout_seconds for other in others)
    assert {other.length_ratio for other in others} == {best.length_ratio}


@given(st.floats(0.0, 0.2), st.sampled_from([(), (1.5,), (2.0, 1.75)]), st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_ladder_and_sizes_change_only_for_a_gain(
    tail: float, factors: tuple[float, ...], seed: int
) -> None:
    seen = groups(200, tail, seed)
    law = GroupLaw(seen, 8192)
    present = (2,) * (len(factors) + 1)
    choice = choose_ladder(RULES, SIZED, seen, factors, present)
    now = forecast(RULES, SIZED, law, factors, sizes=present)
    same_ladder = forecast(RULES, SIZED, law, factors)
    if (choice.factors, choice.sizes) == (factors, present):
        assert now.rollout_seconds <= same_ladder.rollout_seconds / (1.0 - RULES.min_gain)
    else:
        new = forecast(RULES, SIZED, law, choice.factors, sizes=choice.sizes)
        assert new.tokens_per_second > now.tokens_per_second


def test_responses_that_never_stop_take_turns_where_the_kv_is_full() -> None:
    """What does not fit makes its tokens up when the others have ended."""
    capped = [ObservedGroup((8192,) * 4, complete=True) for _ in range(64)]
    law = GroupLaw(capped, 8192)
    one = replace(ENGINE, replicas=16, per_sequence_seconds=0.0, per_kv_token_seconds=0.0)
    all_fit = forecast(RULES, {0: replace(one, kv_capacity=4 * 9000)}, law, ()).rollout_seconds
    half_fit = forecast(RULES, {0: replace(one, kv_capacity=2 * 9000)}, law, ()).rollout_seconds
    assert 1.2 * all_fit < half_fit <= 2 * all_fit


def test_a_guess_does_not_keep_a_ladder_that_shortens_what_is_trained() -> None:
    drifting = replace(RULES, unchanged=lambda updates, tokens: 0.0)
    whole = [group for group in groups(400, 0.05) if group.longest < 8192]
    cut = [ObservedGroup((500,) * 4, complete=False)] * (400 - len(whole))
    choice = chosen(drifting, [*whole, *cut], (2.0,))
    assert choice.factors == ()


def test_a_fresh_group_of_the_same_prompts_is_between_the_old_one_and_any() -> None:
    rng = random.Random(1)
    rows = [
        tuple(round(1000 * scale * rng.uniform(0.5, 1.5)) for _ in range(4))
        for scale in (rng.choice((1, 3)) for _ in range(600))
    ]
    law = GroupLaw([ObservedGroup(row, complete=True) for row in rows], 8192)
    longer = law.bins[len(law.bins) // 2 :]
    fresh, old = (
        sum(item.mass * tokens for item, tokens in rows) / sum(item.mass for item in longer)
        for rows in (
            [(item, item.fresh_tokens) for item in longer],
            [(item, item.tokens) for item in longer],
        )
    )
    assert law.tokens(0.0, 1.0) < fresh < old
    assert sum(item.mass * item.fresh_tokens for item in law.bins) == pytest.approx(
        law.tokens(0.0, 1.0), rel=1e-6
    )


def third_level_seconds(count: int, never: float) -> float:
    """Of a round that keeps seven eighths of all groups, where a share `never` meets the cap."""
    rng = random.Random(0)
    longest = [8192 if n < never * count else rng.randint(100, 500) for n in range(count)]
    seen = [ObservedGroup((min(top, 300), min(top, 200), top), complete=True) for top in longest]
    rules, law = replace(RULES, prompts_per_step=128), GroupLaw(seen, 8192)
    return level_rounds(rules, law, (2.0, 2.0, 2.0))[2].seconds(rules, ENGINE, law)[1]


def test_at_the_edge_of_the_groups_that_meet_the_cap_a_forecast_rises_without_jumps() -> None:
    """Else a ladder is taken or left for a few groups more or less among those that were seen."""
    shares = [0.1 + 0.005 * n for n in range(11)]
    seconds = [third_level_seconds(1000, share) for share in shares]
    rises = [after - before for before, after in pairwise(seconds)]
    assert seconds[-1] > 3 * seconds[0]
    assert all(0.0 < rise < 0.2 * (seconds[-1] - seconds[0]) for rise in rises)


def test_what_is_known_of_few_groups_may_meet_the_cap_more_often_than_they_did() -> None:
    few, many = (third_level_seconds(count, 0.1) for count in (250, 4000))
    assert few > 1.3 * many
