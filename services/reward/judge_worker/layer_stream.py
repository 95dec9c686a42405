"""Layers of a model that do not fit on its device: streamed through two buffers as needed.

Every layer has a home, one block of host memory (pinned where the device is CUDA) that holds all
its parameters. A resident layer also has a copy on the device; its parameters point there. A
streamed layer is at home, except while it computes:

    before layer k:  wait until its copy is in its buffer; point its parameters there;
                     start the copy of the next streamed layer into the other buffer
    after layer k:   its buffer is free; point its parameters home

The layers run in order, forward after forward, so the next one is always known; behind the last
comes the first. On CUDA copies run on a side stream. Two events per buffer keep order without the
host: `filled` (the copy is done; the layer's kernels wait for it) and `free` (the kernels are
done; the next copy waits for it). On a CPU a copy is a copy, and the same steps run in line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from services.reward.judge_worker.residency import BUFFERS

_ALIGNMENT = 256  # bytes; no kernel asks for more


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter stands in the block of its layer."""

    parameter: nn.Parameter
    start: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def point_into(self, block: torch.Tensor) -> None:
        view = block[self.start : self.start + self.size].view(self.dtype).view(self.shape)
        self.parameter.data = view


class _Home:
    """A layer's parameters in one block of host memory."""

    def __init__(self, layer: nn.Module, pinned: bool) -> None:
        self._places: list[_Place] = []
        end = 0
        for parameter in layer.parameters():
            place = _Place(parameter, end, parameter.shape, parameter.dtype)
            self._places.append(place)
            end += -(-place.size // _ALIGNMENT) * _ALIGNMENT
        self.block = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        for place in self._places:
            values = place.parameter.data
            place.point_into(self.block)
            place.parameter.data.copy_(values)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.block.numel()

    def point_into(self, block: torch.Tensor) -> None:
        for place in self._places:
            place.point_into(block)


class _Buffers(Protocol):
    """The buffers on the device, and who may touch them when."""

    def fill(self, buffer: int, home: torch.Tensor) -> None:
        """Copy a layer in, as soon as the buffer is free."""

    def take(self, buffer: int) -> torch.Tensor:
        """The buffer, for kernels that are launched from now on."""

    def give_back(self, buffer: int) -> None:
        """The kernels that use it have all been launched."""


class _PlainBuffers:
    """On a device without streams."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._blocks = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]

    def fill(self, buffer: int, home: torch.Tensor) -> None:
        self._blocks[buffer][: home.numel()].copy_(home)

    def take(self, buffer: int) -> torch.Tensor:
        return self._blocks[buffer]

    def give_back(self, buffer: int) -> None:
        del buffer


class _CudaBuffers:
    """On CUDA: copies on a side stream, ordered by events."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._blocks = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        new_stream: Any = torch.cuda.Stream  # its types are not written down
        new_event: Any = torch.cuda.Event
        self._side = new_stream(device)
        self._filled = [new_event() for _ in range(BUFFERS)]
        self._free = [new_event() for _ in range(BUFFERS)]
        for event in self._free:
            event.record(torch.cuda.current_stream(device))

    def fill(self, buffer: int, home: torch.Tensor) -> None:
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._free[buffer])
            self._blocks[buffer][: home.numel()].copy_(home, non_blocking=True)
            self._filled[buffer].record(self._side)

    def take(self, buffer: int) -> torch.Tensor:
        torch.cuda.current_stream(self._blocks[buffer].device).wait_event(self._filled[buffer])
        return self._blocks[buffer]

    def give_back(self, buffer: int) -> None:
        self._free[buffer].record(torch.cuda.current_stream(self._blocks[buffer].device))


class LayerStream:
    """Takes over the parameters of `layers`, which run in this order; all are at home at first."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._homes = [_Home(layer, pinned=device.type == "cuda") for layer in layers]
        self._copies: dict[int, torch.Tensor] = {}  # of resident layers
        self._buffers: _Buffers | None = None
        self._streamed: tuple[int, ...] = tuple(range(len(layers)))
        self._next = 0  # the buffer that is filled next
        self._coming: tuple[int, int] | None = None  # layer and buffer of the copy under way
        self._computing = 0  # the buffer of the layer that computes
        self.copied_bytes = 0  # by streaming, since the start
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._before(index))
            layer.register_forward_hook(lambda *_, index=index: self._after(index))

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        return tuple(home.size for home in self._homes)

    @property
    def device_bytes(self) -> int:
        """What copies and buffers hold on the device."""
        held = sum(block.numel() for block in self._copies.values())
        return held + (BUFFERS * max(self.layer_bytes) if self._buffers else 0)

    @property
    def resident_count(self) -> int:
        return len(self._homes) - len(self._streamed)

    def arrange(self, stays: Sequence[bool]) -> None:
        """Copy the layers that stay to the device, and let go of the others."""
        self._let_go(tuple(index for index, stay in enumerate(stays) if not stay))
        for index, stay in enumerate(stays):
            if stay and index not in self._copies and self._device.type != "cpu":
                self._copies[index] = self._homes[index].block.to(self._device)
                self._homes[index].point_into(self._copies[index])
        if self._streamed and self._buffers is None:
            kind = _CudaBuffers if self._device.type == "cuda" else _PlainBuffers
            self._buffers = kind(max(self.layer_bytes), self._device)

    def release(self) -> None:
        """Hold nothing on the device; no layer runs until the next `arrange`."""
        self._let_go(tuple(range(len(self._homes))))
        self._buffers = None

    def _let_go(self, streamed: tuple[int, ...]) -> None:
        self._synchronize()
        self._coming = None
        self._streamed = streamed
        for index in streamed:
            self._homes[index].point_into(self._homes[index].block)
            self._copies.pop(index, None)
        if not streamed:
            self._buffers = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _before(self, index: int) -> None:
        if self._buffers is None or index not in self._streamed:
            return
        if self._coming is None or self._coming[0] != index:  # the first, or a forward broke off
            self._synchronize()
            self._start_copy(self._buffers, index)
        assert self._coming
        self._computing = self._coming[1]
        self._homes[index].point_into(self._buffers.take(self._computing))
        place = self._streamed.index(index)
        self._start_copy(self._buffers, self._streamed[(place + 1) % len(self._streamed)])

    def _after(self, index: int) -> None:
        if self._buffers is None or index not in self._streamed:
            return
        self._buffers.give_back(self._computing)
        self._homes[index].point_into(self._homes[index].block)

    def _start_copy(self, buffers: _Buffers, index: int) -> None:
        buffer = self._next
        self._next = (buffer + 1) % BUFFERS
        buffers.fill(buffer, self._homes[index].block)
        self.copied_bytes += self._homes[index].size
        self._coming = (index, buffer)
