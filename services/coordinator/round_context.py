"""What a round needs to know beyond its policy; its requests, and the check of their answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rollpacker import wire
from rollpacker.data.tokenizer import TextTokenizer
from rollpacker.policy.selection_weights import Selection
from rollpacker.types import (
    Draft,
    Draw,
    DrawId,
    InvalidResponseError,
    Prompt,
    Response,
    SamplingParameters,
)
from rollpacker.v1 import rollout_service_pb2
from services.coordinator.carry_over import LaunchParts

_PROGRESS_INTERVAL_TOKENS = 16
_STREAM_SECONDS = 600.0  # of a group's stream, apart from its tokens
_SLOWEST_SECONDS_PER_TOKEN = 1.0


@dataclass(frozen=True, slots=True)
class RoundContext:
    """One round of one run."""

    run_id: str
    step: int
    fence: int
    weight_version: int
    sampling: SamplingParameters
    draws: Mapping[DrawId, Draw]
    prompts: Mapping[DrawId, Prompt]
    tokenizer: TextTokenizer
    drafts: Mapping[DrawId, Sequence[Draft]] = field(default_factory=dict)  # of queued draws
    carry_over_max_tokens: int = 0  # per response, for the drafts that losers leave; 0: none
    selection: Selection | None = None  # by which groups are weighed; None: all count 1


def group_request(
    context: RoundContext, draw: DrawId, indices: Sequence[int], parts: LaunchParts
) -> rollout_service_pb2.GenerateGroupRequest:
    """What a replica is asked for."""
    return rollout_service_pb2.GenerateGroupRequest(
        run_id=context.run_id,
        step=context.step,
        fence=context.fence,
        draw=wire.draw_to_proto(context.draws[draw]),
        prompt_token_ids=context.prompts[draw].token_ids,
        weight_version=context.weight_version,
        sampling=wire.sampling_to_proto(context.sampling),
        indices=indices,
        progress_interval_tokens=_PROGRESS_INTERVAL_TOKENS,
        resume_from=[wire.response_to_proto(prefix) for prefix in parts.resume_from],
        drafts=[wire.draft_to_proto(draft) for draft in parts.drafts],
    )


def stream_seconds(context: RoundContext, waves: int) -> float:
    """The deadline of a group's stream whose responses run in so many waves."""
    tokens = waves * context.sampling.max_response_tokens
    return _STREAM_SECONDS + tokens * _SLOWEST_SECONDS_PER_TOKEN


def check_response(
    context: RoundContext, draw: DrawId, response: Response, missing: Collection[int]
) -> None:
    """Raise InvalidResponseError unless the response is one that was asked for."""
    seeds = context.draws[draw].seeds
    if response.index not in missing or response.seed != seeds[response.index]:
        raise InvalidResponseError(
            f"response {response.response_id}: index {response.index} with seed"
            f" {response.seed} was not asked for"
        )
    if response.weight_version != context.weight_version:
        raise InvalidResponseError(
            f"response {response.response_id}: weight version {response.weight_version},"
            f" asked for {context.weight_version}"
        )
    if len(response.token_ids) > context.sampling.max_response_tokens:
        raise InvalidResponseError(
            f"response {response.response_id}: {len(response.token_ids)} tokens, above the cap"
            f" of {context.sampling.max_response_tokens}"
        )
