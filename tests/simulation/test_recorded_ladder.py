"""The planner of a run, played again: it is told of the ladder that was in force."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollpacker.policy.planner import LadderChoice
from rollpacker.policy.tail_batching import Backlog, RoundPlan, TailBatchingRules, plan
from rollpacker.round_log import RoundArguments, read_round
from rollpacker.simulation import recorded_ladder
from rollpacker.simulation.engine_model import ReplicaModel
from rollpacker.simulation.recorded_run import NoTrainer
from rollpacker.simulation.recorded_steps import recorded_steps
from rollpacker.simulation.round_simulation import RoundSimulation
from rollpacker.simulation.round_trace import Launchable
from rollpacker.types import DeferredDraw, Draw, RoundKind
from tests.simulation.test_recorded_run import SPEED, LoggingRound

BEFORE, AFTER = (1.75,), (1.5,)
RULES = TailBatchingRules(4, 1, BEFORE)


def played(
    rules: TailBatchingRules, planned: RoundPlan, draws: tuple[Draw, ...]
) -> tuple[list[str], tuple[DeferredDraw, ...]]:
    """The log of a round, and what it deferred."""
    round_ = LoggingRound(RoundArguments(rules, planned, draws, {}))
    lengths = {draw.id: Launchable((9 + int(draw.prompt_id),), prompt_tokens=0) for draw in draws}
    trace = RoundSimulation(
        round_,
        rules,
        planned,
        draws,
        lengths,
        [ReplicaModel("a", SPEED)],
        None,
        NoTrainer(),
        0.0,
        9,
    ).run()
    assert trace.finish is not None
    return round_.log.lines, trace.finish.deferred


def test_a_ladder_of_none_that_waited_for_the_end_of_the_queue_is_the_present_one_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner, for once, says what the test wants: at first to defer no more, then to do."""
    told: list[tuple[int, tuple[float, ...]]] = []

    def next_ladder(
        _rules: Any,
        _memory: Any,
        step: int,
        _others: Any,
        present: tuple[float, ...],
        sizes: Any,
        weights: bool,
    ) -> LadderChoice:
        told.append((step, present))
        return LadderChoice({3: (), 4: AFTER}[step], sizes, "", weights)

    monkeypatch.setattr(recorded_ladder, "next_ladder", next_ladder)
    logged, queue, drawn = [], list[DeferredDraw](), 0
    for step in range(6):
        rules = RULES if step < 4 else replace(RULES, speculation_factors=AFTER)
        deferred = tuple(item.draw for item in queue)
        planned = plan(rules, Backlog(step, deferred, 0 if step == 3 else 99))
        assert planned is not None
        new = [Draw(0, str(drawn + n), (), 0, step) for n in range(planned.new_prompts)]
        drawn += len(new)
        lines, lost = played(rules, planned, (*planned.queued, *new))
        queue = [item for item in queue if item.draw not in planned.queued] + list(lost)
        logged.append(read_round(lines))
    kinds = [round_.arguments.plan.kind for round_ in logged]
    assert kinds[2:4] == [RoundKind.LONG, RoundKind.DRAIN]
    run = {"mode": "auto", "settings": {"sampling": {"max_response_tokens": 99}}}
    run["settings"]["tail_batching"] = {}  # type: ignore[index]
    (tmp_path / "run.json").write_text(json.dumps(run))
    metrics = [{"step": s, "timing_s/step": 2.0, "timing_s/rollout": 1.0} for s in range(6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    rows = list(recorded_ladder.ladder_rows(tmp_path, recorded_steps(tmp_path, logged)))
    assert told == [(3, BEFORE), (4, ())]
    assert rows[-1] == {"figure": "ladders", "choices": 2, "differences": 0}
