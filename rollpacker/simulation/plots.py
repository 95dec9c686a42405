"""Pictures of the reports as small SVG files. Needs the extra `plot` (matplotlib).

`draw_all` writes one picture per figure of the paper (published and ours side by side) and a Gantt
chart of a short and of a long round: when each replica was busy, and when the round was decided.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollpacker.simulation.paper import Value, reproduce
from rollpacker.simulation.parameters import MODELS, Parameters
from rollpacker.simulation.scenario import FROZEN, Scenario, ladder
from rollpacker.simulation.simulator import Simulator, StepTrace
from rollpacker.simulation.workload import WorkloadRules
from rollpacker.types import RoundKind

_FIGURES = ("fig11", "fig10c", "table2", "fig9", "fig14")
_PAPER, _OURS = "#9aa5b1", "#c2410c"


def draw_all(parameters: Parameters, directory: Path) -> list[Path]:
    """Draw everything; returns the files. Raises ImportError without matplotlib."""
    directory.mkdir(parents=True, exist_ok=True)
    values = list(reproduce(parameters, _FIGURES))
    paths = [
        _bars([value for value in values if value.figure == name], directory / f"{name}.svg")
        for name in _FIGURES
    ]
    return [*paths, _gantt(parameters, directory / "rounds.svg")]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rollpacker"  # the same bytes for the same picture
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    _pyplot().close(figure)
    return path


def _bars(values: list[Value], path: Path) -> Path:
    figure, axes = _pyplot().subplots(figsize=(max(5.0, 0.32 * len(values)), 4.0))
    places = range(len(values))
    axes.bar([p - 0.2 for p in places], [v.paper for v in values], 0.4, color=_PAPER, label="paper")
    axes.bar([p + 0.2 for p in places], [v.ours for v in values], 0.4, color=_OURS, label="ours")
    axes.set_xticks(list(places), [v.key for v in values], rotation=90, fontsize=7)
    axes.set_title(values[0].figure, fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, path)


def _gantt(parameters: Parameters, path: Path) -> Path:
    model = MODELS["14B"]
    workload = WorkloadRules(
        model.max_response_tokens, parameters["prompt_correlation"], parameters["never_stop_share"]
    )
    scenario = Scenario(model, workload, ladder(1.5), FROZEN, steps=4, scores=False)
    steps = list(Simulator(scenario, parameters).steps())
    figure, rows = _pyplot().subplots(1, 2, figsize=(8.0, 3.2), sharey=True)
    for axes, kind in zip(rows, (RoundKind.SHORT, RoundKind.LONG), strict=True):
        _draw_round(axes, next(step for step in steps if step.kind is kind))
    return _save(figure, path)


def _draw_round(axes: Any, step: StepTrace) -> None:
    for row, (start, end) in enumerate(step.round.spans):
        axes.barh(row, end - start, left=start - step.round.start, height=0.8, color=_OURS)
    axes.axvline(step.rollout_seconds, color="black", linewidth=0.8)
    axes.set_title(f"{step.kind.value} round: {step.rollout_seconds:.0f} s", fontsize=9)
    axes.set_xlabel("seconds", fontsize=8)
    axes.set_ylabel("replica", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
