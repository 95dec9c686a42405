"""What is simulated: a model on a cluster, a workload, a mode and how fast the weights drift."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rollpacker.policy.tail_batching import RaceKind, TailBatchingRules
from rollpacker.simulation.parameters import ModelFacts
from rollpacker.simulation.schedule import PLAIN, Schedule
from rollpacker.simulation.workload import (
    MEASURED_ACCEPTANCE,
    MEASURED_COUPLING,
    RecordedWorkload,
    Workload,
    WorkloadRules,
    by_age,
)


def _one(age: int) -> float:  # noqa: ARG001  whatever the age
    return 1.0


def _zero(age: int) -> float:  # noqa: ARG001
    return 0.0


def _always(share: float, age: int) -> float:  # noqa: ARG001
    return share


def _measured_coupling(age: int) -> float:
    return by_age(MEASURED_COUPLING, age)


def _measured_acceptance(age: int) -> float:
    return by_age(MEASURED_ACCEPTANCE, age)


@dataclass(frozen=True, slots=True)
class Drift:
    """What is left of a deferred response after `age` weight updates: the same or another one."""

    coupling: Callable[[int], float] = _one  # correlation of its noise with the first launch
    acceptance: Callable[[int], float] | None = None  # share of draft tokens kept; None: no drafts

    def lengths(
        self, workload: Workload | RecordedWorkload, number: int, age: int, launch: int
    ) -> list[int]:
        """Tokens of each response of a draw."""
        return workload.lengths(number, self.coupling(age), launch)

    def accepted(
        self,
        workload: Workload | RecordedWorkload,  # noqa: ARG002  the share is the same for all
        number: int,  # noqa: ARG002
        age: int,
        drafts: Sequence[int],
    ) -> list[int]:
        """Tokens of each draft that need no decoding."""
        share = self.acceptance(age) if self.acceptance else 0.0
        return [int(share * tokens) for tokens in drafts]


@dataclass(frozen=True, slots=True)
class TokenDrift:
    """Tokens change, and what follows a changed one is another response."""

    changes_per_token: float  # and update
    drafts: bool = True

    def lengths(
        self, workload: Workload | RecordedWorkload, number: int, age: int, launch: int
    ) -> list[int]:
        """Tokens of each response of a draw; of drawn lengths only, not of recorded ones."""
        assert isinstance(workload, Workload)
        return workload.lengths_changed(number, self.changes_per_token * age, launch)

    def accepted(
        self,
        workload: Workload | RecordedWorkload,
        number: int,
        age: int,
        drafts: Sequence[int],
    ) -> list[int]:
        """Tokens of each draft that need no decoding: those before the first changed one, as if a
        draft were of the first launch."""
        if not self.drafts or not drafts:
            return [0] * len(drafts)
        assert isinstance(workload, Workload)
        before = workload.first_changes(number, self.changes_per_token * age)
        return [int(min(a, b)) for a, b in zip(drafts, before, strict=False)]


FROZEN = Drift()  # weights hardly move: a deferred response is the same again
MEASURED = Drift(_measured_coupling)
MEASURED_CARRY_OVER = Drift(_measured_coupling, _measured_acceptance)
FRESH = Drift(_zero)


def carried(share: float) -> Drift:
    """The same response again, with a fixed share of its tokens carried over."""
    return Drift(_one, partial(_always, share))


SYNCHRONOUS = TailBatchingRules(128, 8, race=RaceKind.TOKENS, streams=False)
OVERLAP = TailBatchingRules(128, 8, race=RaceKind.TOKENS)
PAPER = TailBatchingRules(128, 8, (1.25,), 1.25, race=RaceKind.ARRIVAL, keeps_seeds=False)


def ladder(*factors: float, max_age: int = 32) -> TailBatchingRules:
    """Mode `exact`: seeds kept, eta_R = 1, a race in tokens."""
    return TailBatchingRules(128, 8, factors, max_deferral_age=max_age)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run."""

    model: ModelFacts
    workload: WorkloadRules
    rules: TailBatchingRules
    drift: Drift | TokenDrift = field(default=FROZEN)
    steps: int = 10  # prompts for so many steps are drawn; the queue is drained behind them
    gpus: int = 0  # 0: the paper's for this model
    tensor_parallel_size: int = 0  # where the rules name none; 0: the paper's for this model
    resize_seconds: float | None = None  # of engines between two rounds; None: the parameter's
    adaptive_timeouts: bool = True
    knows_anchors: bool = False  # of the time limits, from an earlier epoch
    scales_down: bool = False  # release replicas to training during a round
    release_share: float = 0.0  # release then, whatever the KV need; 0: the live rule
    fetches_once: bool = False  # released replicas train what is there at the release, no more
    scores: bool = True  # False: rewards take no time (rollout only)
    schedule: Schedule = PLAIN  # how rounds are laid over the replicas
    redraws: int = 0  # of a response that was cut and comes out shorter than it was, at most
    admission_responses: int = 0  # running responses per replica; 0: the engine's own limit

    @property
    def gpu_count(self) -> int:
        """GPUs of the run."""
        return self.gpus or self.model.gpus
