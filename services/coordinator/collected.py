"""Finished responses with what has come in for them, and the prompt groups made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker.policy.commands import EmitGroup
from rollpacker.types import DrawId, PromptGroup, Response, ResponseTiming, ScoredResponse
from services.coordinator.reward_client import Score
from services.coordinator.round_context import RoundContext


@dataclass(slots=True)
class CollectedResponse:
    """A finished response; its score comes later."""

    response: Response
    timing: ResponseTiming
    text: str
    score: Score | None = None


def prompt_group(
    context: RoundContext,
    command: EmitGroup,
    collected: Mapping[tuple[DrawId, int], CollectedResponse],
) -> PromptGroup:
    """The group that the round wants in the sample stream."""
    scored = [
        _scored(collected[command.draw, index], advantage)
        for index, advantage in zip(command.indices, command.advantages, strict=True)
    ]
    lengths = [len(item.response.token_ids) for item in scored]
    selection = context.selection
    return PromptGroup(
        run_id=context.run_id,
        step=context.step,
        draw=context.draws[command.draw],
        prompt_token_ids=context.prompts[command.draw].token_ids,
        responses=tuple(scored),
        weight_version=context.weight_version,
        race_key=max(lengths),
        selection_weight=selection.weight(command.draw, lengths) if selection else 1.0,
    )


def _scored(collected: CollectedResponse, advantage: float) -> ScoredResponse:
    score = collected.score
    assert score is not None, "the round emits scored responses only"
    return ScoredResponse(
        response=collected.response,
        reward=score.reward,
        advantage=advantage,
        verdict=score.verdict,
        text=collected.text,
        timing=collected.timing,
        score_start_time=score.start_time,
        score_time=score.end_time,
    )
