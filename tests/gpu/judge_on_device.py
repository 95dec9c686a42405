"""The judge worker on a device: streamed layers must reply what resident ones reply.

    python tests/gpu/judge_on_device.py --device cuda

Prints one JSON line per figure and ends with status 1 when a reply differs. Last come the speeds
of the judge and of a neighbour that computes on the same device, alone and beside each other, and
whether an MPS daemon shares the device out (CUDA_MPS_PIPE_DIRECTORY). Not collected by pytest: it
is one short script for a machine with a GPU (`--device cpu` tries the script itself,
`--model DIRECTORY` takes a real model in place of a random one).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from services.reward.judge_process import JudgeModelSettings
from services.reward.judge_worker.model import JudgeModel, Reply, Request
from services.reward.judge_worker.residency import spread
from tests.judge_models import save_judge

LAYERS = 16
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}


def requests(count: int, tokens: int) -> list[Request]:
    """Prompts of 64 tokens; every other one is sampled."""
    return [
        Request(tuple((7 * row + place) % 100 + 4 for place in range(64)), tokens, row % 2, row)
        for row in range(count)
    ]


def reply(
    model: JudgeModel, stays: Sequence[bool], asked: list[Request]
) -> tuple[list[Reply], float]:
    """Replies with so many layers resident, and the seconds that they took."""
    model._arrange = lambda *_: model.layers.arrange(stays)  # type: ignore[method-assign]
    model.complete(asked[:1])
    start = time.perf_counter()
    replies = model.complete(asked)
    return replies, time.perf_counter() - start


NEIGHBOUR = """
import sys, time, torch
size = int(sys.argv[2])
left = torch.randn(size, size, device=sys.argv[1])
print("ready", flush=True)
while True:
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.5:
        (left @ left).sum().item()
        count += 1
    print(count / (time.perf_counter() - start), flush=True)
"""


def beside_a_neighbour(model: JudgeModel, asked: list[Request], device: str) -> dict[str, object]:
    """Speeds of both, alone and together; the neighbour's in products of matrices per second."""
    stays = (True,) * len(model.layers.layer_bytes)
    replies, alone = reply(model, stays, asked)
    tokens = sum(len(each.token_ids) for each in replies)
    size = "4096" if device.startswith("cuda") else "256"
    command = [sys.executable, "-c", NEIGHBOUR, device, size]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdout
        neighbour.stdout.readline()
        rate_alone = float(neighbour.stdout.readline())
        _, together = reply(model, stays, asked)
        rate_together = float(neighbour.stdout.readline())
        neighbour.kill()
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108  its default
    return {
        "check": "judge_beside_a_neighbour",
        "mps": (Path(pipe) / "control").exists(),
        "judge_tokens_per_second": [round(tokens / alone), round(tokens / together)],
        "neighbour_per_second": [round(rate_alone, 1), round(rate_together, 1)],
    }


def main(device: str, directory: str) -> int:
    different = 0
    with tempfile.TemporaryDirectory() as name:
        if directory:
            settings = JudgeModelSettings(directory, device, "bfloat16")
        else:
            made = save_judge(Path(name), layers=LAYERS, **SIZES)
            settings = JudgeModelSettings(made.model, device, "float32")
        model = JudgeModel(settings)
        count = len(model.layers.layer_bytes)
        asked = requests(16, 64)
        expected, seconds = reply(model, (True,) * count, asked)
        for streamed in (0, 1, count // 2, count):
            replies, seconds = reply(model, spread(count, streamed), asked)
            unequal = sum(a != b for a, b in zip(replies, expected, strict=True))
            different += unequal
            tokens = sum(len(each.token_ids) for each in replies)
            figure = {"check": "judge", "device": device, "layers": count, "streamed": streamed}
            figure |= {"different": unequal, "tokens_per_second": round(tokens / seconds)}
            figure |= {"device_mib": model.layers.device_bytes >> 20}
            print(json.dumps(figure))
        print(json.dumps(beside_a_neighbour(model, asked, device)))
        model.release()
        if device.startswith("cuda"):
            held = torch.cuda.memory_allocated() >> 20
            print(json.dumps({"check": "judge_released", "allocated_mib": held}))
    return 1 if different else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    sys.exit(main(options.device, options.model))
