"""Responses on their way through the engine, and the groups that they belong to: host state only.

Lengths are known without asking the device, because a running response gains one token per step.
A draft stands in `draft` until it is checked, right after the first admission; then its accepted
tokens are part of `token_ids` and the rest is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rollpacker.types import FinishReason
from services.rollout.engine import GenerationProgress, GenerationRequest, GenerationResult

Event = GenerationResult | GenerationProgress


@dataclass(slots=True, eq=False)
class Group:
    """The responses of one `generate` call."""

    emit: Callable[[Event], None]
    progress_interval: int
    responses: list[ResponseState] = field(default_factory=list)
    reported_tokens: int = 0  # longest response at the last progress
    reported_step: int = -1  # of the last progress, or of the first admission
    check_pending: bool = False  # a progress check stands in the calendar


@dataclass(slots=True, eq=False)
class ResponseState:
    """One response on its way. `token_ids` are those known on the host, up to its admission."""

    request: GenerationRequest
    group: Group
    arrival: int
    token_ids: list[int]
    logprobs: list[float]
    near_ties: int
    draft: tuple[int, ...] = ()  # until it is checked: a guess at what comes behind token_ids
    accepted_tokens: int = 0  # of the draft
    told_tokens: int = 0  # that progress has told
    slot: int = -1  # kept after the response has left it
    running: bool = False
    admitted_step: int = 0
    start_time: float = 0.0

    def __lt__(self, other: ResponseState) -> bool:
        return self.arrival < other.arrival

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and response tokens known on the host."""
        return (*self.request.prompt_token_ids, *self.token_ids)

    @property
    def room(self) -> int:
        """Tokens below the cap at its last admission."""
        return self.request.max_response_tokens - len(self.token_ids)

    @property
    def carried_tokens(self) -> int:
        """Tokens that were not decoded here."""
        return len(self.request.carried_token_ids) + self.accepted_tokens

    def sampled(self, step: int) -> int:
        """Tokens sampled since the last admission."""
        return step - self.admitted_step if self.running else 0

    def response_tokens(self, step: int) -> int:
        """Tokens of the response so far."""
        return len(self.token_ids) + self.sampled(step)

    def held_tokens(self, step: int) -> int:
        """KV tokens that it needs once the coming step has run."""
        return len(self.request.prompt_token_ids) + self.response_tokens(step) + len(self.draft)

    @property
    def untold_from(self) -> int:
        """Place, since its admission, of the first token that progress has not told."""
        return max(0, self.told_tokens - len(self.token_ids))

    @property
    def end_of_draft(self) -> FinishReason | None:
        """How the response ends if its whole draft is accepted; None: it goes on."""
        if self.draft[-1] in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.draft) == self.room else None


def useful_draft(request: GenerationRequest) -> tuple[int, ...]:
    """The draft of a request up to its first stop token, and to the cap."""
    room = request.max_response_tokens - len(request.carried_token_ids)
    draft = request.draft_token_ids[:room]
    ends = (place for place, token in enumerate(draft) if token in request.stop_token_ids)
    return draft[: next(ends, len(draft)) + 1]
