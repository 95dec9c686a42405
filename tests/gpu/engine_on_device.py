"""The embedded engine on a device, beside the CPU: the same seeds must give the same tokens.

    python tests/gpu/engine_on_device.py --device cuda

Prints one JSON line per figure and ends with status 1 when float64 tokens differ. Not collected by
pytest: it is one short script for a machine with a GPU (`--device cpu` tries the script itself).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from services.rollout.engine import GenerationRequest, GenerationResult
from services.rollout.torch_engine import TorchEngine
from tests.tiny_models import PROMPT, STOP, save_model

FAMILIES = ("llama", "qwen2", "qwen3")


async def sample(
    model: Path, device: str, dtype: str, seeds: Sequence[int], cap: int
) -> tuple[dict[str, GenerationResult], float]:
    """The responses to one prompt by seed, and the seconds that sampling took."""
    engine = TorchEngine(device=device, dtype=dtype, slots=max(512, len(seeds)))
    try:
        await engine.load_weights(model)
        requests = [
            GenerationRequest(str(seed), PROMPT, seed, 1.0, cap, frozenset({STOP}))
            for seed in seeds
        ]
        start = time.perf_counter()
        results = {
            event.request_id: event
            async for event in engine.generate(requests, 1_000_000)
            if isinstance(event, GenerationResult)
        }
        return results, time.perf_counter() - start
    finally:
        await engine.close()


async def main(device: str) -> int:
    different = 0
    with tempfile.TemporaryDirectory() as name:
        for family in FAMILIES:
            model = save_model(Path(name) / family, family)
            cpu, _ = await sample(model, "cpu", "float64", range(32), 200)
            here, _ = await sample(model, device, "float64", range(32), 200)
            unequal = sum(cpu[seed].token_ids != here[seed].token_ids for seed in cpu)
            different += unequal
            print(json.dumps({"check": "same_tokens", "family": family, "different": unequal}))
        wide = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}
        model = save_model(Path(name) / "wide", "llama", **wide)
        for count in (1, 16, 64, 256):
            await sample(model, device, "float32", range(count), 32)  # warm
            results, seconds = await sample(model, device, "float32", range(count), 256)
            tokens = sum(len(result.token_ids) for result in results.values())
            figure = {"check": "speed", "device": device, "responses": count, "tokens": tokens}
            print(json.dumps({**figure, "tokens_per_second": round(tokens / seconds)}))
    return 1 if different else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    sys.exit(asyncio.run(main(parser.parse_args().device)))
