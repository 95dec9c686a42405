"""`python -m services.coordinator`: the process."""

from __future__ import annotations

import logging
import sys
from functools import partial

import uvloop

from rollpacker.observability import set_up_logging
from rollpacker.observability.metrics import serve_metrics
from rollpacker.observability.tracing import set_up_tracing
from rollpacker.rpc.server import RpcServer, serve
from rollpacker.settings import read_service_settings
from rollpacker.store.redis_client import connect
from rollpacker.v1.coordinator_service_pb2_grpc import add_CoordinatorServiceServicer_to_server
from services.coordinator.leadership import LeaseLostError
from services.coordinator.readings import coordinator_readings
from services.coordinator.runs import Runs
from services.coordinator.server import SERVICE_NAME, CoordinatorServicer
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.web import serve_web
from services.coordinator.workers import WorkerRegistry


async def main(settings: CoordinatorSettings) -> None:
    """Serve until SIGTERM, SIGINT or the loss of the lease."""
    redis = connect(settings.redis_url)
    workers = WorkerRegistry(settings.worker_lease_seconds, settings.worker_wait_seconds)
    runs = Runs(redis, settings, workers)
    servicer = CoordinatorServicer(runs, workers)
    server = RpcServer(
        settings.address,
        [SERVICE_NAME],
        lambda target: add_CoordinatorServiceServicer_to_server(servicer, target),
    )
    metrics = partial(
        serve_metrics, settings.metrics_address, partial(coordinator_readings, runs, workers)
    )
    web = partial(serve_web, settings.web_address, settings.web_token_file, runs, workers)
    try:
        await serve(server, address_file=settings.address_file, background=[runs.run, metrics, web])
    finally:
        await workers.close()
        await redis.aclose()


if __name__ == "__main__":
    settings = read_service_settings(CoordinatorSettings)
    set_up_logging("coordinator", settings.log_level, settings.log_format, settings.coordinator_id)
    set_up_tracing("coordinator", settings.trace_endpoint, settings.coordinator_id)
    try:
        uvloop.run(main(settings))
    except LeaseLostError as error:
        logging.getLogger(__name__).error("%s; this process ends", error)
        sys.exit(1)
