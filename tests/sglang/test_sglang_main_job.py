"""The whole main job with SGLang as its engine, beside the same job with the embedded engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct

from rollpacker.local_stack import LocalStack
from rollpacker.local_stack.ports import free_port
from rollpacker.rpc.client import call_until, open_channel
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc
from services.coordinator.outputs import read_step_samples
from services.rollout.sglang_engine import launch, served_model
from services.rollout.sglang_engine.server_process import ServerProcess
from tests.sglang_support import PYTHON, options
from tests.tiny_run import run_settings, write_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

PROMPTS, STEPS = 16, 4
OPEN_STATES = (pb.Run.STATE_RUNNING, pb.Run.STATE_STOPPING)


class RunFailed(Exception):
    """The run came to no good end; the message is the coordinator's."""


async def trained(
    directory: Path, values: dict[str, Any], engine: dict[str, object], *, rollouts: int = 1
) -> list[Any]:
    """What each step of a run trained: (draw, index, tokens, reward). Raises RunFailed."""
    settings = Struct()
    settings.update(values)
    async with LocalStack(directory, rollouts=rollouts, rollout_settings=engine) as stack:
        async with open_channel(stack.coordinator_address) as channel:
            stub: Any = pb_grpc.CoordinatorServiceStub(channel)

            async def ask(make: Any) -> Any:
                return await call_until(make, seconds=120, what="the coordinator")

            start = pb.StartRunRequest(run_id="job", settings=settings)
            await ask(lambda: stub.StartRun(start, timeout=30))
            get = pb.GetRunRequest(run_id="job")
            while (run := (await ask(lambda: stub.GetRun(get, timeout=30))).run).state in (
                OPEN_STATES
            ):
                stack.supervisor.check()
                await asyncio.sleep(0.1)
            if run.state != pb.Run.STATE_SUCCEEDED:
                raise RunFailed(run.failure)
        outputs = stack.layout.run_directory / "job"
    return [
        [
            (str(group.draw.id), each.response.index, each.response.token_ids, each.reward)
            for group in read_step_samples(outputs, step) or []
            for each in group.responses
        ]
        for step in range(STEPS)
    ]


async def test_a_run_trains_the_same_responses_on_sglang_and_on_the_embedded_engine(tmp_path):
    write_model(tmp_path / "model")
    values = run_settings(tmp_path, PROMPTS)
    size = {"slots": 64, "kv_budget_tokens": 8192}
    ours = await trained(tmp_path / "torch", values, size)
    theirs = await trained(
        tmp_path / "sglang", values, {**size, "engine": "sglang", "sglang_python": PYTHON}
    )
    assert sum(map(len, ours)) == PROMPTS * 2
    assert theirs == ours


async def test_groups_that_move_between_servers_keep_their_tokens(tmp_path):
    """An idle server takes groups over; the progress of their streams told what they had."""
    write_model(tmp_path / "model")
    tail = {"prompts_per_step": 4, "responses_per_prompt": 4, "rebalance": True}
    sampling = {"max_response_tokens": 200, "stop_token_ids": [999]}
    values = run_settings(tmp_path, PROMPTS, tail_batching=tail, sampling=sampling)
    size = {"slots": 64, "kv_budget_tokens": 8192}
    ours = await trained(tmp_path / "torch", values, size)
    directory = tmp_path / "sglang"
    engine = {**size, "engine": "sglang", "sglang_python": PYTHON}
    assert await trained(directory, values, engine, rollouts=2) == ours
    lines = (directory / "runs" / "job" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    moved = sum(line["rollout/moved_groups"] for line in metrics)
    carried = sum(
        each.response.carried_token_count
        for step in range(STEPS)
        for group in read_step_samples(directory / "runs" / "job", step) or []
        for each in group.responses
    )
    print(f"{moved} groups moved; {carried} trained tokens were carried")
    assert moved > 0
    assert carried > 0


async def test_a_mixture_of_experts_is_trained(tmp_path):
    """Its weights go from the trainer to the engine after every step."""
    write_model(tmp_path / "model", family="qwen3_moe")
    engine = {"slots": 64, "kv_budget_tokens": 8192, "engine": "sglang", "sglang_python": PYTHON}
    steps = await trained(tmp_path, run_settings(tmp_path, PROMPTS), engine)
    assert sum(map(len, steps)) == PROMPTS * 2


async def test_exact_is_refused_on_a_server_that_ignores_seeds(tmp_path):
    write_model(tmp_path / "model")
    asked, port = options(), free_port()
    shown = served_model.show(served_model.read_directory(tmp_path / "model"), tmp_path / "shown")
    command = launch.command(asked, shown, port, 1)
    command.remove("--enable-deterministic-inference")
    log = tmp_path / "log"
    server = await ServerProcess.start(command, launch.environment(asked, 1), log)
    engine = {"engine": "sglang", "sglang_url": f"http://127.0.0.1:{port}"}
    try:
        with pytest.raises(RunFailed, match=r"\(sglang\) does not replay by seed"):
            await trained(tmp_path / "stack", run_settings(tmp_path, PROMPTS), engine)
    finally:
        await server.kill()


async def test_the_levels_of_a_ladder_run_on_engines_of_their_own_sizes(tmp_path):
    """Each change of size is another server; what is trained is what one size trains."""
    write_model(tmp_path / "model")
    values = run_settings(tmp_path, 8)
    values["tail_batching"] |= {"deferral_levels": 1, "speculation_factors": [2.0]}
    size = {"slots": 64, "kv_budget_tokens": 8192}
    ours = await trained(tmp_path / "torch", values, size)
    values["tail_batching"]["tensor_parallel_sizes"] = [1, 2]
    theirs = await trained(
        tmp_path / "sglang", values, {**size, "engine": "sglang", "sglang_python": PYTHON}
    )
    lines = (tmp_path / "sglang/runs/job/metrics.jsonl").read_text().splitlines()
    sizes = [json.loads(line)["rollout/tensor_parallel_size"] for line in lines]
    assert sizes[:2] == [1, 2]
    assert theirs == ours


async def test_a_run_asks_for_the_tensor_parallel_size_that_it_plans(tmp_path):
    write_model(tmp_path / "model")
    values = run_settings(tmp_path, PROMPTS)
    size = {"slots": 64, "kv_budget_tokens": 8192}
    ours = await trained(tmp_path / "torch", values, size)
    values["tail_batching"] |= {"tensor_parallel_size": 2, "max_tensor_parallel_size": 2}
    theirs = await trained(
        tmp_path / "sglang", values, {**size, "engine": "sglang", "sglang_python": PYTHON}
    )
    lines = (tmp_path / "sglang/runs/job/metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["rollout/tensor_parallel_size"] for line in lines} == {2}
    assert theirs == ours
