"""Run files and overrides: what is wrong is said in one line, and nothing is dropped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollpacker.settings import SettingsError, load_run_settings
from rollpacker.strict_yaml import load_yaml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: 'a' stands twice; keep one"),
        ("t: {x: 1, x: 1}", "line 1, column 11: 'x' stands twice; keep one"),
        ('{"a": 1, "a": 2}', "line 1, column 10: 'a' stands twice; keep one"),
        ("a: [1,\n", "line 2, column 1: "),
        ("a: \x00", "special characters are not allowed"),
        ("? [1]\n: 2", "line 1, column 3: found unhashable key"),
    ],
)
def test_what_is_no_yaml_or_stands_twice_is_named_by_its_place(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        load_yaml(text)
    assert "\n" not in str(caught.value)


def test_everything_else_is_read_as_before() -> None:
    assert load_yaml("") is None
    assert load_yaml("1e-6") == "1e-6"
    text = "base: &b {x: 1, y: 2}\nother: {<<: *b, x: 3}\nlist: [{x: 1}, {x: 2}]\n"
    assert load_yaml(text) == {
        "base": {"x": 1, "y": 2},
        "other": {"x": 3, "y": 2},
        "list": [{"x": 1}, {"x": 2}],
    }


def test_a_run_file_and_an_override_that_are_no_yaml_are_settings_errors(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {path: d}\n")
    with pytest.raises(SettingsError, match="is not YAML"):
        load_run_settings(path, ["max_steps=["])
    with pytest.raises(SettingsError, match="is not a section"):
        load_run_settings(path, ["seed=1", "seed.x=1"])
    path.write_text("model: m\nmodel: n\ndata: {path: d}\n")
    with pytest.raises(SettingsError, match="line 2, column 1: 'model' stands twice"):
        load_run_settings(path)
