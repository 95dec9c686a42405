"""A response that was cut and comes out shorter is drawn again: which, how often, at what cost."""

from __future__ import annotations

import dataclasses
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import Backlog, TailBatchingRules, plan
from rollpacker.simulation.engine_model import ReplicaModel
from rollpacker.simulation.engine_speed import engine_speed
from rollpacker.simulation.parameters import MODELS, load_parameters
from rollpacker.simulation.redraws import redrawn
from rollpacker.simulation.round_simulation import RoundSimulation
from rollpacker.simulation.round_trace import Launchable, RoundTrace
from rollpacker.simulation.scenario import FROZEN, MEASURED_CARRY_OVER, Drift, Scenario, ladder
from rollpacker.simulation.schedule import PLAIN, REBALANCED, Schedule
from rollpacker.simulation.simulator import Simulator, StepTrace
from rollpacker.simulation.trainer_model import TrainerModel
from rollpacker.simulation.workload import WorkloadRules
from rollpacker.types import DeferredDraw, Draw

PARAMETERS = load_parameters()
MODEL = dataclasses.replace(MODELS["7B"], gpus=4)
DRAW = Draw(0, "0", (), first_step=0)


def deferred(tokens: tuple[int, ...], finished: tuple[bool, ...]) -> DeferredDraw:
    return DeferredDraw(DRAW, tokens, finished)


def test_only_what_was_cut_and_is_no_longer_than_it_was_is_drawn_again() -> None:
    draft = deferred((500, 500, 500, 90), (False, False, False, True))
    others = {1: [400, 501, 300, 7], 2: [900, 900, 250, 7]}
    last, before = redrawn([501, 500, 100, 40], draft, 2, others.__getitem__)
    assert last == [501, 501, 250, 40]
    assert before == {1: [500], 2: [100, 300]}


@given(
    st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99), st.booleans()), min_size=1),
    st.integers(0, 4),
    st.randoms(use_true_random=False),
)
def test_attempts_end_with_the_first_long_one(
    rows: list[tuple[int, int, bool]], most: int, random: Random
) -> None:
    lengths, had, finished = zip(*rows, strict=True)
    again = [[random.randint(1, 99) for _ in rows] for _ in range(most)]
    last, before = redrawn(lengths, deferred(had, finished), most, lambda n: again[n - 1])
    for index, tokens in enumerate(last):
        attempts = [*before.get(index, ()), tokens]
        assert attempts == [row[index] for row in [lengths, *again]][: len(attempts)]
        assert all(one <= had[index] for one in attempts[:-1])
        if finished[index]:
            assert len(attempts) == 1
        elif tokens <= had[index]:
            assert len(attempts) == most + 1


def one_round(
    launchables: list[Launchable], replicas: int, schedule: Schedule = PLAIN
) -> tuple[RoundTrace, list[ReplicaModel]]:
    rules = TailBatchingRules(len(launchables), len(launchables[0].lengths))
    planned = plan(rules, Backlog(0, (), len(launchables)))
    assert planned is not None
    draws = [Draw(0, str(n), (), first_step=0) for n in range(len(launchables))]
    engines = [ReplicaModel(f"r{n}", engine_speed(PARAMETERS, MODEL)) for n in range(replicas)]
    simulation = RoundSimulation(
        Round(rules, planned, draws),
        rules,
        planned,
        draws,
        {draw.id: known for draw, known in zip(draws, launchables, strict=True)},
        engines,
        None,
        TrainerModel(PARAMETERS, MODEL, 4),
        0.0,
        8,
        schedule=schedule,
    )
    return simulation.run(), engines


def test_an_attempt_costs_its_tokens_and_only_the_last_is_trained() -> None:
    plain, before = one_round([Launchable([300, 200])], 1)
    trace, after = one_round([Launchable([300, 200], attempts={1: [100, 50]})], 1)
    assert [lengths for _, lengths in trace.emitted] == [(300, 200)]
    assert sum(replica.decoded_tokens for replica in after) == 650
    assert trace.end > plain.end > 0.0
    assert sum(replica.decoded_tokens for replica in before) == 500


def test_attempts_go_on_where_their_group_is_moved() -> None:
    """The second replica is idle after 10 tokens, and takes a group over amid its first attempt."""
    short = Launchable([10, 10])
    long = Launchable([3000, 10], attempts={0: [2500, 2000]})
    trace, engines = one_round([long, short, long], 2, REBALANCED)
    assert sorted(lengths for _, lengths in trace.emitted) == [(10, 10)] + [(3000, 10)] * 2
    decoded = [replica.decoded_tokens for replica in engines]
    assert min(decoded) > 7000, "each has decoded most of a long group"
    assert sum(decoded) == 20 + 2 * (2500 + 2000 + 3010)


def run(redraws: int, drift: Drift) -> list[StepTrace]:
    rules = dataclasses.replace(ladder(2.0, 2.0), prompts_per_step=16, responses_per_prompt=4)
    workload = WorkloadRules(4096, 0.6, 0.03)
    scenario = Scenario(MODEL, workload, rules, drift, steps=16, redraws=redraws)
    return list(Simulator(scenario, PARAMETERS).steps())


def test_weights_that_do_not_move_have_nothing_drawn_again() -> None:
    once, never = run(1, FROZEN), run(0, FROZEN)
    assert [step.trained for step in once] == [step.trained for step in never]
    assert [step.step_seconds for step in once] == [step.step_seconds for step in never]


def test_fewer_long_ones_are_missing_and_it_costs_tokens() -> None:
    trained, waste = [], []
    for redraws in (0, 1, 2):
        steps = run(redraws, MEASURED_CARRY_OVER)
        trained.append(sum(step.trained_tokens for step in steps))
        waste.append(sum(step.decoded_tokens for step in steps) / trained[-1])
        draws = [draw for step in steps for draw in step.trained]
        assert len(set(draws)) == len(draws) == 16 * 16
    assert trained[0] < trained[1] < trained[2]
    assert waste[0] < waste[1] < waste[2]
