"""The endpoint `/metrics`: a service's figures, read off the service when they are asked for.

A service hands over one function that returns its readings; no code of a service counts for
Prometheus. The readings are made on the service's event loop, so they see a consistent state, and
a loop that hangs shows as a scrape that fails. Counts of calls come from `rpc_metrics`; figures
of the process (CPU, memory) from the client library.

Off unless an address is set. On loopback it is plain HTTP; elsewhere TLS with the certificates of
`ROLLPACKER_SECURITY_*`, and only to callers that have a certificate of the same authority.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.rpc.security import Security, is_loopback

_READ_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """One figure. Names are those of Prometheus: rollpacker_..., with the unit at the end."""

    name: str
    meaning: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)
    is_counter: bool = False  # only grows while the process lives


Read = Callable[[], "Iterable[Reading] | Awaitable[Iterable[Reading]]"]


async def serve_metrics(address: str, read: Read, registry: CollectorRegistry = REGISTRY) -> None:
    """Answer at "host:port" until cancelled; without an address only wait.

    Raises InvalidArgumentError (metrics_address) when it is no address, is taken, or is beyond
    loopback without TLS.
    """
    if not address:
        await asyncio.Event().wait()
    collector = _Readings(read, asyncio.get_running_loop())
    registry.register(collector)
    try:
        server, thread = _start(address, registry)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            thread.join()
    finally:
        registry.unregister(collector)


def _start(address: str, registry: CollectorRegistry) -> tuple[Any, Any]:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise InvalidArgumentError.field(
            "metrics_address", f"{address!r} is not host:port; give for example 127.0.0.1:9464"
        )
    security = Security.from_environment()
    options: dict[str, Any] = {}
    if not is_loopback(address):
        if not security.uses_tls:
            raise InvalidArgumentError.field(
                "metrics_address",
                f"{address} is not loopback and there are no certificates; take 127.0.0.1:{port},"
                " or set ROLLPACKER_SECURITY_CERTIFICATE_FILE and its companions",
            )
        options = {
            "certfile": str(security.certificate_file),
            "keyfile": str(security.key_file),
            "client_cafile": str(security.ca_file),
            "client_auth_required": True,
        }
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry, **options)
    except OSError as error:
        raise InvalidArgumentError.field(
            "metrics_address", f"{address} cannot be taken ({error}); choose another port"
        ) from error
    scheme = "https" if options else "http"
    _log.info("metrics on %s://%s:%d/metrics", scheme, host, server.server_port)
    return server, thread


class _Readings(Collector):
    """Asks the service, on its loop; called from a thread of the endpoint."""

    def __init__(self, read: Read, loop: asyncio.AbstractEventLoop) -> None:
        self._read = read
        self._loop = loop

    def describe(self) -> list[Any]:
        return []  # names are known only when the service is asked

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        readings = asyncio.run_coroutine_threadsafe(self._ask(), self._loop).result(_READ_SECONDS)
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for reading in readings:
            kind = CounterMetricFamily if reading.is_counter else GaugeMetricFamily
            labels = list(reading.labels)
            family = families.setdefault(
                reading.name, kind(reading.name, reading.meaning, labels=labels)
            )
            family.add_metric(list(reading.labels.values()), reading.value)
        yield from families.values()

    async def _ask(self) -> Iterable[Reading]:
        found = self._read()
        return await found if inspect.isawaitable(found) else found
