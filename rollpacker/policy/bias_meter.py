"""Does tail batching train shorter responses than the policy writes? The live answer.

The trained mean is over all trained responses. The uncensored mean is the Kaplan-Meier mean over
every response of the run: trained ones with their length; those of deferred draws, and those that
a trained group let go of (`response_speculation_factor`), with what they had (right-censored unless
finished). Each (draw, index) counts once, with its latest state.
Their ratio is 1 when nothing is lost, and falls below 1 when long responses go missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


def kaplan_meier_mean(finished: Mapping[int, int], censored: Mapping[int, int]) -> float:
    """Mean of the uncensored length, restricted to the longest one observed.

    Both arguments count responses by their length in tokens: `finished` ended there by themselves,
    `censored` had so many tokens when they were cut off. 0 where there is nothing.
    """
    lengths = sorted({*finished, *censored})
    at_risk = sum(finished.values()) + sum(censored.values())
    mean, survival, previous = 0.0, 1.0, 0
    for length in lengths:
        mean += survival * (length - previous)
        previous = length
        ended = finished.get(length, 0)
        if at_risk and ended:
            survival *= 1 - ended / at_risk
        at_risk -= ended + censored.get(length, 0)
    return mean


class BiasMeter:
    """Counts what was trained; the deferred part is passed in, because it changes every round."""

    def __init__(
        self,
        trained_lengths: Mapping[int, int] | None = None,
        cut_lengths: Mapping[int, int] | None = None,
    ) -> None:
        self.trained_lengths: Counter[int] = Counter(trained_lengths or {})
        self.cut_lengths: Counter[int] = Counter(cut_lengths or {})

    def add_trained(self, lengths: Iterable[int]) -> None:
        """Responses of a committed step, in tokens."""
        self.trained_lengths.update(lengths)

    def add_cut(self, lengths: Iterable[int]) -> None:
        """Responses that the step's groups let go of: tokens that they had."""
        self.cut_lengths.update(lengths)

    def trained_mean(self) -> float:
        """Mean trained length in tokens; 0 before the first step."""
        count = self.trained_lengths.total()
        tokens = sum(length * number for length, number in self.trained_lengths.items())
        return tokens / count if count else 0.0

    def uncensored_mean(self, deferred: Iterable[tuple[int, bool]]) -> float:
        """Kaplan-Meier mean in tokens; `deferred` holds (tokens so far, whether finished)."""
        finished = Counter(self.trained_lengths)
        censored = Counter(self.cut_lengths)
        for tokens, ended in deferred:
            (finished if ended else censored)[tokens] += 1
        return kaplan_meier_mean(finished, censored)

    def ratio(self, deferred: Iterable[tuple[int, bool]]) -> float:
        """Trained mean / uncensored mean; 1 before the first step."""
        uncensored = self.uncensored_mean(deferred)
        return self.trained_mean() / uncensored if uncensored else 1.0
