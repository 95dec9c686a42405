"""Logs of the services: one line per event, to standard error, as text or as JSON.

What a line is about (run, step, prompt, replica) is a property of the task that writes it: it is
set once by `log_context` and inherited by the tasks that this one starts. A server sets it from
the request of each call. Only the JSON format shows it.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
_about: ContextVar[Mapping[str, str | int]] = ContextVar("_about")


def set_up_logging(
    service: str, level: str, log_format: LogFormat = "text", replica: str = ""
) -> None:
    """Send all logs of this process to standard error, at `level` and above.

    `replica` is the worker id of this process, where it has one.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(service, replica))
    else:
        line = f"%(asctime)s {service} %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(line))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("grpc").setLevel(logging.WARNING)


def log_context(**fields: str | int) -> None:
    """What the lines of this task, and of tasks that it starts later, are about."""
    _about.set({**_about.get({}), **fields})


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, service, logger, message, and what it is about."""

    def __init__(self, service: str, replica: str = "") -> None:
        super().__init__()
        self._service = {"service": service, **({"replica": replica} if replica else {})}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_about.get({}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
