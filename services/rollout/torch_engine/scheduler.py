"""Who runs: a pure policy over counts. It decides; the decode loop acts.

    waiting --admit--> running --finish--> gone
       ^------preempt-----'

Responses have an arrival number. Invariant: every running response arrived before every waiting
one. So admission is in order of arrival, the newest running response is the first to lose its
KV cache, and the oldest one always gets to its end: nobody starves and nothing deadlocks.

A response holds as many KV tokens as its prompt and response have; each step adds one to each.
Because every running response grows by one token per step, lengths are known without asking the
device: a response has `length_at_admission + steps since`. A draft counts in full until it is
checked, right after its admission. Nothing here touches a tensor.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from services.rollout.torch_engine.responses import ResponseState

_GROWTH_RESERVE = 16  # tokens per running response that admission leaves free, against thrashing


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do before the next step: let go of these, then prefill those."""

    preempted: list[ResponseState]
    admitted: list[ResponseState]


class Scheduler:
    """Slots and a KV budget, shared out in order of arrival."""

    def __init__(self, slot_count: int, kv_budget_tokens: int) -> None:
        self.step = 0
        self.preemption_count = 0
        self.held_tokens = 0  # of the running responses, once the coming step has run
        self.slot_count = slot_count
        self.kv_budget_tokens = kv_budget_tokens
        self._waiting: list[ResponseState] = []  # heap
        self._running: dict[int, ResponseState] = {}  # by arrival, oldest first
        self._free_slots = list(range(slot_count))  # heap

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def running(self) -> list[ResponseState]:
        """The running responses, oldest first."""
        return list(self._running.values())

    def submit(self, response: ResponseState) -> None:
        heapq.heappush(self._waiting, response)

    def plan(self) -> Plan:
        """Decide and book the next step's preemptions and admissions.

        The caller submits a preempted response again once its tokens are on the host.
        """
        preempted = []
        while self.held_tokens > self.kv_budget_tokens and len(self._running) > 1:
            newest = next(reversed(self._running.values()))
            preempted.append(newest)
            self.leave(newest)
            self.preemption_count += 1
        admitted = []
        while not preempted and self._waiting and self._free_slots and self._fits(self._waiting[0]):
            response = heapq.heappop(self._waiting)
            self._enter(response)
            admitted.append(response)
        return Plan(preempted, admitted)

    def advance(self) -> None:
        """A step has run: every running response has one token more."""
        self.step += 1
        self.held_tokens += len(self._running)

    def drop_draft(self, response: ResponseState, accepted: Sequence[int]) -> None:
        """The draft of a running response is checked: go on behind its accepted tokens."""
        self.held_tokens += len(accepted) - len(response.draft)
        response.token_ids += accepted
        response.accepted_tokens = len(accepted)
        response.draft = ()

    def leave(self, response: ResponseState) -> None:
        """Take a running response off its slot."""
        self.held_tokens -= response.held_tokens(self.step)
        del self._running[response.arrival]
        heapq.heappush(self._free_slots, response.slot)
        response.running = False

    def withdraw(self, response: ResponseState) -> None:
        """Take a waiting response out of the queue."""
        self._waiting.remove(response)
        heapq.heapify(self._waiting)

    def _enter(self, response: ResponseState) -> None:
        response.slot = heapq.heappop(self._free_slots)
        response.running = True
        response.admitted_step = self.step
        self._running[response.arrival] = response
        self.held_tokens += response.held_tokens(self.step)

    def _fits(self, response: ResponseState) -> bool:
        if not self._running:
            return True  # checked at submission: one response alone always fits
        reserve = _GROWTH_RESERVE * (len(self._running) + 1)
        needed = self.held_tokens + response.held_tokens(self.step) + reserve
        return needed <= self.kv_budget_tokens
