"""The lengths of a run directory: rows in launch order, the coupling of its rounds, the modes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollpacker.policy.events import ReplicaJoined, ResponseFinished
from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.round_log import RoundArguments, RoundLog
from rollpacker.simulation.__main__ import main
from rollpacker.simulation.recorded_lengths import (
    RecordedLengthsError,
    ResampledWorkload,
    coupling_rows,
    read_lengths,
)
from rollpacker.types import Draw, DrawId, RoundKind

PROMPTS, RESPONSES, STEPS = 4, 2, 20


def lengths_of(number: int) -> list[int]:
    return np.random.default_rng(number).geometric(0.02, RESPONSES).clip(1, 200).tolist()


def sample(step: int, number: int, index: int, first_step: int) -> str:
    draw = {"epoch": 0, "prompt_id": str(number), "first_step": first_step}
    return json.dumps(
        {"step": step, "draw": draw, "index": index, "token_count": lengths_of(number)[index]}
    )


def write_run(directory: Path) -> None:
    """A run that trains the draws in their order, but the first one, which waits for the end."""
    settings = {
        "tail_batching": {"prompts_per_step": PROMPTS, "responses_per_prompt": RESPONSES},
        "sampling": {"max_response_tokens": 200},
    }
    (directory / "samples").mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"mode": "exact", "settings": settings}))
    order = [*range(1, PROMPTS * STEPS), 0]
    for step in range(STEPS):
        lines = [
            sample(step, number, index, first_step=number // PROMPTS)
            for number in order[step * PROMPTS : (step + 1) * PROMPTS]
            for index in range(RESPONSES)
        ]
        path = directory / f"samples/step_{step:06d}.jsonl"
        path.write_text("\n".join(lines) + '\n{"torn')


def write_round(directory: Path, step: int, tokens: dict[int, int]) -> None:
    """The log of a round in which the first response of each of these draws finished."""
    draws = tuple(Draw(0, str(number), (1, 2)) for number in tokens)
    plan = RoundPlan(step, RoundKind.SHORT, 0, (), len(draws), 1, RESPONSES)
    arguments = RoundArguments(TailBatchingRules(1, RESPONSES, (2.0,)), plan, draws, {})
    round_, log = arguments.make(), RoundLog(arguments)
    events = [ReplicaJoined(0.0, "a", 100)]
    finished = [ResponseFinished(1.0, DrawId(0, str(n)), 0, count) for n, count in tokens.items()]
    for event in [*events, *finished]:
        log.handled(event, round_.handle(event))
    (directory / "rounds").mkdir(exist_ok=True)
    (directory / f"rounds/step_{step:06d}.jsonl").write_text("\n".join(log.lines) + "\n")


def test_draws_stand_where_they_were_first_launched(tmp_path: Path) -> None:
    write_run(tmp_path)
    recorded = read_lengths(tmp_path)
    assert len(recorded.rows) == PROMPTS * STEPS
    first = {tuple(row) for row in recorded.rows[:PROMPTS]}
    assert first == {tuple(lengths_of(number)) for number in range(PROMPTS)}
    assert (recorded.cap, recorded.prompts_per_step, recorded.mode) == (200, PROMPTS, "exact")


def test_the_coupling_is_the_share_of_responses_that_came_out_as_long_again(
    tmp_path: Path,
) -> None:
    write_run(tmp_path)
    write_round(tmp_path, 3, {number: 10 + number for number in range(40)})
    write_round(tmp_path, 5, {number: 10 + number + (number < 10) for number in range(40)})
    recorded = read_lengths(tmp_path)
    (found,) = recorded.coupling
    assert (found.age, found.pairs, found.same_share) == (2, 40, 0.75)
    assert found.correlation == pytest.approx(1.0, abs=0.01)
    assert recorded.coupling_at(0) == 1.0
    assert recorded.coupling_at(2) == 0.75
    assert [row["figure"] for row in coupling_rows(recorded)] == ["recorded_lengths", "coupling"]


def test_a_changed_response_has_the_length_of_a_sibling() -> None:
    rows = [(3, 5), (70, 90, 80)]
    workload = ResampledWorkload(rows, responses=3, seed=0)
    assert workload.lengths(1)[:3] == [70, 90, 80]
    assert workload.lengths(1, 1.0, 2) == workload.lengths(1)
    for number, row in enumerate(rows):
        assert set(workload.lengths(number)) <= set(row)
        assert set(workload.lengths(number, 0.0, 1)) <= set(row)
    again = ResampledWorkload(rows, responses=3, seed=0)
    assert workload.lengths(1, 0.5, 1) == again.lengths(1, 0.5, 1)


def test_modes_are_compared_on_the_lengths_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    write_round(tmp_path, 3, {number: 10 + number for number in range(40)})
    write_round(tmp_path, 4, {number: 10 + number + (number < 10) for number in range(40)})
    assert main(["compare", "--json", "--lengths", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    modes = [row for row in rows if "mode" in row and "steps" in row]
    assert {row["task"] for row in modes} == {"recorded"}
    assert {row["coupling"] for row in modes} == {"frozen", "fresh", "recorded"}
    for row in modes:
        if row["coupling"] == "frozen":
            assert row["mean_length_ratio"] == 1.0
    assert [row["age"] for row in rows if row.get("figure") == "coupling"] == [1]


def test_a_directory_without_a_run_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RecordedLengthsError, match=r"run\.json: No such file"):
        read_lengths(tmp_path)
    write_run(tmp_path)
    for path in (tmp_path / "samples").iterdir():
        path.unlink()
    with pytest.raises(RecordedLengthsError, match="no trained response"):
        read_lengths(tmp_path)
