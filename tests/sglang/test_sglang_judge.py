"""The judge grader asks a real SGLang server, in its OpenAI-compatible shape."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest

from rollpacker.local_stack.ports import free_port
from rollpacker.types import GraderKind, Verdict
from services.reward.graders.grader import GraderFailedError, GradingTask
from services.reward.graders.judge import JudgeGrader
from services.rollout.sglang_engine import launch
from services.rollout.sglang_engine.server_process import ServerProcess
from tests.judge_models import SCORE, save_decided_judge
from tests.sglang_support import options

KEY = "secret"
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


def task(**reference: object) -> GradingTask:
    rubric = json.dumps({"rubric": "Is it short?", **reference})
    return GradingTask(GraderKind.JUDGE, "an answer", rubric, prompt_text="a question")


async def until_served(server: ServerProcess, url: str) -> None:
    asked = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {KEY}"})
    while True:
        assert not server.ended, server.tail()
        try:
            await asyncio.to_thread(urllib.request.urlopen, asked, timeout=5)
        except OSError:
            await asyncio.sleep(0.5)
        else:
            return


async def test_a_real_server_judges(tmp_path: Path) -> None:
    asked, port = options(max_context_tokens=0), free_port()
    save_decided_judge(tmp_path / "judge")
    command = launch.command(asked, tmp_path / "judge", port, 1)
    command.remove("--skip-tokenizer-init")
    command += ["--api-key", KEY]
    environment = launch.environment(asked, 1)
    server = await ServerProcess.start(command, environment, tmp_path / "log")
    try:
        url = f"http://127.0.0.1:{port}/v1"
        await until_served(server, url)
        judge = JudgeGrader()
        judge.load({"url": url, "model": "judge", "api_key": KEY})
        score = await asyncio.to_thread(judge.grade, task())
        assert (score.reward, score.verdict) == (SCORE, Verdict.INCORRECT)
        with pytest.raises(GraderFailedError, match=r"no usable score in 3 replies.*0\.75"):
            await asyncio.to_thread(judge.grade, task(range=[0, 0.5]))
        judge.load({"url": url, "model": "judge", "api_key": KEY, "max_tokens": 1 << 20})
        with pytest.raises(GraderFailedError, match="400"):
            await asyncio.to_thread(judge.grade, task())
    finally:
        await server.kill()
