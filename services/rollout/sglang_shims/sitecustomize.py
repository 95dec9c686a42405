"""Lets SGLang run on a CPU: imported by every interpreter that has this directory on its path.

SGLang is made for accelerators. Four things stand in its way on a CPU, and none is a computation of
the model: torchvision without its C++ part lacks two operators that its import looks up; the
attention back end `torch_native` is not among those that may be deterministic; deterministic mode
swaps matrix products for Triton kernels; and the check of weights waits for a CUDA device. Here the
operators are declared, the list is extended, the swap does nothing (on a CPU the rest of the batch
changes a row by rounding only), and there is no device to wait for. The noise hash, which SGLang
has for accelerators only, is in the module `sgl_kernel` beside this file.

Modules are patched when they are imported, so an interpreter that imports none pays nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_libraries: list[Any] = []  # a torch.library.Library lives as long as it is referred to


def _declare_operators() -> None:
    torch: Any = importlib.import_module("torch")
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def _allow_torch_native(module: ModuleType) -> None:
    module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _keep_matrix_products(module: ModuleType) -> None:
    vars(module)["enable_batch_invariant_mode"] = lambda *_args, **_options: None


def _wait_for_no_device(module: ModuleType) -> None:
    module.torch.cuda.synchronize = lambda *_args: None


_BEFORE = {"torchvision": _declare_operators}
_AFTER = {
    "sglang.srt.arg_groups.choices": _allow_torch_native,
    "sglang.srt.batch_invariant_ops": _keep_matrix_products,
    "sglang.srt.utils.weight_checker": _wait_for_no_device,
}


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules to patch by the other finders, and patches them once they have run."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in _BEFORE:
            _BEFORE.pop(name)()
        patch = _AFTER.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _run_after(spec.loader, patch)
        return spec


def _run_after(loader: Any, patch: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        patch(module)

    loader.exec_module = exec_module


sys.meta_path.insert(0, _PatchingFinder())
