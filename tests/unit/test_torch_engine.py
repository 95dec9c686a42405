"""The embedded engine: a response is a function of weights, prompt, seed and parameters."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollpacker import sampling
from rollpacker.types import FinishReason
from services.rollout.engine import (
    EngineError,
    GenerationProgress,
    GenerationRequest,
    GenerationResult,
    InvalidRequestError,
    PromptTooLongError,
    WeightsNotFoundError,
)
from services.rollout.torch_engine import TorchEngine
from tests.tiny_models import CONTEXT, FOREVER, PROMPT, STOP, VOCABULARY, save_model

ENDLESS = frozenset[int]()


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other_directory(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
async def make_engine(model_directory):
    engines = []

    async def make(directory: Path | None = model_directory, **settings) -> TorchEngine:
        engine = TorchEngine(**{"dtype": "float64", "slots": 64, **settings})
        engines.append(engine)
        if directory:
            await engine.load_weights(directory)
        return engine

    yield make
    for engine in engines:
        await engine.close()


def request(seed: int = 1, **changes) -> GenerationRequest:
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


def seeded(count: int, **changes) -> list[GenerationRequest]:
    return [request(seed, **changes) for seed in range(1, count + 1)]


async def run(engine: TorchEngine, requests) -> dict[str, GenerationResult]:
    """The results of one group, by request id."""
    return {
        event.request_id: event
        async for event in engine.generate(requests, 16)
        if isinstance(event, GenerationResult)
    }


def essence(result: GenerationResult):
    return result.token_ids, result.finish_reason


def law_of(directory: Path, sequence, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of a transformers forward pass in float64."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    with torch.no_grad():
        return (model(torch.tensor([sequence])).logits[0] / temperature).log_softmax(-1)


async def test_a_response_is_what_the_definition_says(make_engine, model_directory):
    """Token by token, from transformers' logits and the noise in plain numbers."""
    result = (await run(await make_engine(), [request(7, temperature=0.8)]))["r7"]
    law = law_of(model_directory, [*PROMPT, *result.token_ids], 0.8)
    for place, (token, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        position = len(PROMPT) + place - 1
        noise = [
            float(sampling.gumbel(sampling.noise_bits(sampling.seed_state(7), position, v)))
            for v in range(VOCABULARY)
        ]
        assert int((law[position] + torch.tensor(noise)).argmax()) == token
        assert logprob == pytest.approx(float(law[position, token]), abs=1e-5)
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids[-1] == STOP


@pytest.mark.parametrize("dtype", ["float64", "float32"])
async def test_logprobs_are_those_of_a_transformers_forward(
    make_engine, model_directory, dtype, record_property
):
    engine = await make_engine(dtype=dtype)
    results = await run(engine, seeded(16, temperature=0.7, stop_token_ids=ENDLESS))
    worst = 0.0
    for result in results.values():
        law = law_of(model_directory, [*PROMPT, *result.token_ids], 0.7)[len(PROMPT) - 1 : -1]
        theirs = law.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        worst = max(worst, float((theirs - torch.tensor(result.logprobs)).abs().max()))
    record_property("worst_logprob_difference", worst)
    assert worst < 1e-4


async def test_a_response_is_the_same_alone_and_in_a_batch_of_64(make_engine):
    batch = await run(await make_engine(), seeded(64))
    engine = await make_engine()
    for each in seeded(64)[::9]:
        alone = await run(engine, [each])
        assert essence(alone[each.request_id]) == essence(batch[each.request_id])
    assert len({result.token_ids for result in batch.values()}) > 32


async def test_float32_and_float64_part_only_where_a_near_tie_was_counted(make_engine):
    """Response by response: equal tokens, or a near-tie at or before the first difference."""
    exact = await run(await make_engine(), seeded(64, stop_token_ids=ENDLESS))
    rough = await run(await make_engine(dtype="float32"), seeded(64, stop_token_ids=ENDLESS))
    parted = [name for name in exact if exact[name].token_ids != rough[name].token_ids]
    for name in parted:
        assert exact[name].near_tie_count + rough[name].near_tie_count > 0
    assert len(parted) <= 6


async def test_near_ties_are_counted(make_engine, tmp_path):
    """With equal logits the two best scores are as close as their noise."""
    flat = save_model(tmp_path, initializer_range=1e-12)
    engine = await make_engine(flat)
    results = await run(engine, seeded(64, stop_token_ids=ENDLESS, max_response_tokens=500))
    expected = 0
    for result in results.values():
        state = sampling.seed_state(int(result.request_id[1:]))
        positions = torch.arange(len(PROMPT) - 1, len(PROMPT) + 499)[:, None]
        bits = sampling.noise_bits(state, positions, torch.arange(VOCABULARY))
        best = sampling.gumbel(bits, torch).topk(2).values
        expected += int((best[:, 0] - best[:, 1] < 1e-4).sum())
    assert sum(result.near_tie_count for result in results.values()) == expected > 0


async def test_a_preempted_response_goes_on_as_it_would_have(make_engine):
    undisturbed = await run(await make_engine(), seeded(16, stop_token_ids=ENDLESS))
    engine = await make_engine(kv_budget_tokens=300)
    squeezed = await run(engine, seeded(16, stop_token_ids=ENDLESS))
    assert engine.stats().preemption_count > 0
    for name, result in undisturbed.items():
        assert essence(squeezed[name]) == essence(result)
        assert squeezed[name].logprobs == pytest.approx(result.logprobs, abs=1e-9)
        assert squeezed[name].carried_token_count == 0


async def test_a_moved_response_goes_on_as_it_would_have(make_engine):
    whole = (await run(await make_engine(), [request(5)]))["r5"]
    engine = await make_engine()
    for length in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        carried = request(
            5,
            carried_token_ids=whole.token_ids[:length],
            carried_logprobs=whole.logprobs[:length],
            carried_near_ties=2,
        )
        moved = (await run(engine, [carried]))["r5"]
        assert essence(moved) == essence(whole)
        assert moved.logprobs == pytest.approx(whole.logprobs, abs=1e-9)
        assert moved.carried_token_count == length
        assert moved.near_tie_count == whole.near_tie_count + 2


async def test_long_responses_among_short_ones_stay_what_they_are(make_engine):
    """Rows move to larger blocks of the KV cache while their neighbours come and go."""
    caps = [20, 400, 70, 140, 300, 40, 1, 130]
    requests = [
        request(n, max_response_tokens=cap, stop_token_ids=ENDLESS) for n, cap in enumerate(caps)
    ]
    together = await run(await make_engine(), requests)
    engine = await make_engine()
    for each in requests:
        alone = (await run(engine, [each]))[each.request_id]
        assert essence(alone) == essence(together[each.request_id])
        assert len(alone.token_ids) == each.max_response_tokens
        assert alone.finish_reason is FinishReason.LENGTH


async def test_a_group_larger_than_the_slots_is_served_in_turns(make_engine):
    """Later responses copy the prompt from a running sibling, or compute it again."""
    wide = await run(await make_engine(), seeded(12))
    for slots in (1, 3):
        narrow = await run(await make_engine(slots=slots), seeded(12))
        assert {name: essence(r) for name, r in narrow.items()} == {
            name: essence(r) for name, r in wide.items()
        }


async def test_prompts_of_any_length_share_a_batch(make_engine):
    prompts = [tuple(i % VOCABULARY for i in range(n)) for n in (1, 2, 63, 64, 65, 200)]
    prompts += [(n, *prompts[-1], *prompts[-1]) for n in range(12)]  # too many for one prefill
    requests = [request(n, prompt_token_ids=prompt) for n, prompt in enumerate(prompts)]
    engine = await make_engine()
    together = await asyncio.gather(*(run(engine, [each]) for each in requests))
    for each, result in zip(requests, together, strict=True):
        alone = await run(engine, [each])
        assert essence(alone[each.request_id]) == essence(result[each.request_id])


async def test_300_groups_at_once_are_what_each_is_alone(make_engine):
    engine = await make_engine(slots=128)
    groups = [
        [request(2 * n + k, prompt_token_ids=(n % VOCABULARY, 5)) for k in range(2)]
        for n in range(300)
    ]
    together = await asyncio.gather(*(run(engine, group) for group in groups))
    for n in (0, 131, 299):
        alone = await run(engine, groups[n])
        assert {k: essence(r) for k, r in alone.items()} == {
            k: essence(r) for k, r in together[n].items()
        }
    stats = engine.stats()
    assert stats.generated_token_count > 600
    assert (stats.running_response_count, stats.waiting_response_count) == (0, 0)
    assert stats.kv_cache_usage == 0


async def test_an_empty_response_is_its_stop_token(make_engine):
    everything = frozenset(range(VOCABULARY))
    results = await run(await make_engine(), seeded(4, stop_token_ids=everything))
    for result in results.values():
        assert len(result.token_ids) == len(result.logprobs) == 1
        assert result.finish_reason is FinishReason.STOP


async def test_a_stop_token_at_the_cap_is_a_stop(make_engine):
    engine = await make_engine()
    whole = (await run(engine, [request(5)]))["r5"]
    assert whole.finish_reason is FinishReason.STOP
    capped = await run(engine, [request(5, max_response_tokens=len(whole.token_ids))])
    assert essence(capped["r5"]) == essence(whole)


async def test_an_aborted_response_is_a_prefix_of_the_undisturbed_one(make_engine):
    whole = await run(await make_engine(), seeded(6, stop_token_ids=ENDLESS))
    caps = [60, 60, *[FOREVER] * 4]
    requests = [
        request(n, stop_token_ids=ENDLESS, max_response_tokens=cap)
        for n, cap in enumerate(caps, start=1)
    ]
    engine = await make_engine()
    stream = engine.generate(requests, 5)
    await anext(stream)
    returned = await engine.abort(["r3", "r4", "r5", "r6", "unknown", "r3"])
    results = {e.request_id: e async for e in stream if isinstance(e, GenerationResult)}
    assert [result.request_id for result in returned] == ["r3", "r4", "r5", "r6"]
    for result in returned:
        assert results[result.request_id] == result
        assert result.finish_reason is FinishReason.INTERRUPTED
        length = min(len(result.token_ids), 60)
        assert result.token_ids[:length] == whole[result.request_id].token_ids[:length]
        assert 0 < len(result.logprobs) == len(result.token_ids) < FOREVER
    for name in ("r1", "r2"):
        assert essence(results[name]) == essence(whole[name])
    assert await engine.abort(["r1"]) == []


async def test_a_response_that_never_ran_is_aborted_empty(make_engine):
    engine = await make_engine(slots=1)
    requests = seeded(2, stop_token_ids=ENDLESS, max_response_tokens=FOREVER)
    stream = engine.generate(requests, 1)
    await anext(stream)
    ran, waited = await engine.abort(["r1", "r2"])
    assert (ran.slot, waited.slot) == (0, -1)
    assert waited.token_ids == waited.logprobs == ()
    assert [e async for e in stream if isinstance(e, GenerationResult)] == [ran, waited]


async def test_closing_the_iterator_aborts_what_runs(make_engine):
    engine = await make_engine()
    stream = engine.generate(seeded(4, stop_token_ids=ENDLESS, max_response_tokens=FOREVER), 1)
    await anext(stream)
    await stream.aclose()
    assert await engine.abort(["r1"]) == []  # posted after the stream's own abort
    assert engine.stats().running_response_count == 0


async def test_progress_tells_the_longest_and_the_total(make_engine):
    engine = await make_engine()
    whole = (await run(engine, [request(1, stop_token_ids=ENDLESS)]))["r1"]
    moved = request(
        1,
        stop_token_ids=ENDLESS,
        carried_token_ids=whole.token_ids[:25],
        carried_logprobs=whole.logprobs[:25],
    )
    fresh = request(2, stop_token_ids=ENDLESS)
    events = [event async for event in engine.generate([moved, fresh], 10)]
    progress = [event for event in events if isinstance(event, GenerationProgress)]
    assert [event.total_response_tokens for event in progress[:2]] == [27, 47]
    assert {event.carried_response_tokens for event in progress} == {25}
    longest = [event.longest_response_tokens for event in progress]
    assert longest == [26, 36, 46, 56, 60, 60]


async def test_progress_tells_every_token_of_a_running_response_once(make_engine):
    """Also where responses are preempted, come from elsewhere, or have not started yet."""
    whole = await run(await make_engine(), seeded(6, stop_token_ids=ENDLESS))
    engine = await make_engine(kv_budget_tokens=150)
    cut = 25
    first = request(
        1,
        stop_token_ids=ENDLESS,
        carried_token_ids=whole["r1"].token_ids[:cut],
        carried_logprobs=whole["r1"].logprobs[:cut],
    )
    drafted = request(2, stop_token_ids=ENDLESS, draft_token_ids=whole["r2"].token_ids[:30])
    told: dict[str, tuple[int, ...]] = {f"r{seed}": () for seed in range(1, 7)}
    requests = [first, drafted, *seeded(6, stop_token_ids=ENDLESS)[2:]]
    async for event in engine.generate(requests, 7):
        if isinstance(event, GenerationProgress):
            for name, tokens in event.new_token_ids.items():
                told[name] += tokens
                assert told[name] == whole[name].token_ids[: len(told[name])]
    assert engine.stats().preemption_count > 0
    assert all(len(tokens) >= 60 - 7 for tokens in told.values())


async def test_swapped_weights_give_what_a_fresh_engine_gives(make_engine, other_directory):
    engine = await make_engine()
    before = await run(engine, seeded(8))
    await engine.load_weights(other_directory)
    after = await run(engine, seeded(8))
    fresh = await run(await make_engine(other_directory), seeded(8))
    for name in fresh:
        assert essence(after[name]) == essence(fresh[name])
        assert after[name].logprobs == fresh[name].logprobs
    assert any(before[name].token_ids != after[name].token_ids for name in before)


async def test_another_architecture_replaces_the_model(make_engine, tmp_path):
    engine = await make_engine()
    await run(engine, seeded(2))
    qwen = save_model(tmp_path, "qwen3", num_hidden_layers=3)
    await engine.load_weights(qwen)
    fresh = await run(await make_engine(qwen), seeded(4))
    assert {n: essence(r) for n, r in (await run(engine, seeded(4))).items()} == {
        n: essence(r) for n, r in fresh.items()
    }


async def test_weights_that_cannot_be_loaded_leave_the_old_ones(make_engine, tmp_path):
    engine = await make_engine()
    before = await run(engine, seeded(4))
    broken = save_model(tmp_path / "broken", seed=1)
    (broken / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(WeightsNotFoundError):
        await engine.load_weights(broken)
    with pytest.raises(WeightsNotFoundError):
        await engine.load_weights(tmp_path / "nowhere")
    with pytest.raises(InvalidRequestError, match="one process"):
        await engine.load_weights(broken, tensor_parallel_size=2)
    after = await run(engine, seeded(4))
    assert {n: essence(r) for n, r in after.items()} == {n: essence(r) for n, r in before.items()}


async def test_weights_change_only_when_nothing_runs(make_engine, other_directory):
    engine = await make_engine()
    stream = engine.generate(seeded(2, stop_token_ids=ENDLESS, max_response_tokens=FOREVER), 1)
    await anext(stream)
    with pytest.raises(EngineError, match="abort them first"):
        await engine.load_weights(other_directory)
    with pytest.raises(EngineError, match="abort them first"):
        await engine.release()
    await stream.aclose()
    await engine.load_weights(other_directory)


async def test_a_released_engine_serves_again_after_loading(make_engine, model_directory):
    engine = await make_engine()
    before = await run(engine, seeded(4))
    await engine.release()
    await engine.release()
    with pytest.raises(EngineError, match="no weights"):
        await run(engine, seeded(1))
    await engine.load_weights(model_directory)
    after = await run(engine, seeded(4))
    assert {n: essence(r) for n, r in after.items()} == {n: essence(r) for n, r in before.items()}


@pytest.mark.parametrize(
    ("settings", "longest", "named"),
    [
        ({}, CONTEXT - 4, f"context is {CONTEXT}"),
        ({"max_context_tokens": 100}, 96, "context is 100"),
        ({"kv_budget_tokens": 90}, 86, "KV budget is 90"),
    ],
)
async def test_a_response_that_can_never_fit_is_refused(make_engine, settings, longest, named):
    engine = await make_engine(**settings)
    with pytest.raises(PromptTooLongError, match=named):
        await run(engine, [request(max_response_tokens=longest)])
    stats = engine.stats()
    told = min(stats.context_tokens, stats.kv_budget_tokens)
    assert longest + len(PROMPT) > told >= longest + len(PROMPT) - 1
    assert await run(engine, [request(max_response_tokens=80)])


async def test_a_response_may_fill_the_context_and_the_budget(make_engine):
    for settings in ({"max_context_tokens": 100}, {"kv_budget_tokens": 100}):
        engine = await make_engine(**settings)
        room = 100 - len(PROMPT)
        requests = seeded(2, max_response_tokens=room, stop_token_ids=ENDLESS)
        results = await run(engine, requests)
        assert {len(result.token_ids) for result in results.values()} == {room}


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prompt_token_ids", {"prompt_token_ids": ()}),
        ("prompt_token_ids", {"prompt_token_ids": (VOCABULARY,)}),
        ("seed", {"seed": 2**63}),
        ("seed", {"seed": -1}),
        ("temperature", {"temperature": 0.0}),
        ("temperature", {"temperature": math.inf}),
        ("max_response_tokens", {"max_response_tokens": 0}),
        ("carried_token_ids", {"carried_token_ids": (-1,), "carried_logprobs": (-1.0,)}),
        ("carried_token_ids", {"carried_token_ids": (5,) * 60, "carried_logprobs": (-1.0,) * 60}),
        ("carried_logprobs", {"carried_token_ids": (5,)}),
    ],
)
async def test_a_request_that_cannot_be_served_is_named(make_engine, field, changes):
    engine = await make_engine()
    with pytest.raises(InvalidRequestError) as refused:
        await run(engine, [request(**changes)])
    assert refused.value.field == field
    assert await run(engine, [request()])  # and harms nobody


async def test_a_request_id_that_runs_is_refused(make_engine):
    engine = await make_engine()
    with pytest.raises(InvalidRequestError, match="running already"):
        await run(engine, [request(), request()])


async def test_temperature_and_stop_set_belong_to_each_request(make_engine):
    requests = [
        request(1, temperature=0.2, stop_token_ids=frozenset({1, 2, 3, 4})),
        request(2, temperature=3.0, stop_token_ids=ENDLESS),
        request(3, temperature=1.5, stop_token_ids=frozenset({9})),
    ]
    engine = await make_engine()
    together = await run(engine, requests)
    for each in requests:
        alone = (await run(engine, [each]))[each.request_id]
        assert essence(alone) == essence(together[each.request_id])


async def test_an_engine_without_weights_says_so(make_engine):
    engine = await make_engine(None)
    with pytest.raises(EngineError, match="no weights"):
        await run(engine, [request()])


async def test_a_closed_engine_has_aborted_everything_and_refuses_more(make_engine):
    engine = await make_engine()
    stream = engine.generate(seeded(2, stop_token_ids=ENDLESS, max_response_tokens=FOREVER), 1)
    await anext(stream)
    await engine.close()
    ends = [event async for event in stream if isinstance(event, GenerationResult)]
    assert {event.finish_reason for event in ends} == {FinishReason.INTERRUPTED}
    with pytest.raises(EngineError, match="closed"):
        await run(engine, [request()])
    with pytest.raises(EngineError, match="closed"):
        await engine.abort(["r1"])


async def test_bfloat16_serves(make_engine):
    results = await run(await make_engine(dtype="bfloat16"), seeded(8))
    for result in results.values():
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in result.logprobs)


async def test_responses_of_a_large_vocabulary_keep_to_the_definition(make_engine, tmp_path):
    """So large that the noise of a step is computed in pieces."""
    wide = save_model(tmp_path, vocab_size=30_000, initializer_range=0.1)
    requests = seeded(3, stop_token_ids=ENDLESS, max_response_tokens=12)
    results = await run(await make_engine(wide), requests)
    for result in results.values():
        law = law_of(wide, [*PROMPT, *result.token_ids])[len(PROMPT) - 1 : -1]
        positions = torch.arange(len(PROMPT) - 1, len(PROMPT) + 11)[:, None]
        state = sampling.seed_state(int(result.request_id[1:]))
        bits = sampling.noise_bits(state, positions, torch.arange(30_000))
        assert (law + sampling.gumbel(bits, torch)).argmax(-1).tolist() == list(result.token_ids)


async def test_a_vocabulary_of_one_token_has_no_near_ties(make_engine, tmp_path):
    single = save_model(tmp_path, vocab_size=1, pad_token_id=None, bos_token_id=0, eos_token_id=0)
    each = request(1, prompt_token_ids=(0,), stop_token_ids=ENDLESS, max_response_tokens=3)
    result = (await run(await make_engine(single), [each]))["r1"]
    assert result.token_ids == (0, 0, 0)
    assert result.logprobs == (0.0, 0.0, 0.0)
    assert result.near_tie_count == 0
