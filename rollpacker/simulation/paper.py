"""The paper's figures from the simulator, with one set of parameters.

Each `Value` is one published number with ours beside it. Fig. 11 and Fig. 10c are what the
parameters were fitted to; all others are predictions. Runs are cached by what they simulate, so
that a figure which shows a run again does not run it again.

Reading of the paper where it leaves room: Fig. 11 has no rewards and no training in it, and each
cap has the model of section 6.1; a round's `rollout` in Fig. 10 lasts until its rewards are in,
where they stream; Fig. 13c is 7B on code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from rollpacker.policy.tail_batching import RaceKind, TailBatchingRules
from rollpacker.simulation.calibration import CAPS, FIG11_TASK, flat
from rollpacker.simulation.parameters import MODELS, Parameters, paper_figures
from rollpacker.simulation.scenario import FRESH, OVERLAP, PAPER, SYNCHRONOUS, Scenario
from rollpacker.simulation.schedule import AS_PUBLISHED
from rollpacker.simulation.simulator import Simulator, StepTrace
from rollpacker.simulation.summary import mean_rollout, mean_step, of_kind, stages
from rollpacker.simulation.workload import MIX, WorkloadRules
from rollpacker.types import RoundKind

FITTED_FIGURES = ("fig11", "fig10c")
PREDICTED_PER_FITTED = 3
_NO_FACTOR = 1.0 + 1e-12  # a short round that launches exactly P0 prompts
_MIX_STEPS = 20
_STAGES = ("sync", "rollout", "reward", "train")


@dataclass(frozen=True, slots=True)
class Value:
    """A published number and ours."""

    figure: str
    key: str
    paper: float
    ours: float

    @property
    def relative_error(self) -> float:
        """Of ours, signed."""
        return self.ours / self.paper - 1.0

    @property
    def predicted(self) -> bool:
        """Whether no parameter was fitted to it."""
        return self.figure not in FITTED_FIGURES

    def to_row(self) -> dict[str, Any]:
        """As the report prints it."""
        return {
            "figure": self.figure,
            "key": self.key,
            "paper": self.paper,
            "ours": round(self.ours, 4),
            "relative_error": round(self.relative_error, 4),
            "predicted": self.predicted,
        }


class PaperRuns:
    """Runs the paper's systems on demand, each once."""

    def __init__(self, parameters: Parameters, steps: int = _MIX_STEPS) -> None:
        """`steps`: length of the runs on the task mix; whole periods of five."""
        self.parameters = parameters
        self._steps = steps
        self._done: dict[Any, list[StepTrace]] = {}

    def run(
        self,
        model: str,
        rules: TailBatchingRules,
        task: str = MIX,
        steps: int = 0,
        **changes: Any,
    ) -> list[StepTrace]:
        """All steps of a run; `changes` are fields of Scenario. Groups are spread, as there."""
        steps = steps or self._steps
        key = (model, rules, task, steps, tuple(sorted(changes.items())))
        if key not in self._done:
            facts = MODELS[model]
            workload = WorkloadRules(
                facts.max_response_tokens,
                self.parameters["prompt_correlation"],
                self.parameters["never_stop_share"],
                task,
            )
            scenario = Scenario(
                facts,
                workload,
                rules,
                FRESH,
                steps=steps,
                schedule=AS_PUBLISHED,
                knows_anchors=True,
                **changes,
            )
            self._done[key] = list(Simulator(scenario, self.parameters).steps())
        return self._done[key]

    def system(self, model: str, name: str) -> list[StepTrace]:
        """One of Table 2's systems, cumulative, on the task mix."""
        unstreamed = dataclasses.replace(PAPER, streams=False)
        return {
            "synchronous": partial(self.run, model, SYNCHRONOUS, steps=10, adaptive_timeouts=False),
            "rlhfuse": partial(self.run, model, OVERLAP, steps=10, adaptive_timeouts=False),
            "tail_batching": partial(self.run, model, unstreamed, adaptive_timeouts=False),
            "reward": partial(self.run, model, PAPER),
            "parallelism": partial(self.run, model, PAPER),
            "stream_trainer": partial(self.run, model, PAPER, scales_down=True),
        }[name]()


def fig11(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """Rollout seconds over a full period of short and long rounds."""
    for cap, model in CAPS.items():
        run = partial(runs.run, model, task=FIG11_TASK, scores=False)
        yield f"{cap}.synchronous", mean_rollout(run(SYNCHRONOUS, steps=40))
        for factor in (1.125, 1.25, 1.5):
            rules = _rules(_NO_FACTOR, factor)
            yield f"{cap}.responses_only.{factor}", mean_rollout(run(rules, steps=40))
        for factor, steps in ((1.125, 45), (1.25, 40), (1.5, 42)):
            rollout = mean_rollout(run(_rules(factor, 1.0), steps=steps))
            yield f"{cap}.prompts_only.{factor}", rollout
        yield f"{cap}.both_1.25", mean_rollout(run(PAPER, steps=40))


def fig10c(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """Stages of a short and of a long step of the whole system."""
    for model in MODELS:
        steps = runs.system(model, "stream_trainer")
        for kind in (RoundKind.SHORT, RoundKind.LONG):
            for name, seconds in zip(_STAGES, _stage_values(of_kind(steps, kind)), strict=True):
                yield f"{model}.{kind.value}.{name}", seconds


def fig10b(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """32B rollouts."""
    yield "synchronous", mean_rollout(runs.system("32B", "synchronous"))
    steps = runs.system("32B", "stream_trainer")
    for kind in (RoundKind.SHORT, RoundKind.LONG):
        yield kind.value, stages(of_kind(steps, kind)).rollout


def fig9(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """Step seconds of three systems, and of our short and long steps."""
    for model in MODELS:
        ours = runs.system(model, "stream_trainer")
        yield f"{model}.synchronous", mean_step(runs.system(model, "synchronous"))
        yield f"{model}.rlhfuse", mean_step(runs.system(model, "rlhfuse"))
        yield f"{model}.rollpacker", mean_step(ours)
        for kind in (RoundKind.SHORT, RoundKind.LONG):
            yield f"{model}.{kind.value}", mean_step(of_kind(ours, kind))


def table2(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """Cumulative speedups over synchronous."""
    for model in MODELS:
        base = mean_step(runs.system(model, "synchronous"))
        for name in ("tail_batching", "reward", "parallelism", "stream_trainer"):
            yield f"{model}.{name}", base / mean_step(runs.system(model, name))


def section6_5(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """Step time with rewards behind the rollout over that with streamed rewards."""
    for model in MODELS:
        behind = mean_step(runs.system(model, "tail_batching"))
        yield model, behind / mean_step(runs.system(model, "reward"))


def table3(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """7B: step seconds when replicas are released at a fixed share, or by the rule."""
    yield "none", mean_step(runs.system("7B", "parallelism"))
    for share in (0.2, 0.3, 0.4):
        steps = runs.run("7B", PAPER, scales_down=True, release_share=share)
        yield f"fixed_{share:.2f}", mean_step(steps)
    yield "adaptive", mean_step(runs.system("7B", "stream_trainer"))


def table4(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """7B: step seconds when released replicas fetch groups once, or as they come."""
    yield "streaming", mean_step(runs.system("7B", "stream_trainer"))
    for share in (0.2, 0.3, 0.4, 0.5):
        steps = runs.run("7B", PAPER, scales_down=True, release_share=share, fetches_once=True)
        yield f"once_{share:.2f}", mean_step(steps)


def fig13c(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """7B on code: rollout with its rewards, with a fixed and with the adaptive time limit."""
    for name in ("fixed", "adaptive"):
        steps = runs.run("7B", PAPER, task="code", adaptive_timeouts=name == "adaptive")
        for kind in (RoundKind.SHORT, RoundKind.LONG):
            yield f"{kind.value}_{name}", stages(of_kind(steps, kind)).rollout


def fig14(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """14B: responses per second when GPUs and batch grow together."""
    for factor in (1, 2, 4):
        gpus, prompts = 32 * factor, 128 * factor
        grown = partial(dataclasses.replace, prompts_per_step=prompts)
        key = f"{gpus}_gpus_batch_{prompts}"
        run = partial(runs.run, "14B", gpus=gpus)
        base = run(grown(SYNCHRONOUS), steps=6, adaptive_timeouts=False)
        ours = run(grown(PAPER), steps=10, scales_down=True)
        yield f"{key}.synchronous", prompts * 8 / mean_step(base)
        yield f"{key}.rollpacker", prompts * 8 / mean_step(ours)


def table1(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """14B: percent of a synchronous step per stage, by task."""
    for task in ("math", "code", "judge"):
        steps = runs.run("14B", SYNCHRONOUS, task, steps=10, adaptive_timeouts=False)
        mine = stages(steps, streams=False)
        for name, seconds in (
            ("rollout", mine.rollout),
            ("reward", mine.reward),
            ("training", mine.train),
        ):
            yield f"{task}.{name}", 100.0 * seconds / (mine.step - mine.sync)


def fig4(runs: PaperRuns) -> Iterator[tuple[str, float]]:
    """14B on code: the longest trained response of a short round, and five steps' ratio."""
    steps = runs.run("14B", PAPER, task="code")
    longest = [max(max(lengths) for _, lengths in s.round.emitted) for s in steps]
    short = [n for n, s in zip(longest, steps, strict=True) if s.kind is RoundKind.SHORT]
    yield "max_length_short_rounds", fmean(short)


def _stage_values(steps: list[StepTrace]) -> tuple[float, float, float, float]:
    mean = stages(steps)
    return mean.sync, mean.rollout, mean.reward, mean.train


def _rules(prompt_factor: float, response_factor: float) -> TailBatchingRules:
    return TailBatchingRules(
        128, 8, (prompt_factor,), response_factor, race=RaceKind.ARRIVAL, keeps_seeds=False
    )


def _published() -> dict[str, dict[str, float]]:
    """The published values under the keys that the functions above yield."""
    figures = paper_figures()
    bars = figures["fig10c_seconds_sync_rollout_reward_train_vec"]
    scaling = figures["fig14_14B_16k_responses_per_second_vec"]
    lengths = figures["fig4_14B_16k_code"]["max_length_short_rounds_vec"]
    shares = flat(figures["table1_stage_share_percent_14B_16k"])
    del shares["math.reward"]  # the dispatcher's seconds per response were read off it
    return {
        "fig11": flat(figures["fig11_rollout_seconds_full_period"]),
        "fig10c": {
            f"{model}.{kind}.{stage}": seconds
            for model, kinds in bars.items()
            for kind, values in kinds.items()
            for stage, seconds in zip(_STAGES, values, strict=True)
        },
        "table2": flat(figures["table2_cumulative_speedup_over_synchronous"]),
        "fig9": flat(figures["fig9_step_seconds_vec"]),
        "fig10b": flat(figures["fig10b_32B_rollout_seconds_vec"]),
        "section6_5": flat(figures["section6_5_async_over_sync_reward"]),
        "table3": flat(figures["table3_stream_scaling_7B_8k_step_seconds"]),
        "table4": flat(figures["table4_fetch_step_seconds"]),
        "fig13c": flat(figures["fig13c_adaptive_timeout_rollout_plus_reward_seconds_vec"]),
        "fig14": flat(scaling),
        "table1": shares,
        "fig4": {"max_length_short_rounds": fmean(lengths)},
    }


FIGURES: dict[str, Callable[[PaperRuns], Iterator[tuple[str, float]]]] = {
    "fig11": fig11,
    "fig10c": fig10c,
    "table2": table2,
    "fig9": fig9,
    "fig10b": fig10b,
    "section6_5": section6_5,
    "table3": table3,
    "table4": table4,
    "fig13c": fig13c,
    "fig14": fig14,
    "table1": table1,
    "fig4": fig4,
}


def reproduce(parameters: Parameters, names: tuple[str, ...] = ()) -> Iterator[Value]:
    """Every value of the named figures (all by default), as it is computed."""
    runs = PaperRuns(parameters)
    published = _published()
    for name in names or tuple(FIGURES):
        for key, ours in FIGURES[name](runs):
            if key in published[name]:
                yield Value(name, key, published[name][key], ours)


def enough_predicted(parameters: Parameters, values: list[Value]) -> bool:
    """Whether three times as many values are predicted as parameters were fitted."""
    predicted = sum(value.predicted for value in values)
    return predicted >= PREDICTED_PER_FITTED * len(parameters.fitted)
