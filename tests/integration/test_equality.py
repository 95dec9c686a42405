"""At fixed weights the ladder only reorders: over a drained epoch `exact` trains the responses of
`synchronous`, each once, and its steps' gradients add up to the same sum.

Both modes run as real processes at learning rate 0, on the same prompts and seeds. The gradients
are the trainer's own, summed over each run's samples in this process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import torch
from torch import Tensor

from rollpacker.algorithms import ALGORITHMS
from rollpacker.settings import load_run_settings
from rollpacker.types import PromptGroup
from services.trainer.model import PolicyModel
from services.trainer.packing import WINDOW_GROUPS, StreamPacker
from services.trainer.ranks import Ranks
from services.trainer.settings import OpenRunSettings
from services.trainer.step_accumulator import StepAccumulator
from tests.integration.real_runs import RealStack, Trace, proof_settings, running_stack
from tests.tiny_run import write_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

DEMO = Path(__file__).parents[2] / "demo" / "gcd" / "run.yaml"
STEPS, RESPONSES, CAP = 10, 4, 40
PROMPTS_PER_STEP = WINDOW_GROUPS  # a full step is one window of the trainer's packer


class Epoch(NamedTuple):
    """One mode's run over the data, drained."""

    trace: Trace
    groups: list[list[PromptGroup]]  # per step
    metrics: dict[str, float]  # of the last step


class Epochs(NamedTuple):
    exact: Epoch
    synchronous: Epoch
    model: PolicyModel


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def epochs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Epochs]:
    directory = tmp_path_factory.mktemp("equality")
    write_model(directory / "model")
    async with running_stack(directory) as real:
        exact = await run_epoch(real, "exact")
        synchronous = await run_epoch(real, "synchronous")
    torch.set_num_threads(1)
    model = PolicyModel(directory / "model", "float32", torch.device("cpu"), None)
    yield Epochs(exact, synchronous, model)


async def run_epoch(real: RealStack, mode: str) -> Epoch:
    values = proof_settings(
        real.directory,
        PROMPTS_PER_STEP * STEPS,
        tail_batching={
            "mode": mode,
            "prompts_per_step": PROMPTS_PER_STEP,
            "responses_per_prompt": RESPONSES,
        },
        sampling={"max_response_tokens": CAP},
        trainer={"learning_rate": 0},
    )
    trace = await real.run(mode, values)
    return Epoch(trace, real.samples(mode), real.metrics(mode)[-1])


def trainer_settings(**changes: Any) -> OpenRunSettings:
    """The demo's, with these changes."""
    values = load_run_settings(DEMO).trainer.model_dump(mode="json") | changes
    return OpenRunSettings(
        **values,
        prompts_per_step=PROMPTS_PER_STEP,
        responses_per_prompt=RESPONSES,
        max_response_tokens=CAP,
    )


def summed_gradient(
    model: PolicyModel, steps: Sequence[Sequence[PromptGroup]], settings: OpenRunSettings
) -> Tensor:
    """The sum over all steps of the gradient that the update would take, flat."""
    accumulator = StepAccumulator(model, settings, temperature=1.0, ranks=Ranks())
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for groups in steps:
        packer = StreamPacker(1, settings.micro_batch_tokens)
        *_, windows = [packer.add(group) for group in groups]
        assert windows is not None, "the groups of a step fill one window"
        for batch in windows[0].micro_batches:
            accumulator.add(batch)
        normaliser = settings.fixed_normaliser() or accumulator.sums().trained_tokens
        total += torch.cat([g.flatten() for g in accumulator.gradients()]).double() / normaliser
        accumulator.drop()
    return total


def relative_difference(epochs: Epochs, settings: OpenRunSettings) -> float:
    """How far the summed gradient of `exact` is from that of `synchronous`."""
    exact = summed_gradient(epochs.model, epochs.exact.groups, settings)
    synchronous = summed_gradient(epochs.model, epochs.synchronous.groups, settings)
    assert synchronous.norm() > 0
    return ((exact - synchronous).norm() / synchronous.norm()).item()


async def test_exact_trains_the_responses_of_synchronous_each_once(epochs: Epochs) -> None:
    exact, synchronous = (
        Counter(response for step in epoch.trace.responses for group in step for response in group)
        for epoch in (epochs.exact, epochs.synchronous)
    )
    assert exact == synchronous
    assert set(exact.values()) == {1}
    assert len(exact) == STEPS * PROMPTS_PER_STEP * RESPONSES


async def test_exact_trains_them_in_other_steps(epochs: Epochs) -> None:
    """Else the equality of the sums would say nothing."""
    assert len(epochs.exact.groups) == len(epochs.synchronous.groups) == STEPS
    assert epochs.exact.metrics["tail/deferrals_total"] > STEPS
    assert epochs.synchronous.metrics["tail/deferrals_total"] == 0
    lengths = [
        [max(len(tokens) for group in step for _, _, tokens, *_ in group) for step in responses]
        for responses in (epochs.exact.trace.responses, epochs.synchronous.trace.responses)
    ]
    assert sum(lengths[0]) < sum(lengths[1])  # each step's longest, summed: the long ones share
    rewards = [reward for step in epochs.exact.trace.responses for g in step for *_, reward in g]
    assert 0 < math.fsum(rewards) < len(rewards)


async def test_the_bias_meter_reads_that_nothing_is_lost(epochs: Epochs) -> None:
    bias = {"bias/ratio": 1.0, "bias/shorter_again_share": 0.0}
    for epoch in (epochs.exact, epochs.synchronous):
        assert {name: epoch.metrics[name] for name in bias} == bias


ALL_ALGORITHMS = [
    {"algorithm": name, "normaliser": None, "normaliser_tokens": 0}
    | ({"advantage_deviation": 0.5} if name == "reinforce_plus_plus" else {})
    for name in ALGORITHMS
]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normaliser": "response_cap", "normaliser_tokens": 0},
        {"normaliser": "constant", "normaliser_tokens": 7},
        *ALL_ALGORITHMS,
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "demo",
)
async def test_the_summed_gradient_of_exact_is_that_of_synchronous(
    epochs: Epochs, changes: dict[str, Any]
) -> None:
    assert relative_difference(epochs, trainer_settings(**changes)) < 1e-5


async def test_a_normaliser_of_the_step_breaks_the_equality(epochs: Epochs) -> None:
    """Why `exact` refuses it: a response's weight would depend on the step it is trained in."""
    settings = trainer_settings(normaliser="step_tokens", normaliser_tokens=0)
    assert relative_difference(epochs, settings) > 0.01
