"""Where the commands find the coordinator, and how they call it."""

from __future__ import annotations

from typing import Annotated

import typer

from rollpacker.client import AsyncClient as Coordinator
from rollpacker.client import connect

__all__ = ["DEFAULT_ADDRESS", "DEFAULT_PORT", "Coordinator", "CoordinatorAddress", "connect"]
DEFAULT_PORT = 7777
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
CoordinatorAddress = Annotated[
    str,
    typer.Option(
        "--coordinator",
        envvar="ROLLPACKER_COORDINATOR",
        metavar="HOST:PORT",
        help="Where the coordinator listens.",
    ),
]
