"""Tokens per second of a trainer step beside a bare torch loop, on the same model and data.

    python benchmarks/trainer.py [--model DIR] [--meshes 1x1 1x2 2x1] [--groups 8] [--repeats 3]

Ours: packing, accumulation with the loss and all its metrics, and the update, as the service does
them. The bare loop: the same padded batches, log_softmax, a sum, backward, clip, AdamW. In one
process they take turns, and the best of the repeats counts. Tokens are real ones (prompts included,
padding left out). Prints one JSON line per mesh (replicas x shards): tokens_per_second, peak
resident memory of the largest rank, padding_share; with one process also bare_tokens_per_second and
`share` = ours / bare, in CPU time, which a busy machine disturbs less (the goal is 0.95). Without
--model: a random Llama of 0.5 M parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollpacker.types import PromptGroup
from services.trainer.model import PolicyModel
from services.trainer.packing import MicroBatch, StreamPacker
from services.trainer.ranks import Ranks
from services.trainer.settings import OpenRunSettings
from services.trainer.step_accumulator import StepAccumulator
from services.trainer.update import apply_update, make_optimizer
from tests.trainer_support import make_group, make_response, trainer_settings

RESPONSES = 4
PROMPT_TOKENS = 24
MEDIAN_TOKENS, SPREAD, CAP = 60, 0.8, 400  # of a response: log-normal, as in long-tailed rollouts
MICRO_BATCH_TOKENS = 1024


def make_tiny_model(directory: Path) -> Path:
    """The shape of the demo's model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_groups(vocabulary: int, count: int) -> list[PromptGroup]:
    """A step of long-tailed responses of random tokens."""
    noise = random.Random(0)
    groups = []
    for index in range(count):
        lengths = [
            min(CAP, int(noise.lognormvariate(0, SPREAD) * MEDIAN_TOKENS) + 1)
            for _ in range(RESPONSES)
        ]
        responses = tuple(
            make_response(
                [noise.randrange(vocabulary) for _ in range(length)],
                index=place,
                advantage=(-1.0) ** place,
            )
            for place, length in enumerate(lengths)
        )
        prompt = tuple(noise.randrange(vocabulary) for _ in range(PROMPT_TOKENS))
        groups.append(replace(make_group(index), prompt_token_ids=prompt, responses=responses))
    return groups


def bare_step(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[MicroBatch]) -> None:
    """What anyone would write first."""
    for batch in batches:
        keep = batch.target_ids.shape[1]
        logits = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=keep).logits
        law = torch.log_softmax(logits.float(), -1)
        logprobs = law.gather(-1, batch.target_ids.unsqueeze(-1)).squeeze(-1)
        loss = -(logprobs * batch.advantages.unsqueeze(1) * batch.mask).sum() / 1000
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


class OurStep:
    """The trainer's own parts, without Redis and gRPC."""

    def __init__(self, model: Path, settings: OpenRunSettings, ranks: Ranks) -> None:
        self._settings, self._ranks = settings, ranks
        self._policy = PolicyModel(model, "float32", ranks.device, ranks.mesh)
        self._optimizer = make_optimizer(self._policy, settings)
        self._accumulator = StepAccumulator(self._policy, settings, 1.0, ranks)
        self.padding_share = 0.0

    def batches(self, groups: Sequence[PromptGroup]) -> list[MicroBatch]:
        """This rank's micro-batches of a step."""
        ranks = self._ranks
        packer = StreamPacker(ranks.shard_size, MICRO_BATCH_TOKENS, ranks.replica_count)
        full = [windows for group in groups if (windows := packer.add(group))]
        mine = [*full[ranks.replica :: ranks.replica_count], packer.flush()[ranks.replica]]
        return [batch for windows in mine for batch in windows[ranks.shard].micro_batches]

    def run(self, groups: Sequence[PromptGroup]) -> None:
        for batch in self.batches(groups):
            self._accumulator.add(batch)
        sums = apply_update(
            self._policy, self._optimizer, self._accumulator, self._settings, self._ranks
        ).sums
        self.padding_share = 1 - sums.real_tokens / sums.padded_tokens


def cost(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the wall and of this process's CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def run_rank(model: Path, mesh: str, group_count: int, repeats: int) -> None:
    """One process of a mesh; rank 0 prints the line."""
    ranks = Ranks(shard_size=int(mesh.partition("x")[2]))
    settings = trainer_settings(max_response_tokens=CAP, micro_batch_tokens=MICRO_BATCH_TOKENS)
    config = json.loads((model / "config.json").read_text())
    groups = make_groups(config["vocab_size"], group_count)
    tokens = sum(
        PROMPT_TOKENS + len(scored.response.token_ids)
        for group in groups
        for scored in group.responses
    )
    ours = OurStep(model, settings, ranks)
    ours.run(groups[:1])  # warm
    line: dict[str, object] = {"model": model.name, "mesh": mesh, "tokens": tokens}
    own_peak = peak_mib()
    if ranks.world_size == 1:
        bare = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-6)
        batches = ours.batches(groups)
        bare_step(bare, optimizer, batches[:1])
        times = [
            (*cost(lambda: ours.run(groups)), *cost(lambda: bare_step(bare, optimizer, batches)))
            for _ in range(repeats)
        ]
        best, own_cpu, bare_best, bare_cpu = (min(column) for column in zip(*times, strict=True))
        line["bare_tokens_per_second"] = round(tokens / bare_best, 1)
        line["share"] = round(bare_cpu / own_cpu, 3)
    else:
        best = min(cost(lambda: ours.run(groups))[0] for _ in range(repeats))
        own_peak = peak_mib()
    line |= {
        "tokens_per_second": round(tokens / best, 1),
        "padding_share": round(ours.padding_share, 3),
        "peak_mib": round(ranks.max(torch.tensor(own_peak)).item()),
    }
    if ranks.is_leader:
        print(json.dumps(line), flush=True)
    ranks.close()


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_mesh(options: argparse.Namespace, model: Path, mesh: str) -> int:
    """All processes of a mesh. Returns the largest exit status."""
    replicas, _, shards = mesh.partition("x")
    size = int(replicas) * int(shards)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--rank", "--model", str(model), "--meshes", mesh]
    command += ["--groups", str(options.groups), "--repeats", str(options.repeats)]
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place["OMP_NUM_THREADS"] = "1"
    processes = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)})
        for rank in range(size)
    ]
    return max(process.wait() for process in processes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="directory that transformers loads")
    parser.add_argument("--meshes", nargs="+", default=["1x1", "1x2", "2x1"])
    parser.add_argument("--groups", type=int, default=16, help="prompts of a step")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    if options.rank:
        run_rank(options.model, options.meshes[0], options.groups, options.repeats)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or make_tiny_model(Path(directory) / "tiny")
        return max(run_mesh(options, model, mesh) for mesh in options.meshes)


if __name__ == "__main__":
    sys.exit(main())
