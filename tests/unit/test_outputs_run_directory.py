"""The files of a run: lines survive torn writes, damage is named, nothing is overwritten."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.coordinator.outputs.run_directory import (
    LineFile,
    RunDirectory,
    RunDirectoryError,
    read_json,
    write_atomic,
)


@pytest.fixture
def file(tmp_path: Path) -> LineFile:
    return LineFile(tmp_path / "metrics.jsonl")


def test_lines_come_back_in_order(file: LineFile) -> None:
    rows = [{"step": step, "reward/mean": step / 10} for step in range(3)]
    for row in rows:
        file.append(row)
    assert file.read() == rows
    assert file.newest_step() == 2


def test_a_missing_file_has_no_lines(file: LineFile) -> None:
    assert file.read() == []
    assert file.newest_step() is None


@pytest.mark.parametrize("torn", ["{", '{"step":1,"rew', '{"step":1}'])
def test_a_torn_last_line_is_skipped_and_the_next_append_removes_it(
    file: LineFile, torn: str
) -> None:
    file.append({"step": 0})
    with file.path.open("a") as opened:
        opened.write(torn)
    assert file.read() == [{"step": 0}]
    file.append({"step": 1, "again": True})
    assert file.read() == [{"step": 0}, {"step": 1, "again": True}]


def test_a_file_that_is_one_torn_line_starts_anew(file: LineFile) -> None:
    file.path.write_text('{"step":')
    file.append({"step": 0})
    assert file.path.read_text() == '{"step":0}\n'


@pytest.mark.parametrize("damage", ["not json", "[1]", '{"reward/mean":1}'])
def test_a_damaged_line_is_named_with_its_number(file: LineFile, damage: str) -> None:
    file.path.write_text(f'{{"step":0}}\n{damage}\n{{"step":2}}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl, line 2: .*restore the line"):
        file.read()


def test_drop_from_keeps_the_earlier_steps(file: LineFile) -> None:
    for step in range(5):
        file.append({"step": step})
    file.drop_from(3)
    assert [row["step"] for row in file.read()] == [0, 1, 2]
    file.drop_from(3)
    assert [row["step"] for row in file.read()] == [0, 1, 2]


def test_a_number_that_json_cannot_hold_is_refused_before_anything_is_written(
    file: LineFile,
) -> None:
    with pytest.raises(ValueError, match="JSON"):
        file.append({"step": 0, "reward/mean": float("nan")})
    assert file.read() == []


def test_superseded_samples_are_never_overwritten(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path)
    for content in ("first", "second", "third"):
        write_atomic(files.samples_file(7), content)
        files.supersede_samples(7)
    found = {path.name: path.read_text() for path in files.superseded.iterdir()}
    assert found == {
        "step_000007.jsonl": "first",
        "step_000007.2.jsonl": "second",
        "step_000007.3.jsonl": "third",
    }


def test_sampled_steps_ignore_files_that_are_being_written(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path)
    write_atomic(files.samples_file(3), "")
    write_atomic(files.samples_file(1_000_000), "")
    (files.samples / ".step_000004.jsonl.writing").write_text("half")
    assert files.sampled_steps() == [3, 1_000_000]


def test_write_atomic_leaves_only_the_new_content(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "summary.json"
    write_atomic(target, "old")
    write_atomic(target, "new")
    assert target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["summary.json"]


def test_a_file_may_be_replaced_by_several_at_the_same_time(tmp_path: Path) -> None:
    target = tmp_path / "step_000000.jsonl"
    contents = [f"{number}\n" * 1000 for number in range(64)]
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda content: write_atomic(target, content), contents))
    assert target.read_text() in contents
    assert list(tmp_path.iterdir()) == [target]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    write_atomic(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(target, "\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("summary.json", "old")
    ]


def test_read_json_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not the directory of a run; give runs/<run_id>"):
        read_json(tmp_path / "run.json")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="is not JSON"):
        read_json(tmp_path / "run.json")
    (tmp_path / "run.json").write_text(json.dumps([1]))
    with pytest.raises(RunDirectoryError, match="does not hold an object"):
        read_json(tmp_path / "run.json")
