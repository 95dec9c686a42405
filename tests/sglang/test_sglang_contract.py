"""SGLang keeps the contract of all engines, and samples what the embedded engine samples."""

from __future__ import annotations

import pytest

from services.rollout.torch_engine import TorchEngine
from tests.engine_contract import CONTRACT, ENDLESS, KV_BUDGET, TOLERANCE, Subject, essence, seeded

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
async def test_sglang_keeps_the_contract(subject, rule):
    await rule(subject)


@pytest.mark.parametrize("stop_token_ids", [frozenset({3}), ENDLESS], ids=["stops", "endless"])
async def test_sglang_and_the_embedded_engine_sample_the_same_tokens(subject, stop_token_ids):
    """Response by response: equal, or with a near-tie that the embedded engine counted."""
    requests = seeded(48, stop_token_ids=stop_token_ids, temperature=0.9)
    embedded = TorchEngine(slots=64, kv_budget_tokens=KV_BUDGET)
    try:
        await embedded.load_weights(subject.directory)
        ours = await Subject(embedded, subject.directory, subject.other).run(requests)
    finally:
        await embedded.close()
    theirs = await subject.run(requests)
    parted = [name for name in ours if essence(ours[name]) != essence(theirs[name])]
    near_ties = sum(result.near_tie_count for result in ours.values())
    worst = max(
        abs(mine - other)
        for name in ours.keys() - parted
        for mine, other in zip(ours[name].logprobs, theirs[name].logprobs, strict=True)
    )
    print(f"{len(parted)} of 48 parted; {near_ties} near-ties; logprobs differ by {worst:.2e}")
    assert worst < TOLERANCE
    assert all(ours[name].near_tie_count > 0 for name in parted)
    assert len(parted) <= 2


async def test_seeds_were_probed_when_the_server_started(subject):
    assert subject.engine.replays_by_seed


async def test_the_server_tells_its_load(subject):
    stats = subject.engine.stats()
    assert (stats.slot_count, stats.kv_budget_tokens, stats.gpu_count) == (64, KV_BUDGET, 0)
    assert stats.generated_token_count > 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_engine_goes_on_as_if_it_had_not_been(subject, mode):
    whole = await subject.run(seeded(6, stop_token_ids=ENDLESS, max_response_tokens=200))
    before = subject.engine.stats()
    stream = subject.engine.generate(seeded(6, stop_token_ids=ENDLESS, max_response_tokens=200), 10)
    events = [await anext(stream)]
    await subject.engine.pause(mode)
    await subject.engine.go_on()
    events += [event async for event in stream]
    results = {event.request_id: event for event in events if hasattr(event, "finish_reason")}
    for name, result in results.items():
        assert essence(result) == essence(whole[name])
    assert len(results) == 6
    retracted = subject.engine.stats().preemption_count - before.preemption_count
    print(f"retractions by pausing {mode}: {retracted}")
    if mode == "in_place":
        assert retracted == 0


async def test_a_flush_is_refused_while_requests_run(subject):
    stream = subject.engine.generate(seeded(2, stop_token_ids=ENDLESS, max_response_tokens=500), 1)
    await anext(stream)
    with pytest.raises(Exception, match="abort them first"):
        await subject.engine.flush()
    await stream.aclose()
    await subject.engine.flush()
