"""The simulator carries out the policy and adds nothing to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import Backlog, RaceKind, TailBatchingRules, plan
from rollpacker.simulation.calibration import completion_seconds
from rollpacker.simulation.engine_model import ReplicaModel
from rollpacker.simulation.engine_speed import engine_speed
from rollpacker.simulation.parameters import MODELS, load_parameters
from rollpacker.simulation.release import IdleRelease
from rollpacker.simulation.round_simulation import RoundSimulation
from rollpacker.simulation.round_trace import Launchable
from rollpacker.simulation.scenario import FRESH, FROZEN, MEASURED, Drift, Scenario, carried
from rollpacker.simulation.schedule import SPREAD, TRAINING_IDLE, Schedule
from rollpacker.simulation.simulator import Simulator, StepTrace
from rollpacker.simulation.workload import Workload, WorkloadRules
from rollpacker.types import Draw, RoundKind

PARAMETERS = load_parameters()
MODEL = replace(MODELS["7B"], gpus=4)


def scenario(rules: TailBatchingRules, drift: Drift = FROZEN, **changes: object) -> Scenario:
    workload = WorkloadRules(4096, 0.3, 0.03, seed=changes.pop("seed", 0))  # type: ignore[arg-type]
    return Scenario(MODEL, workload, rules, drift, **{"steps": 6, **changes})  # type: ignore[arg-type]


def run(item: Scenario) -> tuple[Simulator, list[StepTrace]]:
    simulator = Simulator(item, PARAMETERS)
    return simulator, list(simulator.steps())


def rules(*factors: float, **changes: object) -> TailBatchingRules:
    return TailBatchingRules(8, 4, factors, **changes)  # type: ignore[arg-type]


MODES = {
    "synchronous": rules(streams=False),
    "overlap": rules(),
    "paper": rules(
        1.25, response_speculation_factor=1.25, race=RaceKind.ARRIVAL, keeps_seeds=False
    ),
    "one level": rules(1.5),
    "two levels": rules(1.75, 2.0),
    "three levels": rules(2.0, 2.0, 2.0),
}


@pytest.mark.parametrize("name", MODES)
def test_over_a_drained_epoch_every_draw_is_trained_once(name: str) -> None:
    _, steps = run(scenario(MODES[name]))
    trained = Counter(draw.prompt_id for step in steps for draw in step.trained)
    assert trained == Counter(map(str, range(48)))


@pytest.mark.parametrize("name", MODES)
def test_the_round_counts_the_tokens_that_the_replicas_decoded(name: str) -> None:
    _, steps = run(scenario(MODES[name]))
    for step in steps:
        assert step.round.finish is not None
        assert step.round.finish.generated_tokens == step.decoded_tokens
        assert step.trained_tokens <= step.decoded_tokens
        assert step.trained_responses == 4 * len(step.trained)


@given(st.integers(0, 1000), st.sampled_from([(1.5,), (1.75, 2.0), (2.0, 2.0, 2.0)]))
@settings(max_examples=25, deadline=None)
def test_the_winners_are_the_groups_with_the_shortest_longest_response(
    seed: int, factors: tuple[float, ...]
) -> None:
    """Equality with the definition: keys in tokens, ties by launch order."""
    simulator, steps = run(scenario(rules(*factors), seed=seed))
    queued: list[int] = []  # launch order of the queue, by level
    levels: dict[int, int] = {}
    launched = 0
    for step in steps:
        taken = set(map(int, (draw.prompt_id for draw in step.trained)))
        assert step.round.finish is not None
        deferred = [int(item.draw.prompt_id) for item in step.round.finish.deferred]
        order = [n for n in queued if n in taken or n in deferred]
        new = len(taken) + len(deferred) - len(order)
        order += range(launched, launched + new)
        launched += new
        keys = {n: max(simulator.workload.lengths(n)[:4]) for n in order}
        ranked = sorted(order, key=lambda n: (keys[n], order.index(n)))
        if step.kind is RoundKind.SHORT and not any(age >= 32 for age in step.ages):
            assert [int(draw.prompt_id) for draw in step.trained] == ranked[:8]
        queued = [n for n in queued if n not in order] + deferred
        for item in step.round.finish.deferred:
            levels[int(item.draw.prompt_id)] = item.draw.level
        queued.sort(key=levels.__getitem__)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_winners_of_a_token_race_do_not_depend_on_the_number_of_replicas(replicas: int) -> None:
    _, one = run(scenario(MODES["two levels"], gpus=4))
    _, other = run(scenario(MODES["two levels"], gpus=replicas))
    assert [step.trained for step in one] == [step.trained for step in other]


def test_without_drift_the_epoch_trains_the_lengths_of_synchronous() -> None:
    (_, base), (_, deep) = (run(scenario(MODES[name])) for name in ("overlap", "three levels"))
    lengths = [
        sorted((draw, tokens) for step in steps for draw, tokens in step.round.emitted)
        for steps in (base, deep)
    ]
    assert lengths[0] == lengths[1]


def test_fresh_sampling_of_deferred_draws_trains_shorter_responses() -> None:
    simulator, steps = run(scenario(MODES["one level"], FRESH, steps=30))
    ratio = _length_ratio(simulator, steps)
    assert ratio < 0.97
    assert ratio < _length_ratio(*run(scenario(MODES["one level"], MEASURED, steps=30))) < 1.0


def _length_ratio(simulator: Simulator, steps: list[StepTrace]) -> float:
    uncensored = sum(sum(simulator.workload.lengths(n)[:4]) for n in range(len(simulator.workload)))
    return sum(step.trained_tokens for step in steps) / uncensored


def test_carried_tokens_are_not_decoded_again() -> None:
    runs = [run(scenario(MODES["two levels"], d))[1] for d in (FROZEN, carried(0.5), carried(0.9))]
    for step in runs[1]:
        assert step.round.finish is not None
        assert step.round.finish.generated_tokens == step.decoded_tokens
    decoded = [sum(step.decoded_tokens for step in steps) for steps in runs]
    assert decoded[0] > decoded[1] > decoded[2]


@pytest.mark.parametrize("replicas", [1, 8])
def test_a_round_takes_as_long_as_the_closed_form_says(replicas: int) -> None:
    item = scenario(rules(), scores=False, steps=3, gpus=replicas, schedule=SPREAD)
    simulator, steps = run(item)
    workload = simulator.workload
    assert isinstance(workload, Workload)
    lengths = workload.first_lengths.reshape(3, 8, -1)[:, :, :4]
    prompt_tokens = int(PARAMETERS["prompt_tokens"])
    ends = completion_seconds(lengths, 4, replicas, simulator.speed_at(0), prompt_tokens)
    prompts = {1: 8, 8: 4}[replicas]  # whose responses a replica has
    prefill = prompts * prompt_tokens * simulator.speed_at(0).prefill_seconds
    for step, end in zip(steps, ends.max(axis=1), strict=True):
        assert step.rollout_seconds == pytest.approx(end + prefill, rel=1e-6)


def test_a_run_is_a_function_of_its_scenario() -> None:
    first, second = (run(scenario(MODES["paper"]))[1] for _ in range(2))
    assert [s.step_seconds for s in first] == [s.step_seconds for s in second]


@pytest.mark.parametrize("spreads", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_replicas_released_to_training_lose_no_response(share: float, spreads: bool) -> None:
    item = scenario(
        MODES["two levels"],
        scales_down=True,
        release_share=share,
        schedule=Schedule(spreads_groups=spreads),
    )
    _, steps = run(item)
    for step in steps:
        assert step.round.finish is not None
        assert step.round.finish.generated_tokens == step.decoded_tokens
    plain = run(scenario(MODES["two levels"]))[1]
    assert [step.trained for step in steps] == [step.trained for step in plain]
    assert all(s.trained_tokens == p.trained_tokens for s, p in zip(steps, plain, strict=True))


class Arrivals:
    """A trainer's side of a round: when each group came, by its tokens."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}

    def receive(self, at: float, tokens: int) -> None:
        self.at[tokens] = at

    def release(self, at: float, share: float) -> None:
        """Whatever trains."""


def test_a_group_goes_to_released_gpus_once_no_running_group_can_come_before_it() -> None:
    """Three groups of one response, on a replica each; none can lose."""
    three = TailBatchingRules(3, 1)
    planned = plan(three, Backlog(0, (), 3))
    assert planned is not None
    draws = [Draw(0, name, (), first_step=0) for name in "abc"]
    lengths = dict(zip("abc", (100, 2000, 4000), strict=True))
    launchables = {draw.id: Launchable([lengths[draw.id.prompt_id]]) for draw in draws}
    replicas = [ReplicaModel(name, engine_speed(PARAMETERS, MODEL)) for name in "xyz"]
    arrivals = Arrivals()
    RoundSimulation(
        Round(three, planned, draws),
        three,
        planned,
        draws,
        launchables,
        replicas,
        None,
        arrivals,
        0.0,
        1,
        IdleRelease(),
        TRAINING_IDLE,
    ).run()
    ends = sorted(replica.now for replica in replicas)
    assert [arrivals.at[tokens] for tokens in (100, 2000, 4000)] == pytest.approx(ends)


def test_a_size_for_each_level_changes_times_and_nothing_else() -> None:
    _, one = run(scenario(rules(2.0, 2.0)))
    sized = rules(2.0, 2.0, tensor_parallel_sizes=(1, 2, 4))
    _, own = run(scenario(sized, resize_seconds=7.0))
    assert [step.trained for step in own] == [step.trained for step in one]
    assert [len(step.round.spans) for step in own] == [4 // (1, 2, 4)[step.level] for step in one]
    for before, after in zip(one, own, strict=True):
        assert (after.rollout_seconds == before.rollout_seconds) == (after.level == 0)
    levels = [step.level for step in own]
    resized = [False, *(a != b for a, b in pairwise(levels))]
    longer = [b.refit_seconds - a.refit_seconds for a, b in zip(one, own, strict=True)]
    assert longer == [7.0 if was else 0.0 for was in resized]


def test_a_run_that_gives_up_deferring_drains_its_queue_first() -> None:
    """Rules without a level have no round for what was deferred."""

    def steer(step: int, done: list[StepTrace], present: TailBatchingRules) -> object:
        told.append(present.speculation_factors)
        return replace(present, speculation_factors=()) if step == 1 else None

    told: list[tuple[float, ...]] = []
    simulator = Simulator(scenario(rules(2.0)), PARAMETERS, steer=steer)  # type: ignore[arg-type]
    steps = list(simulator.steps())
    assert Counter(draw.prompt_id for step in steps for draw in step.trained) == Counter(
        map(str, range(48))
    )
    assert [step.factors for step in steps][-1] == ()
    assert told[: len(steps)] == [step.factors for step in steps]  # as a live run's planner is
    assert all(set(step.ages) == {0} for step in steps if not step.factors)
