"""Experiment trackers: where metrics go besides the run's own files. None decides anything.

A tracker is opened by its first write and closed at the end of the run; written to again, it goes
on with the same run of its own (a coordinator that was restarted). One that fails, or cannot be
reached, is left out from then on, with one warning. TensorBoard needs no package and
is always written (`tensorboard.py`); wandb and mlflow are chosen by `tracking.trackers` and come
with the extra `trackers`. All calls block; the coordinator makes them in a thread.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from services.coordinator.outputs.run_directory import RunDirectoryError

_RUN_TAG = "rollpacker.run_id"
_log = logging.getLogger(__name__)


class TrackerMissingError(RunDirectoryError):
    """A tracker that the settings name is not installed."""


class Tracker(Protocol):
    """One tracker of one run."""

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        """Record scalars of a step. wall_time: seconds since the Unix epoch.

        A step may come again, or an earlier one after a rewind: the later write stands.
        """

    def close(self) -> None:
        """Send what is left."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run."""

    run_id: str
    directory: Path
    settings: Mapping[str, Any]  # of the run, as JSON values

    def option(self, name: str) -> str:
        """A value of the section `tracking`."""
        return str(self.settings["tracking"][name])


class WandbTracker:
    """Weights & Biases; offline it writes below the run's directory, for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=run.option("project"),
            id=run.run_id,
            name=run.run_id,
            dir=str(run.directory),
            mode=run.option("wandb_mode"),
            resume="allow",
            config=dict(run.settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")  # the own step may go back; wandb's not

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        self._run.log({**_finite(scalars), "step": step, "time": wall_time})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow, at `tracking.mlflow_uri` or where MLFLOW_TRACKING_URI says."""

    def __init__(self, run: TrackedRun) -> None:
        tracking = importlib.import_module("mlflow.tracking")
        self._entities = importlib.import_module("mlflow.entities")
        self._failure: type[Exception] = importlib.import_module(
            "mlflow.exceptions"
        ).MlflowException
        self._client = tracking.MlflowClient(tracking_uri=run.option("mlflow_uri") or None)
        name = run.option("project")
        experiment = self._client.get_experiment_by_name(name)
        self._experiment = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        self._id = self._find(run.run_id) or self._create(run.run_id)

    def _find(self, run_id: str) -> str | None:
        found = self._client.search_runs([self._experiment], f"tags.`{_RUN_TAG}` = '{run_id}'")
        return str(found[0].info.run_id) if found else None

    def _create(self, run_id: str) -> str:
        tags = {_RUN_TAG: run_id}
        made = self._client.create_run(self._experiment, run_name=run_id, tags=tags)
        return str(made.info.run_id)

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        time = round(wall_time * 1000)
        metrics = [
            self._entities.Metric(name.replace("@", "_at_"), value, time, step)  # it takes no @
            for name, value in _finite(scalars).items()
        ]
        try:
            self._client.log_batch(self._id, metrics=metrics)
        except self._failure as error:
            _log.warning("mlflow did not take step %d; the run goes on: %s", step, error)

    def close(self) -> None:
        self._client.set_terminated(self._id)


_TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


class Trackers:
    """The trackers that a run asks for."""

    def __init__(
        self,
        run: TrackedRun,
        known: Mapping[str, Callable[[TrackedRun], Tracker]] = _TRACKERS,
    ) -> None:
        """Raises TrackerMissingError; opens none yet."""
        self._run = run
        self._known = known
        self._names = tuple(run.settings.get("tracking", {}).get("trackers", ()))
        self._open: dict[str, Tracker] = {}
        self._failed: set[str] = set()  # not tried again
        for name in self._names:
            if known is _TRACKERS and importlib.util.find_spec(name) is None:
                raise TrackerMissingError(
                    f"tracking.trackers: {name} is not installed where the coordinator runs;"
                    " pip install 'rollpacker[trackers]', or leave it out"
                )

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        """Record scalars of a step in all of them. One that fails is warned of and left out."""
        for name in self._names:
            if name in self._failed:
                continue
            with self._without_it(name):
                if name not in self._open:
                    self._open[name] = self._known[name](self._run)
                self._open[name].write(step, wall_time, scalars)

    def close(self) -> None:
        """Send what is left; a later write opens them again."""
        for name, tracker in self._open.items():
            with self._without_it(name):
                tracker.close()
        self._open = {}

    @contextlib.contextmanager
    def _without_it(self, name: str) -> Iterator[None]:
        """If it fails, the run goes on without this tracker."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  a foreign library; a tracker decides nothing
            if name not in self._failed:
                _log.warning("%s failed; the run goes on without it: %r", name, error)
            self._failed.add(name)


def _finite(scalars: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if math.isfinite(value)}
