"""Loopback ports that stay the same while processes come and go.

A port is taken from below the range that the kernel hands to outgoing connections, so that no
client gets it while its service is being started again.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection

_RANGE = range(20_000, 32_000)
_ATTEMPTS = 200


class PortError(Exception):
    """No port could be had; the message says why."""


def free_port(taken: Collection[int] = ()) -> int:
    """A port that nobody listens on now, and that is not in `taken`. Raises PortError."""
    for _ in range(_ATTEMPTS):
        port = random.choice(_RANGE)
        if port not in taken and is_free(port):
            return port
    raise PortError(f"no free port found in {_RANGE.start}..{_RANGE.stop - 1}")


def is_free(port: int) -> bool:
    """Whether a service could listen on 127.0.0.1:port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
