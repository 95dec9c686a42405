"""Count, status and time of every call that a server answers, for Prometheus.

`measured` stands outermost around a call, so that refusals (a missing token) count too. A stream
takes as long as it is open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from rollpacker.rpc.around import status_name

_CALLS = Counter("rollpacker_rpc_calls", "calls answered, by status", ["method", "code"])
_SECONDS = Histogram(
    "rollpacker_rpc_seconds",
    "time of a call; of a stream, how long it was open",
    ["method"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
)
_RUNNING = Gauge("rollpacker_rpc_running", "calls under way", ["method"])


@contextmanager
def measured(details: Any, context: Any) -> Iterator[None]:
    """Around one call; for `AroundInterceptor`."""
    method, start, cancelled = details.method, time.perf_counter(), False
    running = _RUNNING.labels(method)
    running.inc()
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        cancelled = True
        raise
    finally:
        running.dec()
        _SECONDS.labels(method).observe(time.perf_counter() - start)
        _CALLS.labels(method, "CANCELLED" if cancelled else status_name(context)).inc()
