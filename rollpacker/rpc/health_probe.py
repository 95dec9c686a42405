"""`python -m rollpacker.rpc.health_probe HOST:PORT`: does the service say SERVING?

The healthcheck of a container. Ends with 0 for SERVING; else with 1 and the reason on one line.
Speaks TLS where the environment gives certificates, as the service does. Light on imports, because
it starts every few seconds.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollpacker.rpc.security import SERVER_NAME, Security

_DEADLINE_SECONDS = 5.0


def probe(address: str) -> str:
    """The health of the whole server at `address`: SERVING, NOT_SERVING, or why there is none."""
    security = Security.from_environment()
    options = (("grpc.ssl_target_name_override", SERVER_NAME),)
    channel = (
        grpc.secure_channel(address, security.channel_credentials(), options)
        if security.uses_tls
        else grpc.insecure_channel(address)
    )
    with channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = check(health_pb2.HealthCheckRequest(), timeout=_DEADLINE_SECONDS)
        except grpc.RpcError as error:
            return f"no answer from {address}: {error.code().name} {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main() -> None:
    """Probe the address of the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m rollpacker.rpc.health_probe HOST:PORT")
    status = probe(sys.argv[1])
    print(status)
    sys.exit(status != "SERVING")


if __name__ == "__main__":
    main()
