"""`AsyncClient` for code without asyncio: the same calls, carried out by a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from rollpacker.client.aio import AsyncClient, connect
from rollpacker.rpc.security import Security
from rollpacker.settings import RunSettings
from rollpacker.types import DrawId
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import types_pb2

Result = TypeVar("Result")


class Client:
    """A context manager; see `AsyncClient` for the calls."""

    def __init__(
        self,
        address: str,
        patience_seconds: float = 0.0,
        *,
        deadline_seconds: float = 10.0,
        security: Security | None = None,
    ) -> None:
        self._opened = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def open_() -> AsyncClient:
            return await self._opened.enter_async_context(
                connect(
                    address,
                    patience_seconds,
                    deadline_seconds=deadline_seconds,
                    security=security,
                )
            )

        self._client = self._wait(open_())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Repeat: no effect."""
        if self._loop.is_closed():
            return
        self._wait(self._opened.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- the life of a run --------------------------------------------------------------------

    def start_run(
        self,
        run_id: str,
        settings: RunSettings | Mapping[str, Any],
        *,
        queue: bool = False,
        until_step: int = 0,
    ) -> pb.Run:
        return self._wait(
            self._client.start_run(run_id, settings, queue=queue, until_step=until_step)
        )

    def validate_run(self, run_id: str, settings: RunSettings | Mapping[str, Any]) -> None:
        self._wait(self._client.validate_run(run_id, settings))

    def stop_run(
        self, run_id: str, mode: pb.StopMode.ValueType = pb.STOP_MODE_AFTER_STEP
    ) -> pb.Run:
        return self._wait(self._client.stop_run(run_id, mode))

    def pause_run(
        self, run_id: str, mode: pb.PauseMode.ValueType = pb.PAUSE_MODE_AFTER_STEP
    ) -> pb.Run:
        return self._wait(self._client.pause_run(run_id, mode))

    def resume_run(self, run_id: str, until_step: int = 0) -> pb.Run:
        return self._wait(self._client.resume_run(run_id, until_step))

    def step_run(self, run_id: str) -> pb.Run:
        return self._wait(self._client.step_run(run_id))

    # --- changes ------------------------------------------------------------------------------

    def update_run(self, run_id: str, settings: Mapping[str, Any]) -> pb.Run:
        return self._wait(self._client.update_run(run_id, settings))

    def force_long_round(self, run_id: str) -> pb.Run:
        return self._wait(self._client.force_long_round(run_id))

    def save_checkpoint(self, run_id: str) -> int:
        return self._wait(self._client.save_checkpoint(run_id))

    def add_prompts(self, run_id: str, rows: Sequence[Mapping[str, Any]]) -> pb.AddPromptsResponse:
        return self._wait(self._client.add_prompts(run_id, rows))

    def requeue_draws(self, run_id: str, draws: Iterable[DrawId], level: int) -> pb.Run:
        return self._wait(self._client.requeue_draws(run_id, draws, level))

    def drop_draws(self, run_id: str, draws: Iterable[DrawId], reason: str) -> pb.Run:
        return self._wait(self._client.drop_draws(run_id, draws, reason))

    def run_evaluation(self, run_id: str, timeout_seconds: float = 600) -> pb.RunEvaluationResponse:
        return self._wait(self._client.run_evaluation(run_id, timeout_seconds))

    # --- what there is ------------------------------------------------------------------------

    def get_run(self, run_id: str) -> pb.Run:
        return self._wait(self._client.get_run(run_id))

    def list_runs(self) -> list[pb.Run]:
        return self._wait(self._client.list_runs())

    def list_steps(self, run_id: str, limit: int = 0) -> list[pb.Step]:
        return self._wait(self._client.list_steps(run_id, limit))

    def list_samples(self, run_id: str, step: int, **filters: Any) -> list[types_pb2.PromptGroup]:
        return self._wait(self._client.list_samples(run_id, step, **filters))

    def list_deferred_draws(self, run_id: str) -> list[types_pb2.Draw]:
        return self._wait(self._client.list_deferred_draws(run_id))

    def list_dropped_draws(self, run_id: str) -> list[pb.DroppedDraw]:
        return self._wait(self._client.list_dropped_draws(run_id))

    def list_devices(self) -> list[pb.DeviceLease]:
        return self._wait(self._client.list_devices())

    def list_workers(self) -> list[pb.Worker]:
        return self._wait(self._client.list_workers())

    # --- streams ------------------------------------------------------------------------------

    def regrade_samples(
        self, request: pb.RegradeSamplesRequest
    ) -> Iterator[pb.RegradeSamplesResponse]:
        return self._each(lambda: self._client.regrade_samples(request))

    def watch_run(self, run_id: str, after_revision: str = "") -> Iterator[pb.WatchRunResponse]:
        return self._each(lambda: self._client.watch_run(run_id, after_revision))

    # --- how ----------------------------------------------------------------------------------

    def _wait(self, work: Awaitable[Result]) -> Result:
        async def awaited() -> Result:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def _each(self, make: Callable[[], AsyncGenerator[Result, None]]) -> Iterator[Result]:
        items = make()
        try:
            while True:
                try:
                    yield self._wait(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            self._wait(items.aclose())
