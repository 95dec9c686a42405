"""Coordinator and reward service run where torch is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

_CHILD = """
import importlib, pkgutil, sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "safetensors", "sglang"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
package = importlib.import_module(sys.argv[1])
names = [
    module.name
    for module in pkgutil.walk_packages(package.__path__, sys.argv[1] + ".")
    if not module.name.startswith("services.reward.judge_worker.")  # a process of its own
]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def import_without_torch(package: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _CHILD, package],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("package", ["services.coordinator", "services.reward"])
def test_every_module_of_the_service_is_imported_without_torch(package: str) -> None:
    done = import_without_torch(package)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


def test_the_block_on_torch_would_be_noticed() -> None:
    done = import_without_torch("services.trainer")
    assert "No module named 'torch'" in done.stderr
