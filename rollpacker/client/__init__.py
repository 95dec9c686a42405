"""The coordinator from Python: `connect` in asyncio code, `Client` elsewhere.

    with Client("127.0.0.1:7777") as client:
        client.start_run("demo", yaml.safe_load(open("run.yaml")))
        for event in client.watch_run("demo"):
            ...

Answers are the messages of `rollpacker.v1`; errors are `rollpacker.rpc.errors.ServiceError`. The
contract of each call is its comment in `coordinator_service.proto` (docs/api.md).
"""

from rollpacker.client.aio import AsyncClient, connect
from rollpacker.client.blocking import Client
from rollpacker.rpc.security import Security

__all__ = ["AsyncClient", "Client", "Security", "connect"]
