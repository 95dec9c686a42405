"""Starts a trainer: `python -m services.trainer`, or N ranks of it under torchrun.

Rank 0 serves gRPC and leads; the others follow until it lets them go, or until it is lost. The
ranks join before gRPC starts, and nothing forks after that. SIGTERM goes to rank 0, which ends
what it is doing and then releases the others; they ignore it themselves.
"""

from __future__ import annotations

import logging
import signal

import grpc.aio
import torch
import uvloop

from rollpacker.devices.holder import worker_devices
from rollpacker.observability import set_up_logging
from rollpacker.observability.metrics import serve_metrics
from rollpacker.observability.tracing import set_up_tracing
from rollpacker.refit import sender
from rollpacker.refit.broadcast import Broadcaster
from rollpacker.refit.sender import WeightsServicer
from rollpacker.rpc.heartbeat import run_heartbeat
from rollpacker.rpc.server import RpcServer, serve
from rollpacker.settings import read_service_settings
from rollpacker.store.redis_client import open_client
from rollpacker.v1 import (
    coordinator_service_pb2,
    trainer_service_pb2_grpc,
    weights_service_pb2_grpc,
)
from services.trainer.leader import Leader
from services.trainer.open_run import Roots
from services.trainer.ranks import Ranks
from services.trainer.readings import trainer_readings
from services.trainer.replica import follow
from services.trainer.server import TrainerServicer
from services.trainer.session import Session
from services.trainer.settings import TrainerServiceSettings

_REDIS_TIMEOUT_SECONDS = 10.0  # above the longest blocking read
_log = logging.getLogger("services.trainer")


def main() -> None:
    """Run until SIGTERM."""
    settings = read_service_settings(TrainerServiceSettings)
    set_up_logging("trainer", settings.log_level, settings.log_format, settings.worker_id)
    torch.set_num_threads(settings.threads)
    meter = settings.meter()
    ranks = Ranks(settings.device, settings.rank_timeout_seconds, settings.shard_size, meter)
    _log.info(
        "rank %d of %d on %s: shard %d of replica %d",
        ranks.rank,
        ranks.world_size,
        ranks.device,
        ranks.shard,
        ranks.replica,
    )
    try:
        if ranks.is_leader:
            uvloop.run(lead(settings, ranks))
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            follow(ranks)
    finally:
        ranks.close()


async def lead(settings: TrainerServiceSettings, ranks: Ranks) -> None:
    """The life of rank 0."""
    set_up_tracing("trainer", settings.trace_endpoint, settings.worker_id)
    leader = Leader(ranks)
    redis = open_client(settings.redis_url, socket_timeout=_REDIS_TIMEOUT_SECONDS)
    devices = worker_devices(settings, settings.meter(), bound=True)
    roots = Roots(settings.weights_root, settings.checkpoint_root)
    session = Session(redis, leader, roots, devices, ranks.world_size)
    servicer = TrainerServicer(session, ranks.world_size)
    host = settings.broadcast_host
    broadcaster = Broadcaster(host, settings.broadcast_seconds) if host else None
    weights = WeightsServicer(settings.weights_root, broadcaster)

    def register(grpc_server: grpc.aio.Server) -> None:
        trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, grpc_server)
        weights_service_pb2_grpc.add_WeightsServiceServicer_to_server(weights, grpc_server)

    server = RpcServer(
        settings.address, ["rollpacker.v1.TrainerService", sender.SERVICE_NAME], register
    )

    async def heartbeat() -> None:
        await run_heartbeat(settings, coordinator_service_pb2.WORKER_KIND_TRAINER, server.address)

    async def metrics() -> None:
        await serve_metrics(
            settings.metrics_address, lambda: trainer_readings(session, ranks.world_size)
        )

    background = [leader.watch, heartbeat, metrics, devices.keep]
    try:
        await serve(server, address_file=settings.address_file, background=background)
    finally:
        await session.close()
        await leader.close()
        await devices.leave()
        await redis.aclose()


if __name__ == "__main__":
    main()
