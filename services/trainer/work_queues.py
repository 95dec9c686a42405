"""Work from the leader to the replicas: one queue for each, in a small store of the leader's.

The leader puts; a replica takes in order, whenever it is ready, and says when it has done a piece.
So a replica never waits for another one, and the leader knows how much each has before it.
A replica that waits longer than the timeout for work raises: the leader pings far more often.
"""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]


class WorkQueues:
    """The queues of all replicas; calls block for a moment, `take` until there is work."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self._put: Counter[int] = Counter()
        self._taken = 0

    @classmethod
    def join(cls, is_leader: bool, group: dist.ProcessGroup, timeout: timedelta) -> Self:
        """Collective: the leader serves the store, the others connect to it."""
        host = os.environ["MASTER_ADDR"]
        port = [0]
        store = None
        if is_leader:
            store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
            port = [store.port]
        dist.broadcast_object_list(port, src=0, group=group)
        store = store or TCPStore(host, port[0], is_master=False, timeout=timeout)
        return cls(store)

    def put(self, replica: int, work: bytes) -> None:
        """Leader: append to a replica's queue."""
        self._store.set(_key(replica, self._put[replica]), work)  # type: ignore[arg-type]
        self._put[replica] += 1

    def waiting(self, replica: int) -> int:
        """Leader: pieces of work that a replica has not done yet."""
        done: int = self._store.add(_done(replica), 0)
        return self._put[replica] - done

    def take(self, replica: int) -> bytes:
        """A replica's shard 0: the next piece of work of its own queue."""
        key = _key(replica, self._taken)
        work: bytes = self._store.get(key)
        self._store.delete_key(key)
        self._taken += 1
        return work

    def done(self, replica: int) -> None:
        """A replica's shard 0: the piece that it took last is done."""
        self._store.add(_done(replica), 1)


def _key(replica: int, number: int) -> str:
    return f"work/{replica}/{number}"


def _done(replica: int) -> str:
    return f"done/{replica}"
