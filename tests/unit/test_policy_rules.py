"""The small rules of the policy: time limits, bias meter, seeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.bias_meter import BiasMeter, kaplan_meier_mean
from rollpacker.policy.timeouts import TimeoutRules, next_anchor, time_limit
from rollpacker.sampling import response_seed, response_seeds
from rollpacker.types import DrawId


def test_the_time_limit_follows_the_anchor_between_its_bounds() -> None:
    rules = TimeoutRules(min_seconds=2, max_seconds=30, relaxation=1.5)
    assert time_limit(rules, None) == 30
    assert time_limit(rules, 0.1) == 2
    assert time_limit(rules, 4) == 6
    assert time_limit(rules, 100) == 30


def test_the_anchor_grows_by_correct_runs_only() -> None:
    assert next_anchor(None, 3, correct=False) is None
    assert next_anchor(None, 3, correct=True) == 3
    assert next_anchor(3, 9, correct=False) == 3
    assert next_anchor(3, 2, correct=True) == 3
    assert next_anchor(3, 9, correct=True) == 9


@given(st.lists(st.integers(0, 50), min_size=1))
def test_without_censoring_the_kaplan_meier_mean_is_the_mean(lengths: list[int]) -> None:
    counts = {length: lengths.count(length) for length in lengths}
    assert kaplan_meier_mean(counts, {}) == pytest.approx(sum(lengths) / len(lengths))


def test_the_kaplan_meier_mean_equals_a_published_example() -> None:
    # Survival 1, 5/6, 5/6 (censored at 2), 5/6*3/4 at 3 (one of four), then 0 at 5.
    mean = kaplan_meier_mean({1: 1, 3: 1, 5: 3}, {2: 1})
    assert mean == pytest.approx(1 + 5 / 6 * 2 + 5 / 6 * 3 / 4 * 2)


def test_the_bias_ratio_falls_when_long_responses_wait_in_the_queue() -> None:
    meter = BiasMeter()
    meter.add_trained([10, 10, 10, 10])
    assert meter.ratio([]) == 1
    assert meter.ratio([(100, False), (100, True)]) < 0.5
    meter.add_trained([100, 120])
    assert meter.ratio([]) == 1


def test_the_bias_ratio_falls_when_groups_let_go_of_their_longest_responses() -> None:
    meter = BiasMeter()
    meter.add_trained([10, 10, 10, 40])
    meter.add_cut([10])
    assert meter.ratio([]) == pytest.approx(17.5 / 22.0)  # two of five go on to 40
    assert BiasMeter(meter.trained_lengths, meter.cut_lengths).ratio([]) == meter.ratio([])


@given(st.integers(0, 2**53), st.integers(0, 9), st.text(max_size=5), st.integers(0, 64))
def test_seeds_are_63_bits_and_differ_between_responses(run_seed, epoch, prompt_id, count) -> None:
    seeds = response_seeds(run_seed, DrawId(epoch, prompt_id), count)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len(set(seeds)) == count


def test_seeds_depend_on_run_epoch_prompt_index_and_attempt_and_never_change() -> None:
    base = response_seed(0, DrawId(0, "p"), 0)
    assert base == 7_644_607_807_707_020_034
    others = [
        response_seed(1, DrawId(0, "p"), 0),
        response_seed(0, DrawId(1, "p"), 0),
        response_seed(0, DrawId(0, "q"), 0),
        response_seed(0, DrawId(0, "p"), 1),
        response_seed(0, DrawId(0, "p"), 0, attempt=1),
    ]
    assert len({base, *others}) == 6
