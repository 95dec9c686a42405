"""The HTTP side door over real loopback HTTP, with real sandboxes behind it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.types import GraderKind
from services.reward.run_code import MOST_BODY_BYTES, SideDoor
from services.reward.settings import RewardServiceSettings
from services.reward.worker_pool import WorkerPool
from tests.contract.test_security import Act, act_as, secrets

__all__ = ["act_as", "secrets"]  # fixtures
TOKEN = "a token that nobody guesses"


@dataclass
class Door:
    port: int
    pool: WorkerPool

    async def ask(
        self, body: Any, *, token: str = TOKEN, path: str = "/run_code"
    ) -> tuple[int, Any]:
        """Status and body of one request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Authorization": f"Bearer {token}"}
        )

        def send() -> tuple[int, Any]:
            try:
                with urllib.request.urlopen(request, timeout=120) as reply:
                    return reply.status, json.loads(reply.read())
            except urllib.error.HTTPError as error:
                return error.code, json.loads(error.read())

        return await asyncio.to_thread(send)

    async def run(self, code: str, **more: Any) -> dict[str, Any]:
        status, answer = await self.ask({"code": code, "language": "python", **more})
        assert status == 200, answer
        return answer


@asynccontextmanager
async def open_door(**options: Any) -> AsyncIterator[Door]:
    async with WorkerPool(1, 5.0, **options) as pool:
        with SideDoor("127.0.0.1:0", TOKEN, pool, 2.0) as door:
            yield Door(door.port, pool)


async def test_a_program_runs_in_the_sandbox_and_answers_in_the_shape_of_sandboxfusion() -> None:
    async with open_door() as door:
        answer = await door.run("print(2 * int(input()))", stdin="21", compile_timeout=1)
        result = answer["run_result"]
        assert (answer["status"], answer["compile_result"], answer["files"]) == (
            "Success",
            None,
            {},
        )
        assert (result["status"], result["return_code"]) == ("Finished", 0)
        assert (result["stdout"], result["stderr"]) == ("42\n", "")
        assert result["execution_time"] > 0
        failed = await door.run("import sys\nprint('so far')\nraise KeyError('no such thing')")
        result = failed["run_result"]
        assert (failed["status"], result["return_code"], result["stdout"]) == (
            "Failed",
            1,
            "so far\n",
        )
        assert "KeyError: 'no such thing'" in result["stderr"]
        assert "line 3" in result["stderr"]
        broken = await door.run("def f(:")
        assert "SyntaxError" in broken["run_result"]["stderr"]
        late = await door.run("while True: pass", run_timeout=0.3)
        assert (late["status"], late["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
        assert (await door.run("print(1)"))["run_result"]["stderr"] == ""  # a sandbox of its own


async def test_what_the_sandbox_forbids_is_forbidden_here() -> None:
    async with open_door() as door:
        tries = (
            "import os, socket\nfor act in (os.fork, socket.socket, lambda: open('/etc/shadow')):"
        )
        tries += "\n    try: act()\n    except OSError: print('refused')"
        assert (await door.run(tries))["run_result"]["stdout"] == "refused\n" * 3
        hungry = await door.run("x = bytearray(300 << 20)", memory_limit_MB=200)
        assert "MemoryError" in hungry["run_result"]["stderr"]
        chatty = await door.run("while True: print('x' * 1000)")
        assert "too much output" in chatty["run_result"]["stderr"]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"language": "python"}, "code: is no text"),
        ([], "code: is no text"),
        ({"code": "1", "language": "rust"}, "language: 'rust' is not offered"),
        ({"code": "1", "language": "python", "files": {"a": "b"}}, "files: is not offered"),
        ({"code": "1", "language": "python", "stdin": 1}, "stdin: 1 is no text"),
        ({"code": "1", "language": "python", "run_timeout": "5"}, "run_timeout: '5' is no number"),
        ({"code": "1", "language": "python", "run_timeout": -1}, "run_timeout: -1.0"),
        ({"code": "1", "language": "python", "run_timeout": 10**400}, "is no finite number"),
        ({"code": "1", "language": "python", "stdin": "a\ud800"}, "stdin: character 1 is half"),
        ({"code": "\udfff", "language": "python"}, "code: character 0 is half"),
        (b"{", "not JSON"),
    ],
)
async def test_a_wrong_request_is_400_and_names_the_field(body: Any, what: str) -> None:
    with SideDoor("127.0.0.1:0", TOKEN, WorkerPool(1, 5.0), 2.0) as door:
        status, answer = await Door(door.port, None).ask(body)  # type: ignore[arg-type]
    assert status == 400
    assert what in answer["error"]


async def test_without_the_token_or_beyond_the_limits_nothing_is_read() -> None:
    with SideDoor("127.0.0.1:0", TOKEN, WorkerPool(1, 5.0), 2.0) as door:
        asked = Door(door.port, None)  # type: ignore[arg-type]
        assert (await asked.ask({}, token="a guess"))[0] == 401
        assert (await asked.ask({}, path="/run_jupyter"))[0] == 404
        for length, status in ((str(MOST_BODY_BYTES + 1), b" 413 "), ("9" * 5000, b" 400 ")):
            with socket.create_connection(("127.0.0.1", door.port)) as connection:
                head = f"POST /run_code HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n"
                connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
                assert status in await asyncio.to_thread(connection.recv, 100)


async def test_where_the_service_has_certificates_the_door_speaks_tls(
    secrets: Path,  # noqa: F811
    act_as: Act,  # noqa: F811
) -> None:
    act_as(secrets / "reward")
    trust = ssl.create_default_context(cafile=str(secrets / "reward" / "ca.crt"))
    trust.check_hostname = False
    with SideDoor("127.0.0.1:0", TOKEN, WorkerPool(1, 5.0), 2.0) as door:
        url = f"https://127.0.0.1:{door.port}/run_code"
        request = urllib.request.Request(url, b"{}", {"Authorization": f"Bearer {TOKEN}"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            await asyncio.to_thread(urllib.request.urlopen, request, timeout=60, context=trust)
        with caught.value as answer:
            assert (answer.code, b"code: is no text" in answer.read()) == (400, True)


async def test_trouble_of_the_service_is_503_and_no_result() -> None:
    settings = {GraderKind.CODE: {"sandbox": {"bwrap": "/nowhere/bwrap"}}}
    async with open_door(settings=settings, checked_graders=[GraderKind.CODE]) as door:
        status, answer = await door.ask({"code": "1", "language": "python"})
        assert (status, answer["status"], answer["run_result"]) == (503, "SandboxError", None)
        assert "SANDBOX_BWRAP" in answer["message"]


async def test_the_door_is_shut_by_default_and_opens_on_loopback_with_a_token_only() -> None:
    worker = {"worker_id": "r", "coordinator_address": "127.0.0.1:1"}
    assert RewardServiceSettings(**worker).run_code_address == ""
    with pytest.raises(ValidationError, match="run_code_token: needs at least 16"):
        RewardServiceSettings(**worker, run_code_address="127.0.0.1:0", run_code_token="short")
    with pytest.raises(InvalidArgumentError, match="not loopback"):
        SideDoor("0.0.0.0:0", TOKEN, WorkerPool(1, 5.0), 2.0)
