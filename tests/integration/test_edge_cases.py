"""Odd jobs as real processes: each comes to a good end and trains every draw once.

All runs follow each other on one stack, which has more replicas than some of them have prompts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from rollpacker.rpc.errors import InvalidArgumentError
from tests.integration.real_runs import (
    ANY_NUMBER,
    OUTCOME,
    Moment,
    RealStack,
    Trace,
    proof_settings,
    running_stack,
    trained_draws,
    write_rows,
)
from tests.tiny_run import CHARACTERS, write_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

EOS = len(CHARACTERS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealStack]:
    directory = tmp_path_factory.mktemp("edge")
    write_model(directory / "model")
    async with running_stack(directory, rollouts=3) as stack:
        yield stack


def write_stopping_model(directory: Path, bias: float) -> None:
    """The tiny model, with about `bias` added to the logit of the stop token at every position.

    Dimension 0 of the residual stream is 1 for every token and no layer writes to it.
    """
    write_model(directory)
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weight[:, 0] = 1.0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][EOS, 0] = bias
    save_file(weights, path, metadata={"format": "pt"})


def responses(trace: Trace) -> list[tuple[int, ...]]:
    """The tokens of every trained response."""
    return [tokens for step in trace.responses for group in step for _, _, tokens, *_ in group]


def rewards(trace: Trace) -> list[float]:
    return [reward for step in trace.responses for group in step for *_, reward in group]


def draws(prompts: int, epochs: int = 1) -> Counter[str]:
    """Every draw of the data, once."""
    return Counter(f"{epoch}:{row}" for epoch in range(epochs) for row in range(1, prompts + 1))


async def run(
    real: RealStack, run_id: str, prompts: int, rows: list[Any] | None = None, **sections: Any
) -> Trace:
    """A run to its end; it has trained every draw of its data once."""
    values = proof_settings(real.directory, prompts, **sections)
    if rows is not None:
        write_rows(real.directory / "train.jsonl", rows)
    trace = await real.run(run_id, values)
    epochs = values["data"].get("epochs", 1)
    assert Counter(trained_draws(trace)) == draws(prompts, epochs)
    return trace


async def test_empty_responses_are_trained(real: RealStack) -> None:
    write_stopping_model(real.directory / "silent", bias=1e4)
    trace = await run(real, "silent", 12, model=str(real.directory / "silent"))
    assert set(responses(trace)) == {(EOS,)}
    assert set(rewards(trace)) == {0.0}
    assert real.samples("silent")[0][0].responses[0].text == ""


async def test_groups_may_be_empty_in_part(real: RealStack) -> None:
    write_stopping_model(real.directory / "terse", bias=3.0)
    trace = await run(real, "terse", 12, model=str(real.directory / "terse"))
    share = responses(trace).count((EOS,)) / len(responses(trace))
    assert 0.1 < share < 0.9


async def test_rewards_that_are_all_equal_move_no_weight(real: RealStack) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": "7", "answer_after": "never said"} for i in range(12)]
    trace = await run(real, "equal", 12, rows)
    assert set(rewards(trace)) == {0.0}
    assert all(line["trainer/grad_norm"] == 0.0 for line in trace.metrics)
    assert len(set(trace.weights.values())) == 1


async def test_dynamic_sampling_trains_groups_whose_rewards_differ_and_reports_the_others(
    real: RealStack,
) -> None:
    """Half of the prompts are never answered right. A killed coordinator changes nothing."""
    values = proof_settings(
        real.directory, 48, tail_batching={"dynamic_sampling": True, "responses_per_prompt": 4}
    )
    hopeless = {"answer": "7", "answer_after": "never said"}
    write_rows(
        real.directory / "train.jsonl",
        [
            {"prompt": f"{i}+1=", **(hopeless if i % 2 else {"reference": ANY_NUMBER})}
            for i in range(48)
        ],
    )
    straight = await real.run("dynamic", values)
    await real.start("dynamic-killed", values, held=True)
    for moment in (Moment(1, 2), Moment(2, OUTCOME)):
        await real.reach("dynamic-killed", moment)
        await real.kill("coordinator")
    await real.succeeded("dynamic-killed")
    killed = await real.trace("dynamic-killed")
    assert killed == straight
    steps = await real.steps("dynamic")
    kept = [
        [group for group in step if len({reward for *_, reward in group}) == 1]
        for step in straight.responses
    ]
    assert any(step and not flat for step, flat in zip(straight.responses, kept, strict=True))
    for step, flat in zip(steps, kept, strict=True):  # trained only where replacements ran out
        assert not flat or len(step.flat_draws) > 4
    assert len(steps[0].draws) == 4
    assert steps[0].flat_draws  # although the data was not at its end
    dropped = [f"{draw.epoch}:{draw.prompt_id}" for step in steps for draw in step.flat_draws]
    assert len(dropped) + sum(map(len, kept)) >= 24
    assert Counter([*trained_draws(straight), *dropped]) == draws(48)


@pytest.mark.parametrize("prompts", [1, 2, 3])
async def test_less_data_than_a_step_and_less_prompts_than_replicas(
    real: RealStack, prompts: int
) -> None:
    trace = await run(real, f"less-{prompts}", prompts)
    assert len(trace.schedule) == 1


async def test_one_prompt_is_one_draw_in_each_epoch(real: RealStack) -> None:
    data = {"path": str(real.directory / "train.jsonl"), "epochs": 9}
    await run(real, "one", 1, data=data)


async def test_an_epoch_begins_while_draws_of_the_last_one_are_queued(real: RealStack) -> None:
    data = {"path": str(real.directory / "train.jsonl"), "epochs": 5}
    trace = await run(real, "epochs", 6, data=data)
    order = [int(draw.partition(":")[0]) for draw in trained_draws(trace)]
    assert order != sorted(order), "no draw was queued over the end of its epoch"


async def test_a_run_resumes_amid_an_epoch_at_its_end_and_in_its_last_step(
    real: RealStack,
) -> None:
    """Killed there: at the end all, so that engines need the weights again, else who has state."""
    values = proof_settings(
        real.directory,
        8,
        tail_batching={"mode": "synchronous", "prompts_per_step": 4, "responses_per_prompt": 2},
        data={"path": str(real.directory / "train.jsonl"), "epochs": 2},
    )
    straight = await real.run("whole", values)
    assert len(straight.schedule) == 4
    await real.start("resumed", values, held=True)
    state = ("coordinator", "trainer-0")
    for moment, names in (
        (Moment(1, 2), state),
        (Moment(2, 0), real.stack.pids),
        (Moment(3, OUTCOME), state),
    ):
        await real.reach("resumed", moment)
        await asyncio.gather(*map(real.kill, list(names)))
    await real.succeeded("resumed")
    assert await real.trace("resumed") == straight


async def test_a_prompt_that_stands_twice_in_the_data_is_two_draws(real: RealStack) -> None:
    rows = [{"prompt": "1+1=", "reference": ANY_NUMBER}] * 12
    trace = await run(real, "twice", 12, rows)
    assert len(set(responses(trace))) > 12  # other seeds, other responses


async def test_a_cap_beyond_the_context_is_refused_with_the_remedy(real: RealStack) -> None:
    values = proof_settings(real.directory, 8, sampling={"max_response_tokens": 300})
    with pytest.raises(InvalidArgumentError, match="the model takes 256: give 25. at most"):
        await real.start("too-long", values)
