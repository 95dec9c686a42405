"""The processes of one trainer: who is who, and the few things that they say to each other.

    rank      0        1        2        3
    replica   0        0        1        1      a shard group: one copy of the model
    shard     0        1        0        1      lockstep inside a replica

Rank 0, the leader, decides; the others follow. Each replica has a queue of work from the leader,
which its shard 0 takes from and scatters; so a replica goes at its own pace, and only collectives
over all ranks make one wait for another. All are started by torchrun by one owner, so objects may
travel between them as pickles; nothing from outside does. With one process there is no process
group at all, and every method is a plain function.

`scatter`, `sum`, `max` and `sum_over_replicas` are collective: every rank concerned calls them in
the same order, from the one thread that does torch work. A rank that is lost breaks the connection,
which raises in all others; a rank that hangs raises there after `timeout_seconds`. Both end the
process.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from rollpacker.devices.memory import Meter
from services.trainer.work_queues import WorkQueues

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_BUCKET_ELEMENTS = 1 << 25  # of one all-reduce over the replicas: 128 MiB in float32


class ShardSizeError(ValueError):
    """The ranks cannot be divided into replicas; the message says why."""


class Ranks:
    """This process among the trainer's processes."""

    def __init__(
        self,
        device_type: str = "cpu",
        timeout_seconds: float = 600.0,
        shard_size: int = 0,
        meter: Meter | None = None,
    ) -> None:
        """Join the group that torchrun describes in the environment; without it, be alone.

        `shard_size` ranks hold one copy of the model, 0 means all. With a meter no device is
        touched before `use_devices`. Raises ShardSizeError.
        """
        self._meter = meter
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._has_device = meter is None
        self._timeout = timedelta(seconds=timeout_seconds)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.shard_size = shard_size or self.world_size
        if self.world_size % self.shard_size:
            raise ShardSizeError(
                f"shard_size: {shard_size} does not divide {self.world_size} ranks;"
                " choose a divisor, or 0 for one replica"
            )
        self.replica_count = self.world_size // self.shard_size
        self.replica, self.shard = divmod(self.rank, self.shard_size)
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device("cuda", self._local_rank)
        self.mesh: DeviceMesh | None = None  # of this rank's replica; None: it is this rank alone
        self._control: dist.ProcessGroup | None = None
        self._shards: dist.ProcessGroup | None = None
        self._replicas: dist.ProcessGroup | None = None
        self.queues: WorkQueues | None = None
        self.saving: dist.ProcessGroup | None = None  # of the threads that write checkpoints
        if self.world_size > 1:
            self._join(device_type, self._timeout)
            if self._has_device:
                self._make_mesh()

    def _join(self, device_type: str, timeout: timedelta) -> None:
        # NCCL asks CUDA for its devices, which then stay what they are: not before the claim.
        backend = _BACKENDS[device_type] if self._has_device else "gloo"
        dist.init_process_group(backend, timeout=timeout)
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        self.saving = dist.new_group(backend="gloo", timeout=timeout)
        if self.shard_size > 1:
            for replica in range(self.replica_count):
                ranks = [replica * self.shard_size + shard for shard in range(self.shard_size)]
                group = dist.new_group(ranks, backend="gloo", timeout=timeout)
                if replica == self.replica:
                    self._shards = group
        if self.replica_count > 1:
            self.queues = WorkQueues.join(self.is_leader, self._control, timeout)

    def _make_mesh(self) -> None:
        shape = (self.replica_count, self.shard_size)
        names = ("replicate", "shard")
        own_groups: Any = dict.fromkeys(names, _BACKENDS[self.device.type]) if self._meter else None
        mesh = init_device_mesh(
            self.device.type, shape, mesh_dim_names=names, backend_override=own_groups
        )
        for name in names:  # else groups of the mesh have torch's own
            _set_pg_timeout(self._timeout, mesh.get_group(name))
        if self.shard_size > 1:
            self.mesh = mesh["shard"]
        if self.replica_count > 1:
            self._replicas = mesh.get_group("replicate")

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def enter_thread(self) -> None:
        """To be called once in the thread that does the torch work."""
        if self.device.type == "cuda" and self._has_device:
            torch.cuda.set_device(self.device)

    def use_devices(self, devices: Sequence[str]) -> None:
        """The devices of this host's ranks, one each. Collective, in the thread that does the torch
        work. Repeat: no effect, they stay the same."""
        if self._has_device or self._meter is None:
            return
        on_gpu = self.device.type == "cuda"
        self._meter.keep_to(devices if on_gpu else devices[self._local_rank :][:1])
        self._has_device = True
        self.enter_thread()
        if on_gpu:
            _check_device(self.device, devices[self._local_rank])
        if self.world_size > 1:
            self._make_mesh()

    def holds(self, size: int) -> None:
        """Tell the meter how many bytes this rank has on its device."""
        if self._meter is not None:
            self._meter.hold(size)

    def take(self) -> Any:
        """The next work of this replica, for this rank. Not for the leader's replica's shard 0."""
        if self.shard == 0:
            assert self.queues is not None, "only shard 0 of replica 0 leads"
            return self.scatter(pickle.loads(self.queues.take(self.replica)))  # noqa: S301
        return self.scatter(None)

    def scatter(self, objects: Sequence[Any] | None) -> Any:
        """Each rank of a replica gets its item of shard 0's list; the others pass None."""
        if self._shards is None:
            assert objects is not None
            return objects[0]
        received: list[Any] = [None]
        dist.scatter_object_list(
            received,
            list(objects) if objects is not None else None,
            group=self._shards,
            group_src=0,
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

    def sum_over_replicas(self, tensors: Sequence[Tensor]) -> None:
        """Add up each tensor over the ranks that hold the same shard, in place."""
        if self._replicas is None:
            return
        bucket: list[Tensor] = []
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if bucket and sum(map(Tensor.numel, bucket)) + local.numel() > _BUCKET_ELEMENTS:
                self._sum_bucket(bucket)
                bucket = []
            bucket.append(local)
        self._sum_bucket(bucket)

    def _sum_bucket(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, dist.ReduceOp.SUM, group=self._replicas)
        for tensor, summed in zip(
            tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(summed.view_as(tensor))

    def close(self) -> None:
        """Leave the group."""
        if self._control is not None:
            dist.destroy_process_group()
            self._control = None


def _check_device(device: torch.device, uuid: str) -> None:
    """That what CUDA calls by this index is the device that was claimed."""
    found = str(torch.cuda.get_device_properties(device).uuid)
    if found.removeprefix("GPU-") != uuid.removeprefix("GPU-"):
        raise RuntimeError(
            f"{device} is GPU-{found}, not the claimed {uuid}: something asked CUDA for its devices"
            " before they were claimed; set ROLLPACKER_TRAINER_DEVICE_LEASES=false, and"
            " CUDA_VISIBLE_DEVICES by hand"
        )
