"""Response lengths: the law of Fig. 2a, correlated within a prompt and between two launches.

A response has a normal score x = sqrt(rho) * z + sqrt(1 - rho) * e: z belongs to the prompt, e to
the seed. Its length is the inverse CDF of its task at Phi(x), cut at the cap. A draw that was
deferred keeps z; a response of it keeps e with probability c and gets a fresh one otherwise, where
c is the coupling after so many weight updates: c = 1 replays the response, c = 0 samples afresh,
and c is the correlation with the first length beyond what the prompt explains. A mixture, because
that is what was measured: the length correlation (0.83, 0.63, 0.56, 0.41 after 1, 2, 4, 8 updates)
is the share of identical responses (0.84, 0.74, 0.60, 0.41). A response that has changed once stays
changed.

That table is of responses of some twenty tokens. What happens is that tokens change: each with a
small probability per update, about proportional to the learning rate (`benchmarks/drift.py`), and
what follows the first changed one is another response. So, the other model: a response changes
first at token X, exponential with mean 1 / (changes per token and update * updates). If it ends
before, it is the same again; else its length is drawn afresh, given that it is longer than X. Long
responses hardly ever stay the same then, but most stay long.

Everything is a function of (seed, draw number): two modes that are given the same workload see the
same lengths (common random numbers).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rollpacker.simulation.parameters import paper_figures

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TASKS = ("math", "code", "judge")
MIX = "mix"  # a third of each, as in the paper
NEVER_STOP_RATIO = {"math": 1.0, "code": 0.9, "judge": 0.14}  # of the cap shares of Fig. 2a
_QUANTILES = (5, 10, 25, 50, 60, 70, 75, 80, 85, 90, 92, 94, 95)

# Measured on the tiny model of the demo at learning rate 1e-4 (256 responses, seeded against the
# same responses `age` updates before). Real learning rates drift far less, so this is pessimistic.
MEASURED_COUPLING = {0: 1.0, 1: 0.83, 2: 0.63, 4: 0.56, 8: 0.41}
MEASURED_ACCEPTANCE = {0: 1.0, 1: 0.54, 2: 0.54, 4: 0.44, 8: 0.35}  # draft tokens of long responses


def by_age(table: Mapping[int, float], age: int) -> float:
    """A measured table at any age: linear in log(1 + age), constant behind its last entry."""
    ages = sorted(table)
    return float(
        np.interp(math.log1p(age), [math.log1p(a) for a in ages], [table[a] for a in ages])
    )


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """Inverse CDF of a task's length in tokens: Fig. 2a to p95, a Pareto tail, then never."""

    task: str
    never_stop_share: float

    def quantile(self, u: Floats) -> Floats:
        """Lengths in tokens at the probabilities u; infinite for responses that never stop."""
        points, lengths, index = _body(self.task)
        lengths_at = np.exp(np.interp(u, points, np.log(lengths)))
        tail = lengths[-1] * (np.maximum(1.0 - u, 1e-12) / 0.05) ** (-1.0 / index)
        return np.where(
            u >= 1.0 - self.never_stop_share, np.inf, np.where(u > 0.95, tail, lengths_at)
        )


@cache
def _body(task: str) -> tuple[Floats, Floats, float]:
    """(probabilities, lengths in tokens) of Fig. 2a, and the tail index between p90 and p95."""
    row = paper_figures()["fig2a_response_length_quantiles_vec"][task]
    lengths = np.array([row[f"p{number:02d}"] for number in _QUANTILES], dtype=float)
    index = math.log(2.0) / math.log(row["p95"] / row["p90"])
    return np.array(_QUANTILES) / 100.0, lengths, index


@cache
def _normal_table() -> tuple[Floats, Floats]:
    scores = np.linspace(-6.0, 6.0, 4801)
    normal = NormalDist()
    return scores, np.array([normal.cdf(float(score)) for score in scores])


def normal_cdf(scores: Floats) -> Floats:
    """Phi, by table: error below 1e-6."""
    table, values = _normal_table()
    return np.interp(scores, table, values)


def _normal_quantile(shares: Floats) -> Floats:
    """The inverse of `normal_cdf`, between -6 and 6."""
    table, values = _normal_table()
    return np.interp(shares, values, table)


@cache
def _length_table(task: str, never_stop_share: float) -> tuple[Floats, Floats]:
    """(probabilities, lengths in tokens) of a task, finer towards the longest, which are finite."""
    law = LengthLaw(task, never_stop_share * NEVER_STOP_RATIO[task])
    ends = 1.0 - law.never_stop_share
    shares = np.concatenate([np.linspace(0.0, 0.95, 400), ends - np.geomspace(0.05, 1e-6, 400)])
    shares = np.unique(np.clip(shares, 0.0, ends - 1e-9))
    return shares, law.quantile(shares)


@dataclass(frozen=True, slots=True)
class WorkloadRules:
    """What the lengths are drawn from."""

    cap: int  # max_response_tokens
    prompt_correlation: float  # rho
    never_stop_share: float  # of math and code
    task: str = MIX
    seed: int = 0
    width: int = 16  # responses per draw that have a noise of their own
    length_growth: float = 1.0  # factor on all lengths by the last draw, linear in the draw number


class Workload:
    """Draws 0, 1, 2, ... with their tasks and the lengths of their responses."""

    def __init__(self, rules: WorkloadRules, count: int) -> None:
        self.rules = rules
        generator = np.random.Generator(np.random.PCG64([rules.seed, 11]))
        self._prompt_scores: Floats = generator.standard_normal(count)
        self._noise: Floats = generator.standard_normal((count, rules.width))
        self._changes: Floats = np.random.Generator(np.random.PCG64([rules.seed, 37])).random(
            self._noise.shape
        )  # the coupling below which a response has changed
        self._fresh: dict[int, Floats] = {}  # noise of later launches
        if rules.task == MIX:
            self.tasks: Ints = generator.integers(0, len(TASKS), count)
        else:
            self.tasks = np.full(count, TASKS.index(rules.task), dtype=np.int64)
        self.first_lengths: Ints = self._lengths(np.arange(count), self._noise)

    def __len__(self) -> int:
        return len(self.tasks)

    def task(self, number: int) -> str:
        """The task of a draw."""
        return TASKS[int(self.tasks[number])]

    def lengths(self, number: int, coupling: float = 1.0, launch: int = 0) -> list[int]:
        """Tokens of each response of a draw in its `launch`-th launch; coupling c as at the top."""
        if coupling >= 1.0 or launch == 0:
            first: list[int] = self.first_lengths[number].tolist()
            return first
        again: list[int] = self.lengths_again(np.array([number]), coupling, launch)[0].tolist()
        return again

    def lengths_again(self, numbers: Ints, coupling: float, launch: int) -> Ints:
        """Tokens of the responses of these draws in a later launch; [draws, width]."""
        fresh = self._fresh_noise(launch)[numbers]
        kept = self._changes[numbers] < coupling
        return self._lengths(numbers, np.where(kept, self._noise[numbers], fresh))

    def first_changes(self, number: int, changes_per_token: float) -> Floats:
        """Tokens of each response of a draw before its first changed one; infinite for none."""
        with np.errstate(divide="ignore"):
            positions: Floats = -np.log1p(-self._changes[number]) / changes_per_token
        return positions

    def lengths_changed(self, number: int, changes_per_token: float, launch: int) -> list[int]:
        """Tokens of each response of a draw in a later launch, by the model of changed tokens."""
        first = self.first_lengths[number]
        if not changes_per_token:
            unchanged: list[int] = first.tolist()
            return unchanged
        before = self.first_changes(number, changes_per_token)
        rho = self.rules.prompt_correlation
        least = (self._scores_of(before, number) - math.sqrt(rho) * self._prompt_scores[number]) / (
            math.sqrt(max(1e-12, 1.0 - rho))
        )
        below = normal_cdf(least)
        share = normal_cdf(self._fresh_noise(launch)[number])
        noise = _normal_quantile(below + share * (1.0 - below))
        longer = self._lengths(np.array([number]), noise[None, :])[0]
        floor = np.minimum(before + 1.0, self.rules.cap).astype(np.int64)
        found: list[int] = np.where(before >= first, first, np.maximum(longer, floor)).tolist()
        return found

    def _scores_of(self, tokens: Floats, number: int) -> Floats:
        """Normal scores of responses of so many tokens to a draw's task."""
        growth = 1.0 + (self.rules.length_growth - 1.0) * number / max(1, len(self.tasks) - 1)
        shares, lengths = _length_table(self.task(number), self.rules.never_stop_share)
        return _normal_quantile(np.interp(tokens / growth, lengths, shares))

    def _fresh_noise(self, launch: int) -> Floats:
        if launch not in self._fresh:
            generator = np.random.Generator(np.random.PCG64([self.rules.seed, 31, launch]))
            self._fresh[launch] = generator.standard_normal(self._noise.shape)
        return self._fresh[launch]

    def _lengths(self, numbers: Ints, noise: Floats) -> Ints:
        rho = self.rules.prompt_correlation
        scores = math.sqrt(rho) * self._prompt_scores[numbers][:, None] + math.sqrt(1 - rho) * noise
        u = normal_cdf(scores)
        lengths = np.empty_like(u)
        for code, task in enumerate(TASKS):
            rows = self.tasks[numbers] == code
            law = LengthLaw(task, self.rules.never_stop_share * NEVER_STOP_RATIO[task])
            lengths[rows] = law.quantile(u[rows])
        growth = 1.0 + (self.rules.length_growth - 1.0) * numbers / max(1, len(self.tasks) - 1)
        lengths *= growth[:, None]
        return np.clip(lengths, 1, self.rules.cap).astype(np.int64)


class RecordedWorkload:
    """Lengths of a real run: one row of response lengths per draw, in data order."""

    def __init__(self, lengths: Sequence[Sequence[int]], task: str = "math") -> None:
        self._rows = [list(row) for row in lengths]
        self._task = task

    def __len__(self) -> int:
        return len(self._rows)

    def task(self, number: int) -> str:  # noqa: ARG002  one task per recording
        """The task of a draw."""
        return self._task

    def lengths(self, number: int, coupling: float = 1.0, launch: int = 0) -> list[int]:  # noqa: ARG002
        """As recorded, whatever the launch."""
        return self._rows[number]
