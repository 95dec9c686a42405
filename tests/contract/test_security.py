"""Who gets in: certificates, tokens, sizes. Real TLS between a real server and real channels.

The certificates and tokens are those of deploy/make_secrets.sh. A refused handshake reaches the
caller as UNAVAILABLE, for gRPC does not tell a refusal from a server that is away.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from rollpacker.local_stack.ports import free_port
from rollpacker.observability.metrics import Reading, serve_metrics
from rollpacker.rpc import client, errors, health_probe, security
from rollpacker.rpc.server import MAX_MESSAGE_BYTES, RpcServer
from rollpacker.tasks import end_tasks
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import coordinator_service_pb2_grpc as pb_grpc
from rollpacker.v1 import reward_service_pb2, rollout_service_pb2, trainer_service_pb2
from services.coordinator.web import serve_web
from tests.fake_coordinator import server as fake_coordinator

SCRIPT = Path(__file__).parents[2] / "deploy" / "make_secrets.sh"
FILES = {"certificate_file": "tls.crt", "key_file": "tls.key", "ca_file": "ca.crt"}
TOKENS = {"token_file": "token", "accepted_tokens_file": "accepted_tokens"}
Act = Callable[..., None]
SERVICES = [
    service
    for module in (pb, rollout_service_pb2, reward_service_pb2, trainer_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
METHODS = [f"/{s.full_name}/{method.name}" for s in SERVICES for method in s.methods]


def make_secrets(directory: Path, *options: str, days: int = 30) -> Path:
    environment = {**os.environ, "ROLLPACKER_CERTIFICATE_DAYS": str(days)}
    subprocess.run([SCRIPT, *options, directory], env=environment, check=True, capture_output=True)
    return directory


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_secrets(tmp_path_factory.mktemp("security") / "secrets")


@pytest.fixture
def act_as(monkeypatch: pytest.MonkeyPatch) -> Act:
    """From now on this process is the one whose folder is given (None: no identity)."""

    def act(folder: Path | None, **changes: Path | None) -> None:
        given = (
            {name: folder / file for name, file in {**FILES, **TOKENS}.items()} if folder else {}
        )
        for name in {**FILES, **TOKENS}:
            path = {**given, **changes}.get(name)
            variable = security.PREFIX + name.upper()
            if path is not None and path.exists():
                monkeypatch.setenv(variable, str(path))
            else:
                monkeypatch.delenv(variable, raising=False)

    return act


@pytest.fixture
async def server(secrets: Path, act_as: Act) -> AsyncIterator[RpcServer]:
    act_as(secrets / "coordinator")
    server = fake_coordinator("127.0.0.1:0")
    await server.start()
    await server.set_serving(True)
    yield server
    await server.stop()


async def list_workers(address: str) -> pb.ListWorkersResponse:
    async with client.open_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        return await client.call(lambda: stub.ListWorkers(pb.ListWorkersRequest(), timeout=10))


async def stop_run(address: str) -> pb.StopRunResponse:
    async with client.open_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        return await client.call(lambda: stub.StopRun(pb.StopRunRequest(), timeout=10))


async def test_a_service_and_people_with_certificate_and_token_get_in(
    server: RpcServer, secrets: Path, act_as: Act
) -> None:
    for name in ("operator", "viewer"):
        act_as(secrets / name)
        await list_workers(server.address)
    act_as(secrets / "trainer")
    async with client.open_channel(server.address) as channel:
        beat = pb.HeartbeatRequest(worker_id="t", address="x:1", kind=pb.WORKER_KIND_TRAINER)
        await pb_grpc.CoordinatorServiceStub(channel).Heartbeat(beat, timeout=10)


async def test_a_service_that_was_taken_over_cannot_stop_runs_nor_people_pose_as_workers(
    server: RpcServer, secrets: Path, act_as: Act
) -> None:
    act_as(secrets / "reward")
    with pytest.raises(errors.PermissionDeniedError):
        await stop_run(server.address)
    act_as(secrets / "operator")
    async with client.open_channel(server.address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(errors.PermissionDeniedError):
            await client.call(lambda: stub.Heartbeat(pb.HeartbeatRequest(), timeout=10))


async def test_a_caller_without_certificate_is_refused(server: RpcServer, secrets: Path) -> None:
    ca = (secrets / "viewer" / "ca.crt").read_bytes()
    options = (("grpc.ssl_target_name_override", security.SERVER_NAME),)
    credentials = grpc.ssl_channel_credentials(ca)
    async with grpc.aio.secure_channel(server.address, credentials, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=10
            )
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_caller_without_tls_is_refused(server: RpcServer, act_as: Act) -> None:
    act_as(None)
    with pytest.raises(errors.UnavailableError):
        await list_workers(server.address)


async def test_a_certificate_of_another_authority_is_refused_by_both_ends(
    server: RpcServer, secrets: Path, act_as: Act, tmp_path: Path
) -> None:
    other = make_secrets(tmp_path / "other")
    act_as(other / "operator", ca_file=secrets / "operator" / "ca.crt")  # the server refuses it
    with pytest.raises(errors.UnavailableError):
        await list_workers(server.address)
    act_as(secrets / "operator", ca_file=other / "operator" / "ca.crt")  # the caller refuses it
    with pytest.raises(errors.UnavailableError):
        await list_workers(server.address)


async def test_an_expired_certificate_is_refused(
    server: RpcServer, secrets: Path, act_as: Act, tmp_path: Path
) -> None:
    expired = make_secrets(shutil.copytree(secrets, tmp_path / "expired"), "--renew", days=-1)
    act_as(expired / "operator")
    with pytest.raises(errors.UnavailableError):
        await list_workers(server.address)


async def test_a_certificate_of_people_is_no_server(secrets: Path, act_as: Act) -> None:
    act_as(secrets / "operator", accepted_tokens_file=secrets / "reward" / "accepted_tokens")
    impostor = fake_coordinator("127.0.0.1:0")
    await impostor.start()
    act_as(secrets / "trainer")
    with pytest.raises(errors.UnavailableError):
        await list_workers(impostor.address)
    await impostor.stop()


async def test_new_certificates_serve_without_a_restart(
    secrets: Path, act_as: Act, tmp_path: Path
) -> None:
    mine = make_secrets(shutil.copytree(secrets, tmp_path / "mine"), "--renew", days=-1)
    act_as(mine / "coordinator")
    server = fake_coordinator("127.0.0.1:0")
    await server.start()
    act_as(secrets / "operator")
    with pytest.raises(errors.UnavailableError):
        await list_workers(server.address)
    make_secrets(mine, "--renew")
    await list_workers(server.address)
    await server.stop()


async def test_a_viewer_cannot_stop_a_run_and_an_operator_can(
    server: RpcServer, secrets: Path, act_as: Act
) -> None:
    act_as(secrets / "viewer")
    with pytest.raises(errors.PermissionDeniedError) as refused:
        await stop_run(server.address)
    assert refused.value.reason == "WRONG_ROLE"
    act_as(secrets / "operator")
    with pytest.raises(errors.ServiceError) as reached:  # the fake knows no such run
        await stop_run(server.address)
    assert reached.value.code not in (
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    )


async def test_without_a_valid_token_nothing_but_health_answers(
    server: RpcServer, secrets: Path, act_as: Act, tmp_path: Path
) -> None:
    guess = tmp_path / "token"
    guess.write_text("0" * 64)
    for token in (None, guess):
        act_as(secrets / "operator", token_file=token)
        with pytest.raises(errors.UnauthenticatedError) as refused:
            await list_workers(server.address)
        assert "0" * 64 not in str(refused.value)
    assert await asyncio.to_thread(health_probe.probe, server.address) == "SERVING"


async def test_a_changed_token_file_counts_at_once(
    secrets: Path, act_as: Act, tmp_path: Path
) -> None:
    accepted = tmp_path / "accepted_tokens"
    accepted.write_text(f"viewer {'0' * 64}\n")
    act_as(secrets / "coordinator", accepted_tokens_file=accepted)
    server = fake_coordinator("127.0.0.1:0")
    await server.start()
    act_as(secrets / "viewer")
    with pytest.raises(errors.UnauthenticatedError):
        await list_workers(server.address)
    aside = tmp_path / "aside"
    shutil.copy(secrets / "coordinator" / "accepted_tokens", aside)
    aside.replace(accepted)
    await list_workers(server.address)
    await server.stop()


async def test_an_oversized_message_is_refused_and_the_service_lives(
    server: RpcServer, secrets: Path, act_as: Act
) -> None:
    act_as(secrets / "operator")
    values = Struct()
    values.update({"model": "x" * (MAX_MESSAGE_BYTES + 1)})
    credentials = security.Security.from_environment().channel_credentials()
    options = (
        ("grpc.ssl_target_name_override", security.SERVER_NAME),
        ("grpc.max_send_message_length", -1),
    )
    async with grpc.aio.secure_channel(server.address, credentials, options=options) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.StartRun(pb.StartRunRequest(run_id="big", settings=values), timeout=60)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await list_workers(server.address)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "10.0.0.1:7777"])
def test_listening_beyond_loopback_needs_certificates_and_tokens(
    secrets: Path, act_as: Act, address: str
) -> None:
    act_as(None)
    with pytest.raises(errors.InvalidArgumentError, match="CERTIFICATE_FILE is not set"):
        fake_coordinator(address)
    act_as(secrets / "coordinator", accepted_tokens_file=None)
    with pytest.raises(errors.InvalidArgumentError, match="ACCEPTED_TOKENS_FILE is not set"):
        fake_coordinator(address)
    act_as(secrets / "coordinator")
    security.Security.from_environment().check_address(address)


def test_half_an_identity_is_refused_by_name(secrets: Path, act_as: Act) -> None:
    act_as(secrets / "coordinator", key_file=None)
    with pytest.raises(errors.InvalidArgumentError, match="key_file: is not set"):
        security.Security.from_environment()
    folder = secrets / "coordinator"
    with pytest.raises(errors.InvalidArgumentError, match="token_file: is set without TLS"):
        security.Security(token_file=folder / "token")
    with pytest.raises(errors.InvalidArgumentError, match="is unknown; valid:"):
        security.Security.from_environment({"ROLLPACKER_SECURITY_CERT": "x"})


def test_every_call_needs_a_role_and_only_reading_calls_a_viewer() -> None:
    needed = {method: security.needed_role(method) for method in METHODS}
    assert None not in needed.values()
    assert {m.rpartition("/")[2] for m, role in needed.items() if role == "viewer"} == {
        method.name
        for method in SERVICES[0].methods
        if method.name.startswith(("Get", "List", "Watch"))
    }
    workers = {m: role for m, role in needed.items() if "CoordinatorService" not in m}
    assert set(workers.values()) == {"service"}


@pytest.mark.parametrize("line", ["admin " + "0" * 64, "viewer abc", "viewer", "a b c"])
def test_a_wrong_line_of_accepted_tokens_is_named(line: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="line 2 is not"):
        security.parse_accepted_tokens(f"viewer {'0' * 64}\n{line}\n")


@hypothesis_settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(method=st.sampled_from(METHODS[: len(SERVICES[0].methods)]), junk=st.binary(max_size=64))
async def test_malformed_messages_get_a_status_and_the_service_lives(
    server: RpcServer, secrets: Path, act_as: Act, method: str, junk: bytes
) -> None:
    act_as(secrets / ("reward" if security.needed_role(method) == "service" else "operator"))
    async with client.open_channel(server.address) as channel:
        call = channel.unary_stream(method)(b"\xff" + junk, timeout=10)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await asyncio.to_thread(health_probe.probe, server.address) == "SERVING"


async def fetched(url: str, secrets: Path, owner: str = "") -> str:
    """A page over TLS; `owner`: whose certificate the reader shows. Raises OSError."""
    context = ssl.create_default_context(cafile=secrets / "operator" / "ca.crt")
    context.check_hostname = False
    if owner:
        context.load_cert_chain(secrets / owner / "tls.crt", secrets / owner / "tls.key")

    def get() -> str:
        with urllib.request.urlopen(url, timeout=30, context=context) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(get)


async def test_metrics_beyond_loopback_are_for_callers_with_a_certificate(
    secrets: Path, act_as: Act
) -> None:
    act_as(secrets / "reward")
    port = free_port()
    reading = Reading("rollpacker_a", "one", 1.0)
    serving = asyncio.create_task(
        serve_metrics(f"0.0.0.0:{port}", lambda: [reading], CollectorRegistry())
    )
    await asyncio.sleep(0)  # it listens from its first step on
    url = f"https://127.0.0.1:{port}/metrics"
    try:
        assert "rollpacker_a 1.0" in await fetched(url, secrets, "operator")
        with pytest.raises(OSError, match=r"(?i)certificate|reset|closed|ssl"):
            await fetched(url, secrets)
    finally:
        await end_tasks(serving)


async def test_the_web_page_beyond_loopback_is_tls_and_asks_for_its_token(
    secrets: Path, act_as: Act, tmp_path: Path
) -> None:
    act_as(secrets / "coordinator")
    (tmp_path / "token").write_text("t" * 32)
    port = free_port()
    nobody = cast(Any, None)  # neither page nor refusal asks for a run
    serving = asyncio.create_task(serve_web(f"0.0.0.0:{port}", tmp_path / "token", nobody, nobody))
    await asyncio.sleep(0)
    try:
        assert "<title>RollPacker" in await fetched(f"https://127.0.0.1:{port}/", secrets)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            await fetched(f"https://127.0.0.1:{port}/api/runs", secrets, "operator")
    finally:
        await end_tasks(serving)
