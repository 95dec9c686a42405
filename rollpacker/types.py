"""The words of RollPacker, as frozen dataclasses: start here.

A *prompt* is launched as a *draw* (one launch of a prompt in an epoch, with its seeds).
A draw yields *responses*, which the reward service turns into *scored responses*; the accepted
ones together are a *prompt group*, the unit that the trainer consumes. A *round* is one rollout
phase, a *step* one optimizer update; they have the same number.

Nothing here does I/O or knows a wire format: `rollpacker.wire` translates to and from protobuf.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

ASSISTANT = "assistant"


class DrawId(NamedTuple):
    """Identity of a draw, everywhere: queues, response ids, seeds, records."""

    epoch: int
    prompt_id: str

    def __str__(self) -> str:
        return f"{self.epoch}:{self.prompt_id}"


class RoundKind(enum.Enum):
    """How a round was scheduled."""

    SHORT = "short"  # races more prompts than it keeps
    LONG = "long"  # runs as many prompts as it keeps
    DRAIN = "drain"  # the end of the data: empties the queues


class FinishReason(enum.Enum):
    """Why a response ended."""

    STOP = "stop"  # a stop token was sampled
    LENGTH = "length"  # the cap was reached
    INTERRUPTED = "interrupted"  # the engine let go of it; to be continued elsewhere


class GraderKind(enum.Enum):
    """Which grader scores a response."""

    MATH = "math"
    CODE = "code"
    JUDGE = "judge"
    REASONING_GYM = "reasoning_gym"
    CUSTOM = "custom"


class Verdict(enum.Enum):
    """How grading ended. A wrong answer is a verdict, never an error."""

    CORRECT = "CORRECT"
    INCORRECT = "INCORRECT"
    NO_ANSWER = "NO_ANSWER"
    NO_CODE = "NO_CODE"
    COMPILE_ERROR = "COMPILE_ERROR"
    CRASHED = "CRASHED"
    TIMED_OUT = "TIMED_OUT"
    MEMORY_LIMIT = "MEMORY_LIMIT"
    OUTPUT_LIMIT = "OUTPUT_LIMIT"
    FILE_LIMIT = "FILE_LIMIT"
    PROCESS_LIMIT = "PROCESS_LIMIT"
    UNSUPPORTED_LANGUAGE = "UNSUPPORTED_LANGUAGE"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data set, tokenized.

    The reference reaches the reward service alone; rollout and trainer see token ids only.
    """

    prompt_id: str  # unique within the data set
    token_ids: tuple[int, ...]  # at least one
    text: str  # as rendered, for graders and people
    grader_kind: GraderKind
    reference_json: str  # what the grader compares with
    domain: str = ""  # what accounts are kept by: the source's name, or the row's own word


@dataclass(frozen=True, slots=True)
class Draw:
    """One launch of a prompt in an epoch: the unit that is queued, trained and recorded."""

    epoch: int
    prompt_id: str
    seeds: tuple[int, ...]  # one per response, 63 bits, fixed at the first launch
    level: int = 0  # the queue it stands in; grows by one per deferral, up to deferral_levels
    first_step: int = 0  # step of its first launch

    @property
    def id(self) -> DrawId:
        return DrawId(self.epoch, self.prompt_id)

    def age(self, step: int) -> int:
        """Steps since the first launch."""
        return step - self.first_step


@dataclass(frozen=True, slots=True)
class LostRace:
    """What is known of a draw's length by the races that it has lost."""

    cut: int  # tokens; the longest response of its group had more
    step: int  # of the launch that had
    weight: float = 1.0  # of the races before (rollpacker/policy/selection_weights.py)


@dataclass(frozen=True, slots=True)
class DeferredDraw:
    """A draw in the long-prompt queue, with how far its responses were when it lost the race."""

    draw: Draw
    response_tokens: tuple[int, ...]  # so far, in order of index
    finished: tuple[bool, ...]  # whether the response had ended by itself
    lost: LostRace | None = None  # None: nothing that groups are weighed by


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens by one author."""

    role: str
    token_count: int
    trainable: bool


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How tokens are drawn. A response is a function of (weights, prompt, seed, these)."""

    temperature: float = 1.0  # divides the logits, > 0
    top_p: float = 1.0  # 1 switches it off
    top_k: int = 0  # 0 switches it off
    max_response_tokens: int = 1024  # cap of a response, in tokens
    stop_token_ids: tuple[int, ...] = ()

    def replays_by_seed(self) -> bool:
        """Whether the noise is indexed by token, so that a seed means the same under drift."""
        return self.top_p == 1.0 and self.top_k == 0


class InvalidResponseError(ValueError):
    """A response breaks the contract of its tokens and logprobs; it must not be trained."""


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled completion of a prompt."""

    response_id: str
    index: int  # place in the group; names the seed
    token_ids: tuple[int, ...]  # what was sampled, the stop token included
    logprobs: tuple[float, ...]  # natural log, under the sampling weights and temperature
    finish_reason: FinishReason
    weight_version: int  # weights that sampled every token
    seed: int
    segments: tuple[Segment, ...]  # token counts sum to the tokens
    carried_token_count: int = 0  # leading tokens taken over instead of decoded
    near_tie_count: int = 0  # positions whose two best scores were closer than 1e-4
    accepted_draft_token_count: int = 0  # of the carried tokens, those of a draft

    def check(self) -> None:
        """Raise InvalidResponseError unless tokens, logprobs and segments fit together."""
        if len(self.logprobs) != len(self.token_ids):
            raise InvalidResponseError(
                f"response {self.response_id}: {len(self.logprobs)} logprobs"
                f" for {len(self.token_ids)} tokens"
            )
        for position, logprob in enumerate(self.logprobs):
            if not (math.isfinite(logprob) and logprob <= 0.0):
                raise InvalidResponseError(
                    f"response {self.response_id}: logprob {logprob} at token {position}"
                    " is not a finite number <= 0"
                )
        covered = sum(segment.token_count for segment in self.segments)
        if covered != len(self.token_ids) or any(s.token_count < 0 for s in self.segments):
            raise InvalidResponseError(
                f"response {self.response_id}: segments cover {covered}"
                f" of {len(self.token_ids)} tokens"
            )


@dataclass(frozen=True, slots=True)
class Draft:
    """What a response held under other weights: a guess at what it holds now.

    It is never trained as it is. The engine takes over the longest prefix that the present weights
    sample too, with the response's own noise; so a draft changes how long a response takes, never
    the response.
    """

    index: int  # place in the group
    token_ids: tuple[int, ...]  # from the first token on
    weight_version: int  # weights that sampled them


@dataclass(frozen=True, slots=True)
class ResponseTiming:
    """When and where a response was decoded; for timelines only, it decides nothing."""

    start_time: float  # seconds since the Unix epoch
    end_time: float
    slot: int
    replica_id: str


@dataclass(frozen=True, slots=True)
class ScoredResponse:
    """A response with its reward and its group-relative advantage."""

    response: Response
    reward: float | None  # None: the reward service gave up
    advantage: float = 0.0
    verdict: Verdict | None = None
    text: str = ""  # what the grader saw
    timing: ResponseTiming | None = None
    score_start_time: float = 0.0  # seconds since the Unix epoch
    score_time: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """The accepted responses to one prompt: the unit the trainer consumes."""

    run_id: str
    step: int
    draw: Draw
    prompt_token_ids: tuple[int, ...]
    responses: tuple[ScoredResponse, ...]  # in order of index
    weight_version: int
    race_key: int  # longest response, in tokens
    selection_weight: float = 1.0  # how much it counts in the loss; 0: it is not trained


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What a rollout engine should look like."""

    run_id: str
    weight_version: int
    weights_uri: str
    tensor_parallel_size: int = 0  # 0 leaves it as it is
    resident: bool = True
    weights_address: str = ""  # who serves them where weights_uri cannot be read


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What routing and planning need to know about an engine."""

    preemption_count: int = 0
    kv_cache_usage: float = 0.0  # share of the budget, 0 to 1
    running_response_count: int = 0
    waiting_response_count: int = 0
    gpu_count: int = 0
    kv_budget_tokens: int = 0
    slot_count: int = 0
    generated_token_count: int = 0
    context_tokens: int = 0  # of the model that it holds; 0: it holds none
    max_context_tokens: int = 0  # that its settings allow; 0: as many as the model
    weight_kv_tokens: int = 0  # whose KV is as many bytes as the weights; 0: not known


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer update left behind; recorded, so that a repeat returns it."""

    weight_version: int
    weights_uri: str
    draws: tuple[Draw, ...]  # the draws that the update contains, in order
    metrics: Mapping[str, float] = field(default_factory=dict)


def response_id(run_id: str, draw: DrawId, index: int) -> str:
    """The id of a response; the same after a retry, a move or a replay."""
    return f"{run_id}:{draw.epoch}:{draw.prompt_id}:{index:04d}"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is kept of a committed step; its metrics are one line of metrics.jsonl."""

    step: int
    round_kind: RoundKind
    level: int  # deferral level of the round
    start_time: float  # start of the round, seconds since the Unix epoch
    rollout_end_time: float  # last accepted response
    end_time: float  # commit
    weight_version: int  # after the step
    draws: tuple[Draw, ...]  # trained, in order
    metrics: Mapping[str, float] = field(default_factory=dict)
    flat_draws: tuple[Draw, ...] = ()  # dropped by dynamic sampling: no response had an advantage
