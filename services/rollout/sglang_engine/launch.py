"""The command and the environment of an SGLang server. Pure.

Seeds are honoured in deterministic mode only, so it is always asked for. On a CPU a directory of
shims stands first on the import path (see `sglang_shims/sitecustomize.py`), and PyTorch's compiler
is off: it takes a minute for what runs in milliseconds without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SHIMS: Final = Path(__file__).resolve().parent.parent / "sglang_shims"
RESERVED_TOKENS: Final = 8  # SGLang keeps some of a context, and of the KV pool, to itself
STREAM_INTERVAL: Final = 8  # tokens between two messages of a response, unless a call says less


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """How to run SGLang, or where it runs."""

    url: str = ""  # of a server to attach to; empty: launch one
    python: str = sys.executable  # interpreter that has SGLang
    device: str = "cpu"
    dtype: str = "float32"
    slots: int = 512
    kv_budget_tokens: int = 262_144
    max_context_tokens: int = 0  # 0: the model's own
    threads: int = 1
    start_seconds: float = 600.0  # a server that is not ready by then is given up
    silence_seconds: float = 60.0  # without a token for so long, the scheduler is probed
    extra_arguments: tuple[str, ...] = ()  # of sglang.launch_server
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


def command(options: SglangOptions, model: Path, port: int, tensor_parallel: int) -> list[str]:
    """The command line of a server for the model directory `model`."""
    arguments = {
        "--model-path": model,
        "--host": "127.0.0.1",
        "--port": port,
        "--device": options.device.partition(":")[0],
        "--dtype": options.dtype,
        "--tp-size": tensor_parallel,
        "--max-total-tokens": options.kv_budget_tokens + RESERVED_TOKENS,
        "--max-running-requests": options.slots,
        "--stream-interval": STREAM_INTERVAL,
        "--grammar-backend": "none",
        "--log-level": "warning",
    }
    if options.on_cpu:
        arguments["--attention-backend"] = "torch_native"
    if device_index := options.device.partition(":")[2]:
        arguments["--base-gpu-id"] = device_index
    flags = ["--skip-tokenizer-init", "--skip-server-warmup", "--incremental-streaming-output"]
    flags.append("--enable-deterministic-inference")
    if options.on_cpu:
        flags += ["--disable-cuda-graph", "--sleep-on-idle"]
    named = [str(part) for pair in arguments.items() for part in pair]
    module = [options.python, "-m", "sglang.launch_server"]
    return [*module, *named, *flags, *options.extra_arguments]


def environment(options: SglangOptions, tensor_parallel: int) -> dict[str, str]:
    """The whole environment of a server."""
    added = {"OMP_NUM_THREADS": str(options.threads), "PYTHONUNBUFFERED": "1"}
    if options.on_cpu:
        known = options.environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
        added["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIMS), known]))
        added["SGLANG_USE_CPU_ENGINE"] = "1"
        added["TORCHDYNAMO_DISABLE"] = "1"
        if tensor_parallel > 1:
            cores = "|".join(str(rank) for rank in range(tensor_parallel))
            added["SGLANG_CPU_OMP_THREADS_BIND"] = cores
    return {**os.environ, **options.environment, **added}
