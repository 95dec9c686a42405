"""Every RPC of every service, with messages that make no sense: a clear status, a live service.

The services are real processes of a local stack that has trained a run. A bug of a service is the
status INTERNAL without a reason of its own, or UNKNOWN; a lost process would be another pid.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollpacker.rpc.health_probe import probe
from rollpacker.v1 import (
    coordinator_service_pb2,
    reward_service_pb2,
    rollout_service_pb2,
    trainer_service_pb2,
    weights_service_pb2,
)
from tests.integration.real_runs import proof_settings, running_stack
from tests.tiny_run import write_model
from tests.wild_messages import cut, messages

MODULES: dict[str, list[Any]] = {
    "coordinator": [coordinator_service_pb2],
    "rollout-0": [rollout_service_pb2],
    "reward-0": [reward_service_pb2],
    "trainer-0": [trainer_service_pb2, weights_service_pb2],
}
EXAMPLES = 12  # of each method
SECONDS = 5.0  # streams that would wait for more end then
Code = grpc.StatusCode
CLEAR = {
    Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.OUT_OF_RANGE,
    Code.PERMISSION_DENIED, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE,
    Code.DEADLINE_EXCEEDED, Code.UNIMPLEMENTED,
}  # fmt: skip


def methods() -> list[tuple[str, Any]]:
    """(process, method) of all services."""
    return [
        (process, method)
        for process, modules in MODULES.items()
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


def test_every_method_of_the_protos_is_fuzzed() -> None:
    files = {path.stem for path in Path("protos/rollpacker/v1").glob("*_service.proto")}
    fuzzed = {Path(module.DESCRIPTOR.name).stem for of in MODULES.values() for module in of}
    assert fuzzed == files


def send(channel: grpc.Channel, method: Any, request: bytes) -> tuple[grpc.StatusCode, str]:
    """Status and reason of a call whose request is these bytes."""
    name = f"/{method.containing_service.full_name}/{method.name}"
    call = channel.unary_stream(name)(request, timeout=SECONDS)
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass  # the call knows its status
    return call.code(), reason(call)


def reason(call: Any) -> str:
    """Of google.rpc.ErrorInfo; empty where there is none."""
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            info = error_details_pb2.ErrorInfo()
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    return str(info.reason)
    return ""


def fuzz(channel: grpc.Channel, method: Any) -> None:
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        message=messages(method.input_type),
        at=st.sampled_from([1.0, 1.0, 1.0, 0.5]),
        junk=st.sampled_from([b"", b"", b"", b"\xff", b"\x0a\xff\xff\xff\xff\x0f"]),
    )
    def one(message: Any, at: float, junk: bytes) -> None:
        code, why = send(channel, method, cut(message.SerializeToString(), at, junk))
        clear = code in CLEAR or (code is Code.INTERNAL and why not in ("", "BUG"))
        assert clear, f"{method.full_name}: {code} {why!r} for {message!r}"

    one()


@pytest.mark.timeout(300)
async def test_no_message_breaks_a_service(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    async with running_stack(tmp_path) as real:
        await real.run("r", proof_settings(tmp_path, 8))
        pids = dict(real.stack.pids)
        for process, method in methods():
            address = real.stack.layout.address(process)
            with grpc.insecure_channel(address) as channel:
                await asyncio.to_thread(fuzz, channel, method)
        for process in MODULES:
            address = real.stack.layout.address(process)
            assert await asyncio.to_thread(probe, address) == "SERVING"
        assert dict(real.stack.pids) == pids
