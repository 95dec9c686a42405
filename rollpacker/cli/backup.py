"""`backup` and `restore`: a run in one file, and back.

They go to Redis and to the directories themselves, not through the coordinator: a run is brought
back before anybody drives it. Where both are is known for a local stack; elsewhere the services'
own variables say it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from rollpacker.backup import BackupError, Manifest, Places, back_up
from rollpacker.backup import restore as restore_run
from rollpacker.cli.failures import REFUSED, UNREACHABLE, WRONG_INPUT, CommandError, run
from rollpacker.cli.reports import RunId
from rollpacker.store.redis_client import open_client

File = Annotated[Path, typer.Argument(metavar="FILE", help="The backup.")]
Stack = Annotated[Path, typer.Option("--stack", help="Directory of a local stack (`up`).")]
Runs = Annotated[
    Path,
    typer.Option("--runs", envvar="ROLLPACKER_COORDINATOR_RUN_DIRECTORY", help="Outputs of runs."),
]
Checkpoints = Annotated[
    Path | None,
    typer.Option(
        envvar="ROLLPACKER_TRAINER_CHECKPOINT_ROOT", help="Default: those of the local stack."
    ),
]
RedisUrl = Annotated[
    str,
    typer.Option(
        "--redis",
        envvar="ROLLPACKER_COORDINATOR_REDIS_URL",
        show_envvar=True,
        help="Default: that of the local stack, which must be up.",
    ),
]
_SECONDS = 10
_LOCAL_STACK, _LOCAL_RUNS = Path("runs/.stack"), Path("runs")


def backup(
    run_id: RunId,
    file: File,
    stack: Stack = _LOCAL_STACK,
    runs: Runs = _LOCAL_RUNS,
    checkpoints: Checkpoints = None,
    redis: RedisUrl = "",
) -> None:
    """Keep a run that is not active in a file: its state, newest checkpoint and outputs."""
    places = Places(runs, checkpoints or stack / "checkpoints")

    async def work(client: Redis) -> None:
        manifest = await back_up(client, places, run_id, file)
        print(f"{file}: {_said(manifest)}, {file.stat().st_size / 1e6:.1f} MB")

    _run(stack, redis, work)


def restore(
    file: File,
    replace: Annotated[
        bool, typer.Option("--replace", help="Overwrite what is there of that run.")
    ] = False,
    stack: Stack = _LOCAL_STACK,
    runs: Runs = _LOCAL_RUNS,
    checkpoints: Checkpoints = None,
    redis: RedisUrl = "",
) -> None:
    """Bring a run back from a file. `submit` with the same settings goes on with it."""
    places = Places(runs, checkpoints or stack / "checkpoints")

    async def work(client: Redis) -> None:
        manifest = await restore_run(client, places, file, replace=replace)
        print(f"{_said(manifest)} is back; `rollpacker submit` with its run file goes on")
        if replace:
            print(
                "a trainer that has this run open must be restarted first: it goes by what it holds"
            )

    _run(stack, redis, work)


def _said(manifest: Manifest) -> str:
    return f"run {manifest.run_id}, {manifest.status} at step {manifest.step}"


def _run(stack: Path, url: str, work: Callable[[Redis], Awaitable[None]]) -> None:
    async def with_redis() -> None:
        try:
            client = open_client(
                url or _redis_of(stack),
                retry=Retry(NoBackoff(), 0),
                socket_timeout=_SECONDS,
                socket_connect_timeout=_SECONDS,
            )
        except ValueError as error:  # its text could hold the password
            message = "--redis is no URL of Redis; give redis://, rediss:// or unix://"
            raise CommandError(message, WRONG_INPUT) from error
        try:
            await work(client)
        except BackupError as error:
            raise CommandError(str(error), REFUSED) from error
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise CommandError(f"{place}{error.strerror or error}", WRONG_INPUT) from error
        except RedisError as error:  # its text could hold the password
            message = f"no Redis answers ({type(error).__name__}); is it up? see --redis"
            raise CommandError(message, UNREACHABLE) from error
        finally:
            await client.aclose()

    run(with_redis)


def _redis_of(stack: Path) -> str:
    """Raises CommandError when there is no such stack."""
    try:
        return str(json.loads((stack / "stack.json").read_text(encoding="utf-8"))["redis_url"])
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(
            f"{stack} is no local stack; say where Redis is with --redis", WRONG_INPUT
        ) from error
