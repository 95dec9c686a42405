"""Work for idle replicas: the prompts of later rounds are begun in the bubbles of this one.

Their tokens come from weights that are not those of their round, so they are drafts: the engine
checks them against the new weights in one prefill, and only what these sample too is taken over.
What is trained stays on-policy; a draft that was not accepted is waste.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.simulation.engine_model import ReplicaModel, RunningResponse
from rollpacker.simulation.engine_speed import EngineSpeed
from rollpacker.types import DrawId


@dataclass(frozen=True, slots=True)
class BubbleDraft:
    """What a draw has of each response before its first launch."""

    step: int  # whose weights sampled it
    tokens: tuple[int, ...]


def begin(
    step: int,
    prompts: Sequence[tuple[int, Sequence[int]]],
    idle_seconds: Sequence[float],
    speed: EngineSpeed,
    prompt_tokens: int,
) -> dict[int, BubbleDraft]:
    """Begin prompts (number, lengths) on replicas that are idle for so long, in turn."""
    idle = [seconds for seconds in idle_seconds if seconds > 0.0]
    drafts = {}
    for place, seconds in enumerate(idle):
        replica = ReplicaModel("bubble", speed)
        begun = {}
        for number, lengths in prompts[place :: len(idle)]:
            draw = DrawId(0, str(number))
            begun[number] = [
                RunningResponse(draw, index, length, prompt_tokens)
                for index, length in enumerate(lengths)
            ]
            replica.launch(0.0, begun[number])
        while replica.next_event_at() <= seconds:
            replica.run_to_event()
        replica.advance(seconds)
        for number, responses in begun.items():
            tokens = tuple(replica.tokens_of(response) for response in responses)
            drafts[number] = BubbleDraft(step, tokens)
    return drafts
