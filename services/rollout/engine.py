"""The `Engine` protocol: what the rollout service asks of an inference engine.

An engine serves one set of weights at a time. A response is a pure function of (weights, prompt,
seed, sampling parameters), whatever else is in the batch and however often it was preempted,
moved or replayed. All methods are called from one asyncio event loop; an engine may compute
elsewhere (a thread, a child process), but results arrive on that loop.

    EngineError                 the engine failed, or was asked at the wrong moment
     +- PromptTooLongError      prompt and cap together can never fit
     +- WeightsNotFoundError    no complete weights at the given place
     +- InvalidRequestError     something of the request must change; `field` says what
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollpacker.types import EngineStats, FinishReason


class EngineError(Exception):
    """The engine cannot do what it was asked; the message says why and what to do."""


class PromptTooLongError(EngineError):
    """Prompt and response cap together exceed the context length or the whole KV budget."""


class WeightsNotFoundError(EngineError):
    """No complete weights at the given place."""


class InvalidRequestError(EngineError):
    """The engine can never serve this request; `field` is the part of it to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to sample."""

    request_id: str  # unique among the requests that run
    prompt_token_ids: tuple[int, ...]  # requests of one `generate` call share it
    seed: int  # 63 bits
    temperature: float
    max_response_tokens: int  # carried tokens count
    stop_token_ids: frozenset[int]
    # A prefix sampled earlier by the same weights (after a move): taken over, not sampled again.
    carried_token_ids: tuple[int, ...] = ()
    carried_logprobs: tuple[float, ...] = ()
    carried_near_ties: int = 0
    # A guess at the tokens behind the carried ones. The engine takes over the longest prefix that
    # these weights sample too; the result is the same without it. An engine may ignore it.
    draft_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A response that finished, or was aborted or interrupted (then: its tokens so far)."""

    request_id: str
    token_ids: tuple[int, ...]  # carried tokens included
    logprobs: tuple[float, ...]
    finish_reason: FinishReason  # INTERRUPTED when aborted
    carried_token_count: int  # not decoded here: the carried ones and those of an accepted draft
    near_tie_count: int  # carried ones included
    slot: int  # -1 if it never ran
    start_time: float  # seconds since the Unix epoch
    end_time: float
    accepted_draft_tokens: int = 0  # of the carried tokens


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """How far the requests of one `generate` call are; carried tokens count."""

    longest_response_tokens: int
    total_response_tokens: int
    carried_response_tokens: int = 0  # of the total: taken over instead of decoded
    # By request, what running responses gained since the last progress (at first: carried tokens
    # too). Together they are the draft that is left when a call is cancelled. May be left out.
    new_token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Of the same tokens, from an engine that ignores drafts: they can be carried elsewhere then.
    new_logprobs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class Engine(Protocol):
    """One inference engine."""

    @property
    def kind(self) -> str:
        """ "torch" or "sglang"."""
        ...

    @property
    def replays_by_seed(self) -> bool:
        """Whether a seed gives the same response whatever else runs."""
        ...

    @property
    def changes_tensor_parallel_size(self) -> bool:
        """Whether `load_weights` may ask for another one."""
        ...

    async def load_weights(self, directory: Path, tensor_parallel_size: int = 0) -> None:
        """Serve the weights of a Hugging Face model directory (config.json, *.safetensors).

        The first call builds the model; later ones of the same architecture swap in place.
        No request may be running (EngineError). Every cache that depends on weights is dropped.
        `tensor_parallel_size` 0 leaves it as it is.
        Raises WeightsNotFoundError, or InvalidRequestError (`weights_uri`,
        `tensor_parallel_size`); on any error the previous weights stay in force.
        """
        ...

    async def release(self) -> None:
        """Give up the memory of weights and caches until the next `load_weights`.

        No request may be running (EngineError). Releasing twice is fine.
        """
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], progress_interval_tokens: int
    ) -> AsyncGenerator[GenerationResult | GenerationProgress]:
        """Sample all requests (one prompt); yield each result as it finishes, progress between.

        The requests are in the engine's hands once the first item is asked for: an `abort` or
        `load_weights` that is called later sees them. Progress comes at least once per
        `progress_interval_tokens` of the longest response. Closing the iterator aborts what still
        runs. Raises PromptTooLongError, InvalidRequestError, EngineError.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> list[GenerationResult]:
        """Stop requests and return their tokens so far; unknown or finished ids are left out.

        An aborted request also yields its INTERRUPTED result on its `generate` iterator.
        """
        ...

    def stats(self) -> EngineStats:
        """Load and counters now."""
        ...

    async def wait_failed(self) -> EngineError:
        """Return why the engine is broken, once it is; a broken engine refuses everything."""
        ...

    async def close(self) -> None:
        """Abort everything and free the engine's resources."""
        ...
