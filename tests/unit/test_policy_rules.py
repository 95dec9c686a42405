"""The small rules of the policy: time limits, seeds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
