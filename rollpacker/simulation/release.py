"""When simulated rounds release replicas: the live rule, the fixed ones of Table 3, or idle ones.

A rule is asked after every event of a replica, as often as the schedule allows releases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rollpacker.policy.scale_down import (
    LengthHistory,
    ReplicaLoad,
    RunningResponse,
    ScaleDownRules,
    next_look,
    replicas_to_release,
)
from rollpacker.simulation.engine_model import ReplicaModel
from rollpacker.simulation.round_simulation import RoundSimulation
from rollpacker.simulation.scenario import Scenario


class AdaptiveRelease:
    """`policy.scale_down` on what the run has trained so far; asks as often as its rules say."""

    def __init__(self, cap: int, *, by_cap: bool = False) -> None:
        """`by_cap`: a running response is taken to need the whole cap, whatever was seen."""
        self._rules = ScaleDownRules()
        self._cap = cap
        self._by_cap = by_cap
        self._counts: Counter[int] = Counter()
        self._history = LengthHistory({})
        self._last_look: float | None = None

    def learn(self, lengths: Iterable[int]) -> None:
        """Of a finished round; also forgets the last look."""
        self._last_look = None
        if not self._by_cap:
            self._counts.update(lengths)
            self._history = LengthHistory(self._counts)

    def __call__(self, round_: RoundSimulation) -> tuple[str, ...]:
        share = round_.finished_responses / round_.launched_responses
        if not next_look(self._rules, share, self._last_look):
            return ()
        self._last_look = share
        loads = [_load(replica) for replica in round_.replicas.values()]
        return replicas_to_release(self._rules, loads, self._history, self._cap)


class IdleRelease:
    """Every replica that runs nothing, once nothing waits."""

    def learn(self, lengths: Iterable[int]) -> None:
        """Nothing to learn."""

    def __call__(self, round_: RoundSimulation) -> tuple[str, ...]:
        return round_.round.idle_replicas()


class FixedRelease:
    """The second half of the replicas, once a share of the responses has finished."""

    def __init__(self, share: float) -> None:
        self._share = share

    def learn(self, lengths: Iterable[int]) -> None:
        """Nothing to learn."""

    def __call__(self, round_: RoundSimulation) -> tuple[str, ...]:
        if round_.finished_responses < self._share * round_.launched_responses:
            return ()
        names = sorted(round_.replicas)
        return tuple(names[len(names) // 2 :]) if len(names) > 1 else ()


def release_rule(scenario: Scenario) -> AdaptiveRelease | IdleRelease | FixedRelease:
    """The rule of a scenario that scales down."""
    if scenario.release_share:
        return FixedRelease(scenario.release_share)
    if scenario.schedule.releases_idle:
        return IdleRelease()
    return AdaptiveRelease(scenario.workload.cap, by_cap=scenario.schedule.releases_by_cap)


def _load(replica: ReplicaModel) -> ReplicaLoad:
    running = tuple(
        RunningResponse(response.prompt_tokens, replica.tokens_of(response))
        for group in replica.groups.values()
        for response in group.values()
    )
    return ReplicaLoad(replica.replica_id, replica.speed.kv_capacity, running)
