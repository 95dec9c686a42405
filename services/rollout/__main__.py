"""Starts a rollout replica: `python -m services.rollout`.

SIGTERM ends it; the responses that still run are handed back and go on elsewhere.
"""

from __future__ import annotations

import logging
import sys

import torch
import uvloop

from rollpacker.devices.holder import worker_devices
from rollpacker.devices.memory import Meter
from rollpacker.observability import set_up_logging
from rollpacker.observability.metrics import serve_metrics
from rollpacker.observability.tracing import set_up_tracing
from rollpacker.refit.receiver import Receiver
from rollpacker.rpc.heartbeat import run_heartbeat
from rollpacker.rpc.server import RpcServer, serve
from rollpacker.settings import read_service_settings
from rollpacker.v1 import coordinator_service_pb2, rollout_service_pb2_grpc
from services.rollout.engine import Engine
from services.rollout.readings import engine_readings
from services.rollout.server import SERVICE_NAME, RolloutServicer, watch_engine
from services.rollout.settings import RolloutServiceSettings
from services.rollout.sglang_engine import SglangEngine, SglangOptions
from services.rollout.torch_engine import TorchEngine
from services.rollout.weights_location import WeightsSource


def main() -> None:
    """Run until SIGTERM, or until the engine fails."""
    settings = read_service_settings(RolloutServiceSettings)
    set_up_logging("rollout", settings.log_level, settings.log_format, settings.worker_id)
    set_up_tracing("rollout", settings.trace_endpoint, settings.worker_id)
    torch.set_num_threads(settings.threads)
    uvloop.run(run(settings))


async def run(settings: RolloutServiceSettings) -> None:
    """The life of one replica."""
    meter = settings.meter()
    devices = worker_devices(settings, meter, bound=settings.engine == "torch")
    engine = make_engine(settings, meter)
    receiver = Receiver(
        settings.weights_root / "received" / settings.worker_id,
        seconds=settings.refit_seconds,
        broadcast_host=settings.broadcast_host,
    )
    servicer = RolloutServicer(
        engine,
        replica_id=settings.worker_id,
        weights=WeightsSource(settings.weights_root, receiver),
        devices=devices,
        device_count=settings.device_count,
    )
    server = RpcServer(
        settings.address,
        [SERVICE_NAME],
        lambda grpc_server: rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(
            servicer, grpc_server
        ),
    )

    async def heartbeat() -> None:
        await run_heartbeat(
            settings,
            coordinator_service_pb2.WORKER_KIND_ROLLOUT,
            server.address,
            engine_stats=engine.stats,
        )

    async def watch() -> None:
        await watch_engine(engine, server)

    async def metrics() -> None:
        await serve_metrics(
            settings.metrics_address,
            lambda: engine_readings(engine.stats(), servicer.weight_version),
        )

    background = [watch, heartbeat, metrics, devices.keep, servicer.hand_back_at_the_end]
    try:
        await serve(server, address_file=settings.address_file, background=background)
    finally:
        await engine.close()
        await devices.leave()


def make_engine(settings: RolloutServiceSettings, meter: Meter | None) -> Engine:
    """The engine that the settings ask for; it tells the meter what it holds."""
    if settings.engine == "sglang":
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every call
        return SglangEngine(
            SglangOptions(
                url=settings.sglang_url,
                python=settings.sglang_python or sys.executable,
                device=settings.device,
                dtype=settings.dtype,
                slots=settings.slots,
                kv_budget_tokens=settings.kv_budget_tokens,
                max_context_tokens=settings.max_context_tokens,
                threads=settings.threads,
                start_seconds=settings.sglang_start_seconds,
                silence_seconds=settings.sglang_silence_seconds,
                extra_arguments=settings.sglang_arguments,
            )
        )
    return TorchEngine(
        slots=settings.slots,
        kv_budget_tokens=settings.kv_budget_tokens,
        max_context_tokens=settings.max_context_tokens,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        silence_seconds=settings.silence_seconds,
        holds=meter.hold if meter else None,
    )


if __name__ == "__main__":
    main()
