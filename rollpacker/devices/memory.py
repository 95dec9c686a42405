"""How much memory of each GPU is free: asked of the driver, which sees every process."""

from __future__ import annotations

import subprocess

_MIB = 1024 * 1024
_SECONDS = 20
_QUERY = ("nvidia-smi", "--query-gpu=index,memory.free", "--format=csv,noheader,nounits")


def free_bytes() -> dict[int, int]:
    """By device index. Raises OSError, subprocess.SubprocessError where there is no driver."""
    said = subprocess.run(_QUERY, check=True, capture_output=True, text=True, timeout=_SECONDS)
    lines = [line.split(",") for line in said.stdout.splitlines() if line.strip()]
    return {int(index): int(mebibytes) * _MIB for index, mebibytes in lines}
