"""Reward functions of other trainers, unchanged, in real workers; remote ones over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollpacker.types import GraderKind, Verdict
from services.reward.graders.custom import parse_reference
from services.reward.graders.grader import (
    BadReferenceError,
    GraderFailedError,
    GradingTask,
    Score,
)
from services.reward.worker_pool import WorkerPool
from services.reward.worker_process import WorkerLostError

# As their documentation shows them.
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info and extra_info.get("as_dict"):
        right = float(solution_str == ground_truth)
        return {"score": right, "acc": True, "length": len(solution_str)}
    return solution_str == ground_truth

def fails(data_source, solution_str, ground_truth, extra_info=None):
    raise KeyError("no such thing")

def hangs(data_source, solution_str, ground_truth, extra_info=None):
    while True: pass

def outside(data_source, solution_str, ground_truth, extra_info=None):
    return -1.0

def nothing(data_source, solution_str, ground_truth, extra_info=None):
    return float("nan")
"""
TRL = """
def accuracy_reward(completions, solution, **kwargs):
    return [1.0 if one == answer else 0.5 for one, answer in zip(completions, solution)]

async def slow_reward(prompts, completions, **kwargs):
    return [float(len(prompt) > 0) for prompt in prompts]
"""
OPEN_R1 = """
def accuracy_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [float(one == gold) if gold else None for one, gold in zip(contents, solution)]
"""
OPENRLHF = """
import numpy

def reward_func(queries, prompts, labels, **kwargs):
    scores = numpy.array([float(q == p + l) for q, p, l in zip(queries, prompts, labels)])
    return {"rewards": scores, "scores": scores, "extra_logs": {"dummy": scores}}
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    inside = tmp_path / "rewards"
    inside.mkdir()
    sources = {"verl": VERL, "trl": TRL, "open_r1": OPEN_R1, "openrlhf": OPENRLHF}
    for name, source in sources.items():
        (inside / f"{name}.py").write_text(source)
    (tmp_path / "outside.py").write_text(VERL)
    (inside / "link.py").symlink_to(tmp_path / "outside.py")
    return inside


@pytest.fixture
def remote() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.bodies.append(body)  # type: ignore[attr-defined]
            answer: Any = {"rewards": [0.25]} if "query" in body else 0.75
            if body.get("label") == "broken":
                self.send_error(500)
                return
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.bodies = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@asynccontextmanager
async def running(
    directory: Path | str, *urls: str, limit: float = 20.0
) -> AsyncIterator[WorkerPool]:
    settings = {GraderKind.CUSTOM: {"directory": str(directory), "urls": list(urls)}}
    async with WorkerPool(1, limit, settings=settings) as pool:
        yield pool


async def score(pool: WorkerPool, response: str, **reference: Any) -> Score:
    task = GradingTask(GraderKind.CUSTOM, response, json.dumps(reference), prompt_text="2 + 2 = ")
    return (await pool.grade(task)).score


async def test_functions_of_verl_trl_and_openrlhf_load_unchanged(directory: Path) -> None:
    async with running(directory) as pool:
        verl = {"function": "verl.py:compute_score", "ground_truth": "4"}
        assert (await score(pool, "4", **verl)).verdict is Verdict.CORRECT
        assert (await score(pool, "5", **verl)).reward == 0.0
        detailed = await score(pool, "4", **verl, extra_info={"as_dict": True})
        assert detailed.reward == 1.0
        assert detailed.breakdown["length"] == 1.0
        trl = {"function": "trl.py:accuracy_reward", "style": "trl", "columns": {"solution": "4"}}
        assert (await score(pool, "4", **trl)).reward == 1.0
        half = await score(pool, "5", **trl)
        assert (half.reward, half.verdict) == (0.5, Verdict.INCORRECT)
        slow = {"function": "trl.py:slow_reward", "style": "trl"}
        assert (await score(pool, "4", **slow)).reward == 1.0
        open_r1 = {"function": "open_r1.py:accuracy_reward", "style": "open_r1"}
        assert (await score(pool, "4", **open_r1, columns={"solution": "4"})).reward == 1.0
        assert (await score(pool, "5", **open_r1, columns={"solution": "4"})).reward == 0.0
        with pytest.raises(GraderFailedError, match="no number"):  # it skips the sample
            await score(pool, "5", **open_r1, columns={"solution": ""})
        openrlhf = {"function": "openrlhf.py:reward_func", "style": "openrlhf", "label": "4"}
        assert (await score(pool, "4", **openrlhf)).reward == 1.0
        assert (await score(pool, "5", **openrlhf)).reward == 0.0


async def test_a_function_that_raises_gives_no_reward_and_names_itself_and_the_sample(
    directory: Path,
) -> None:
    async with running(directory) as pool:
        with pytest.raises(GraderFailedError, match=r"verl.py:fails raised KeyError.*'my answer'"):
            await score(pool, "my answer", function="verl.py:fails")
        with pytest.raises(GraderFailedError, match="no number"):
            await score(pool, "4", function="verl.py:nothing")
        assert pool.worker_restart_count == 0


async def test_a_function_that_hangs_gives_no_reward(directory: Path) -> None:
    async with running(directory, limit=0.3) as pool:
        with pytest.raises(GraderFailedError, match=r"took more than 0.3 s.*verl.py:hangs"):
            await score(pool, "4", function="verl.py:hangs")
        good = {"function": "verl.py:compute_score", "ground_truth": "4"}
        assert (await score(pool, "4", **good)).reward == 1.0


async def test_a_reward_outside_its_declared_range_is_no_reward(directory: Path) -> None:
    async with running(directory) as pool:
        with pytest.raises(GraderFailedError, match=r"outside its range \[0.0, 1.0\]"):
            await score(pool, "4", function="verl.py:outside")
        declared = await score(pool, "4", function="verl.py:outside", range=[-1, 1])
        assert (declared.reward, declared.verdict) == (-1.0, Verdict.INCORRECT)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("../outside.py:compute_score", "no .py file in the allowed directory"),
        ("link.py:compute_score", "no .py file in the allowed directory"),
        ("/etc/passwd:x", "no .py file in the allowed directory"),
        ("none.py:compute_score", "there is no file"),
        ("verl.py:none", "has no function 'none'"),
    ],
)
async def test_a_request_can_name_nothing_outside_the_allowed_directory(
    directory: Path, name: str, what: str
) -> None:
    async with running(directory) as pool:
        with pytest.raises(BadReferenceError, match=what):
            await score(pool, "4", function=name)


async def test_without_a_directory_or_list_nothing_is_allowed() -> None:
    async with running("") as pool:
        with pytest.raises(BadReferenceError, match="CUSTOM_DIRECTORY"):
            await score(pool, "4", function="verl.py:compute_score")
        with pytest.raises(BadReferenceError, match="CUSTOM_URLS"):
            await score(pool, "4", url="http://127.0.0.1:1/", style="slime")


async def test_remote_functions_of_openrlhf_and_slime_are_asked_in_their_shapes(
    remote: HTTPServer,
) -> None:
    url = f"http://127.0.0.1:{remote.server_port}/get_reward"
    async with running("", url) as pool:
        assert (await score(pool, "4", url=url, label="4")).reward == 0.25
        assert (await score(pool, "4", url=url, style="slime", label="4")).reward == 0.75
        assert remote.bodies == [  # type: ignore[attr-defined]
            {"query": ["2 + 2 = 4"], "prompts": ["2 + 2 = "], "labels": ["4"]},
            {"prompt": "2 + 2 = ", "response": "4", "label": "4"},
        ]


async def test_trouble_with_a_remote_function_is_to_be_retried_and_no_reward(
    remote: HTTPServer,
) -> None:
    url = f"http://127.0.0.1:{remote.server_port}/"
    async with running("", url, "http://127.0.0.1:1/") as pool:
        with pytest.raises(WorkerLostError, match="500"):
            await score(pool, "4", url=url, style="slime", label="broken")
        with pytest.raises(WorkerLostError, match="refused"):
            await score(pool, "4", url="http://127.0.0.1:1/", style="slime")


@pytest.mark.parametrize(
    ("reference", "what"),
    [
        ({}, "give either it or url"),
        ({"function": "a.py:f", "url": "http://x"}, "give either it or url"),
        ({"function": "a.py"}, 'is not "file.py:name"'),
        (
            {"function": "a.py:f", "style": "slime"},
            "'slime' is none of verl, trl, open_r1, openrlhf",
        ),
        ({"function": "a.py:f", "range": [1, 0]}, "low < high"),
        ({"function": "a.py:f", "columns": []}, "columns: must be"),
        ({"function": "a.py:f", "answer": "4"}, "answer: unknown key"),
    ],
)
def test_an_unusable_reference_names_the_key(reference: Any, what: str) -> None:
    with pytest.raises(BadReferenceError, match=what):
        parse_reference(json.dumps(reference))
