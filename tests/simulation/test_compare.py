"""The comparison of modes: every mode has its row, by processes of their own."""

from __future__ import annotations

import pytest

from rollpacker.simulation.compare import compare, main_modes, modes
from rollpacker.simulation.parameters import load_parameters


@pytest.mark.parametrize("every", [False, True])
def test_every_mode_has_a_row_and_the_oracle_beside_them(every: bool) -> None:
    rows = list(compare(load_parameters(), (8192,), (0.3,), steps=1, every=every))
    names = [row["mode"] for row in rows]
    assert names.count("oracle") == 1
    expected = [mode.name for mode in (modes() if every else main_modes())]
    assert [name for name in names if name != "oracle"] == expected
    for row in rows:
        assert row["mean_length_ratio"] == 1.0 or row["mode"] == "paper"
        assert row["trained_tokens_per_second"] > 0
        assert ("weighed_length_ratio" in row) == (row["mode"] != "oracle")


def test_the_main_modes_are_the_ones_that_the_goals_are_about() -> None:
    """All names, `auto` like for like at each carry-over, and as a live run may be."""
    main = main_modes()
    assert len(main) < len(modes())
    assert {mode.name for mode in main} == {mode.name for mode in modes()}
    auto = [mode for mode in main if mode.name == "auto"]
    plain = [(mode.coupling, mode.carry_over) for mode in auto if mode.schedule == "plain"]
    assert plain == [("measured", "none"), ("frozen", "none"), ("frozen", "0.5"), ("frozen", "0.9")]
    live = [(m.schedule, m.sizes) for m in auto if (m.coupling, m.carry_over) == ("measured",) * 2]
    assert live == [
        ("rebalance", "the paper's"),
        ("rebalance, idle", "the paper's"),
        ("rebalance, idle", "planned"),
    ]
