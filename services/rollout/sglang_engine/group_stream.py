"""The requests of one `generate` call while SGLang works on them.

A response is *waiting* until its first token, *running* until its last one, then *ended*. The
group is submitted as one batch. When the server goes away, whatever has not ended is submitted to
the next server with its tokens so far as a prefix: a response is a function of weights, prompt and
seed, so it goes on as it would have. Nothing is lost and nothing is sampled twice.

Names of requests have one width, because SGLang aborts every request whose name begins with the
given one; each submission uses new names.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.types import FinishReason
from services.rollout.engine import (
    EngineError,
    GenerationProgress,
    GenerationRequest,
    GenerationResult,
)
from services.rollout.sglang_engine.client import (
    SglangClient,
    SglangGoneError,
    SglangRefusedError,
)

Event = GenerationResult | GenerationProgress | EngineError
_FRUITLESS_SUBMISSIONS = 5  # in a row, each broken off without a token
_PAUSE_SECONDS = 0.3


@dataclass(slots=True)
class OpenResponse:
    """A response that has not ended."""

    request: GenerationRequest
    token_ids: list[int]
    logprobs: list[float]
    submitted: int = 0  # of the tokens, those that the present submission began with
    name: str = ""  # in the present submission
    retractions: int = 0  # in the present submission
    reported: int = 0  # tokens that progress has told
    aborted: bool = False
    slot: int = -1
    start_time: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    result: GenerationResult | None = None


class SlotNumbers:
    """Numbers for responses that run, the lowest free one first: rows of a timeline."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = itertools.count()

    def take(self) -> int:
        return heapq.heappop(self._free) if self._free else next(self._next)

    def give_back(self, number: int) -> None:
        heapq.heappush(self._free, number)


class EngineCounters:
    """What all groups of an engine add up to."""

    def __init__(self) -> None:
        self.slots = SlotNumbers()
        self.names = itertools.count()
        self.retractions = 0
        self.generated_tokens = 0
        self.last_token_at = time.monotonic()


class GroupStream:
    """One `generate` call; `run` moves it, `events` is read by the caller of the engine."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        progress_interval: int,
        counters: EngineCounters,
    ) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.open = {
            request.request_id: OpenResponse(
                request, list(request.carried_token_ids), list(request.carried_logprobs)
            )
            for request in requests
        }
        self._all = tuple(self.open.values())
        self._interval = progress_interval
        self._counters = counters
        self._submitted: dict[str, OpenResponse] = {}  # by name, while a server works on them
        self._longest_told = 0

    async def run(self, serving: Callable[[], Awaitable[SglangClient]]) -> None:
        """Until every response has ended. `serving` waits for a server; its error ends all."""
        fruitless = 0
        try:
            while self.open:
                client = await serving()
                self.end_unsubmitted()
                before = self._total()
                try:
                    await self._submit(client)
                except SglangGoneError as error:
                    fruitless = 0 if self._total() > before else fruitless + 1
                    if fruitless >= _FRUITLESS_SUBMISSIONS:
                        raise EngineError(f"no progress on any server: {error}") from error
                    await asyncio.sleep(_PAUSE_SECONDS * 2**fruitless)
        except (EngineError, SglangRefusedError) as error:
            self.fail(EngineError(str(error)))

    def fail(self, error: EngineError) -> None:
        """End the call with an error."""
        for response in tuple(self.open.values()):
            self._close(response)
        self.events.put_nowait(error)

    def end_unsubmitted(self) -> None:
        """End the aborted responses that no server works on."""
        for response in tuple(self.open.values()):
            if response.aborted and response.name not in self._submitted:
                self._end(response, FinishReason.INTERRUPTED)

    @property
    def running_count(self) -> int:
        return sum(response.slot >= 0 for response in self.open.values())

    async def _submit(self, client: SglangClient) -> None:
        """Have one server work on what is open, until all have ended or it is gone."""
        if not self.open:
            return
        batch = tuple(self.open.values())
        for response in batch:
            response.name = f"response-{next(self._counters.names):015d}"
            response.submitted = len(response.token_ids)
            response.retractions = 0
            self._submitted[response.name] = response
        try:
            async for chunk in client.stream(_body(batch, self._interval)):
                self._take(chunk)
        finally:
            self._submitted.clear()
        if any(response in self.open.values() for response in batch):
            raise SglangGoneError(f"SGLang at {client.url} ended a stream early")

    def _take(self, chunk: dict[str, Any]) -> None:
        meta = chunk["meta_info"]
        response = self._submitted[meta["id"]]
        count = meta["completion_tokens"] - (len(response.token_ids) - response.submitted)
        if count > 0:
            self._add_tokens(response, chunk["output_ids"][-count:], meta)
        retractions = meta.get("num_retractions", response.retractions)
        self._counters.retractions += retractions - response.retractions
        response.retractions = retractions
        if meta["finish_reason"] is not None:
            self._end(response, _finish_reason(response, meta["finish_reason"]))
        elif count > 0:
            self._tell_progress()

    def _add_tokens(
        self, response: OpenResponse, token_ids: list[int], meta: dict[str, Any]
    ) -> None:
        entries = meta["output_token_logprobs"][-len(token_ids) :]
        if [entry[1] for entry in entries] != token_ids:
            raise EngineError(f"SGLang sent logprobs that do not belong to the tokens {token_ids}")
        if response.slot < 0:
            response.slot = self._counters.slots.take()
            response.start_time = time.time()
        response.token_ids += token_ids
        response.logprobs += [min(float(entry[0]), 0.0) for entry in entries]
        self._counters.generated_tokens += len(token_ids)
        self._counters.last_token_at = time.monotonic()

    def _tell_progress(self) -> None:
        longest = max(len(response.token_ids) for response in self._all)
        if self._longest_told and longest < self._longest_told + self._interval:
            return
        self._longest_told = longest
        new, logprobs = {}, {}
        for name, response in self.open.items():
            if len(response.token_ids) > response.reported:
                new[name] = tuple(response.token_ids[response.reported :])
                logprobs[name] = tuple(response.logprobs[response.reported :])
                response.reported = len(response.token_ids)
        carried = sum(len(response.request.carried_token_ids) for response in self._all)
        self.events.put_nowait(GenerationProgress(longest, self._total(), carried, new, logprobs))

    def _end(self, response: OpenResponse, reason: FinishReason) -> None:
        request, now = response.request, time.time()
        response.result = GenerationResult(
            request_id=request.request_id,
            token_ids=tuple(response.token_ids),
            logprobs=tuple(response.logprobs),
            finish_reason=reason,
            carried_token_count=len(request.carried_token_ids),
            near_tie_count=request.carried_near_ties,  # SGLang does not tell of others
            slot=response.slot,
            start_time=response.start_time or now,
            end_time=now,
        )
        self.events.put_nowait(response.result)
        self._close(response)

    def _close(self, response: OpenResponse) -> None:
        self.open.pop(response.request.request_id, None)
        if response.slot >= 0:
            self._counters.slots.give_back(response.slot)
        response.ended.set()

    def _total(self) -> int:
        return sum(len(response.token_ids) for response in self._all)


def _body(batch: Sequence[OpenResponse], interval: int) -> dict[str, Any]:
    """The request for a batch; a response that has tokens goes on behind them."""
    return {
        "rid": [response.name for response in batch],
        "input_ids": [
            [*response.request.prompt_token_ids, *response.token_ids] for response in batch
        ],
        "sampling_params": [
            {
                "temperature": response.request.temperature,
                "max_new_tokens": response.request.max_response_tokens - len(response.token_ids),
                "stop_token_ids": sorted(response.request.stop_token_ids),
                "sampling_seed": response.request.seed,
                "stream_interval": interval,
            }
            for response in batch
        ],
        "return_logprob": True,
    }


def _finish_reason(response: OpenResponse, told: dict[str, Any]) -> FinishReason:
    """Raises EngineError for an end that nobody asked for."""
    request = response.request
    if told["type"] == "stop" and told.get("matched") in request.stop_token_ids:
        return FinishReason.STOP
    if told["type"] == "length" and len(response.token_ids) == request.max_response_tokens:
        return FinishReason.LENGTH
    if told["type"] == "abort" and response.aborted:
        return FinishReason.INTERRUPTED
    raise EngineError(
        f"SGLang ended a response after {len(response.token_ids)} tokens for no reason of ours:"
        f" {told}"
    )
