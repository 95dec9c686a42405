"""A run whose rounds are known by construction: speed and times are found again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollpacker.policy.commands import Command
from rollpacker.policy.events import Event
from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.round_log import RoundArguments, RoundLog, RoundLogError, read_round
from rollpacker.simulation.engine_model import ReplicaModel
from rollpacker.simulation.engine_speed import EngineSpeed
from rollpacker.simulation.recorded_run import (
    NoTrainer,
    measured_speed,
    recorded,
    recorded_rounds,
    replay_rows,
)
from rollpacker.simulation.round_simulation import RoundSimulation
from rollpacker.simulation.round_trace import Launchable
from rollpacker.types import Draw, RoundKind

SPEED = EngineSpeed(2e-3, 1e-4, 0.0, 0.0, 1 << 40)
GROUPS, KEEP, RESPONSES = 12, 8, 4


class LoggingRound(Round):
    def __init__(self, arguments: RoundArguments) -> None:
        super().__init__(arguments.rules, arguments.plan, arguments.draws)
        self.log = RoundLog(arguments)

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        self.log.handled(event, commands)
        return commands


def simulated_round(step: int) -> list[str]:
    """The log of a round that an engine of that speed ran."""
    lengths = np.random.default_rng(step).geometric(0.01, (GROUPS, RESPONSES)).tolist()
    draws = tuple(Draw(0, f"{step}-{row}", (), first_step=step) for row in range(GROUPS))
    plan = RoundPlan(step, RoundKind.SHORT, 0, (), GROUPS, KEEP, RESPONSES)
    rules = TailBatchingRules(KEEP, RESPONSES, (1.5,))
    round_ = LoggingRound(RoundArguments(rules, plan, draws, {}))
    RoundSimulation(
        round_,
        rules,
        plan,
        draws,
        {
            draw.id: Launchable(row, prompt_tokens=0)
            for draw, row in zip(draws, lengths, strict=True)
        },
        [ReplicaModel(name, SPEED) for name in ("a", "b")],
        None,
        NoTrainer(),
        0.0,
        GROUPS * RESPONSES,
    ).run()
    return round_.log.lines


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    (directory / "rounds").mkdir()
    for step in range(8):
        text = "\n".join(simulated_round(step)) + "\n"
        (directory / "rounds" / f"step_{step:06d}.jsonl").write_text(text)
    return directory


def test_the_speed_of_the_engine_is_found(run: Path) -> None:
    speed = measured_speed(recorded_rounds(run))
    assert speed.base_seconds == pytest.approx(SPEED.base_seconds, rel=0.1)
    assert speed.per_sequence_seconds == pytest.approx(SPEED.per_sequence_seconds, rel=0.1)


def test_responses_that_were_cut_off_are_followed_to_their_end() -> None:
    round_ = recorded(read_round(simulated_round(3)))
    cut = [span for span in round_.spans if span.decoded_tokens is None]
    assert len(round_.spans) == GROUPS * RESPONSES
    assert len(round_.tokens) + len(cut) == GROUPS * RESPONSES
    assert cut
    assert all(span.end > span.start for span in round_.spans)


def test_the_report_repeats_the_commands_and_foretells_the_times(run: Path) -> None:
    rows = list(replay_rows(run))
    replay, last = rows[0], rows[-1]
    assert (replay["rounds"], replay["differences"]) == (8, 0)
    assert replay["commands"] > 8 * GROUPS
    assert last["rounds"] == last["same_winners"] == 4
    assert last["median_absolute_error"] < 0.1


def test_a_directory_without_rounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RoundLogError, match="is it a run directory"):
        recorded_rounds(tmp_path)


def test_the_command_fails_when_the_policy_says_something_else(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rounds").mkdir()
    for path in (run / "rounds").iterdir():
        text = path.read_text().replace('"type":"EmitGroup"', '"type":"AbortGroup"', 1)
        (tmp_path / "rounds" / path.name).write_text(text)
    command = [sys.executable, "-m", "rollpacker.simulation", "replay", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["differences"] == 8
