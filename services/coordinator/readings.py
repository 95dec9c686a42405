"""What the coordinator shows to Prometheus: workers, the active run, its newest step and
held-out measurement."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from rollpacker.devices.lease import Leases
from rollpacker.observability.metric_names import find_metric, prometheus_name
from rollpacker.observability.metrics import Reading
from rollpacker.policy.alarms import ALARMS, PREFIX
from rollpacker.store.records import RunState
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator.progress import RoundProgress
from services.coordinator.runs import Runs
from services.coordinator.validation import Measurement
from services.coordinator.workers import WorkerRegistry


async def coordinator_readings(runs: Runs, workers: WorkerRegistry) -> list[Reading]:
    """All of it; of a run only while it is driven here."""
    readings = [
        Reading(
            "rollpacker_coordinator_leads", "1 while it holds the lease", float(runs.holds_lease)
        ),
        *_worker_readings(workers),
    ]
    if runs.holds_lease:
        readings += device_readings(await runs.devices.load())
    run_id, progress = runs.active_run_id, runs.progress
    if run_id:
        state = await runs.get(run_id)
        newest = await runs.store(run_id).records_before(state.step, 1)
        readings += run_readings(state, progress)
        if newest:
            readings += step_readings(run_id, newest[0].metrics)
        active = runs.active(run_id)
        if active is not None and active.driver is not None:
            readings += held_out_readings(run_id, active.driver.validator.newest)
    return readings


def _worker_readings(workers: WorkerRegistry) -> Iterator[Reading]:
    alive = Counter(pb.WorkerKind.Name(worker.kind) for worker in workers.alive())
    for name in pb.WorkerKind.keys()[1:]:
        kind = name.removeprefix("WORKER_KIND_").lower()
        yield Reading("rollpacker_workers", "workers with a lease", alive[name], {"kind": kind})


def device_readings(leases: Leases) -> Iterator[Reading]:
    """Who holds which GPU; nothing where no GPU is held."""
    for device, lease in [*sorted(leases.leases.items()), *sorted(leases.guests.items())]:
        labels = {"device": device, "worker": lease.owner}
        lasts = float(lease.expires > time.time())
        meaning = "1 while the worker's lease lasts, 0 when it has lapsed"
        yield Reading("rollpacker_device_held", meaning, lasts, labels)


def run_readings(state: RunState, progress: RoundProgress | None) -> Iterator[Reading]:
    """Where a run is."""
    run = {"run": state.run_id}
    yield Reading("rollpacker_run_steps", "steps committed", state.step, run)
    yield Reading("rollpacker_run_planned_steps", "steps planned", state.planned_steps, run)
    queued = Counter(item.draw.level for item in state.deferred)
    for level, count in sorted(queued.items()):
        labels = {**run, "level": str(level)}
        yield Reading("rollpacker_run_queued_draws", "draws in the queue", count, labels)
    if progress is not None:
        groups = {
            "launched": progress.launched,
            "finished": progress.finished,
            "kept": progress.kept,
        }
        for name, count in groups.items():
            labels = {**run, "groups": name}
            yield Reading("rollpacker_round_groups", "groups of this round", count, labels)


def held_out_readings(run_id: str, measured: Measurement | None) -> Iterator[Reading]:
    """The newest measurement of the held-out sets; nothing before the first one."""
    if measured is None or not measured.scores:
        return
    version = measured.weight_version
    what = "optimizer updates behind the weights that were measured last"
    yield Reading("rollpacker_held_out_weight_version", what, version, {"run": run_id})
    for name, scores in measured.scores.items():
        for score, value in scores.items():
            labels = {"run": run_id, "set": name, "score": score}
            yield Reading("rollpacker_held_out_score", "as in validation.jsonl", value, labels)


def step_readings(run_id: str, metrics: Mapping[str, float]) -> Iterator[Reading]:
    """The metrics of a step, each under its own name, and the alarms."""
    for name, value in metrics.items():
        metric = find_metric(name)
        if metric is not None:
            yield Reading(prometheus_name(name), metric.meaning, value, {"run": run_id})
    for alarm in ALARMS:
        value = metrics.get(PREFIX + alarm.name, 0.0)
        labels = {"run": run_id, "alarm": alarm.name}
        yield Reading("rollpacker_alarm", "1 while it is raised", value, labels)
