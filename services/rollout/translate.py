"""Between GenerateGroup's messages and the engine's requests and results; checks every field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollpacker import types, wire
from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.sampling import MAX_SEED
from rollpacker.v1 import rollout_service_pb2 as pb
from rollpacker.v1 import types_pb2
from services.rollout.engine import GenerationProgress, GenerationRequest, GenerationResult

_DEFAULT_PROGRESS_INTERVAL = 16
_invalid = InvalidArgumentError.field


@dataclass(frozen=True, slots=True)
class GroupCall:
    """One GenerateGroup call, checked."""

    run_id: str
    draw: types.Draw
    weight_version: int
    progress_interval_tokens: int
    indices: tuple[int, ...]
    requests: tuple[GenerationRequest, ...]  # one per index
    resumed: Mapping[int, types.Response]  # what was sampled elsewhere, by index

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(request.request_id for request in self.requests)

    def finished(self, result: GenerationResult, replica_id: str) -> pb.GenerateGroupResponse:
        """The message for a response that ended."""
        index = self._index(result.request_id)
        before = self.resumed.get(index)
        accepted = result.accepted_draft_tokens
        response = types.Response(
            response_id=types.response_id(self.run_id, self.draw.id, index),
            index=index,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            finish_reason=result.finish_reason,
            weight_version=self.weight_version,
            seed=self.draw.seeds[index],
            segments=(types.Segment(types.ASSISTANT, len(result.token_ids), trainable=True),),
            carried_token_count=result.carried_token_count,
            near_tie_count=result.near_tie_count,
            accepted_draft_token_count=accepted
            + (before.accepted_draft_token_count if before else 0),
        )
        timing = types.ResponseTiming(result.start_time, result.end_time, result.slot, replica_id)
        return pb.GenerateGroupResponse(
            finished=pb.FinishedResponse(
                response=wire.response_to_proto(response), timing=wire.timing_to_proto(timing)
            )
        )

    def progress(self, event: GenerationProgress) -> pb.GenerateGroupResponse:
        """The message for progress."""
        return pb.GenerateGroupResponse(
            progress=pb.GroupProgress(
                longest_response_tokens=event.longest_response_tokens,
                total_response_tokens=event.total_response_tokens,
                carried_response_tokens=event.carried_response_tokens,
                new_tokens=[
                    pb.NewTokens(
                        index=self._index(name),
                        token_ids=token_ids,
                        logprobs=event.new_logprobs.get(name, ()),
                    )
                    for name, token_ids in event.new_token_ids.items()
                ],
            )
        )

    def _index(self, request_id: str) -> int:
        return self.indices[self.request_ids.index(request_id)]


def group_call(request: pb.GenerateGroupRequest, call_number: int) -> GroupCall:
    """Check and translate a request; `call_number` keeps equal calls apart in the engine.

    Raises InvalidArgumentError, naming the field.
    """
    draw = wire.draw_from_proto(request.draw)
    _check_draw(request.run_id, draw)
    sampling = wire.sampling_from_proto(request.sampling)
    _check_sampling(sampling)
    if not request.prompt_token_ids:
        raise _invalid("prompt_token_ids", "is empty; a prompt has at least one token")
    if request.progress_interval_tokens < 0:
        raise _invalid(
            "progress_interval_tokens", f"{request.progress_interval_tokens} is below 0; 0 means 16"
        )
    indices = _indices(request.indices, len(draw.seeds))
    carried = _carried(request, draw, sampling, indices)
    drafts = _drafts(request, indices, carried)
    prompt, stops = tuple(request.prompt_token_ids), frozenset(sampling.stop_token_ids)
    requests = []
    for index in indices:
        prefix = carried.get(index)
        requests.append(
            GenerationRequest(
                request_id=f"{call_number}:{index:04d}",
                prompt_token_ids=prompt,
                seed=draw.seeds[index],
                temperature=sampling.temperature,
                max_response_tokens=sampling.max_response_tokens,
                stop_token_ids=stops,
                carried_token_ids=prefix.token_ids if prefix else (),
                carried_logprobs=prefix.logprobs if prefix else (),
                carried_near_ties=prefix.near_tie_count if prefix else 0,
                draft_token_ids=drafts.get(index, ()),
            )
        )
    return GroupCall(
        run_id=request.run_id,
        draw=draw,
        weight_version=request.weight_version,
        progress_interval_tokens=request.progress_interval_tokens or _DEFAULT_PROGRESS_INTERVAL,
        indices=indices,
        requests=tuple(requests),
        resumed=carried,
    )


def _check_draw(run_id: str, draw: types.Draw) -> None:
    if not run_id:
        raise _invalid("run_id", "is empty; name the run")
    if not draw.prompt_id:
        raise _invalid("draw.prompt_id", "is empty; name the prompt")
    if not draw.seeds:
        raise _invalid("draw.seeds", "is empty; give one seed per response")
    for seed in draw.seeds:
        if seed > MAX_SEED:
            raise _invalid("draw.seeds", f"{seed} has 64 bits; seeds have 63 (at most {MAX_SEED})")


def _check_sampling(sampling: types.SamplingParameters) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature > 0):
        raise _invalid(
            "sampling.temperature", f"{sampling.temperature} is not a finite number above 0"
        )
    if sampling.top_p != 1.0:
        raise _invalid(
            "sampling.top_p", f"{sampling.top_p} truncates, which this service does not do; use 1"
        )
    if sampling.top_k != 0:
        raise _invalid(
            "sampling.top_k", f"{sampling.top_k} truncates, which this service does not do; use 0"
        )
    if sampling.max_response_tokens < 1:
        raise _invalid(
            "sampling.max_response_tokens", f"{sampling.max_response_tokens} is not above 0"
        )


def _indices(given: Sequence[int], seed_count: int) -> tuple[int, ...]:
    for index in given:
        if not 0 <= index < seed_count:
            raise _invalid("indices", f"{index} names no seed; the draw has {seed_count}")
    if len(set(given)) != len(given):
        raise _invalid("indices", "one is named twice; name each response once")
    return tuple(given) or tuple(range(seed_count))


def _carried(
    request: pb.GenerateGroupRequest,
    draw: types.Draw,
    sampling: types.SamplingParameters,
    indices: Sequence[int],
) -> dict[int, types.Response]:
    """The prefixes to go on from, by index."""
    carried: dict[int, types.Response] = {}
    for place, message in enumerate(request.resume_from):
        name = f"resume_from[{place}]"
        response = _interrupted(message, name)
        if response.index not in indices or response.index in carried:
            raise _invalid(
                f"{name}.index", f"{response.index} is not asked for, or is resumed twice"
            )
        if response.weight_version != request.weight_version:
            raise _invalid(
                f"{name}.weight_version",
                f"{response.weight_version} is not the {request.weight_version} that is asked for;"
                " start the response afresh",
            )
        if response.seed != draw.seeds[response.index]:
            raise _invalid(f"{name}.seed", f"{response.seed} is not the draw's seed")
        if len(response.token_ids) >= sampling.max_response_tokens:
            raise _invalid(f"{name}.token_ids", "fill the cap already: it has ended")
        if not set(sampling.stop_token_ids).isdisjoint(response.token_ids):
            raise _invalid(f"{name}.token_ids", "hold a stop token: it has ended")
        carried[response.index] = response
    return carried


def _drafts(
    request: pb.GenerateGroupRequest,
    indices: Sequence[int],
    carried: Mapping[int, types.Response],
) -> dict[int, tuple[int, ...]]:
    """The guesses that are to be checked, by index."""
    drafts: dict[int, tuple[int, ...]] = {}
    for place, message in enumerate(request.drafts):
        draft = wire.draft_from_proto(message)
        if draft.index not in indices or draft.index in drafts:
            raise _invalid(
                f"drafts[{place}].index", f"{draft.index} is not asked for, or has two drafts"
            )
        if draft.index in carried:
            raise _invalid(
                f"drafts[{place}].index", f"{draft.index} is in resume_from too; send one of them"
            )
        drafts[draft.index] = draft.token_ids
    return drafts


def _interrupted(message: types_pb2.Response, name: str) -> types.Response:
    try:
        response = wire.response_from_proto(message)
    except (wire.WireError, types.InvalidResponseError) as error:
        raise _invalid(name, str(error)) from error
    if response.finish_reason is not types.FinishReason.INTERRUPTED:
        raise _invalid(
            f"{name}.finish_reason",
            f"{response.finish_reason.name}: only an INTERRUPTED response can go on",
        )
    return response
