"""The judge worker on a CPU: streamed layers say what resident ones say; the process comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollpacker.types import GraderKind
from services.reward.graders.grader import GradingLostError, GradingTask
from services.reward.graders.judge import JudgeGrader
from services.reward.judge_process import JudgeModelSettings, JudgeProcess
from services.reward.judge_worker.__main__ import Completions
from services.reward.judge_worker.batches import Batches, TooLateError
from services.reward.judge_worker.layer_stream import LayerStream
from services.reward.judge_worker.model import (
    JudgeModel,
    PromptTooLongError,
    Request,
    decoder_layers,
)
from services.reward.judge_worker.residency import DeviceMemoryError, spread
from services.reward.worker_pool import WorkerPool
from tests.judge_models import LAYERS, SCORE, save_decided_judge, save_judge
from tests.tiny_models import STOP

REQUESTS = [
    Request((5, 6, 7, 8, 9), 24),
    Request((7, 7), 40, temperature=0.8, seed=3),
    Request((4, 9, 9, 12, 6, 5, 8, 11, 10), 16, temperature=1.3, seed=11),
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> JudgeModelSettings:
    return save_judge(tmp_path_factory.mktemp("judge"))


def arranged(settings: JudgeModelSettings, stays: Sequence[bool], monkeypatch: Any) -> JudgeModel:
    """A judge whose layers stay as told, whatever memory there is."""
    model = JudgeModel(settings)
    monkeypatch.setattr(model, "_arrange", lambda *_: model.layers.arrange(stays))
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_streamed_layers_reply_bit_for_bit_like_resident_ones(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = save_judge(tmp_path, family=family)
    resident = arranged(settings, (True,) * LAYERS, monkeypatch)
    expected = resident.complete(REQUESTS)
    assert {len(reply.token_ids) > 3 for reply in expected} == {True}
    for streamed in (1, 3, LAYERS):
        model = arranged(settings, spread(LAYERS, streamed), monkeypatch)
        assert model.complete(REQUESTS) == expected
        assert model.layers.copied_bytes > 0
    assert resident.layers.copied_bytes == 0


def test_a_reply_is_what_transformers_itself_generates(settings: JudgeModelSettings) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    ids = torch.tensor([REQUESTS[0].token_ids])
    text = reference.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=STOP)
    reply = JudgeModel(settings).complete(REQUESTS[:1])[0]
    expected = text[0, ids.shape[1] :].tolist()
    assert list(reply.token_ids) == [token for token in expected if token != STOP]


def test_layers_may_be_arranged_anew_between_batches_and_after_a_release(
    settings: JudgeModelSettings,
) -> None:
    model = JudgeModel(settings)
    expected = model.complete(REQUESTS)
    shape, longest = model._shape, 9 + 40
    per_token = shape.cache_bytes_per_token + shape.work_bytes_per_token
    others = model._other_bytes + len(REQUESTS) * longest * per_token
    for layers_of_room, resident in ((LAYERS, LAYERS), (4, 2), (2, 0), (3, 1)):
        model._limit = others + layers_of_room * shape.layer_bytes[0]
        assert model.complete(REQUESTS) == expected
        assert model.layers.resident_count == resident
    model.release()
    assert model.layers.device_bytes == 0
    assert model.complete(REQUESTS) == expected


def test_a_forward_that_broke_off_leaves_the_stream_in_order(settings: JudgeModelSettings) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    layers = decoder_layers(model)
    stream = LayerStream(layers, torch.device("cpu"))
    stream.arrange((False,) * LAYERS)
    ids = torch.tensor([[5, 6, 7]])

    def fail(*_: Any) -> None:
        raise KeyError("in the middle")

    with torch.no_grad():
        hook = layers[2].register_forward_hook(fail)
        with pytest.raises(KeyError):
            model(ids)
        hook.remove()
        assert torch.equal(model(ids).logits, reference(ids).logits)


def test_memory_for_less_than_two_layers_is_refused_with_the_figures(
    settings: JudgeModelSettings,
) -> None:
    model = JudgeModel(replace(settings, memory_gib=1e-9))
    with pytest.raises(DeviceMemoryError, match="3 sequences of 49 tokens"):
        model.complete(REQUESTS)


def test_a_batch_that_does_not_fit_is_answered_in_halves_and_one_that_never_does_is_told(
    settings: JudgeModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = JudgeModel(settings)
    expected = [model.complete([request])[0] for request in REQUESTS]
    logits, sizes = model._logits, []

    def scarce(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(ids))
        if len(ids) > most:
            raise torch.OutOfMemoryError("no room")
        return logits(ids, *rest)

    monkeypatch.setattr(model, "_logits", scarce)
    batches = Batches(model, 4, patience_seconds=60, idle_seconds=0.01)
    threading.Thread(target=batches.run, daemon=True).start()
    most = 1
    with ThreadPoolExecutor() as callers:
        assert list(callers.map(batches.ask, REQUESTS)) == expected
    most = 0
    with pytest.raises(DeviceMemoryError, match="no room"):
        batches.ask(REQUESTS[0])
    assert max(sizes) <= 4


def test_a_request_whose_caller_has_given_up_is_dropped(settings: JudgeModelSettings) -> None:
    batches = Batches(JudgeModel(settings), 4, patience_seconds=0.0, idle_seconds=60)
    threading.Thread(target=batches.run, daemon=True).start()
    with pytest.raises(TooLateError):
        batches.ask(REQUESTS[0])


def test_a_prompt_beyond_the_context_is_refused(settings: JudgeModelSettings) -> None:
    model = JudgeModel(settings)
    message = {"role": "user", "content": "x" * 100}
    assert len(model.encode([message], 10)) == len("<user><assistant>") + 100
    with pytest.raises(PromptTooLongError, match="of the judge"):
        model.encode([message], 40_000)


@pytest.mark.parametrize("name", ["max_tokens", "seed"])
def test_an_infinite_number_is_a_bad_request(settings: JudgeModelSettings, name: str) -> None:
    model = JudgeModel(settings)
    completions = Completions(model, Batches(model, 4, patience_seconds=60, idle_seconds=60))
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, name: float("inf")}
    status, answer = completions.answer(body)
    assert (status, "OverflowError" in answer["error"]) == (400, True)


@pytest.mark.parametrize(
    ("model", "what"), [("default", "JUDGE_MODEL"), ("/nowhere", "no directory with a model")]
)
def test_a_judge_that_cannot_be_is_told_with_its_knob(model: str, what: str) -> None:
    assert what in JudgeModelSettings(model).missing()


async def test_a_killed_judge_starts_again_and_what_is_asked_meanwhile_is_answered(
    tmp_path: Path,
) -> None:
    task = GradingTask(GraderKind.JUDGE, "an answer", json.dumps({"rubric": "Is it short?"}))
    async with JudgeProcess(save_decided_judge(tmp_path)) as judge:
        options = {"url": judge.url, "api_key": judge.token, "timeout_seconds": 250}
        async with WorkerPool(1, 5.0, settings={GraderKind.JUDGE: options}) as pool:
            assert (await pool.grade(task)).score.reward == SCORE
            first = judge.pid
            assert first
            os.kill(first, signal.SIGKILL)
            assert (await pool.grade(task)).score.reward == SCORE
            assert judge.start_count == 2
            assert judge.pid != first
        stranger = JudgeGrader()
        stranger.load({**options, "api_key": "a guess"})
        with pytest.raises(GradingLostError, match="401"):
            await asyncio.to_thread(stranger.grade, task)
        last = judge.pid
    assert last
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


class OneDevice:
    """A device that nobody else wants; notes what is asked of it."""

    held: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.given_back = asyncio.Event()

    async def claim(self, count: int) -> tuple[str, ...]:
        self.calls.append(f"claim {count}")
        self.given_back.clear()
        return ("gpu",)

    async def release(self) -> int:
        self.calls.append("release")
        self.given_back.set()
        return 0

    async def keep(self) -> None:
        """Nothing to renew."""

    async def leave(self) -> None:
        """Nothing to give back."""


async def test_a_judge_claims_its_device_when_it_is_asked_and_gives_it_back_when_idle(
    tmp_path: Path,
) -> None:
    task = GradingTask(GraderKind.JUDGE, "an answer", json.dumps({"rubric": "Is it short?"}))
    device = OneDevice()
    settings = replace(save_decided_judge(tmp_path), idle_seconds=0.5)
    async with JudgeProcess(settings, device) as judge:
        grader = JudgeGrader()
        grader.load({"url": judge.url, "api_key": judge.token, "timeout_seconds": 250})
        assert (judge.pid, device.calls) == (None, [])
        for turn in (1, 2):
            assert (await asyncio.to_thread(grader.grade, task)).reward == SCORE
            await device.given_back.wait()
            turns = len(device.calls) // 2  # one more where it was idle before the request came
            assert device.calls == ["claim 1", "release"] * turns
            assert turns >= turn
            assert judge.pid
            with pytest.raises(ProcessLookupError):
                os.kill(judge.pid, 0)
