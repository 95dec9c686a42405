"""A replica with continuous batching on the virtual clock, in runs of equal decode steps.

    add --KV room--> RUNNING --its last token--> finished (an event for the caller)
          |             | KV full: the one that was admitted last
          +-> WAITING <-+ (its tokens are kept, its KV is recomputed by a prefill when it returns)

All running responses advance by one token per step, so between two events (a response ends, a
watched token is reached, the KV cache is full) only a count of steps matters; their time is a
quadratic in that count, because the KV cache grows by the batch in each step. Work per event is
O(log n), whatever the number of tokens.

`watch(tokens)` asks for an event when a response has so many tokens, and at each token beyond,
until its group leaves: one number for all, so it costs the same whatever runs.
What never happens: a token is decoded twice (an eviction costs a prefill, not a decode); the KV
cache holds more than its capacity, except for a single response that alone exceeds it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rollpacker.simulation.engine_speed import EngineSpeed
from rollpacker.types import DrawId


@dataclass(slots=True, eq=False)
class RunningResponse:
    """A response on a replica; while it runs it has `step - offset` tokens."""

    draw: DrawId
    index: int
    length: int  # tokens at which it ends
    prompt_tokens: int
    offset: int = 0
    tokens: int = 0  # while it waits
    carried: int = 0  # tokens that it was launched with: a moved prefix, an accepted draft
    running: bool = False
    is_watched: bool = True
    watch_key: int = 0  # it is heard of so many steps behind the tokens that are watched for
    recomputes: bool = False  # its prompt is not shared with a group that is prefilled anyway


@dataclass(frozen=True, slots=True)
class Reached:
    """A response has reached its end, or else the tokens that are watched for."""

    response: RunningResponse
    tokens: int
    finished: bool


class ReplicaModel:
    """See the top of the file."""

    def __init__(self, replica_id: str, speed: EngineSpeed) -> None:
        self.replica_id = replica_id
        self.speed = speed
        self.now = 0.0  # seconds, of the last step boundary
        self._asked_until = 0.0
        self.step = 0
        self.kv_tokens = 0
        self.decoded_tokens = 0
        self.preemptions = 0
        self.busy_seconds = 0.0
        self.groups: dict[DrawId, dict[int, RunningResponse]] = {}
        self._running: dict[RunningResponse, None] = {}  # in order of admission
        self._waiting: deque[RunningResponse] = deque()
        self._ends: list[tuple[int, int, RunningResponse]] = []  # (step, tie-break, response)
        self._watched_tokens: int | None = None
        self._watched: list[tuple[int, int, RunningResponse]] = []  # (key, ..), longest first
        self._pushes = 0

    # --- what the caller asks for -----------------------------------------------------------

    def launch(self, at: float, responses: Iterable[RunningResponse]) -> None:
        """Take responses of one group; their prompt is prefilled once."""
        self._advance_to(at)
        shared = True
        for response in responses:
            self.groups.setdefault(response.draw, {})[response.index] = response
            response.recomputes = response.tokens > 0 or shared
            shared = False
            self._waiting.append(response)
        self._admit()

    def abort(self, at: float, draw: DrawId) -> list[RunningResponse]:
        """Let go of a group; returns its unfinished responses with their tokens so far."""
        self._advance_to(at)
        dropped = list(self.groups.pop(draw, {}).values())
        for response in dropped:
            if response.running:
                self._stop(response)
            else:
                self._waiting.remove(response)
        if dropped:
            self._admit()
        return dropped

    def watch(self, tokens: int) -> list[Reached]:
        """Hear from now on of each running response with so many tokens; those that have them."""
        self._watched_tokens = tokens
        return self._take_watched()

    def tokens_of(self, response: RunningResponse) -> int:
        """Tokens of an unfinished response at the last step boundary."""
        return self.step - response.offset if response.running else response.tokens

    def next_event_at(self) -> float:
        """When something happens next, if nothing else is asked for; infinite when idle."""
        steps = self._steps_to_event()
        return math.inf if steps is None else self.now + self._seconds(steps)

    def run_to_event(self) -> list[Reached]:
        """Go to `next_event_at`; an eviction is an event of which the caller hears nothing."""
        steps = self._steps_to_event()
        if steps is None:
            return []
        self._run(steps)
        reached = self._take_reached()
        if any(item.finished for item in reached):
            self._admit()
        self._evict()
        return reached

    def advance(self, at: float) -> None:
        """Go on in whole steps to a time that lies before the next event."""
        self._advance_to(at)

    # --- how it gets there ------------------------------------------------------------------

    def _seconds(self, steps: int) -> float:
        n = len(self._running)
        speed = self.speed
        return steps * speed.step_seconds(n, self.kv_tokens) + (
            speed.per_kv_token_seconds * n * steps * (steps - 1) / 2
        )

    def _steps_within(self, seconds: float) -> int:
        """The most whole steps that fit."""
        n = len(self._running)
        first = self.speed.step_seconds(n, self.kv_tokens)
        growth = self.speed.per_kv_token_seconds * n
        if growth * seconds < 1e-9 * first * first:
            return int(seconds / first)
        linear = first - growth / 2
        return int((math.sqrt(linear * linear + 2 * growth * seconds) - linear) / growth)

    def _steps_to_event(self) -> int | None:
        if not self._running:
            return None
        while not self._is_end(self._ends[0]):
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self.step
        if (watched := self._watched_step()) is not None:
            steps = min(steps, max(0, watched - self.step))
        if len(self._running) > 1:
            room = max(0, self.speed.kv_capacity - self.kv_tokens) // len(self._running)
            steps = min(steps, room)
        return steps

    def _run(self, steps: int) -> None:
        if steps <= 0:
            return
        seconds = self._seconds(steps)
        self.now += seconds
        self.busy_seconds += seconds
        self.step += steps
        tokens = steps * len(self._running)
        self.kv_tokens += tokens
        self.decoded_tokens += tokens

    def _advance_to(self, at: float) -> None:
        if not self._running:
            self.now = max(self.now, at)
            self._asked_until = max(self._asked_until, at)
            return
        if at <= self._asked_until:  # whoever leaves makes steps shorter, but not those before
            return
        self._asked_until = at
        limit = self._steps_to_event()
        assert limit is not None, "a running response always has an end"
        if at > self.now:
            self._run(min(limit, self._steps_within(at - self.now)))

    def _take_reached(self) -> list[Reached]:
        reached = []
        ends = self._ends
        while ends and ends[0][0] <= self.step:
            entry = heapq.heappop(ends)
            response = entry[2]
            if self._is_end(entry):
                self._stop(response)
                group = self.groups[response.draw]
                del group[response.index]
                if not group:
                    del self.groups[response.draw]
                reached.append(Reached(response, response.length, finished=True))
        return reached + self._take_watched()

    def _take_watched(self) -> list[Reached]:
        reached = []
        while (step := self._watched_step()) is not None and step <= self.step:
            assert self._watched_tokens is not None
            response = heapq.heappop(self._watched)[2]
            self._watch(response, self.step + 1 - self._watched_tokens)
            reached.append(Reached(response, self.step - response.offset, finished=False))
        return reached

    def _watched_step(self) -> int | None:
        """When a response has the tokens that are watched for, next."""
        if self._watched_tokens is None:
            return None
        watched = self._watched
        while watched and not self._is_watched(watched[0]):
            heapq.heappop(watched)
        return watched[0][0] + self._watched_tokens if watched else None

    def _admit(self) -> None:
        """First come, first served, while the KV cache has room for what is known."""
        limit = self.speed.kv_capacity
        while self._waiting and len(self._running) < self.speed.max_running:
            response = self._waiting[0]
            need = response.prompt_tokens + response.tokens
            headroom = 8 * (len(self._running) + 1)
            if self._running and self.kv_tokens + need + headroom > limit:
                return
            self._waiting.popleft()
            self._start(response)

    def _start(self, response: RunningResponse) -> None:
        need = response.prompt_tokens + response.tokens
        if response.recomputes:
            seconds = need * self.speed.prefill_seconds
            self.now += seconds
            self.busy_seconds += seconds
        response.running = True
        response.offset = self.step - response.tokens
        self.kv_tokens += need
        self._running[response] = None
        self._pushes += 1
        heapq.heappush(self._ends, (response.offset + response.length, self._pushes, response))
        if response.is_watched:
            self._watch(response, response.offset)

    def _stop(self, response: RunningResponse) -> None:
        response.tokens = self.step - response.offset
        response.running = False
        self.kv_tokens -= response.prompt_tokens + response.tokens
        del self._running[response]

    def _evict(self) -> None:
        while (
            len(self._running) > 1 and self.kv_tokens + len(self._running) > self.speed.kv_capacity
        ):
            response = next(reversed(self._running))
            self._stop(response)
            response.recomputes = True
            self._waiting.appendleft(response)
            self.preemptions += 1

    def _watch(self, response: RunningResponse, key: int) -> None:
        response.watch_key = key
        self._pushes += 1
        heapq.heappush(self._watched, (key, self._pushes, response))

    def _is_watched(self, entry: tuple[int, int, RunningResponse]) -> bool:
        key, _, response = entry
        return response.running and response.watch_key == key

    def _is_end(self, entry: tuple[int, int, RunningResponse]) -> bool:
        step, _, response = entry
        return response.running and step - response.offset == response.length
