"""Everything that Redis holds of one run, as lines of JSON, and back.

A line is one key: its name without the run's prefix, its type, its value in base64, and for how
long it still lives. The values are written out by type instead of with DUMP, so that they fit any
version of Redis or Valkey and any user of the ACL. Consumer groups are left out: a trainer makes
its own again and reads a stream from the start.

The fence does not travel: another Redis counts its own, and whoever coordinates there may claim.
Restoring writes the state last; until then there is no run.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from redis.asyncio import Redis

from rollpacker.store import keys

_PAGE = 1000
_STATE = "state"


class DumpError(ValueError):
    """A line cannot be read; the message says which."""


async def run_exists(redis: Redis, run_id: str) -> bool:
    """Whether Redis holds anything of this run."""
    return bool([name async for name in _names(redis, run_id)])


async def dump_run(redis: Redis, run_id: str) -> AsyncIterator[str]:
    """One line for each key of the run, the state's first."""
    names = sorted([n async for n in _names(redis, run_id)], key=lambda n: (n != _STATE, n))
    for name in names:
        line = await _dump_key(redis, keys.of_run(run_id, name))
        if line is not None:
            yield json.dumps({"key": name, **line})


async def restore_run(redis: Redis, run_id: str, lines: Iterable[str], create_time: float) -> None:
    """Write the keys of a run that Redis does not hold. Raises DumpError."""
    state: dict[Any, Any] | None = None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            name, kind, value = line["key"], line["type"], _decoded(line["value"])
            if name == _STATE:
                state = dict(value) | {b"fence": b"0"}
            else:
                key = keys.of_run(run_id, name)
                await _restore_key(redis, key, kind, value, line)
        except (KeyError, TypeError, ValueError) as error:
            raise DumpError(f"line {number} of the dump cannot be read: {error}") from error
    if state is None:
        raise DumpError("the dump holds no state; it was cut off")
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hset(keys.state(run_id), mapping=state)
        pipe.zadd(keys.RUNS, {run_id: create_time})
        await pipe.execute()


async def delete_run(redis: Redis, run_id: str) -> None:
    """Forget a run, its state first. Repeat: no effect."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.delete(keys.state(run_id))
        pipe.zrem(keys.RUNS, run_id)
        await pipe.execute()
    for name in [name async for name in _names(redis, run_id)]:
        await redis.delete(keys.of_run(run_id, name))


async def _names(redis: Redis, run_id: str) -> AsyncIterator[str]:
    """Names of the run's keys without its prefix, each once."""
    prefix = keys.of_run(run_id, "")
    seen: set[str] = set()
    async for key in redis.scan_iter(match=f"{prefix}*", count=_PAGE):
        name = key.decode().removeprefix(prefix)
        if name not in seen:
            seen.add(name)
            yield name


async def _dump_key(redis: Redis, key: str) -> dict[str, Any] | None:
    """None when the key is gone, or an empty stream."""
    found_type: Any = await redis.type(key)
    kind = found_type.decode()
    value: Any
    more: dict[str, Any] = {}
    match kind:
        case "string":
            value = await redis.get(key)
        case "hash":
            value = list((await redis.hgetall(key)).items())
        case "list":
            value = await redis.lrange(key, 0, -1)
        case "zset":
            value = [[member, score] for member, score in await _scored(redis, key)]
        case "stream":
            entries: Any = await redis.xrange(key)
            value = [[entry, list(fields.items())] for entry, fields in entries]
            if not value:
                return None
            info = await redis.xinfo_stream(key)
            more = {
                "last_id": info["last-generated-id"].decode(),
                "entries_added": info["entries-added"],
            }
        case "none":
            return None
        case _:
            raise DumpError(f"{key} is a {kind}, which no key of a run is")
    lives = await redis.pttl(key)
    return {"type": kind, "value": _encoded(value), "milliseconds": max(lives, 0), **more}


async def _restore_key(redis: Redis, key: str, kind: str, value: Any, line: dict[str, Any]) -> None:
    async with redis.pipeline(transaction=True) as pipe:
        match kind:
            case "string":
                pipe.set(key, value)
            case "hash":
                pipe.hset(key, mapping=dict(value))
            case "list":
                pipe.rpush(key, *value)
            case "zset":
                pipe.zadd(key, dict(value))
            case "stream":
                for entry, fields in value:
                    pipe.xadd(key, dict(fields), id=entry)
                pipe.execute_command(
                    "XSETID", key, line["last_id"], "ENTRIESADDED", line["entries_added"],
                    "MAXDELETEDID", "0-0",
                )  # fmt: skip
            case _:
                raise DumpError(f"{kind} is no type of a run's key")
        if line["milliseconds"]:
            pipe.pexpire(key, line["milliseconds"])
        await pipe.execute()


async def _scored(redis: Redis, key: str) -> list[tuple[bytes, float]]:
    found: Any = await redis.zrange(key, 0, -1, withscores=True)
    return [(member, float(score)) for member, score in found]


def _encoded(value: Any) -> Any:
    """Bytes as base64, in lists of any depth; numbers as they are."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [_encoded(item) for item in value] if isinstance(value, (list, tuple)) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return base64.b64decode(value, validate=True)
    return [_decoded(item) for item in value] if isinstance(value, list) else value
