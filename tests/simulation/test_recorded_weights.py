"""How responses of a run changed from launch to launch, by logs of rounds that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollpacker.policy.tail_batching import RoundPlan, TailBatchingRules
from rollpacker.round_log import RoundArguments, read_round
from rollpacker.simulation.engine_model import ReplicaModel
from rollpacker.simulation.recorded_run import NoTrainer
from rollpacker.simulation.recorded_steps import RecordedStep, recorded_step
from rollpacker.simulation.recorded_weights import drift_rows
from rollpacker.simulation.round_simulation import RoundSimulation
from rollpacker.simulation.round_trace import Launchable
from rollpacker.types import Draw, RoundKind
from tests.simulation.test_recorded_run import SPEED, LoggingRound

KEPT, SHORT_DRAFT = 40, 33
RULES = TailBatchingRules(KEPT, 1, (2.0,))


def length(draw: Draw) -> int:
    return 20 + int(draw.prompt_id)


def played(planned: RoundPlan, draws: tuple[Draw, ...], carried: dict[str, int]) -> RecordedStep:
    """A round, from its log; `carried`: accepted tokens, by prompt."""
    round_ = LoggingRound(RoundArguments(RULES, planned, draws, {}))
    launched = {
        draw.id: Launchable((length(draw),), (carried.get(draw.prompt_id, 0),), prompt_tokens=0)
        for draw in draws
    }
    replicas = [ReplicaModel("a", SPEED)]
    RoundSimulation(
        round_, RULES, planned, draws, launched, replicas, None, NoTrainer(), 0.0, 2 * KEPT
    ).run()
    return recorded_step(read_round(round_.log.lines), {})


@pytest.fixture(scope="module")
def steps() -> list[RecordedStep]:
    """A short round, and the long one of its losers: of four drafts one changes at token 33."""
    new = tuple(Draw(0, str(number), (), first_step=0) for number in range(2 * KEPT))
    short = RoundPlan(0, RoundKind.SHORT, 0, (), len(new), KEPT, 1)
    first = played(short, new, {})
    deferred = first.finish.deferred
    again = tuple(item.draw for item in deferred)
    carried = {
        item.draw.prompt_id: SHORT_DRAFT if place % 4 == 0 else item.response_tokens[0]
        for place, item in enumerate(deferred)
    }
    long = RoundPlan(1, RoundKind.LONG, 1, again, 0, KEPT, 1)
    return [first, played(long, again, carried)]


def test_drafts_that_came_out_again_are_told_by_length_and_updates(
    tmp_path: Path, steps: list[RecordedStep]
) -> None:
    (row,) = drift_rows(tmp_path, steps)
    assert (row["updates"], row["tokens"], row["responses"]) == (1, 32, KEPT)
    assert row["unchanged_share"] == 0.75
    assert 1000 / 60 / 4 < row["changes_per_1000_tokens"] < 1000 / SHORT_DRAFT / 4


def test_a_draft_is_no_longer_than_what_is_kept_of_it(
    tmp_path: Path, steps: list[RecordedStep]
) -> None:
    settings = {"tail_batching": {"carry_over_max_tokens": SHORT_DRAFT}}
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings}))
    (row,) = drift_rows(tmp_path, steps)
    assert (row["unchanged_share"], row["changes_per_1000_tokens"]) == (1.0, 0.0)


def test_without_drafts_nothing_is_told(tmp_path: Path, steps: list[RecordedStep]) -> None:
    assert list(drift_rows(tmp_path, steps[:1])) == []
