"""`TorchEngine`: the `Engine` protocol in front of a decode loop in its own thread.

The event loop never touches a tensor. It posts jobs into the thread's inbox; the thread runs them
between two steps, in order, and sleeps on the inbox when there is nothing to decode. Results go
back by `call_soon_threadsafe`.

Life: open -> closed (by `close`: everything is aborted first) or open -> broken (an unforeseen
exception in the thread, or a thread that makes no step any more although responses run: every
waiting caller gets an EngineError, and so does every later one).
Errors that the loop foresees (EngineError) go to their caller and leave the engine open.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import torch

from rollpacker.types import EngineStats
from services.rollout.engine import (
    EngineError,
    GenerationProgress,
    GenerationRequest,
    GenerationResult,
    InvalidRequestError,
)
from services.rollout.request_check import check_request
from services.rollout.torch_engine.decode_loop import DecodeLoop

DtypeName = Literal["float32", "bfloat16", "float64"]
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_LOOK_SECONDS = 1.0
_log = logging.getLogger(__name__)
_Event = GenerationResult | GenerationProgress
Result = TypeVar("Result")


class TorchEngine:
    """One engine on one device; create it inside the event loop that uses it."""

    kind = "torch"
    replays_by_seed = True
    changes_tensor_parallel_size = False

    def __init__(
        self,
        *,
        slots: int = 512,
        kv_budget_tokens: int = 262_144,
        max_context_tokens: int = 0,
        device: str = "cpu",
        dtype: DtypeName = "float32",
        threads: int = 1,
        silence_seconds: float = 300.0,
        holds: Callable[[int], None] | None = None,
    ) -> None:
        """`slots`: responses decoded at once. `kv_budget_tokens`: of all their sequences.

        `max_context_tokens` caps a sequence; 0 means the model's own length. `threads`: CPU
        threads of one operation. `silence_seconds`: without a step for so long, the engine hangs.
        `holds` is told the bytes of the weights on the device, whenever they change.
        """
        self._loop = asyncio.get_running_loop()
        self._kv_budget = kv_budget_tokens
        self._threads = threads
        self._silent_looks = math.ceil(silence_seconds / _LOOK_SECONDS)
        self._core = DecodeLoop(
            slot_count=slots,
            kv_budget_tokens=kv_budget_tokens,
            max_context_tokens=max_context_tokens,
            device=torch.device(device),
            dtype=_DTYPES[dtype],
            holds=holds,
        )
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._limits = (0, 0)  # context, vocabulary
        self._failure: asyncio.Future[EngineError] = self._loop.create_future()
        self._streams: set[asyncio.Queue[_Event | EngineError]] = set()
        self._calls: set[asyncio.Future[Any]] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    async def load_weights(self, directory: Path, tensor_parallel_size: int = 0) -> None:
        if tensor_parallel_size not in (0, 1):
            raise InvalidRequestError(
                "tensor_parallel_size",
                f"{tensor_parallel_size}: the torch engine runs in one process; use 1 or 0",
            )
        await self._call(lambda: self._core.load_weights(directory))

    async def release(self) -> None:
        await self._call(self._core.release)

    async def generate(
        self, requests: Sequence[GenerationRequest], progress_interval_tokens: int
    ) -> AsyncGenerator[_Event]:
        self._refuse_if_unusable()
        for request in requests:
            self._check(request)
        events: asyncio.Queue[_Event | EngineError] = asyncio.Queue()
        open_names = {request.request_id for request in requests}
        self._streams.add(events)
        self._post(lambda: self._submit(tuple(requests), progress_interval_tokens, events))
        try:
            while open_names:
                event = await events.get()
                if isinstance(event, EngineError):
                    open_names.clear()
                    raise event
                if isinstance(event, GenerationResult):
                    open_names.discard(event.request_id)
                yield event
        finally:
            self._streams.discard(events)
            if open_names:
                names = tuple(open_names)
                self._post(lambda: self._abort_unheard(names))

    async def abort(self, request_ids: Sequence[str]) -> list[GenerationResult]:
        names = tuple(request_ids)
        return await self._call(lambda: self._core.abort(names))

    def stats(self) -> EngineStats:
        return self._core.stats()  # counts only: safe to read while the thread works

    async def wait_failed(self) -> EngineError:
        """Also watches the thread: looks are counted, not seconds, so that a process that was
        stopped for a while is not taken for one that hangs."""
        silent, step = 0, -1
        while not (await asyncio.wait([self._failure], timeout=_LOOK_SECONDS))[0]:
            is_silent = self._core.step_count == step and self.stats().running_response_count > 0
            silent, step = silent + 1 if is_silent else 0, self._core.step_count
            if silent >= self._silent_looks:
                seconds = self._silent_looks * _LOOK_SECONDS
                self._fail(EngineError(f"no step for {seconds:.0f} s; restart the service"))
        return self._failure.result()

    async def close(self) -> None:
        self._closed = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _check(self, request: GenerationRequest) -> None:
        """Raise for what the decode loop could not serve."""
        context, vocabulary = self._limits
        check_request(request, context=context, kv_budget=self._kv_budget, vocabulary=vocabulary)

    def _refuse_if_unusable(self) -> None:
        if self._failure.done():
            raise self._failure.result()
        if self._closed:
            raise EngineError("the engine is closed")

    def _post(self, job: Callable[[], None]) -> None:
        if not self._failure.done() and not self._closed:
            self._inbox.put(job)

    async def _call(self, work: Callable[[], Result]) -> Result:
        """Run `work` in the engine's thread, between two steps."""
        self._refuse_if_unusable()
        future: asyncio.Future[Result] = self._loop.create_future()
        self._calls.add(future)
        self._inbox.put(lambda: self._answer(future, work))
        try:
            return await future
        finally:
            self._calls.discard(future)

    # In the engine's thread:

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._take_jobs(block=not self._core.step()):
                    pass
                self._core.abort_all()
                self._core.release()
        except Exception as error:  # noqa: BLE001  every caller must hear of it
            _log.exception("the engine failed")
            failure = EngineError(f"the engine failed: {error!r}; restart the service")
            self._loop.call_soon_threadsafe(self._fail, failure)

    def _take_jobs(self, *, block: bool) -> bool:
        """Run what is in the inbox; wait for a job first if `block`. False: close."""
        while block or not self._inbox.empty():
            job = self._inbox.get()
            if job is None:
                return False
            job()
            block = False
        return True

    def _submit(
        self,
        requests: Sequence[GenerationRequest],
        progress_interval: int,
        events: asyncio.Queue[_Event | EngineError],
    ) -> None:
        def emit(event: _Event | EngineError) -> None:
            self._loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            self._core.submit(requests, progress_interval, emit)
        except EngineError as error:
            emit(error)

    def _abort_unheard(self, names: Sequence[str]) -> None:
        self._core.abort(names)

    def _answer(self, future: asyncio.Future[Result], work: Callable[[], Result]) -> None:
        try:
            result = work()
        except EngineError as error:
            self._loop.call_soon_threadsafe(_set_exception, future, error)
        else:
            self._limits = self._core.limits
            self._loop.call_soon_threadsafe(_set_result, future, result)

    # In the event loop again:

    def _fail(self, failure: EngineError) -> None:
        if self._failure.done():
            return
        self._failure.set_result(failure)
        for events in self._streams:
            events.put_nowait(failure)
        for future in self._calls:
            _set_exception(future, failure)


def _set_result(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():  # its caller may have been cancelled
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: EngineError) -> None:
    if not future.done():
        future.set_exception(error)
