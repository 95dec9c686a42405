"""The drafts of deferred draws: what their responses held when they lost a race.

A draft changes how long a response takes, never the response; so this is the one part of a run
that may be lost or stale: a crash, a rewind or a coordinator that was replaced costs time only.
Drafts are written before the outcome of the round that left them, replaced when the draw loses
again, and deleted after the commit of the step that trains it. Each entry is a
`rollpacker.v1.Draft`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from rollpacker import wire
from rollpacker.store import keys
from rollpacker.types import Draft, DrawId
from rollpacker.v1 import types_pb2

_PAGE = 128  # draws


class DraftStore:
    """The drafts of one run, by draw."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis = redis
        self._run_id = run_id

    async def save(self, drafts: Mapping[DrawId, Sequence[Draft]]) -> None:
        """Replace the drafts of these draws; a draw without any keeps none. Repeat: no effect.

        Others have turns in between.
        """
        for page in _pages(list(drafts)):
            async with self._redis.pipeline(transaction=True) as pipe:
                for draw in page:
                    pipe.delete(self._key(draw))
                    data = [wire.draft_to_proto(d).SerializeToString() for d in drafts[draw]]
                    if data:
                        pipe.rpush(self._key(draw), *data)
                await pipe.execute()

    async def load(self, draws: Sequence[DrawId]) -> dict[DrawId, tuple[Draft, ...]]:
        """The drafts of these draws; those without any are left out."""
        loaded: dict[DrawId, tuple[Draft, ...]] = {}
        for page in _pages(draws):
            async with self._redis.pipeline(transaction=False) as pipe:
                for draw in page:
                    pipe.lrange(self._key(draw), 0, -1)
                found: list[Any] = await pipe.execute()
            for draw, items in zip(page, found, strict=True):
                if items:
                    loaded[draw] = tuple(map(_draft, items))
        return loaded

    async def delete(self, draws: Iterable[DrawId]) -> None:
        """Forget the drafts of these draws. Repeat: no effect."""
        names = [self._key(draw) for draw in draws]
        if names:
            await self._redis.delete(*names)

    def _key(self, draw: DrawId) -> str:
        return keys.deferred_draw(self._run_id, draw)


def _draft(data: bytes) -> Draft:
    return wire.draft_from_proto(types_pb2.Draft.FromString(data))


def _pages(draws: Sequence[DrawId]) -> Iterator[Sequence[DrawId]]:
    return (draws[start : start + _PAGE] for start in range(0, len(draws), _PAGE))
