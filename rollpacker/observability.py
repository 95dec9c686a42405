"""Logs of the services: one line per event, to standard error, with the service's name."""

from __future__ import annotations

import logging
import sys


def set_up_logging(service: str, level: str) -> None:
    """Send all logs of this process to standard error, at `level` and above."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"%(asctime)s {service} %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    logging.getLogger("grpc").setLevel(logging.WARNING)
