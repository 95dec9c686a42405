"""How a command ends: one clear line on standard error, and an exit status that scripts can read.

| status | meaning                                                                  |
|--------|--------------------------------------------------------------------------|
| 0      | done                                                                     |
| 1      | the work failed: a run failed, a process of the stack keeps dying        |
| 2      | wrong settings, data or arguments: mend them                             |
| 3      | no coordinator answers                                                   |
| 4      | the coordinator refused: not found, taken, or not in this state          |
| 130    | interrupted (Ctrl-C or SIGTERM)                                          |

Commands raise; `run` is the only place that turns an exception into a status.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from rollpacker.cli.console import printable
from rollpacker.data import DataError
from rollpacker.local_stack import StackError
from rollpacker.rpc import errors
from rollpacker.settings import SettingsError

WORK_FAILED = 1
WRONG_INPUT = 2
UNREACHABLE = 3
REFUSED = 4
INTERRUPTED = 130
HELP = (
    "Exit status: 0 done; 1 the work failed; 2 wrong settings, data or arguments;"
    " 3 no coordinator answers; 4 the coordinator refused; 130 interrupted."
)


class CommandError(Exception):
    """A command cannot do what it was asked; the message says why and what to do."""

    def __init__(self, message: str, status: int = WORK_FAILED) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Turn the known errors into a line on standard error and an exit status."""
    try:
        yield
    except CommandError as error:
        _leave(str(error), error.status)
    except SettingsError as error:
        _leave(str(error), WRONG_INPUT)
    except DataError as error:
        _leave(str(error), WRONG_INPUT)
    except StackError as error:
        _leave(str(error), WORK_FAILED)
    except (errors.UnavailableError, errors.DeadlineExceededError) as error:
        _leave(
            f"no coordinator answers ({error.message}); start one with `rollpacker up`,"
            " or say where it is with --coordinator",
            UNREACHABLE,
        )
    except errors.InvalidArgumentError as error:
        problems = [f"{name}: {what}" for name, what in error.violations]
        _leave("\n".join(problems) or error.message, WRONG_INPUT)
    except errors.ServiceError as error:
        _leave(error.message, REFUSED)


def run(
    work: Callable[[], Coroutine[Any, Any, None]],
    on_second_interrupt: Callable[[], None] = lambda: None,
) -> None:
    """Run a command to its end.

    The first Ctrl-C, SIGTERM or hang-up cancels it, so that it can clean up; each further one
    calls `on_second_interrupt`. Raises typer.Exit with the status.
    """
    with told_in_one_line():
        if asyncio.run(_until_interrupted(work, on_second_interrupt)):
            raise typer.Exit(INTERRUPTED)


async def _until_interrupted(
    work: Callable[[], Coroutine[Any, Any, None]], on_second_interrupt: Callable[[], None]
) -> bool:
    """Whether it was interrupted."""
    task = asyncio.ensure_future(work())
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if interrupted:
            on_second_interrupt()
        else:
            interrupted = True
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
    return interrupted


def _leave(message: str, status: int) -> None:
    for line in message.splitlines():
        shown = printable(line)
        typer.echo(shown if shown.startswith(" ") else f"error: {shown}", err=True)
    raise typer.Exit(status)
