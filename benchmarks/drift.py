"""How far a seeded response drifts while the weights are trained, by learning rate.

    python benchmarks/drift.py --learning-rates 2e-4 2e-5 2e-6
    python benchmarks/drift.py --config demo/smollm2/run.yaml --learning-rates 1e-5 1e-6 \
        --updates 1 2 4 8 --prompts 12 --max-response-tokens 128

A real run of the job (real services, real Redis) per learning rate, in mode synchronous; its
weights are kept after each of `--updates` updates. Then the embedded engine samples held-out
prompts, `--seeds` times each, with the weights of the start, and again with the same seeds and the
kept weights; the first responses are given to it as drafts. One JSON line per learning rate and
number of updates:

    same                 responses that came out again, token for token
    length_correlation   of the two lengths, over all responses; null where all are equally long
    accepted             of all tokens of the first responses, those before their first change
    changes_per_1000     tokens that changed first, per 1000 accepted ones
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollpacker.cli.coordinator import connect
from rollpacker.data.run_data import load_run_data
from rollpacker.local_stack import LocalStack
from rollpacker.settings import RunSettings, load_run_settings
from rollpacker.types import Prompt
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.rollout.engine import GenerationRequest, GenerationResult
from services.rollout.torch_engine import TorchEngine

_KV_TOKENS = 1 << 20
Responses = dict[tuple[str, int], tuple[int, ...]]


async def train(settings: RunSettings, updates: Sequence[int], directory: Path) -> dict[int, Path]:
    """Weights of the start (0) and after so many updates."""
    kept = {count: directory / f"kept_{count}" for count in (0, *updates)}
    async with (
        LocalStack(directory / "stack", run_directory=directory / "runs") as stack,
        connect(stack.coordinator_address, 300.0) as coordinator,
    ):
        await coordinator.start_run("run", settings)
        while True:
            for count, place in kept.items():
                published = stack.layout.weights / "run" / f"step_{count:06d}"
                if published.is_dir() and not place.exists():
                    shutil.copytree(published, place, copy_function=os.link)
            run = await coordinator.get_run("run")
            if run.state == pb.Run.STATE_SUCCEEDED:
                break
            if run.state not in (pb.Run.STATE_RUNNING, pb.Run.STATE_STOPPING):
                raise SystemExit(f"the run ended early: {run.failure}")
            await asyncio.sleep(0.05)
    missing = [count for count, place in kept.items() if not place.exists()]
    if missing:
        raise SystemExit(f"weights after {missing} updates went too soon; steps are too short")
    return kept


async def sample(
    weights: Path,
    prompts: Sequence[Prompt],
    settings: RunSettings,
    stop: Sequence[int],
    seeds: int,
    drafts: Responses,
) -> tuple[Responses, int]:
    """A response by prompt and seed, and the draft tokens that were accepted."""
    engine = TorchEngine(threads=2)
    await engine.load_weights(weights)
    found: Responses = {}
    accepted = 0

    async def group(prompt: Prompt) -> None:
        nonlocal accepted
        requests = [
            GenerationRequest(
                f"{prompt.prompt_id}:{seed}",
                tuple(prompt.token_ids),
                seed,
                settings.sampling.temperature,
                settings.sampling.max_response_tokens,
                frozenset(stop),
                draft_token_ids=drafts.get((prompt.prompt_id, seed), ()),
            )
            for seed in range(seeds)
        ]
        async for event in engine.generate(requests, _KV_TOKENS):
            if isinstance(event, GenerationResult):
                name, _, seed = event.request_id.rpartition(":")
                found[name, int(seed)] = event.token_ids
                accepted += event.accepted_draft_tokens

    try:
        await asyncio.gather(*(group(prompt) for prompt in prompts))
    finally:
        await engine.close()
    return found, accepted


def compared(first: Responses, again: Responses, accepted: int) -> dict[str, Any]:
    pairs = [(tokens, again[name]) for name, tokens in first.items()]
    lengths = [tuple(map(len, pair)) for pair in pairs]
    changed = sum(a != b for a, b in pairs)
    before, after = zip(*lengths, strict=True)
    varied = len(set(before)) > 1 and len(set(after)) > 1
    return {
        "responses": len(pairs),
        "mean_tokens": round(statistics.fmean(before), 1),
        "same": round(1 - changed / len(pairs), 4),
        "length_correlation": round(statistics.correlation(before, after), 4) if varied else None,
        "accepted": round(accepted / sum(before), 4),
        "changes_per_1000": round(1000 * changed / max(1, accepted), 3),
    }


async def measure(args: argparse.Namespace, rate: str) -> None:
    overrides = [
        f"max_steps={max(args.updates)}",
        f"trainer.learning_rate={rate}",
        "tail_batching.mode=synchronous",
        f"validation.prompts={args.prompts}",
        *args.overrides,
    ]
    if args.max_response_tokens:
        overrides.append(f"sampling.max_response_tokens={args.max_response_tokens}")
    settings = load_run_settings(args.config, overrides)
    data = load_run_data(settings)
    prompts = list(itertools.chain(*data.validation.values()))[: args.prompts]
    stop = settings.sampling.stop_token_ids or data.tokenizer.eos_token_ids
    with tempfile.TemporaryDirectory() as name:
        kept = await train(settings, args.updates, Path(name))
        first, _ = await sample(kept[0], prompts, settings, stop, args.seeds, {})
        for count in args.updates:
            again, accepted = await sample(kept[count], prompts, settings, stop, args.seeds, first)
            line = {"figure": "drift", "learning_rate": float(rate), "updates": count}
            print(json.dumps(line | compared(first, again, accepted)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("demo/gcd/run.yaml"))
    parser.add_argument("--learning-rates", nargs="+", default=["2e-4", "2e-5", "2e-6"])
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, default=64, help="of the held-out ones")
    parser.add_argument("--seeds", type=int, default=8, help="responses per prompt")
    parser.add_argument("--max-response-tokens", type=int, default=0, help="0: of the config")
    parser.add_argument("overrides", nargs="*", help="settings of the run, as NAME=VALUE")
    args = parser.parse_args()
    for rate in args.learning_rates:
        asyncio.run(measure(args, rate))


if __name__ == "__main__":
    main()
