"""Weights and optimizer state in host memory while an engine owns the accelerator.

    on the device <--bring_back-- in host memory
          |                             ^
          +----------put_away-----------+

Parameters stay the same objects, so optimizer and FSDP go on with them. Gradients are none at that
time: a step's sums are dropped with its update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_HOST = torch.device("cpu")


class Offload:
    """Moves the tensors of one rank; where its device is the host, nothing moves."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        holds: Callable[[int], None] | None = None,
    ) -> None:
        """The tensors are on the device. `holds` is told how many bytes of them are."""
        self._modules = modules
        self._optimizer = optimizer
        self._device = device
        self._away = False
        self._holds = holds or (lambda _: None)
        self._holds(self._bytes())

    def put_away(self) -> None:
        """Free the device's memory. Repeat: no effect."""
        self._move(_HOST, away=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._holds(0)

    def bring_back(self) -> None:
        """Make the tensors ready for work. Repeat: no effect."""
        self._move(self._device, away=False)

    def _move(self, device: torch.device, *, away: bool) -> None:
        if away == self._away:
            return
        self._away = away
        if not away:
            self._holds(self._bytes())
        for module in self._modules:
            module.to(device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:  # Adam's step count is on the host
                    state[name] = value.to(device)

    def _bytes(self) -> int:
        """Of all tensors of this rank, wherever they are."""
        return sum(_local(tensor).nbytes for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        for module in self._modules:
            yield from module.parameters()
            yield from module.buffers()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
