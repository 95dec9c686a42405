"""What history says about the tokens that a response of each draw will need.

A deferred draw is expected to need at least what its longest response had when it lost; a new one
what a trained response had on average, and half of the cap while nothing was trained. It decides
where and in which order groups run, never who wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollpacker.policy.bias_meter import BiasMeter
from rollpacker.store.records import RunState
from rollpacker.types import Draw, DrawId, Prompt


def expected_tokens(
    state: RunState, draws: Iterable[Draw], prompts: Mapping[DrawId, Prompt], cap: int
) -> dict[DrawId, int]:
    """KV tokens of one response, prompt included, by draw."""
    known = {item.draw.id: max(item.response_tokens, default=0) for item in state.deferred}
    mean = round(BiasMeter(state.totals.trained_lengths).trained_mean()) or cap // 2
    return {
        draw.id: len(prompts[draw.id].token_ids) + min(cap, max(1, known.get(draw.id) or mean))
        for draw in draws
    }
