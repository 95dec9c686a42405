"""Does tail batching train shorter responses than the policy writes? The live answer.

The trained mean is over all trained responses. The uncensored mean is over what the first launches
of all draws, trained or queued, would have come to (`first_lengths`). Where groups let go of
responses (`response_speculation_factor`), that is the Kaplan-Meier mean for the draws that were
launched once: those responses are right-censored, with what they had. The ratio of the two is 1
when nothing is lost, and falls below 1 when long responses go missing: because they wait, because
they were let go of, or because they came out shorter when their draw was launched again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollpacker.policy.commands import FinishRound
from rollpacker.policy.first_lengths import first_lengths_from_json, first_lengths_to_json
from rollpacker.types import DeferredDraw, DrawId

Lengths = Mapping[int, int] | Mapping[float, int]  # tokens -> responses


@dataclass(frozen=True, slots=True)
class LengthBias:
    """What the meter reads."""

    trained_mean: float  # tokens; 0 before the first step
    uncensored_mean: float  # tokens
    ratio: float  # of the two; 1 before the first step
    shorter_again_share: float  # of trained responses that had been cut off before; 0: none had


def kaplan_meier_mean(finished: Lengths, censored: Lengths) -> float:
    """Mean of the uncensored length, restricted to the longest one observed.

    Both arguments count responses by their length in tokens: `finished` ended there by themselves,
    `censored` had so many tokens when they were cut off. 0 where there is nothing.
    """
    ends = [(length, False, count) for length, count in finished.items()]
    cuts = [(length, True, count) for length, count in censored.items()]
    at_risk = sum(finished.values()) + sum(censored.values())
    mean, survival, previous = 0.0, 1.0, 0.0
    for length, is_cut, count in sorted([*ends, *cuts]):  # who ends goes before who is cut
        mean += survival * (length - previous)
        previous = length
        if not is_cut:
            survival *= 1 - count / at_risk
        at_risk -= count
    return mean


class BiasMeter:
    """Counts what rounds trained and put off; the queue is passed in, as the run has it."""

    def __init__(
        self,
        trained_lengths: Mapping[int, int] | None = None,
        cut_lengths: Mapping[int, int] | None = None,
        first_lengths: Mapping[str, Any] | None = None,
    ) -> None:
        self.trained_lengths: Counter[int] = Counter(trained_lengths or {})
        self.cut_lengths: Counter[int] = Counter(cut_lengths or {})
        self._first = first_lengths_from_json(first_lengths or {})

    @property
    def first_lengths(self) -> dict[str, Any]:
        """What is known of first launches, as JSON values."""
        return first_lengths_to_json(self._first)

    def add_round(
        self,
        queue: Iterable[DeferredDraw],
        trained: Mapping[DrawId, Mapping[int, int]],
        finish: FinishRound,
    ) -> None:
        """A round of a step that is to be committed.

        `queue`: as it was before the round; `trained`: tokens of the responses by index, by draw.
        """
        waiting = {item.draw.id: item for item in queue}
        for draw, lengths in trained.items():
            self.trained_lengths.update(lengths.values())
            item = waiting.pop(draw, None)
            if item is not None:
                self._first.add_trained(item, lengths)
        for draw in finish.flat:
            waiting.pop(draw, None)
        self._first.keep_queue(waiting, finish.deferred)
        self.cut_lengths.update(finish.cut_tokens)

    def trained_mean(self) -> float:
        """Mean trained length in tokens; 0 before the first step."""
        return _mean(self.trained_lengths)

    def read(self, queue: Iterable[DeferredDraw]) -> LengthBias:
        """The bias so far; `queue` is the present one."""
        trained = self.trained_mean()
        first = self._first.lengths(self.trained_lengths, queue)
        uncensored = _mean(first)
        if self.cut_lengths:
            once = self.trained_lengths - self._first.redrawn
            longer = kaplan_meier_mean(once, self.cut_lengths) - _mean(once)
            uncensored += longer * once.total() / max(1, first.total())
        return LengthBias(
            trained,
            uncensored,
            trained / uncensored if uncensored else 1.0,
            self._first.shorter_again / max(1, self._first.cut_before),
        )


def _mean(lengths: Lengths) -> float:
    """Mean of lengths that are counted; 0 where there is nothing."""
    count = sum(lengths.values())
    tokens = math.fsum(length * number for length, number in lengths.items())
    return tokens / count if count else 0.0
