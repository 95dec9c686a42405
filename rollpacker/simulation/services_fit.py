"""The second part of the fit: judge and training, by running the simulator on Fig. 10c."""

from __future__ import annotations

import math
from statistics import fmean

from rollpacker.simulation.paper import PaperRuns, fig10c
from rollpacker.simulation.parameters import MODELS, Parameters, paper_figures

_BISECTIONS = 5
_EFFICIENCIES = (0.15, 0.2, 0.25, 0.3, 0.4)


def fit_services(parameters: Parameters) -> Parameters:
    """Refit, judge, reward tail, update and training efficiency: the bars of Fig. 10c.

    Refit and reward tail are read off the bars. The judge's seconds follow from the short rounds'
    rollouts by bisection; training from its bars by a search over the efficiency, with the update
    of each model as what then remains.
    """
    bars = paper_figures()["fig10c_seconds_sync_rollout_reward_train_vec"]
    tails = [bars[model][kind][2] for model in MODELS for kind in ("short", "long")]
    read_off = {
        f"refit_seconds.{model}": (bars[model]["short"][0] + bars[model]["long"][0]) / 2
        for model in MODELS
    }
    read_off["reward_tail_seconds"] = math.exp(fmean(math.log(seconds) for seconds in tails))
    return fit_training(fit_judge(parameters.replace(read_off)))


def fit_judge(parameters: Parameters) -> Parameters:
    """The judge's seconds per response: short rounds' rollouts right in the geometric mean."""
    low, high = 0.08, 0.30
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        tried = parameters.replace({"judge_seconds_per_response": middle})
        if _mean_log_ratio(tried, "short.rollout") < 0.0:
            low = middle
        else:
            high = middle
    return parameters.replace({"judge_seconds_per_response": math.sqrt(low * high)})


def fit_training(parameters: Parameters) -> Parameters:
    """Efficiency, shared, and the update of each model."""
    tried = [_with_updates(parameters, efficiency) for efficiency in _EFFICIENCIES]
    return min(tried, key=lambda item: item[1])[0]


def _with_updates(parameters: Parameters, efficiency: float) -> tuple[Parameters, float]:
    """With the updates that suit an efficiency, and the sum of squared relative errors."""
    parameters = parameters.replace({"train_efficiency": efficiency})
    ours = _bars(parameters)
    paper = _published()
    updates, error = {}, 0.0
    for model in MODELS:
        name = f"update_seconds.{model}"
        keys = [f"{model}.{kind}.train" for kind in ("short", "long")]
        hidden = [ours[key] - parameters[name] for key in keys]
        updates[name] = max(0.0, fmean(paper[k] - h for k, h in zip(keys, hidden, strict=True)))
        error += sum(
            ((h + updates[name]) / paper[k] - 1.0) ** 2 for k, h in zip(keys, hidden, strict=True)
        )
    return parameters.replace(updates), error


def _mean_log_ratio(parameters: Parameters, ending: str) -> float:
    ours, paper = _bars(parameters), _published()
    return fmean(math.log(ours[key] / paper[key]) for key in paper if key.endswith(ending))


def _bars(parameters: Parameters) -> dict[str, float]:
    return dict(fig10c(PaperRuns(parameters, steps=10)))


def _published() -> dict[str, float]:
    bars = paper_figures()["fig10c_seconds_sync_rollout_reward_train_vec"]
    return {
        f"{model}.{kind}.{stage}": bars[model][kind][place]
        for model in MODELS
        for kind in ("short", "long")
        for place, stage in enumerate(("sync", "rollout", "reward", "train"))
    }
