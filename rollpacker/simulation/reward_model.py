"""The reward service on the virtual clock: dispatcher, sandbox slots, one judge.

Every response of math and code passes the dispatcher, one after the other; a program then takes a
sandbox slot for its run time, cut at the adaptive time limit of `policy.timeouts`; the judge serves
one response after the other. None of them grows with the number of GPUs (this is what Fig. 14
shows: the step time grows with the batch even when the GPUs do). Without streaming, the three
graders run one after the other (the paper's baseline); with it, each as responses arrive.

Run times follow Fig. 7a; a correct program never runs into the limit. A response that was cut off
at the cap holds no program, so nothing is run for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollpacker.policy.timeouts import TimeoutRules, next_anchor, time_limit
from rollpacker.simulation.parameters import Parameters, paper_figures

_QUANTILES = (0.10, 0.25, 0.50, 0.75, 0.90, 0.92, 0.94)


@dataclass(frozen=True, slots=True)
class Score:
    """When a response has its reward, and which."""

    at: float
    reward: float
    seconds: float  # that it took by itself


class RewardModel:
    """Serves all rounds of a run; anchors of the time limit stay over rounds."""

    def __init__(
        self,
        parameters: Parameters,
        seed: int,
        *,
        adaptive_timeouts: bool,
        knows_anchors: bool = False,
    ) -> None:
        """`knows_anchors`: each program was run in an earlier epoch, so a limit is adapted."""
        self._knows_anchors = knows_anchors
        self._parameters = parameters
        self._rules = TimeoutRules()
        self._adaptive = adaptive_timeouts
        row = paper_figures()["fig7a_sandbox_seconds_vec"]
        self._seconds = np.array([row[f"p{round(q * 100)}"] for q in _QUANTILES])
        self._endless = 1.0 - float(row["timeout_share"])
        self._random = np.random.Generator(np.random.PCG64([seed, 23]))
        self._anchors: dict[int, float | None] = {}
        self._dispatcher_free_at = 0.0
        self._judge_free_at = 0.0
        self._slots = [0.0] * int(parameters["sandbox_slots"])
        self.busy_seconds = 0.0  # of the judge

    def room(self, task: str) -> int:
        """Responses of a task that are here at once: twice what is worked on, as in a live run."""
        return 2 * (len(self._slots) if task == "code" else 1)

    def score(self, at: float, prompt: int, task: str, *, is_cut: bool = False) -> Score:
        """A response that arrives at `at`; `is_cut`: at the cap."""
        correct = bool(self._random.random() < self._parameters["correct_share"])
        reward = float(correct)
        if task == "judge":
            seconds = self._parameters["judge_seconds_per_response"]
            self.busy_seconds += seconds
            self._judge_free_at = max(self._judge_free_at, at) + seconds
            return Score(self._judge_free_at, reward, seconds)
        seconds = self._parameters[f"{task}_seconds"]
        self._dispatcher_free_at = max(self._dispatcher_free_at, at) + seconds
        if task == "math":
            return Score(self._dispatcher_free_at, reward, seconds)
        if is_cut:
            return Score(self._dispatcher_free_at, 0.0, seconds)
        at, run = self._sandbox(self._dispatcher_free_at, prompt, correct=correct)
        return Score(at, reward, seconds + run)

    def score_in_turn(self, at: float, responses: Sequence[tuple[int, str, bool]]) -> list[Score]:
        """A whole step's (prompt, task, is_cut), one grader after the other; in the order given."""
        scores: dict[int, Score] = {}
        for task in ("math", "code", "judge"):
            mine = [place for place, item in enumerate(responses) if item[1] == task]
            for place in mine:
                prompt, _, is_cut = responses[place]
                scores[place] = self.score(at, prompt, task, is_cut=is_cut)
            at = max([at, *(scores[place].at for place in mine)])
        return [scores[place] for place in range(len(responses))]

    def _sandbox(self, at: float, prompt: int, *, correct: bool) -> tuple[float, float]:
        """When a program is done, and how long it ran."""
        u = float(self._random.random())
        if correct:
            u *= _QUANTILES[-1]
        run_time = float(np.interp(u, _QUANTILES, self._seconds))
        if u > self._endless:
            run_time = self._rules.max_seconds
        if self._adaptive and self._knows_anchors and prompt not in self._anchors:
            self._anchors[prompt] = self._earlier_anchor()
        anchor = self._anchors.get(prompt) if self._adaptive else None
        seconds = min(run_time, time_limit(self._rules, anchor))
        self._anchors[prompt] = next_anchor(self._anchors.get(prompt), run_time, correct=correct)
        start = max(at, heapq.heappop(self._slots))
        heapq.heappush(self._slots, start + seconds)
        return start + seconds, seconds

    def _earlier_anchor(self) -> float:
        """The longest correct run among eight responses."""
        shares = self._random.random(8) * _QUANTILES[-1]
        return float(np.interp(shares, _QUANTILES, self._seconds).max())
