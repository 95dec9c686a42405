"""Full collections wait for the end of a step."""

from __future__ import annotations

import gc

import pytest

from services.coordinator.garbage import full_collections_wait


def full_collections() -> int:
    return gc.get_stats()[2]["collections"]


def make_objects_that_stay() -> int:
    """Full collections meanwhile: there is one when the old objects have grown by a quarter, and
    the young ones have been collected often enough."""
    young, middle, old = 700, 10, 10  # the thresholds of Python 3.11
    count = max(len(gc.get_objects()), 2 * young * middle * old)
    before = full_collections()
    kept = [[] for _ in range(count)]
    assert kept
    return full_collections() - before


def test_nothing_old_is_collected_before_the_end_and_then_it_is_as_before() -> None:
    thresholds = gc.get_threshold()
    with full_collections_wait():
        assert make_objects_that_stay() == 0
    assert gc.get_threshold() == thresholds
    assert make_objects_that_stay() > 0


def test_a_collection_that_was_due_is_made_at_the_end_and_no_other() -> None:
    due = gc.get_threshold()[2] + 1
    for young_collections, expected in ((due, 1), (0, 0)):
        gc.collect()
        with full_collections_wait():
            for _ in range(young_collections):
                gc.collect(1)
            before = full_collections()
        assert full_collections() - before == expected


def test_a_step_that_fails_ends_the_wait() -> None:
    thresholds = gc.get_threshold()
    with pytest.raises(RuntimeError), full_collections_wait():
        raise RuntimeError
    assert gc.get_threshold() == thresholds


def test_waits_that_overlap_end_too() -> None:
    thresholds = gc.get_threshold()
    first, second = full_collections_wait(), full_collections_wait()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds
