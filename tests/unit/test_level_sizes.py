"""The sizes of a run's engines by level: what a run file may say, and what it comes to."""

from __future__ import annotations

from typing import Any

import pytest

from rollpacker.settings import RunSettings, SettingsError, parse_run_settings
from rollpacker.store.records import RunState
from services.coordinator.changes import UpdateSettings, checked_update, settings_in_force, settled
from services.coordinator.modes import tail_batching_rules
from services.coordinator.parallelism import ServedCounts


def parsed(**tail: Any) -> RunSettings:
    return parse_run_settings(
        {"model": "/m", "data": {"path": "/d.jsonl"}, "tail_batching": {"mode": "exact", **tail}}
    )


@pytest.mark.parametrize(
    ("tail", "sizes"),
    [
        ({}, ()),
        ({"tensor_parallel_sizes": [1, 2]}, (1, 2, 2)),
        ({"tensor_parallel_sizes": [4]}, (4, 4, 4)),
        ({"max_tensor_parallel_size": 4}, ()),
        ({"mode": "auto"}, ()),
        ({"mode": "auto", "max_tensor_parallel_size": 4}, (1, 1)),
        (
            {"mode": "auto", "max_tensor_parallel_size": 4, "tensor_parallel_sizes": [2, 4]},
            (2, 4),
        ),
    ],
)
def test_each_level_has_a_size_where_the_run_or_its_mode_says_so(
    tail: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    rules = tail_batching_rules(parsed(**tail))
    levels = range(rules.levels + 1)
    assert tuple(rules.tensor_parallel_size(n) for n in levels) == (sizes or (0,) * len(levels))


@pytest.mark.parametrize(
    ("tail", "problem"),
    [
        ({"tensor_parallel_sizes": [1, 1, 2, 2]}, "4 values for levels 0 to 2; give at most one"),
        (
            {"tensor_parallel_sizes": [1, 2], "max_tensor_parallel_size": 4},
            r"\[1, 2\] beside max_tensor_parallel_size 4, by which preemptions decide; leave one",
        ),
        (
            {"mode": "auto", "tensor_parallel_sizes": [2]},
            "2 is above max_tensor_parallel_size 0; mode auto chooses sizes up to that; raise it",
        ),
        ({"tensor_parallel_sizes": [0]}, "greater than or equal to 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_way_out(
    tail: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SettingsError, match=rf"tensor_parallel_sizes.*{problem}"):
        parsed(**tail)


def test_sizes_may_be_changed_while_a_run_is_under_way() -> None:
    state = RunState("r", parsed().model_dump(mode="json"), 1.0)
    change = checked_update(state, [], {"tail_batching": {"tensor_parallel_sizes": [1, 2]}})
    assert change == UpdateSettings({"tail_batching": {"tensor_parallel_sizes": [1, 2]}})
    in_force = settings_in_force(settled(state, [change]))
    assert in_force.tail_batching.tensor_parallel_sizes == (1, 2)


def test_as_many_replicas_are_expected_as_served_or_have_devices() -> None:
    served = ServedCounts()
    assert (served.expected(0), served.expected(2)) == (0, 0)
    served.served(1, 8)
    assert (served.expected(1), served.expected(2), served.expected(4)) == (8, 4, 2)
    served.served(2, 3)
    assert (served.expected(2), served.expected(1), served.expected(0)) == (3, 8, 0)
