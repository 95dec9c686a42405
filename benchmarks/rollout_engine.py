"""Tokens per second of the engines, in one run: same model, prompts, lengths, threads and dtype.

    python benchmarks/rollout_engine.py --model demo/gcd/model --tokens 128 \
        --sglang-python .venv-sglang/bin/python
    python benchmarks/rollout_engine.py --model .local/smollm2/model --tokens 48 --repeats 1 ...

    ours          the embedded engine
    generate      transformers `generate`, all responses in one batch
    continuous    transformers `generate_batch` (its continuous batching)
    sglang        SGLang on the CPU, one /generate call for all responses

Each engine samples at temperature 1 and starts from nothing but a loaded model; ours and SGLang
return logprobs too. Prompts have 32 tokens, eight responses share one. No stop token ends a
response: all have `--tokens` tokens (`equal`), or a long tail as in RL (`tail`: of eight responses
one has all of them, one a half, two a quarter, four an eighth; a batch of `generate` waits for the
longest). The figure is wanted tokens per second, the median of `--repeats` after a warm-up; of the
settings that are tried for an engine the best one counts and is printed. One JSON line per figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from rollpacker.local_stack.ports import free_port
from services.rollout.engine import GenerationRequest, GenerationResult
from services.rollout.sglang_engine import SglangOptions, launch, served_model
from services.rollout.sglang_engine.client import SglangClient
from services.rollout.sglang_engine.server_process import ServerProcess
from services.rollout.torch_engine import TorchEngine

PROMPT_TOKENS, GROUP = 32, 8
TAIL = (1, 2, 4, 4, 8, 8, 8, 8)  # the cap is divided by these


@dataclass(frozen=True)
class Work:
    """Responses to sample."""

    prompts: list[list[int]]  # one per response
    lengths: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


Run = Callable[[Work], Awaitable[None]]
Settings = dict[str, Any]


def work(count: int, tokens: int, vocabulary: int, tail: bool) -> Work:
    generator = torch.Generator().manual_seed(count)
    groups = -(-count // GROUP)
    prompts = torch.randint(3, vocabulary, (groups, PROMPT_TOKENS), generator=generator).tolist()
    lengths = [max(1, tokens // (TAIL[i % GROUP] if tail else 1)) for i in range(count)]
    return Work([prompts[i // GROUP] for i in range(count)], lengths)


async def measure(run: Run, todo: Work, repeats: int) -> float:
    """Wanted tokens per second."""
    await run(Work(todo.prompts[:2], [2] * len(todo.prompts[:2])))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        await run(todo)
        times.append(time.perf_counter() - start)
    return todo.tokens / statistics.median(times)


async def ours(args: argparse.Namespace, todo: list[Work]) -> list[tuple[Settings, list[float]]]:
    engine = TorchEngine(threads=args.threads)
    await engine.load_weights(args.model)

    async def group(number: int, prompt: list[int], lengths: list[int]) -> None:
        requests = [
            GenerationRequest(f"{number}:{k}", tuple(prompt), k, 1.0, length, frozenset())
            for k, length in enumerate(lengths)
        ]
        sampled = 0
        async for event in engine.generate(requests, 1 << 20):
            if isinstance(event, GenerationResult):
                sampled += len(event.token_ids)
        assert sampled == sum(lengths)

    async def run(work_: Work) -> None:
        await asyncio.gather(
            *(
                group(start, work_.prompts[start], work_.lengths[start : start + GROUP])
                for start in range(0, len(work_.prompts), GROUP)
            )
        )

    try:
        return [({}, [await measure(run, each, args.repeats) for each in todo])]
    finally:
        await engine.close()


def sampling(**changes: Any) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, **changes
    )


async def generate(
    args: argparse.Namespace, todo: list[Work]
) -> list[tuple[Settings, list[float]]]:
    found = []
    for cache in ("dynamic", "static"):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)

        async def run(work_: Work, model: Any = model, cache: str = cache) -> None:
            config = sampling(
                max_new_tokens=max(work_.lengths),
                pad_token_id=0,
                cache_implementation=cache,
                disable_compile=True,
            )
            inputs = torch.tensor(work_.prompts)
            output = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), generation_config=config
            )
            assert output.shape[1] == PROMPT_TOKENS + max(work_.lengths)

        speeds = [await measure(run, each, args.repeats) for each in todo]
        found.append(({"cache": cache}, speeds))
    return found


async def continuous(
    args: argparse.Namespace, todo: list[Work]
) -> list[tuple[Settings, list[float]]]:
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="sdpa"
    )
    most = max(len(each.prompts) for each in todo) * (PROMPT_TOKENS + args.tokens)
    found = []
    for block in (32, 256):

        async def run(work_: Work, block: int = block) -> None:
            config = ContinuousBatchingConfig(
                block_size=block, num_blocks=most // block + 64, max_batch_tokens=4096
            )
            outputs = await asyncio.to_thread(
                model.generate_batch,
                work_.prompts,
                generation_config=sampling(max_new_tokens=max(work_.lengths)),
                continuous_batching_config=config,
                warmup=False,
            )
            assert len(outputs) == len(work_.prompts)

        speeds = [await measure(run, each, args.repeats) for each in todo]
        found.append(({"block_size": block}, speeds))
    return found


async def sglang(args: argparse.Namespace, todo: list[Work]) -> list[tuple[Settings, list[float]]]:
    if not args.sglang_python:
        return []
    options = SglangOptions(python=args.sglang_python, kv_budget_tokens=65_536, slots=64)
    found = []
    for deterministic in (True, False) if args.sglang_without_seeds else (True,):
        with tempfile.TemporaryDirectory() as name:
            shown = served_model.show(served_model.read_directory(args.model), Path(name) / "model")
            port = free_port()
            command = launch.command(options, shown, port, 1)
            if not deterministic:
                command.remove("--enable-deterministic-inference")
            environment = launch.environment(options, 1)
            server = await ServerProcess.start(command, environment, Path(name) / "log")
            client = SglangClient(f"http://127.0.0.1:{port}")
            try:
                while not await client.is_ready():
                    assert not server.ended, server.tail()
                    await asyncio.sleep(0.5)

                async def run(work_: Work, client: SglangClient = client) -> None:
                    outputs = await client.generate(
                        {
                            "input_ids": work_.prompts,
                            "return_logprob": True,
                            "sampling_params": [
                                {
                                    "temperature": 1.0,
                                    "max_new_tokens": length,
                                    "ignore_eos": True,
                                    "sampling_seed": seed,
                                }
                                for seed, length in enumerate(work_.lengths)
                            ],
                        }
                    )
                    assert sum(len(o["output_ids"]) for o in outputs) == work_.tokens

                speeds = [await measure(run, each, args.repeats) for each in todo]
            finally:
                await client.close()
                await server.kill()
            found.append(({"deterministic": deterministic}, speeds))
    return found


ENGINES = {"ours": ours, "generate": generate, "continuous": continuous, "sglang": sglang}


def best(found: list[tuple[Settings, list[float]]]) -> Iterator[tuple[Settings, float]]:
    """Per amount of work, the settings that were fastest."""
    for place in range(len(found[0][1])):
        settings, speeds = max(found, key=lambda each: each[1][place])
        yield settings, speeds[place]


async def figures(args: argparse.Namespace) -> None:
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    todo = [
        work(count, args.tokens, vocabulary, args.lengths == "tail") for count in args.responses
    ]
    speeds: dict[str, list[float]] = {}
    for name in args.engines:
        found = await ENGINES[name](args, todo)
        if not found:
            continue
        speeds[name] = []
        for each, (settings, speed) in zip(todo, best(found), strict=True):
            speeds[name].append(speed)
            line = {
                "benchmark": "rollout_engine",
                "model": str(args.model),
                "engine": name,
                "responses": len(each.prompts),
                "lengths": args.lengths,
                "tokens": each.tokens,
                "threads": args.threads,
                "dtype": "float32",
                "tokens_per_second": round(speed, 1),
                "settings": settings,
            }
            if "ours" in speeds and name != "ours":
                line["ours_over_it"] = round(speeds["ours"][len(speeds[name]) - 1] / speed, 2)
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("demo/gcd/model"))
    parser.add_argument("--tokens", type=int, default=128, help="of the longest response")
    parser.add_argument("--responses", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--lengths", choices=["equal", "tail"], default="equal")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sglang-python", default="", help="interpreter with SGLang; else none")
    parser.add_argument("--sglang-without-seeds", action="store_true", help="try that too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()  # no stop token is on purpose
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(figures(args))


if __name__ == "__main__":
    main()
