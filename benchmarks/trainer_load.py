"""Host memory of each trainer rank while it loads the initial model.

    python benchmarks/trainer_load.py [--model DIR] [--shards 1 2] [--stored float32 bfloat16]

Each rank has a process of its own and prints a JSON line: by how much its own memory
(`anonymous_mib`: what nobody else can use) and its resident memory (`resident_mib`: with the pages
of the files, which all ranks of a host share and the kernel may take back) grew at most while the
model was loaded, and what is left afterwards (`kept_mib`). `way` is `mapped` (the trainer's) or
`whole` (transformers loads all of it in float32, then FSDP shards it); `whole_mib` is the model in
float32. The files hold it in the dtype `stored`. Without --model: a random Llama, 58 M parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))

from services.trainer.model import PolicyModel
from services.trainer.ranks import Ranks

_SAMPLE_SECONDS = 0.002
_STATUS = Path("/proc/self/status")


def memory_kib() -> tuple[int, int]:
    """This process's own memory, and all that is resident."""
    values = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    own, resident = (int(values[name].split()[0]) for name in ("RssAnon", "VmRSS"))
    return own, resident


class Peak:
    """The largest growth of both between its making and `stop`."""

    def __init__(self) -> None:
        self.before = memory_kib()
        self._seen = [self.before]
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._seen.append(memory_kib())

    def stop(self) -> tuple[int, int]:
        """MiB."""
        self._ended.set()
        self._sampler.join()
        self._seen.append(memory_kib())
        own, resident = (max(values) for values in zip(*self._seen, strict=True))
        return (own - self.before[0]) >> 10, (resident - self.before[1]) >> 10


def tiny_config() -> LlamaConfig:
    return LlamaConfig(vocab_size=4, hidden_size=32, intermediate_size=8, num_hidden_layers=1)


def load_whole(directory: Path, ranks: Ranks) -> nn.Module:
    """What most would write first."""
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert isinstance(module, nn.Module)
    if ranks.mesh is not None:
        for part in module.get_submodule("model.layers").children():
            fully_shard(part, mesh=ranks.mesh)
        fully_shard(module, mesh=ranks.mesh)
    return module


def run_rank(options: argparse.Namespace) -> None:
    """One process; it prints its line."""
    ranks, way = Ranks(), options.way
    LlamaForCausalLM(tiny_config())  # what a first model imports does not count
    peak = Peak()
    if way == "whole":
        module = load_whole(options.model, ranks)
    else:
        module = PolicyModel(options.model, "float32", ranks.device, ranks.mesh).module
    own, resident = peak.stop()
    line = {
        "benchmark": "trainer_load",
        "stored": options.stored[0],
        "way": way,
        "rank": ranks.rank,
        "shards": ranks.world_size,
        "whole_mib": sum(parameter.numel() for parameter in module.parameters()) * 4 >> 20,
        "anonymous_mib": own,
        "resident_mib": resident,
        "kept_mib": (memory_kib()[0] - peak.before[0]) >> 10,
    }
    ranks.sum(torch.zeros(1))  # lines do not mix, and nobody leaves before all have loaded
    print(json.dumps(line), flush=True)
    ranks.close()


def run_ranks(model: Path, stored: str, shards: int, way: str) -> int:
    """All processes of a mesh. Returns the largest exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--way", way, "--model", str(model), "--stored", stored]
    place = {"WORLD_SIZE": str(shards), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place["OMP_NUM_THREADS"] = "1"
    processes = [
        subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)})
        for rank in range(shards)
    ]
    return max(process.wait() for process in processes)


def make_model(directory: Path) -> Path:
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="directory that transformers loads")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stored", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    if options.way:
        run_rank(options)
        return 0
    codes = []
    with tempfile.TemporaryDirectory() as directory:
        model = options.model or make_model(Path(directory) / "model")
        for stored in options.stored:
            files = Path(directory) / stored
            dtype = getattr(torch, stored)
            AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(files)
            for shards in options.shards:
                codes += [run_ranks(files, stored, shards, way) for way in ("whole", "mapped")]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
