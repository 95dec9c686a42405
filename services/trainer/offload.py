"""Weights and optimizer state in host memory while an engine owns the accelerator.

    on the device <--bring_back-- in host memory
          |                             ^
          +----------put_away-----------+

Parameters stay the same objects, so optimizer and FSDP go on with them. Gradients are none at that
time: a step's sums are dropped with its update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_HOST = torch.device("cpu")


class Offload:
    """Moves the tensors of one rank; where its device is the host, nothing moves."""

    def __init__(
        self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self._modules = modules
        self._optimizer = optimizer
        self._device = device
        self._away = False

    def put_away(self) -> None:
        """Free the device's memory. Repeat: no effect."""
        self._move(_HOST, away=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def bring_back(self) -> None:
        """Make the tensors ready for work. Repeat: no effect."""
        self._move(self._device, away=False)

    def _move(self, device: torch.device, *, away: bool) -> None:
        if away == self._away:
            return
        self._away = away
        for module in self._modules:
            module.to(device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:  # Adam's step count is on the host
                    state[name] = value.to(device)
