"""What every engine promises, as rules over the `Engine` protocol: run on each engine there is.

A rule is a coroutine function over a `Subject`; its name is the sentence that it proves. Engines
compute in float32 here. Tokens must be equal all the same: two scores so close that rounding could
swap them do not occur with these seeds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollpacker.types import FinishReason
from services.rollout.engine import (
    Engine,
    EngineError,
    GenerationProgress,
    GenerationRequest,
    GenerationResult,
    InvalidRequestError,
    PromptTooLongError,
    WeightsNotFoundError,
)
from tests.tiny_models import PROMPT, STOP, VOCABULARY

KV_BUDGET = 2_000  # tokens; the engines under test have this much
ENDLESS = frozenset[int]()
LONG = 1_900  # tokens; a response that runs while a test looks
TOLERANCE = 1e-4  # of logprobs


@dataclass
class Subject:
    """An engine, and two directories of weights of one architecture."""

    engine: Engine
    directory: Path
    other: Path

    async def run(self, requests: Sequence[GenerationRequest]) -> dict[str, GenerationResult]:
        """The results of one call, by request id."""
        return {
            event.request_id: event
            async for event in self.engine.generate(requests, 16)
            if isinstance(event, GenerationResult)
        }


def request(seed: int = 1, **changes: object) -> GenerationRequest:
    values = {
        "request_id": f"r{seed}",
        "prompt_token_ids": PROMPT,
        "seed": seed,
        "temperature": 1.0,
        "max_response_tokens": 60,
        "stop_token_ids": frozenset({STOP}),
        **changes,
    }
    return GenerationRequest(**values)


def seeded(count: int, **changes: object) -> list[GenerationRequest]:
    return [request(seed, **changes) for seed in range(1, count + 1)]


def essence(result: GenerationResult) -> tuple[tuple[int, ...], FinishReason]:
    return result.token_ids, result.finish_reason


async def a_response_is_the_same_alone_and_in_a_batch(subject: Subject) -> None:
    batch = await subject.run(seeded(16))
    for each in seeded(16)[::5]:
        alone = await subject.run([each])
        assert essence(alone[each.request_id]) == essence(batch[each.request_id])
    assert len({result.token_ids for result in batch.values()}) > 8


async def a_response_ends_at_its_stop_token_or_at_its_cap(subject: Subject) -> None:
    results = await subject.run(seeded(16, max_response_tokens=20))
    reasons = {result.finish_reason for result in results.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for result in results.values():
        stopped = result.finish_reason is FinishReason.STOP
        assert (result.token_ids[-1] == STOP) == stopped
        assert STOP not in result.token_ids[:-1]
        assert stopped or len(result.token_ids) == 20
        assert result.start_time <= result.end_time
        assert result.slot >= 0
    whole = await subject.run(seeded(4, stop_token_ids=ENDLESS, max_response_tokens=20))
    assert {len(result.token_ids) for result in whole.values()} == {20}


async def logprobs_are_those_of_a_transformers_forward(subject: Subject) -> None:
    results = await subject.run(seeded(8, temperature=0.7, stop_token_ids=ENDLESS))
    worst = worst_logprob_difference(subject.directory, results.values(), 0.7)
    print(f"largest logprob difference from a transformers forward: {worst:.2e}")
    assert worst < TOLERANCE


def worst_logprob_difference(directory: Path, results, temperature: float) -> float:
    """The largest difference from a float64 forward pass of the whole sequences."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    )
    worst = 0.0
    for result in results:
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *result.token_ids]])).logits[0]
        law = (logits / temperature).log_softmax(-1)[len(PROMPT) - 1 : -1]
        theirs = law.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        worst = max(worst, float((theirs - torch.tensor(result.logprobs)).abs().max()))
    return worst


async def a_response_resumed_from_a_prefix_goes_on_exactly(subject: Subject) -> None:
    whole = await subject.run(seeded(8, stop_token_ids=ENDLESS))
    moved = [
        request(
            seed,
            stop_token_ids=ENDLESS,
            carried_token_ids=whole[f"r{seed}"].token_ids[: 7 * seed],
            carried_logprobs=whole[f"r{seed}"].logprobs[: 7 * seed],
            carried_near_ties=seed,
        )
        for seed in range(1, 9)
    ]
    for name, result in (await subject.run(moved)).items():
        assert essence(result) == essence(whole[name])
        assert result.logprobs == pytest.approx(whole[name].logprobs, abs=TOLERANCE)
        assert result.carried_token_count == 7 * int(name[1:])
        assert result.near_tie_count >= int(name[1:])


async def a_draft_changes_nothing(subject: Subject) -> None:
    whole = await subject.run(seeded(4))
    drafts = [request(seed, draft_token_ids=(seed, 1, 2)) for seed in range(1, 4)]
    for name, result in (await subject.run(drafts)).items():
        assert essence(result) == essence(whole[name])


async def aborted_responses_come_back_with_their_tokens(subject: Subject) -> None:
    whole = await subject.run([request(3, stop_token_ids=ENDLESS), request(1)])
    stream = subject.engine.generate(
        [request(1), request(3, stop_token_ids=ENDLESS, max_response_tokens=LONG)], 4
    )
    events = [await anext(stream)]
    returned = await subject.engine.abort(["r3", "unknown", "r3"])
    events += [event async for event in stream]
    results = {event.request_id: event for event in events if isinstance(event, GenerationResult)}
    assert [result.request_id for result in returned] == ["r3"]
    assert results["r3"] == returned[0]
    assert returned[0].finish_reason is FinishReason.INTERRUPTED
    length = min(len(returned[0].token_ids), 60)
    assert 0 < length == min(len(returned[0].logprobs), 60)
    assert len(returned[0].token_ids) < LONG
    assert returned[0].token_ids[:length] == whole["r3"].token_ids[:length]
    assert essence(results["r1"]) == essence(whole["r1"])
    assert await subject.engine.abort(["r3"]) == []


async def an_abort_reaches_requests_that_were_asked_for_just_now(subject: Subject) -> None:
    stream = subject.engine.generate(
        seeded(16, stop_token_ids=ENDLESS, max_response_tokens=LONG), LONG
    )
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    returned = await subject.engine.abort([f"r{seed}" for seed in range(1, 17)])
    assert len(returned) == 16
    await first
    async for _ in stream:
        pass
    assert await subject.run(seeded(2))


async def closing_the_iterator_aborts_what_runs(subject: Subject) -> None:
    stream = subject.engine.generate(seeded(4, stop_token_ids=ENDLESS, max_response_tokens=LONG), 1)
    await anext(stream)
    await stream.aclose()
    await subject.engine.load_weights(subject.directory)  # refused while something runs
    assert subject.engine.stats().running_response_count == 0


async def progress_comes_once_per_interval_of_the_longest_response(subject: Subject) -> None:
    events = [
        event
        async for event in subject.engine.generate(
            seeded(3, stop_token_ids=ENDLESS, max_response_tokens=100), 10
        )
        if isinstance(event, GenerationProgress)
    ]
    longest = [0, *(event.longest_response_tokens for event in events), 100]
    assert all(0 <= later - earlier <= 10 for earlier, later in itertools.pairwise(longest))
    assert all(event.total_response_tokens >= event.longest_response_tokens for event in events)


async def a_full_kv_cache_preempts_and_changes_nothing(subject: Subject) -> None:
    """Eight sequences of 145 tokens fit; twenty-four do not."""
    few = await subject.run(seeded(8, stop_token_ids=ENDLESS, max_response_tokens=140))
    before = subject.engine.stats().preemption_count
    many = await subject.run(seeded(24, stop_token_ids=ENDLESS, max_response_tokens=140))
    preempted = subject.engine.stats().preemption_count - before
    print(f"preemptions: {preempted}")
    assert preempted > 0
    for name, result in few.items():
        assert essence(many[name]) == essence(result)


async def other_weights_give_other_responses_and_back_again(subject: Subject) -> None:
    before = await subject.run(seeded(8))
    await subject.engine.load_weights(subject.other)
    between = await subject.run(seeded(8, stop_token_ids=ENDLESS))
    assert worst_logprob_difference(subject.other, between.values(), 1.0) < TOLERANCE
    await subject.engine.load_weights(subject.directory)
    after = await subject.run(seeded(8))
    assert {n: essence(r) for n, r in after.items()} == {n: essence(r) for n, r in before.items()}
    assert any(between[name].token_ids[:9] != before[name].token_ids[:9] for name in before)


async def weights_change_only_when_nothing_runs(subject: Subject) -> None:
    stream = subject.engine.generate(seeded(2, stop_token_ids=ENDLESS, max_response_tokens=LONG), 1)
    await anext(stream)
    with pytest.raises(EngineError, match="abort them first"):
        await subject.engine.load_weights(subject.other)
    await stream.aclose()


async def damaged_weights_are_refused_and_the_old_ones_stay(subject: Subject) -> None:
    before = await subject.run(seeded(4))
    damaged = subject.directory.parent / "damaged"
    damaged.mkdir(exist_ok=True)
    (damaged / "config.json").write_bytes((subject.directory / "config.json").read_bytes())
    tensors = (subject.directory / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(tensors[: len(tensors) // 2])
    for directory in (damaged, subject.directory.parent / "nowhere"):
        with pytest.raises(WeightsNotFoundError):
            await subject.engine.load_weights(directory)
    after = await subject.run(seeded(4))
    assert {n: essence(r) for n, r in after.items()} == {n: essence(r) for n, r in before.items()}


async def what_can_never_be_served_is_refused(subject: Subject) -> None:
    with pytest.raises(PromptTooLongError, match=f"KV budget is {KV_BUDGET}"):
        await subject.run([request(max_response_tokens=KV_BUDGET - len(PROMPT) + 1)])
    for field, changes in (
        ("prompt_token_ids", {"prompt_token_ids": (VOCABULARY,)}),
        ("temperature", {"temperature": 0.0}),
        ("seed", {"seed": 2**63}),
        ("carried_logprobs", {"carried_token_ids": (5,)}),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            await subject.run([request(**changes)])
        assert refused.value.field == field


async def a_response_may_fill_the_kv_budget(subject: Subject) -> None:
    room = KV_BUDGET - len(PROMPT)
    results = await subject.run([request(stop_token_ids=ENDLESS, max_response_tokens=room)])
    assert len(results["r1"].token_ids) == room


async def a_released_engine_serves_again_after_loading(subject: Subject) -> None:
    before = await subject.run(seeded(4))
    await subject.engine.release()
    await subject.engine.release()
    with pytest.raises(EngineError, match="no weights"):
        await subject.run(seeded(1))
    await subject.engine.load_weights(subject.directory)
    after = await subject.run(seeded(4))
    assert {n: essence(r) for n, r in after.items()} == {n: essence(r) for n, r in before.items()}


CONTRACT = (
    a_response_is_the_same_alone_and_in_a_batch,
    a_response_ends_at_its_stop_token_or_at_its_cap,
    logprobs_are_those_of_a_transformers_forward,
    a_response_resumed_from_a_prefix_goes_on_exactly,
    a_draft_changes_nothing,
    aborted_responses_come_back_with_their_tokens,
    an_abort_reaches_requests_that_were_asked_for_just_now,
    closing_the_iterator_aborts_what_runs,
    progress_comes_once_per_interval_of_the_longest_response,
    a_full_kv_cache_preempts_and_changes_nothing,
    other_weights_give_other_responses_and_back_again,
    weights_change_only_when_nothing_runs,
    damaged_weights_are_refused_and_the_old_ones_stay,
    what_can_never_be_served_is_refused,
    a_response_may_fill_the_kv_budget,
    a_released_engine_serves_again_after_loading,
)
