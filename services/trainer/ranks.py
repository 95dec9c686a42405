"""The processes of one trainer: who is who, and the few things that they say to each other.

Rank 0, the leader, decides; the others follow. All are started by torchrun on one host by one
owner, so objects may travel between them as pickles; nothing from outside does. With one process
there is no process group at all, and every method is a plain function.

All methods except the properties are collective: every rank calls them in the same order, from
the one thread that does torch work. A rank that is lost breaks the connection, which raises in
all others; a rank that hangs raises there after `timeout_seconds`. Both end the process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Ranks:
    """This process among the trainer's processes."""

    def __init__(self, device_type: str = "cpu", timeout_seconds: float = 600.0) -> None:
        """Join the group that torchrun describes in the environment; without it, be alone."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        self.mesh: DeviceMesh | None = None
        self._control: dist.ProcessGroup | None = None
        if self.world_size > 1:
            timeout = timedelta(seconds=timeout_seconds)
            backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, timeout=timeout)
            self._control = dist.new_group(backend="gloo", timeout=timeout)
            self.mesh = init_device_mesh(device_type, (self.world_size,))

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def enter_thread(self) -> None:
        """To be called once in the thread that does the torch work."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def scatter(self, objects: Sequence[Any] | None) -> Any:
        """Each rank gets its item of the leader's list; the others pass None."""
        if self._control is None:
            assert objects is not None
            return objects[0]
        received: list[Any] = [None]
        dist.scatter_object_list(
            received, list(objects) if objects is not None else None, group=self._control
        )
        return received[0]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks of a small CPU tensor."""
        if self._control is not None:
            dist.all_reduce(values, dist.ReduceOp.SUM, group=self._control)
        return values

    def max(self, values: Tensor) -> Tensor:
        """The maximum over all ranks of a small CPU tensor."""
        if self._control is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._control)
        return values

    def close(self) -> None:
        """Leave the group."""
        if self._control is not None:
            dist.destroy_process_group()
            self._control = None
