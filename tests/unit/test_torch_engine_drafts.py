"""Drafts: what the weights confirm is taken over; the response is the same without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.rollout.engine import GenerationRequest, GenerationResult, InvalidRequestError
from services.rollout.torch_engine import TorchEngine
from tests.tiny_models import PROMPT, STOP, VOCABULARY, save_model

CAP = 60
GROUP = 6
SEEDS = range(1, GROUP + 1)
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def request(seed: int, draft: Tokens = (), **changes: object) -> GenerationRequest:
    values = {
        "request_id": f"r{seed}",
        "prompt_token_ids": PROMPT,
        "seed": seed,
        "temperature": 1.0,
        "max_response_tokens": CAP,
        "stop_token_ids": frozenset({STOP}),
        "draft_token_ids": draft,
        **changes,
    }
    return GenerationRequest(**values)  # type: ignore[arg-type]


async def run(engine: TorchEngine, requests: list[GenerationRequest]) -> list[GenerationResult]:
    found = {
        event.request_id: event
        async for event in engine.generate(requests, 16)
        if isinstance(event, GenerationResult)
    }
    return [found[each.request_id] for each in requests]


async def sample(directory: Path, requests: list[GenerationRequest], **more: object) -> list:
    """Results of an engine of its own."""
    engine = TorchEngine(**{"dtype": "float64", "slots": 16, **more})  # type: ignore[arg-type]
    try:
        await engine.load_weights(directory)
        return await run(engine, requests)
    finally:
        await engine.close()


def same(result: GenerationResult, expected: GenerationResult) -> None:
    assert result.token_ids == expected.token_ids
    assert result.finish_reason is expected.finish_reason
    assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    assert result.near_tie_count == expected.near_tie_count


def common_prefix(left: Tokens, right: Tokens) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


TOKEN = st.integers(0, VOCABULARY - 1)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[int, Tokens]:
    """How much of the true response a draft repeats, and what it says behind that."""
    return draw(st.integers(0, CAP)), tuple(draw(st.lists(TOKEN, max_size=80)))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    guesses=st.lists(drafts(), min_size=GROUP, max_size=GROUP),
    slots=st.integers(2, 8),
    kv_budget=st.sampled_from([100, 250, 10_000]),
    stops=st.sampled_from([frozenset({STOP}), frozenset()]),
)
async def test_no_draft_changes_a_response(
    directory: Path,
    guesses: list[tuple[int, Tokens]],
    slots: int,
    kv_budget: int,
    stops: frozenset[int],
) -> None:
    """Right ones, wrong ones, ones that stop or run over the cap; with preemption and queueing."""
    truth = await sample(directory, [request(s, stop_token_ids=stops) for s in SEEDS])
    requests = [
        request(seed, whole.token_ids[:kept] + behind, stop_token_ids=stops)
        for seed, whole, (kept, behind) in zip(SEEDS, truth, guesses, strict=True)
    ]
    results = await sample(directory, requests, slots=slots, kv_budget_tokens=kv_budget)
    for asked, result, expected in zip(requests, results, truth, strict=True):
        same(result, expected)
        accepted = common_prefix(asked.draft_token_ids, expected.token_ids)
        assert result.accepted_draft_tokens == result.carried_token_count == accepted


async def test_a_whole_response_as_its_own_draft_decodes_nothing(directory: Path) -> None:
    truth = await sample(directory, [request(seed) for seed in SEEDS])
    engine = TorchEngine(dtype="float64", slots=2)
    await engine.load_weights(directory)
    drafted = [request(s, whole.token_ids) for s, whole in zip(SEEDS, truth, strict=True)]
    for result, expected in zip(await run(engine, drafted), truth, strict=True):
        same(result, expected)
    stats = engine.stats()
    assert (stats.generated_token_count, stats.running_response_count) == (0, 0)
    assert stats.kv_cache_usage == 0
    (fresh,) = await run(engine, [request(9)])  # and the engine goes on
    await engine.close()
    same(fresh, (await sample(directory, [request(9)]))[0])


async def test_a_draft_of_other_weights_gives_what_these_weights_sample(
    directory: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path, seed=1)
    drafts = await sample(directory, [request(seed) for seed in SEEDS])
    truth = await sample(other, [request(seed) for seed in SEEDS])
    requests = [request(s, draft.token_ids) for s, draft in zip(SEEDS, drafts, strict=True)]
    results = await sample(other, requests)
    for result, expected in zip(results, truth, strict=True):
        same(result, expected)
    assert any(r.token_ids != d.token_ids for r, d in zip(results, drafts, strict=True))


async def test_float32_parts_from_a_fresh_run_only_at_a_counted_near_tie(
    directory: Path, record_property: pytest.RecordProperty
) -> None:
    seeds = range(1, 33)
    fresh = await sample(directory, [request(s) for s in seeds], dtype="float32", slots=64)
    requests = [request(s, f.token_ids) for s, f in zip(seeds, fresh, strict=True)]
    verified = await sample(directory, requests, dtype="float32", slots=64)
    parted = 0
    for result, expected in zip(verified, fresh, strict=True):
        if result.token_ids != expected.token_ids:
            parted += 1
            assert result.near_tie_count + expected.near_tie_count > 0
        else:
            assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    record_property("parted", parted)
    assert parted <= 3


async def test_a_draft_may_follow_a_carried_prefix(directory: Path) -> None:
    (whole,) = await sample(directory, [request(3, stop_token_ids=frozenset())])
    moved = request(
        3,
        whole.token_ids[20:45],
        stop_token_ids=frozenset(),
        carried_token_ids=whole.token_ids[:20],
        carried_logprobs=whole.logprobs[:20],
    )
    (result,) = await sample(directory, [moved])
    assert result.token_ids == whole.token_ids
    assert result.logprobs == pytest.approx(whole.logprobs, abs=1e-9)
    assert (result.carried_token_count, result.accepted_draft_tokens) == (45, 25)


async def test_a_prompt_of_one_token_takes_drafts_too(directory: Path) -> None:
    changes = {"prompt_token_ids": PROMPT[:1], "temperature": 0.7}
    truth = await sample(directory, [request(seed, **changes) for seed in (1, 2)])
    wrong = ((truth[1].token_ids[0] + 1) % VOCABULARY,)
    requests = [request(1, truth[0].token_ids[:9], **changes), request(2, wrong, **changes)]
    results = await sample(directory, requests)
    for result, expected in zip(results, truth, strict=True):
        same(result, expected)
    assert results[1].accepted_draft_tokens == 0


async def test_a_draft_outside_the_vocabulary_is_refused(directory: Path) -> None:
    with pytest.raises(InvalidRequestError, match="draft_token_ids"):
        await sample(directory, [request(1, (VOCABULARY,))])
