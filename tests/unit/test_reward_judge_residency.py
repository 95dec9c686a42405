"""How many layers of the judge stay on the device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.judge_worker.residency import (
    BUFFERS,
    DeviceMemoryError,
    ModelShape,
    residents,
    spread,
)

SHAPE = ModelShape((100,) * 8, cache_bytes_per_token=1, work_bytes_per_token=1)


def count(free: float, sequences: int = 1, tokens: int = 0, shape: ModelShape = SHAPE) -> int:
    return sum(residents(shape, free, sequences, tokens))


def test_all_stay_where_all_fit_and_without_buffers() -> None:
    assert count(800) == 8
    assert count(float("inf")) == 8
    assert count(799) == 5  # two buffers take the room of two layers, and one layer is too many


def test_longer_sequences_and_larger_batches_leave_fewer() -> None:
    assert [count(800, 1, tokens) for tokens in (0, 50, 100, 200)] == [8, 5, 4, 2]
    assert [count(800, sequences, 50) for sequences in (1, 2, 4, 6)] == [5, 4, 2, 0]


def test_where_not_even_the_buffers_fit_the_figures_are_told() -> None:
    with pytest.raises(DeviceMemoryError, match=r"3 sequences of 400 tokens"):
        residents(SHAPE, 800, 3, 400)


def test_streamed_layers_lie_evenly_between_resident_ones() -> None:
    assert spread(8, 4) == (True, False) * 4
    assert spread(3, 3) == (False,) * 3
    assert spread(3, 0) == (True,) * 3


@given(
    layers=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    free=st.integers(0, 40_000),
    sequences=st.integers(1, 8),
    tokens=st.integers(0, 100),
)
def test_what_is_placed_never_exceeds_what_is_free_and_one_layer_more_would(
    layers: list[int], free: int, sequences: int, tokens: int
) -> None:
    shape = ModelShape(tuple(layers), 2, 3)
    room = free - sequences * tokens * 5
    buffers = BUFFERS * max(layers)
    try:
        stays = residents(shape, free, sequences, tokens)
    except DeviceMemoryError:
        assert room < buffers
        assert room < sum(layers)
        return
    held = sum(size for size, stay in zip(layers, stays, strict=True) if stay)
    assert held + (0 if all(stays) else buffers) <= room
    if not all(stays):
        more = spread(len(layers), len(layers) - sum(stays) - 1)
        larger = sum(size for size, stay in zip(layers, more, strict=True) if stay)
        assert sum(layers) > room
        assert larger + buffers > room
