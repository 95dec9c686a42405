"""One stack per directory: a lock that ends with its holder, however the holder ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rollpacker.local_stack.supervisor import StackError


def make_directory(directory: Path) -> None:
    """Make a directory if need be. Raises StackError where it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StackError(
            f"{directory} cannot be made: {error.strerror}; give another directory"
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StackError(f"{directory} cannot be written; give another directory")


@contextlib.contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, which is made if need be.

    Raises StackError naming the holder, or why the directory cannot be used.
    """
    make_directory(directory)
    path = directory / "stack.lock"
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise StackError(
                f"{directory} already has a stack, held by {holder};"
                " stop that one, or give another directory"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} since {time.strftime('%F %T')}")
        file.flush()
        yield
