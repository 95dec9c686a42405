"""Between `rollpacker.types` and the protobuf messages of `rollpacker.v1`; nothing else.

`x_to_proto` and `x_from_proto` are inverse to each other. Reading checks what a peer could get
wrong: an enum value that is unknown or unset raises WireError.
"""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from rollpacker import types
from rollpacker.v1 import rollout_service_pb2, trainer_service_pb2, types_pb2


class WireError(ValueError):
    """A message holds a value that this version cannot read."""


_FINISH_REASONS = {
    types.FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    types.FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    types.FinishReason.INTERRUPTED: types_pb2.FINISH_REASON_INTERRUPTED,
}
_FINISH_REASONS_BACK: dict[int, types.FinishReason] = {
    value: key for key, value in _FINISH_REASONS.items()
}
_ROUND_KINDS = {
    types.RoundKind.SHORT: types_pb2.ROUND_KIND_SHORT,
    types.RoundKind.LONG: types_pb2.ROUND_KIND_LONG,
    types.RoundKind.DRAIN: types_pb2.ROUND_KIND_DRAIN,
}
_ROUND_KINDS_BACK: dict[int, types.RoundKind] = {value: key for key, value in _ROUND_KINDS.items()}
_VERDICTS = {
    verdict: types_pb2.Verdict.Value(f"VERDICT_{verdict.name}") for verdict in types.Verdict
}
_VERDICTS_BACK: dict[int, types.Verdict] = {value: key for key, value in _VERDICTS.items()}
_GRADERS = {
    kind: types_pb2.GraderKind.Value(f"GRADER_KIND_{kind.name}") for kind in types.GraderKind
}
_GRADERS_BACK: dict[int, types.GraderKind] = {value: key for key, value in _GRADERS.items()}


def finish_reason_to_proto(reason: types.FinishReason) -> types_pb2.FinishReason.ValueType:
    return _FINISH_REASONS[reason]


def round_kind_to_proto(kind: types.RoundKind) -> types_pb2.RoundKind.ValueType:
    return _ROUND_KINDS[kind]


def round_kind_from_proto(kind: int) -> types.RoundKind:
    if kind not in _ROUND_KINDS_BACK:
        raise WireError(f"round_kind: {kind} is unknown")
    return _ROUND_KINDS_BACK[kind]


def verdict_to_proto(verdict: types.Verdict | None) -> types_pb2.Verdict.ValueType:
    """None (no reward could be given) is VERDICT_UNSPECIFIED."""
    return _VERDICTS[verdict] if verdict else types_pb2.VERDICT_UNSPECIFIED


def verdict_from_proto(verdict: int) -> types.Verdict | None:
    if verdict == types_pb2.VERDICT_UNSPECIFIED:
        return None
    if verdict not in _VERDICTS_BACK:
        raise WireError(f"verdict: {verdict} is unknown")
    return _VERDICTS_BACK[verdict]


def grader_kind_to_proto(kind: types.GraderKind) -> types_pb2.GraderKind.ValueType:
    return _GRADERS[kind]


def grader_kind_from_proto(kind: int) -> types.GraderKind:
    if kind not in _GRADERS_BACK:
        raise WireError(f"grader_kind: {kind} is unknown or unset")
    return _GRADERS_BACK[kind]


def timestamp_to_proto(seconds: float) -> Timestamp:
    """Seconds since the Unix epoch; whole microseconds survive."""
    microseconds = round(seconds * 1e6)
    return Timestamp(seconds=microseconds // 10**6, nanos=microseconds % 10**6 * 1000)


def timestamp_from_proto(timestamp: Timestamp) -> float:
    return timestamp.seconds + timestamp.nanos / 1e9


def draw_to_proto(draw: types.Draw) -> types_pb2.Draw:
    return types_pb2.Draw(
        epoch=draw.epoch,
        prompt_id=draw.prompt_id,
        seeds=draw.seeds,
        level=draw.level,
        first_step=draw.first_step,
    )


def draw_from_proto(draw: types_pb2.Draw) -> types.Draw:
    return types.Draw(
        epoch=draw.epoch,
        prompt_id=draw.prompt_id,
        seeds=tuple(draw.seeds),
        level=draw.level,
        first_step=draw.first_step,
    )


def sampling_to_proto(sampling: types.SamplingParameters) -> types_pb2.SamplingParameters:
    return types_pb2.SamplingParameters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_response_tokens=sampling.max_response_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )


def sampling_from_proto(sampling: types_pb2.SamplingParameters) -> types.SamplingParameters:
    return types.SamplingParameters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_response_tokens=sampling.max_response_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
    )


def response_to_proto(response: types.Response) -> types_pb2.Response:
    return types_pb2.Response(
        response_id=response.response_id,
        index=response.index,
        token_ids=response.token_ids,
        logprobs=response.logprobs,
        finish_reason=finish_reason_to_proto(response.finish_reason),
        weight_version=response.weight_version,
        seed=response.seed,
        segments=[
            types_pb2.Segment(role=s.role, token_count=s.token_count, trainable=s.trainable)
            for s in response.segments
        ],
        carried_token_count=response.carried_token_count,
        near_tie_count=response.near_tie_count,
        accepted_draft_token_count=response.accepted_draft_token_count,
    )


def response_from_proto(response: types_pb2.Response) -> types.Response:
    """Raises WireError for an unknown finish reason, InvalidResponseError for unfit logprobs."""
    if response.finish_reason not in _FINISH_REASONS_BACK:
        raise WireError(f"finish_reason: {response.finish_reason} is unknown or unset")
    result = types.Response(
        response_id=response.response_id,
        index=response.index,
        token_ids=tuple(response.token_ids),
        logprobs=tuple(response.logprobs),
        finish_reason=_FINISH_REASONS_BACK[response.finish_reason],
        weight_version=response.weight_version,
        seed=response.seed,
        segments=tuple(
            types.Segment(s.role, s.token_count, s.trainable) for s in response.segments
        ),
        carried_token_count=response.carried_token_count,
        near_tie_count=response.near_tie_count,
        accepted_draft_token_count=response.accepted_draft_token_count,
    )
    result.check()
    return result


def draft_to_proto(draft: types.Draft) -> types_pb2.Draft:
    return types_pb2.Draft(
        index=draft.index, token_ids=draft.token_ids, weight_version=draft.weight_version
    )


def draft_from_proto(draft: types_pb2.Draft) -> types.Draft:
    return types.Draft(draft.index, tuple(draft.token_ids), draft.weight_version)


def timing_to_proto(timing: types.ResponseTiming) -> types_pb2.ResponseTiming:
    return types_pb2.ResponseTiming(
        start_time=timestamp_to_proto(timing.start_time),
        end_time=timestamp_to_proto(timing.end_time),
        slot=timing.slot,
        replica_id=timing.replica_id,
    )


def timing_from_proto(timing: types_pb2.ResponseTiming) -> types.ResponseTiming:
    return types.ResponseTiming(
        start_time=timestamp_from_proto(timing.start_time),
        end_time=timestamp_from_proto(timing.end_time),
        slot=timing.slot,
        replica_id=timing.replica_id,
    )


def scored_response_to_proto(scored: types.ScoredResponse) -> types_pb2.ScoredResponse:
    return types_pb2.ScoredResponse(
        response=response_to_proto(scored.response),
        reward=scored.reward,
        advantage=scored.advantage,
        verdict=verdict_to_proto(scored.verdict),
        timing=timing_to_proto(scored.timing) if scored.timing else None,
        text=scored.text,
        score_start_time=timestamp_to_proto(scored.score_start_time),
        score_time=timestamp_to_proto(scored.score_time),
    )


def scored_response_from_proto(scored: types_pb2.ScoredResponse) -> types.ScoredResponse:
    return types.ScoredResponse(
        response=response_from_proto(scored.response),
        reward=scored.reward if scored.HasField("reward") else None,
        advantage=scored.advantage,
        verdict=verdict_from_proto(scored.verdict),
        timing=timing_from_proto(scored.timing) if scored.HasField("timing") else None,
        text=scored.text,
        score_start_time=timestamp_from_proto(scored.score_start_time),
        score_time=timestamp_from_proto(scored.score_time),
    )


def prompt_group_to_proto(group: types.PromptGroup) -> types_pb2.PromptGroup:
    return types_pb2.PromptGroup(
        run_id=group.run_id,
        step=group.step,
        draw=draw_to_proto(group.draw),
        prompt_token_ids=group.prompt_token_ids,
        responses=[scored_response_to_proto(response) for response in group.responses],
        weight_version=group.weight_version,
        race_key=group.race_key,
        selection_weight=group.selection_weight,
    )


def prompt_group_from_proto(group: types_pb2.PromptGroup) -> types.PromptGroup:
    return types.PromptGroup(
        run_id=group.run_id,
        step=group.step,
        draw=draw_from_proto(group.draw),
        prompt_token_ids=tuple(group.prompt_token_ids),
        responses=tuple(scored_response_from_proto(scored) for scored in group.responses),
        weight_version=group.weight_version,
        race_key=group.race_key,
        selection_weight=group.selection_weight if group.HasField("selection_weight") else 1.0,
    )


def engine_spec_to_proto(spec: types.EngineSpec) -> rollout_service_pb2.EngineSpec:
    return rollout_service_pb2.EngineSpec(
        run_id=spec.run_id,
        weight_version=spec.weight_version,
        weights_uri=spec.weights_uri,
        tensor_parallel_size=spec.tensor_parallel_size,
        memory_state=(
            rollout_service_pb2.MEMORY_STATE_RESIDENT
            if spec.resident
            else rollout_service_pb2.MEMORY_STATE_RELEASED
        ),
        weights_address=spec.weights_address,
    )


def engine_spec_from_proto(spec: rollout_service_pb2.EngineSpec) -> types.EngineSpec:
    return types.EngineSpec(
        run_id=spec.run_id,
        weight_version=spec.weight_version,
        weights_uri=spec.weights_uri,
        tensor_parallel_size=spec.tensor_parallel_size,
        resident=spec.memory_state != rollout_service_pb2.MEMORY_STATE_RELEASED,
        weights_address=spec.weights_address,
    )


def engine_stats_to_proto(stats: types.EngineStats) -> rollout_service_pb2.EngineStats:
    return rollout_service_pb2.EngineStats(
        preemption_count=stats.preemption_count,
        kv_cache_usage=stats.kv_cache_usage,
        running_response_count=stats.running_response_count,
        waiting_response_count=stats.waiting_response_count,
        gpu_count=stats.gpu_count,
        kv_budget_tokens=stats.kv_budget_tokens,
        slot_count=stats.slot_count,
        generated_token_count=stats.generated_token_count,
        context_tokens=stats.context_tokens,
        max_context_tokens=stats.max_context_tokens,
        weight_kv_tokens=stats.weight_kv_tokens,
    )


def engine_stats_from_proto(stats: rollout_service_pb2.EngineStats) -> types.EngineStats:
    return types.EngineStats(
        preemption_count=stats.preemption_count,
        kv_cache_usage=stats.kv_cache_usage,
        running_response_count=stats.running_response_count,
        waiting_response_count=stats.waiting_response_count,
        gpu_count=stats.gpu_count,
        kv_budget_tokens=stats.kv_budget_tokens,
        slot_count=stats.slot_count,
        generated_token_count=stats.generated_token_count,
        context_tokens=stats.context_tokens,
        max_context_tokens=stats.max_context_tokens,
        weight_kv_tokens=stats.weight_kv_tokens,
    )


def step_result_to_proto(result: types.StepResult) -> trainer_service_pb2.FinishStepResponse:
    return trainer_service_pb2.FinishStepResponse(
        weight_version=result.weight_version,
        weights_uri=result.weights_uri,
        metrics=dict(result.metrics),
        draws=[draw_to_proto(draw) for draw in result.draws],
    )


def step_result_from_proto(result: trainer_service_pb2.FinishStepResponse) -> types.StepResult:
    return types.StepResult(
        weight_version=result.weight_version,
        weights_uri=result.weights_uri,
        draws=tuple(draw_from_proto(draw) for draw in result.draws),
        metrics=dict(result.metrics),
    )
