"""The comparison of modes: every mode has its row, by processes of their own."""

from __future__ import annotations

from rollpacker.simulation.compare import compare, modes
from rollpacker.simulation.parameters import load_parameters


def test_every_mode_has_a_row_and_the_oracle_beside_them() -> None:
    rows = list(compare(load_parameters(), (8192,), (0.3,), steps=1))
    names = [row["mode"] for row in rows]
    assert names.count("oracle") == 1
    assert [name for name in names if name != "oracle"] == [mode.name for mode in modes()]
    for row in rows:
        assert row["mean_length_ratio"] == 1.0 or row["mode"] == "paper"
        assert row["trained_tokens_per_second"] > 0
        assert ("weighed_length_ratio" in row) == (row["mode"] != "oracle")
