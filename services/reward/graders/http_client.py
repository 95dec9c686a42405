"""One POST of JSON to a judge or a remote reward function, with a deadline for all of it.

No redirect is followed: a service may ask only what its settings name. The deadline holds for the
whole exchange, so that a server that sends a byte now and then occupies no slot for long.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered."""

    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def __str__(self) -> str:
        said = self.body[:1000].decode(errors="replace")
        return f"HTTP {self.status} {http.client.responses.get(self.status, '')}: {said}"


def post_json(
    url: str, body: Any, seconds: float, most_bytes: int, headers: Mapping[str, str] | None = None
) -> Reply:
    """Ask an http or https URL. Raises OSError for whatever goes wrong on the way."""
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(parts.netloc, timeout=seconds)
    except http.client.InvalidURL as error:
        raise OSError(f"{url}: {error}") from error
    late = threading.Event()
    end: threading.Timer | None = None
    try:
        connection.connect()
        end = threading.Timer(seconds, _cut, [connection.sock, late])
        end.daemon = True
        end.start()
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        headers = {"Content-Type": "application/json", **(headers or {})}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        reply = connection.getresponse()
        answer = Reply(reply.status, reply.read(most_bytes + 1))
        # What is cut may still be JSON: 0.5 of 0.55.
        if reply.length or len(answer.body) > most_bytes:
            raise OSError(f"the body is cut short, or over {most_bytes} bytes")
    except (OSError, http.client.HTTPException) as error:
        if late.is_set():
            raise TimeoutError(f"no whole answer within {seconds:g} s") from error
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        if end:
            end.cancel()
        connection.close()
    if late.is_set():  # cut without an error: the body had no declared length
        raise TimeoutError(f"no whole answer within {seconds:g} s")
    return answer


def _cut(connection: socket.socket, late: threading.Event) -> None:
    """End the exchange; whoever waits for it gets an error."""
    late.set()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
