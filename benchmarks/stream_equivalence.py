"""Is a step's gradient that of the whole batch, however it is streamed, sharded and replicated?

    python benchmarks/stream_equivalence.py [--meshes 1x1 2x2] [--losses gspo dapo]

For each mesh (replicas x shards) it starts that many processes on gloo, which pack, deal out,
accumulate and sum a step as the service does, in float32. Rank 0 compares with one float64 pass
over the whole batch (`trainer_reference`), made once for all meshes: per weight, max |g - g_ref|
and that over max |g_ref|; a line has the largest over all weights. Ratios are e^0.5, e^-0.5,
e^0.05 and e^-0.05, so that a tenth of the tokens is outside the clip range on each side, which is
checked. Exit status 1: an error is above 1e-5. `--family mixtral`: experts in the place of a Llama.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.trainer_reference import (
    clipped_shares,
    reference_gradients,
    with_shifted_logprobs,
)
from rollpacker.algorithms import ALGORITHMS
from rollpacker.types import PromptGroup
from services.trainer.model import PolicyModel
from services.trainer.packing import StreamPacker, Window
from services.trainer.ranks import Ranks
from services.trainer.settings import OpenRunSettings
from services.trainer.step_accumulator import StepAccumulator
from tests.tiny_models import FAMILIES, SGLANG_FAMILIES
from tests.trainer_support import make_group, make_model, trainer_settings, weighed

TOLERANCE = 1e-5
CLIPPED_SHARE = 0.1
TEMPERATURE = 0.7
SPREAD = 0.1  # of the model's weights; the float32 rounding of a wilder model hides other errors
MESHES = ("1x1", "1x2", "2x1", "1x4", "2x2", "4x1")
LOSSES: dict[str, dict[str, object]] = {
    **{name: {"algorithm": name, "old_logprobs": "rollout"} for name in ALGORITHMS},
    "dapo+k1": {"algorithm": "dapo", "kl_coefficient": 0.3, "kl_estimator": "k1"},
    "dapo+k2": {"algorithm": "dapo", "kl_coefficient": 0.3, "kl_estimator": "k2"},
    "grpo+k3": {"algorithm": "grpo", "kl_coefficient": 0.3, "kl_estimator": "k3"},
    "dapo+entropy": {"algorithm": "dapo", "entropy_coefficient": 0.1},
    "dapo+truncated": {"algorithm": "dapo", "rollout_correction": "truncated"},
    "dapo+checkpointing": {"algorithm": "dapo", "activation_checkpointing": True},
    "grpo+masked": {"algorithm": "grpo", "rollout_correction": "masked"},
}
# Lengths of the responses of even and of odd groups, and how many groups of 4 responses.
CASES = {
    "even": ((1, 20), (1, 20), 12),
    "5_micro_batches_to_1": ((20, 20), (1, 1), 5),
    "fewer_groups_than_ranks": ((8, 20), (8, 20), 1),
    "many_windows": ((1, 20), (1, 20), 40),
    "weighed": ((1, 20), (1, 20), 10),  # by their selection weights
}


def settings_of(loss: str) -> OpenRunSettings:
    """Settings whose micro-batches hold two of the longest responses."""
    values = {"micro_batch_tokens": 52, "rollout_correction_cap": 1.2, **LOSSES[loss]}
    if values["algorithm"] == "reinforce_plus_plus":
        values["advantage_deviation"] = 0.4
    return trainer_settings(**values)


def groups_of(model: Path, loss: str, case: str) -> list[PromptGroup]:
    """The step of a case. Raises ValueError when it leaves clipping untested."""
    even, odd, count = CASES[case]
    groups = [make_group(i, lengths=odd if i % 2 else even) for i in range(count)]
    if case == "weighed":
        groups = weighed(groups)
    settings = settings_of(loss)
    shifted = with_shifted_logprobs(model, settings.algorithm, TEMPERATURE, groups)
    shares = clipped_shares(model, settings, TEMPERATURE, shifted)
    if count > 1 and min(shares) < CLIPPED_SHARE:
        raise ValueError(f"{loss}, {case}: only {shares} of the tokens are outside the clip range")
    return shifted


def gradients(
    model: Path, settings: OpenRunSettings, groups: Sequence[PromptGroup], ranks: Ranks
) -> dict[str, Tensor]:
    """The step's gradient sums over all ranks, whole, by name. Collective."""
    policy = PolicyModel(
        model,
        settings.dtype,
        ranks.device,
        ranks.mesh,
        activation_checkpointing=settings.activation_checkpointing,
    )
    reference = None
    if settings.kl_coefficient:
        reference = PolicyModel(model, settings.dtype, ranks.device, ranks.mesh)
        reference.module.requires_grad_(False)
    accumulator = StepAccumulator(policy, settings, TEMPERATURE, ranks, reference)
    for window in _own_windows(settings, groups, ranks):
        for batch in window.micro_batches:
            accumulator.add(batch)
    ranks.sum_over_replicas(accumulator.gradients())
    return {name: _whole(p.grad) for name, p in policy.module.named_parameters()}


def _own_windows(
    settings: OpenRunSettings, groups: Sequence[PromptGroup], ranks: Ranks
) -> list[Window]:
    """This rank's part of every window, dealt out in turn as `OpenStep` does."""
    packer = StreamPacker(ranks.shard_size, settings.micro_batch_tokens, ranks.replica_count)
    full = [windows for group in groups if (windows := packer.add(group))]
    mine = full[ranks.replica :: ranks.replica_count]
    return [windows[ranks.shard] for windows in [*mine, packer.flush()[ranks.replica]]]


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """Largest absolute and relative error over all weights."""
    assert actual.keys() == expected.keys()
    absolute = {name: (actual[name].double() - expected[name]).abs().max() for name in expected}
    relative = [absolute[name] / expected[name].abs().max() for name in expected]
    return max(absolute.values()).item(), max(relative).item()


def prepare(directory: Path, losses: Sequence[str], family: str) -> None:
    """A model, and the groups and the reference of every case."""
    model = make_model(directory / "model", spread=SPREAD, family=family)
    for loss in losses:
        for case in CASES:
            groups = groups_of(model, loss, case)
            expected = reference_gradients(model, settings_of(loss), TEMPERATURE, groups)
            (directory / f"{loss} {case}").write_bytes(pickle.dumps((groups, expected)))


def run_rank(directory: Path, mesh: str, losses: Sequence[str]) -> int:
    """One process of a mesh: rank 0 prints. Returns how many cases are above the tolerance."""
    model = directory / "model"
    ranks = Ranks(shard_size=int(mesh.partition("x")[2]))
    failures = 0
    for loss in losses:
        for case in CASES:
            prepared = (directory / f"{loss} {case}").read_bytes()
            groups, expected = pickle.loads(prepared)  # noqa: S301, written by `prepare`
            actual = gradients(model, settings_of(loss), groups, ranks)
            if not ranks.is_leader:
                continue
            absolute, relative = errors(actual, expected)
            failures += relative > TOLERANCE
            line = {
                "case": case,
                "loss": loss,
                "mesh": mesh,
                "max_absolute_error": absolute,
                "max_relative_error": relative,
            }
            print(json.dumps(line), flush=True)
    ranks.close()
    return failures


def run_mesh(directory: Path, mesh: str, losses: Sequence[str]) -> bool:
    """All processes of a mesh; whether every one of them was satisfied."""
    replicas, _, shards = mesh.partition("x")
    size = int(replicas) * int(shards)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--rank-in", str(directory)]
    command += ["--meshes", mesh, "--losses", *losses]
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place["OMP_NUM_THREADS"] = "1"
    processes = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)})
        for rank in range(size)
    ]
    statuses = [process.wait() for process in processes]
    return not any(statuses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="replicas x shards")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--family", default="llama", choices=[*FAMILIES, *SGLANG_FAMILIES])
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    if options.rank_in:
        return min(1, run_rank(options.rank_in, options.meshes[0], options.losses))
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory), options.losses, options.family)
        results = [run_mesh(Path(directory), mesh, options.losses) for mesh in options.meshes]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
