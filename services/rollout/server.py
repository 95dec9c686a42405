"""RolloutService: checks requests, translates them, leaves the rest to the engine.

The service knows one spec in force, or none. GenerateGroup runs only against the spec in force;
ApplyEngineSpec changes it: get hold of the weights, refuse new groups, abort the running ones,
load, then take groups again. Applying goes on when its caller gives up, so that spec and engine
never disagree; after an error the previous spec is in force again. Aborted groups end with their
prefixes (INTERRUPTED).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from rollpacker import wire
from rollpacker.devices.holder import Devices, NoDevices
from rollpacker.rpc import errors
from rollpacker.rpc.server import RpcServer
from rollpacker.types import EngineSpec
from rollpacker.v1 import rollout_service_pb2 as pb
from rollpacker.v1 import rollout_service_pb2_grpc
from services.rollout import translate
from services.rollout.engine import (
    Engine,
    EngineError,
    GenerationResult,
    InvalidRequestError,
    PromptTooLongError,
    WeightsNotFoundError,
)
from services.rollout.weights_location import WeightsSource

SERVICE_NAME = "rollpacker.v1.RolloutService"
_NO_SPEC = EngineSpec(run_id="", weight_version=-1, weights_uri="", resident=False)
_log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


class RolloutServicer(rollout_service_pb2_grpc.RolloutServiceServicer):
    """One engine; every method is a contract of rollout_service.proto."""

    def __init__(
        self,
        engine: Engine,
        *,
        replica_id: str,
        weights: WeightsSource,
        devices: Devices | None = None,
        device_count: int = 1,
    ) -> None:
        """`device_count`: that the engine needs where a spec names no tensor-parallel size."""
        self._engine = engine
        self._devices = devices or NoDevices()
        self._device_count = device_count
        self._replica_id = replica_id
        self._weights = weights
        self._spec = _NO_SPEC
        self._applying = asyncio.Lock()
        self._fence = 0  # the highest seen
        self._calls = itertools.count()
        self._running: set[str] = set()  # request ids in the engine

    async def ApplyEngineSpec(
        self, request: pb.ApplyEngineSpecRequest, _context: Context
    ) -> pb.ApplyEngineSpecResponse:
        spec = wire.engine_spec_from_proto(request.spec)
        for field, value in (
            ("weight_version", spec.weight_version),
            ("tensor_parallel_size", spec.tensor_parallel_size),
        ):
            if value < 0:
                raise errors.InvalidArgumentError.field(f"spec.{field}", f"{value} is below 0")
        if not spec.run_id:
            raise errors.InvalidArgumentError.field("spec.run_id", "is empty; name the run")
        self._check_fence(request.fence)
        start = time.monotonic()
        in_force = await asyncio.shield(asyncio.create_task(self._apply(spec, request.fence)))
        return pb.ApplyEngineSpecResponse(
            spec=wire.engine_spec_to_proto(in_force), seconds=time.monotonic() - start
        )

    async def GenerateGroup(
        self, request: pb.GenerateGroupRequest, _context: Context
    ) -> AsyncIterator[pb.GenerateGroupResponse]:
        call = translate.group_call(request, next(self._calls))
        self._check_fence(request.fence)
        self._check_weights(call)
        self._running.update(call.request_ids)
        try:
            events = self._engine.generate(call.requests, call.progress_interval_tokens)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, GenerationResult):
                        yield call.finished(event, self._replica_id)
                    else:
                        yield call.progress(event)
        except EngineError as error:
            raise _service_error(error) from error
        finally:
            self._running.difference_update(call.request_ids)

    async def GetEngine(
        self, _request: pb.GetEngineRequest, _context: Context
    ) -> pb.GetEngineResponse:
        return pb.GetEngineResponse(
            spec=wire.engine_spec_to_proto(self._spec),
            stats=wire.engine_stats_to_proto(self._engine.stats()),
            engine_kind=self._engine.kind,
            replays_by_seed=self._engine.replays_by_seed,
            changes_tensor_parallel_size=self._engine.changes_tensor_parallel_size,
        )

    @property
    def weight_version(self) -> int:
        """Of the spec in force; -1 before the first."""
        return self._spec.weight_version

    async def hand_back(self) -> None:
        """Take no more groups and end the running ones: each open response is sent as
        INTERRUPTED, to go on elsewhere. For a service that ends. Repeat: no effect."""
        async with self._applying:
            self._spec = dataclasses.replace(self._spec, resident=False)
            await self._engine.abort(tuple(self._running))

    async def hand_back_at_the_end(self) -> None:
        """Wait until cancelled; then `hand_back`. A background task of `serve`."""
        try:
            await asyncio.Event().wait()
        finally:
            await self.hand_back()

    async def _apply(self, spec: EngineSpec, fence: int) -> EngineSpec:
        """Bring the engine to `spec`; returns the spec in force. One at a time."""
        async with self._applying:
            self._check_fence(fence)
            before = self._spec
            if spec.tensor_parallel_size == 0:
                size = before.tensor_parallel_size
                spec = dataclasses.replace(spec, tensor_parallel_size=size)
            is_same = dataclasses.replace(spec, weights_address=before.weights_address) == before
            if is_same and (spec.resident or not self._devices.held):
                return before
            directory = await self._weights.directory(spec) if spec.resident else None
            self._spec = dataclasses.replace(before, resident=False)  # takes no groups meanwhile
            try:
                await self._engine.abort(tuple(self._running))
                if directory:
                    await self._claim(spec.tensor_parallel_size or self._device_count)
                    await self._engine.load_weights(directory, spec.tensor_parallel_size)
                else:
                    await self._let_go()
            except EngineError as error:
                self._spec = before
                raise _service_error(error) from error
            self._spec = spec
            _log.info("at weight version %d of run %s", spec.weight_version, spec.run_id)
            return spec

    async def _claim(self, count: int) -> None:
        """Hold so many devices; another number of them is another set, for which these must go."""
        if self._devices.held and len(self._devices.held) != count:
            await self._let_go()
        await self._devices.claim(count)

    async def _let_go(self) -> None:
        await self._engine.release()
        await self._devices.release()

    def _check_fence(self, fence: int) -> None:
        if fence < self._fence:
            raise errors.stale_fence(fence, self._fence)
        self._fence = fence

    def _check_weights(self, call: translate.GroupCall) -> None:
        spec = self._spec
        wanted = (call.run_id, call.weight_version)
        if spec.resident and (spec.run_id, spec.weight_version) == wanted:
            return
        serves = f"weight version {spec.weight_version} of run {spec.run_id!r}"
        raise errors.FailedPreconditionError(
            "WEIGHT_VERSION_MISMATCH",
            f"weight version {call.weight_version} of run {call.run_id!r} is asked for, but the"
            f" engine serves {serves if spec.resident else 'nothing now'};"
            " apply the engine spec first",
        )


async def watch_engine(engine: Engine, server: RpcServer) -> None:
    """Wait until the engine breaks; then become NOT_SERVING and raise why."""
    failure = await engine.wait_failed()
    await server.set_serving(False)
    raise failure


# Where the engine's name for a part of its request differs from the field of the RPC.
_FIELDS = {
    "weights_uri": "spec.weights_uri",
    "tensor_parallel_size": "spec.tensor_parallel_size",
    "seed": "draw.seeds",
    "temperature": "sampling.temperature",
    "carried_token_ids": "resume_from.token_ids",
    "carried_logprobs": "resume_from.logprobs",
    "draft_token_ids": "drafts.token_ids",
}


def _service_error(error: EngineError) -> errors.ServiceError:
    if isinstance(error, PromptTooLongError):
        return errors.FailedPreconditionError("PROMPT_TOO_LONG", str(error))
    if isinstance(error, WeightsNotFoundError):
        return errors.NotFoundError("WEIGHTS_NOT_FOUND", str(error))
    if isinstance(error, InvalidRequestError):
        field = _FIELDS.get(error.field, error.field)
        return errors.InvalidArgumentError.field(field, error.message)
    return errors.UnavailableError("ENGINE_FAILED", str(error))
