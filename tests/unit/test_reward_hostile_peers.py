"""Reward functions and servers that misbehave: no wrong reward, no lost slot, nothing left."""

from __future__ import annotations

import asyncio
import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rollpacker.types import GraderKind, Verdict
from services.reward.graders.grader import GraderFailedError, GradingTask
from services.reward.graders.http_client import post_json
from services.reward.http_json import JsonServer
from services.reward.worker_pool import WorkerPool
from services.reward.worker_process import WorkerLostError

FUNCTIONS = r"""
import os, signal, subprocess, sys, threading, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

def forks_and_returns_twice(data_source, solution_str, ground_truth, extra_info=None):
    os.fork()
    return 1.0

def reads_standard_input(data_source, solution_str, ground_truth, extra_info=None):
    cat = subprocess.run(["cat"], capture_output=True, text=True)
    return float(sys.stdin.read() == "" == cat.stdout)

def prints(data_source, solution_str, ground_truth, extra_info=None):
    print("x" * 1_000_000)
    os.write(1, b"x" * 100_000)
    return 1.0

def writes_everywhere(data_source, solution_str, ground_truth, extra_info=None):
    for descriptor in range(3, 64):
        try: os.write(descriptor, b"\0\0\0\2{]")
        except OSError: pass
    return 1.0

def exits(data_source, solution_str, ground_truth, extra_info=None):
    sys.exit("I leave")

def dies(data_source, solution_str, ground_truth, extra_info=None):
    os._exit(0)

def starts_and_hangs(data_source, solution_str, ground_truth, extra_info=None):
    child = subprocess.Popen(["sleep", "1000"])
    open(extra_info, "w").write(str(child.pid))
    while True: pass

def gives(data_source, solution_str, ground_truth, extra_info=None):
    return eval(extra_info)
"""
BODY_TO_COME = (
    b"POST /run_code HTTP/1.0\r\nAuthorization: Bearer token\r\nContent-Length: 99999\r\n\r\n"
)
RIGHT = {"function": "f.py:compute_score", "ground_truth": "4"}


def task(response: str, **reference: object) -> GradingTask:
    return GradingTask(GraderKind.CUSTOM, response, json.dumps(reference), prompt_text="2 + 2")


def pool_of(directory: Path, *urls: str, limit: float = 20.0) -> WorkerPool:
    settings = {GraderKind.CUSTOM: {"directory": str(directory), "urls": list(urls)}}
    return WorkerPool(1, limit, settings=settings)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "f.py").write_text(FUNCTIONS)
    return tmp_path


async def expect_right(pool: WorkerPool) -> None:
    """The slot still tells right from wrong."""
    assert (await pool.grade(task("4", **RIGHT))).score.verdict is Verdict.CORRECT
    assert (await pool.grade(task("5", **RIGHT))).score.verdict is Verdict.INCORRECT


async def test_a_function_that_forks_prints_or_reads_disturbs_no_other_reward(
    directory: Path,
) -> None:
    async with pool_of(directory) as pool:
        for name in ("forks_and_returns_twice", "reads_standard_input", "prints"):
            assert (await pool.grade(task("4", function=f"f.py:{name}"))).score.reward == 1.0
            await expect_right(pool)
        assert pool.worker_restart_count == 0


async def test_a_function_that_writes_into_the_protocol_or_ends_its_worker_gives_no_reward(
    directory: Path,
) -> None:
    async with pool_of(directory) as pool:
        with pytest.raises(WorkerLostError, match="no JSON"):
            await pool.grade(task("4", function="f.py:writes_everywhere"))
        await expect_right(pool)
        with pytest.raises(WorkerLostError, match="ended with 0"):
            await pool.grade(task("4", function="f.py:dies"))
        await expect_right(pool)
        with pytest.raises(GraderFailedError, match=r"f.py:exits raised SystemExit: I leave.*'4'"):
            await pool.grade(task("4", function="f.py:exits"))
        await expect_right(pool)


async def test_what_a_late_function_started_ends_with_it(directory: Path) -> None:
    started = directory / "pid"
    async with pool_of(directory, limit=1.0) as pool:
        with pytest.raises(GraderFailedError, match="took more than"):
            await pool.grade(task("4", function="f.py:starts_and_hangs", extra_info=str(started)))
        async with asyncio.timeout(60):
            while _runs(int(started.read_text())):
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "value", ["float('nan')", "float('inf')", "10**400", "None", "'1'", "[]", "{'score': 10**400}"]
)
async def test_what_no_float_can_hold_is_no_reward_and_names_the_function(
    directory: Path, value: str
) -> None:
    async with pool_of(directory) as pool:
        with pytest.raises(GraderFailedError, match=r"f.py:gives gave .* holds no number"):
            await pool.grade(task("4", function="f.py:gives", extra_info=value))


async def test_parts_of_a_reward_that_are_not_finite_are_left_out(directory: Path) -> None:
    value = "{'score': 1, 'a': float('nan'), 'b': 10**400, 'c': 0.5}"
    async with pool_of(directory) as pool:
        graded = await pool.grade(task("4", function="f.py:gives", extra_info=value))
    assert graded.score.breakdown == {"score": 1.0, "c": 0.5}


class Server(socketserver.ThreadingTCPServer):
    """Answers every request with the same bytes, then a byte now and then where it is to drip."""

    allow_reuse_address = True
    daemon_threads = True
    answer = b""
    drips = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ended = threading.Event()
        self.asked = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/get_reward"


class _Handler(socketserver.BaseRequestHandler):
    server: Server

    def handle(self) -> None:
        self.server.asked += 1
        self.request.recv(1 << 16)
        self.request.sendall(self.server.answer)
        while self.server.drips and not self.server.ended.wait(0.05):
            try:
                self.request.sendall(b" ")
            except OSError:
                return


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.ended.set()
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.mark.parametrize(
    "begin",
    [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"],
)  # fmt: skip
def test_a_server_that_drips_ends_at_the_deadline(server: Server, begin: bytes) -> None:
    server.answer, server.drips = begin, True
    with pytest.raises(TimeoutError, match="no whole answer within 0.5 s"):
        post_json(server.url, {}, 0.5, 1 << 20)


async def test_a_redirect_is_not_followed(server: Server, directory: Path) -> None:
    target = Server()
    location = f"HTTP/1.1 302 Found\r\nLocation: {target.url}\r\n\r\n"
    server.answer = location.encode()
    async with pool_of(directory, server.url) as pool:
        with pytest.raises(GraderFailedError, match=r"redirects are not followed: HTTP 302"):
            await pool.grade(task("4", url=server.url, style="slime"))
    target.server_close()
    assert (server.asked, target.asked) == (1, 0)


@pytest.mark.parametrize(
    "answer",
    [b"", b"rubbish", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n0.5",
     b"HTTP/1.1 200 OK\r\n\r\n{", b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000],
)  # fmt: skip
async def test_a_broken_answer_is_worth_a_retry_and_no_reward(
    server: Server, directory: Path, answer: bytes
) -> None:
    server.answer = answer
    async with pool_of(directory, server.url) as pool:
        with pytest.raises(WorkerLostError, match="127.0.0.1"):
            await pool.grade(task("4", url=server.url, style="slime"))
    assert server.asked == 2  # the pool has tried once more


@pytest.mark.parametrize("begin", [b"POST /run_code HTTP/1.0\r\nX: ", b"x", BODY_TO_COME])
def test_a_caller_that_trickles_is_sent_away_at_the_deadline(begin: bytes) -> None:
    server = JsonServer(
        socket.create_server(("127.0.0.1", 0)),
        "token",
        {"/run_code": lambda body: (200, body)},
        most_body_bytes=1 << 20,
        most_connections=1,
        read_seconds=0.5,
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with socket.create_connection(server.server_address, timeout=60) as caller:
        caller.sendall(begin)
        caller.settimeout(0.05)
        while _is_open(caller):
            with suppress(OSError):
                caller.sendall(b"9")
    server.shutdown()
    server.server_close()
    thread.join()


def _is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


def _runs(pid: int) -> bool:
    """Alive and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_url_that_is_none_is_an_error_like_others() -> None:
    with pytest.raises(OSError, match="http://127.0.0.1:abc/x: nonnumeric port"):
        post_json("http://127.0.0.1:abc/x", {}, 1.0, 1)
