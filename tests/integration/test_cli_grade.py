"""`rollpacker grade` with the reward service's real worker processes."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from rollpacker.cli.main import app


def test_graded_lines_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    rows = [("b", "\\boxed{12}"), ("a", "\\boxed{13}"), ("c", "I do not know")]
    lines = [{"id": i, "ground_truth": "12", "response": text} for i, text in rows]
    file.write_text("\n".join(map(json.dumps, lines)))
    result = CliRunner().invoke(app, ["grade", "math", str(file)])
    assert result.exit_code == 0, result.output
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"id": "b", "reward": 1.0, "verdict": "CORRECT"},
        {"id": "a", "reward": 0.0, "verdict": "INCORRECT"},
        {"id": "c", "reward": 0.0, "verdict": "NO_ANSWER"},
    ]


def test_a_wrong_line_is_status_2_and_named_before_any_output(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    good = json.dumps({"id": "a", "ground_truth": "1", "response": "1"})
    file.write_text(good + "\n" + json.dumps({"id": "b", "ground_truth": "1"}))
    result = CliRunner().invoke(app, ["grade", "math", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{file}, line 2: response" in result.stderr


def test_a_file_that_does_not_exist_is_status_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["grade", "math", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "cannot be read: No such file" in result.stderr


def test_code_is_run_in_a_sandbox_and_printed_in_order(tmp_path: Path) -> None:
    file = tmp_path / "programs.jsonl"
    tests = [["1\n", "2\n"]]
    rows = [("b", "```python\nprint(2 * int(input()))\n```"), ("a", "```cpp\nint main(){}\n```")]
    lines = [{"id": i, "response": text, "tests": tests} for i, text in rows]
    file.write_text("\n".join(map(json.dumps, lines)))
    result = CliRunner().invoke(app, ["grade", "code", str(file), "--time-limit", "5"])
    assert result.exit_code == 0, result.output
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    assert [list(line) for line in printed] == [["id", "verdict", "reward", "cpu_seconds"]] * 2
    assert [(line["id"], line["verdict"]) for line in printed] == [
        ("b", "CORRECT"),
        ("a", "UNSUPPORTED_LANGUAGE"),
    ]
