"""Which replicas a round gives to training while its last responses still run (paper, section 4.4).

From 20 % of a round's responses on, at each further 5 %, half of the rollout replicas may be
released, once per round, if the responses that still run would fit the KV cache of the kept ones
at their projected peak:

    sum over running responses of (prompt + E[min(L, cap) | L > generated])
        <= KV budget of the kept replicas * (1 - margin)

With `idle_only` a replica is released as soon as it runs nothing and no group waits, as often as
there is one, whatever its KV need: no running response moves or gets slower.

Everything is in tokens; bytes per token are the same on both sides. The expectation is taken over
the lengths that the run has seen so far.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScaleDownRules:
    """When a release is considered, and how cautious it is."""

    first_share: float = 0.20  # of the round's responses finished
    every_share: float = 0.05  # further responses between two looks
    margin: float = 0.10  # KV budget that stays free
    idle_only: bool = False  # release replicas that run nothing instead of half of them


@dataclass(frozen=True, slots=True)
class RunningResponse:
    """A response that would have to fit."""

    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica that serves the round."""

    replica_id: str
    kv_budget_tokens: int
    running: tuple[RunningResponse, ...]


class LengthHistory:
    """Lengths of finished responses, for conditional expectations."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        """`counts`: responses by length in tokens."""
        self._lengths = sorted(length for length, count in counts.items() if count > 0)
        self._counts_from = [0]  # responses, and their tokens, from the i-th longest length down
        self._tokens_from = [0]
        for length in reversed(self._lengths):
            self._counts_from.append(self._counts_from[-1] + counts[length])
            self._tokens_from.append(self._tokens_from[-1] + counts[length] * length)

    def expected_length(self, generated: int, cap: int) -> float:
        """E[min(L, cap) | L > generated] in tokens; the cap where no such response was seen."""
        longer = len(self._lengths) - bisect.bisect_right(self._lengths, generated)
        if longer == 0 or generated >= cap:
            return float(cap)
        capped = len(self._lengths) - bisect.bisect_left(self._lengths, cap)
        capped = min(capped, longer)
        count = self._counts_from[longer]
        below_cap = self._tokens_from[longer] - self._tokens_from[capped]
        return (below_cap + cap * self._counts_from[capped]) / count


class ScaleDown:
    """The releases of one round: asked after every event, it names the replicas to release now."""

    def __init__(
        self, rules: ScaleDownRules, trained_lengths: Mapping[int, int], response_cap: int
    ) -> None:
        """`trained_lengths`: responses that the run has trained, by length in tokens."""
        self._rules = rules
        self._history = LengthHistory(trained_lengths)
        self._cap = response_cap
        self._last_look: float | None = None
        self._released = False

    def look(
        self,
        finished_share: float,
        idle: Sequence[str],
        loads: Callable[[], Sequence[ReplicaLoad]],
    ) -> tuple[str, ...]:
        """The replicas to release now; `idle` run nothing and are not needed any more. `loads` is
        asked only when a look is due."""
        if self._rules.idle_only:
            return tuple(idle)
        if self._released or not next_look(self._rules, finished_share, self._last_look):
            return ()
        self._last_look = finished_share
        names = replicas_to_release(self._rules, loads(), self._history, self._cap)
        self._released = bool(names)
        return names


def next_look(rules: ScaleDownRules, finished_share: float, last_look: float | None) -> bool:
    """Whether a release is considered now; `last_look` is the share at the look before."""
    if last_look is None:
        return finished_share >= rules.first_share
    return finished_share >= last_look + rules.every_share - 1e-9


def replicas_to_release(
    rules: ScaleDownRules, replicas: Sequence[ReplicaLoad], history: LengthHistory, cap: int
) -> tuple[str, ...]:
    """The replicas to give to training now, or none: the emptier half, if the rest can hold all.

    `cap` is max_response_tokens. A single replica is never released.
    """
    if len(replicas) < 2:
        return ()
    by_load = sorted(replicas, key=lambda r: (_peak(r.running, history, cap), r.replica_id))
    released = by_load[: len(replicas) // 2]
    kept = by_load[len(replicas) // 2 :]
    need = sum(_peak(replica.running, history, cap) for replica in replicas)
    room = sum(replica.kv_budget_tokens for replica in kept) * (1 - rules.margin)
    return tuple(replica.replica_id for replica in released) if need <= room else ()


def _peak(running: Sequence[RunningResponse], history: LengthHistory, cap: int) -> float:
    return sum(r.prompt_tokens + history.expected_length(r.generated_tokens, cap) for r in running)
