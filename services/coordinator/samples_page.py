"""ListSamples: the trained groups that a request asks for, a page at a time, from the files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rollpacker import wire
from rollpacker.rpc.errors import InvalidArgumentError, NotFoundError
from rollpacker.types import PromptGroup, ScoredResponse
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import types_pb2
from services.coordinator.outputs import read_step_samples

_MAX_PAGE = 1000
_PAGE_BYTES = 16 << 20  # a message holds four times as much
_PAGE_TOKEN = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")


def samples_page(
    directory: Path, step_count: int, request: pb.ListSamplesRequest
) -> pb.ListSamplesResponse:
    """One page; blocks on the disk. `step_count`: committed steps.

    Raises NotFoundError (STEP_NOT_FOUND), InvalidArgumentError.
    """
    if not 0 <= request.page_size <= _MAX_PAGE:
        raise InvalidArgumentError.field(
            "page_size", f"{request.page_size} is outside 0 to {_MAX_PAGE}"
        )
    last = request.last_step if request.HasField("last_step") else request.step
    if last < request.step:
        raise InvalidArgumentError.field(
            "last_step", f"{last} is below step {request.step}; give the first one as step"
        )
    step, skip = _place(request)
    answer, size = pb.ListSamplesResponse(), 0
    for number in range(step, last + 1):
        groups = read_step_samples(directory, number)
        if groups is None and number == request.step:
            raise NotFoundError(
                "STEP_NOT_FOUND",
                f"run {request.run_id} has no samples of step {number};"
                f" {step_count} steps are committed",
            )
        if groups is None:
            break
        for index, group in enumerate(_passing(groups, request)):
            if number == step and index < skip:
                continue
            message = _message(group, request)
            size += message.ByteSize()
            full = len(answer.groups) == (request.page_size or _MAX_PAGE)
            if full or (answer.groups and size > _PAGE_BYTES):
                answer.next_page_token = f"{number}:{index}"
                return answer
            answer.groups.append(message)
    return answer


def _place(request: pb.ListSamplesRequest) -> tuple[int, int]:
    """The step, and how many of its groups were on pages before."""
    if not request.page_token:
        return request.step, 0
    match = _PAGE_TOKEN.fullmatch(request.page_token)
    if not match:
        raise InvalidArgumentError.field(
            "page_token", f"{request.page_token!r:.80} is not a next_page_token of ListSamples"
        )
    return int(match[1]), int(match[2])


def _passing(groups: list[PromptGroup], request: pb.ListSamplesRequest) -> Iterator[PromptGroup]:
    for group in groups:
        if request.prompt_id and group.draw.prompt_id != request.prompt_id:
            continue
        responses = tuple(scored for scored in group.responses if _passes(scored, request))
        if responses or not (group.responses or _filters(request)):
            yield replace(group, responses=responses)


def _filters(request: pb.ListSamplesRequest) -> bool:
    """Whether some response might not pass."""
    names = ("verdicts", "min_reward", "max_reward", "min_tokens", "max_tokens", "finish_reason")
    return any(field.name in names for field, _ in request.ListFields())


def _passes(scored: ScoredResponse, request: pb.ListSamplesRequest) -> bool:
    response, reward = scored.response, scored.reward
    verdict = wire.verdict_to_proto(scored.verdict)
    tokens = len(response.token_ids)
    reason = request.finish_reason
    return (
        (not request.verdicts or verdict in request.verdicts)
        and (not request.HasField("min_reward") or _at_least(reward, request.min_reward))
        and (not request.HasField("max_reward") or _at_least(request.max_reward, reward))
        and tokens >= request.min_tokens
        and (not request.max_tokens or tokens <= request.max_tokens)
        and (not reason or wire.finish_reason_to_proto(response.finish_reason) == reason)
    )


def _at_least(left: float | None, right: float | None) -> bool:
    """Without a reward nothing holds."""
    return left is not None and right is not None and left >= right


def _message(group: PromptGroup, request: pb.ListSamplesRequest) -> types_pb2.PromptGroup:
    message = wire.prompt_group_to_proto(group)
    if request.without_tokens:
        message.ClearField("prompt_token_ids")
        for scored in message.responses:
            scored.response.ClearField("token_ids")
            scored.response.ClearField("logprobs")
    return message
