"""Peak memory of the trainer's step over one long response, as the response grows.

    python benchmarks/trainer_memory.py [--lengths 4096 8192 16384 32768] [--vocabulary 49152]

A random Llama (hidden 64, 2 layers) with the vocabulary of SmolLM2, so that logits would outweigh
all else: `logits_mib` is what they would take whole, in float32, and their gradients as much again.
`grown_mib` is by how much forward, backward and update raised the peak of resident memory over that
of a response of 64 tokens. Each length has a process of its own; one JSON line per length, with
activation checkpointing (`--keep-activations`: without).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.trainer import OurStep, peak_mib
from rollpacker.types import PromptGroup
from services.trainer.ranks import Ranks
from tests.trainer_support import make_group, make_response, trainer_settings

SHORT_TOKENS = 64
_MIB = 1 << 20


def make_model(directory: Path, vocabulary: int, positions: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=positions,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def one_group(tokens: int) -> PromptGroup:
    """A group of one response of so many tokens."""
    response = make_response([7 + index % 50 for index in range(tokens)], advantage=1.0)
    return replace(make_group(0), prompt_token_ids=(1, 2, 3), responses=(response,))


def run(model: Path, length: int, vocabulary: int, checkpointing: bool) -> None:
    """One step of one length, in this process; prints its line."""
    settings = trainer_settings(max_response_tokens=length, activation_checkpointing=checkpointing)
    step = OurStep(model, settings, Ranks(shard_size=1))
    step.run([one_group(SHORT_TOKENS)])
    before, start = peak_mib(), time.perf_counter()
    step.run([one_group(length)])
    line = {
        "benchmark": "trainer_memory",
        "response_tokens": length,
        "vocabulary": vocabulary,
        "activation_checkpointing": checkpointing,
        "logits_mib": round(length * vocabulary * 4 / _MIB),
        "grown_mib": round(peak_mib() - before),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--keep-activations", action="store_true")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    if options.model:
        checkpointing = not options.keep_activations
        run(options.model, options.lengths[0], options.vocabulary, checkpointing)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), options.vocabulary, max(options.lengths) + SHORT_TOKENS)
        command = [sys.executable, __file__, "--model", directory]
        command += ["--vocabulary", str(options.vocabulary)]
        command += ["--keep-activations"] * options.keep_activations
        codes = [
            subprocess.run(
                [*command, "--lengths", str(length)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=False,
            ).returncode
            for length in options.lengths
        ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
