"""What the page asks for, as JSON values. Nothing here changes a run.

Texts of prompts and responses are passed on as they are, but for control characters, which are
made visible; escaping is the page's work, and it puts them in as texts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rollpacker.data.errors import DataError
from rollpacker.data.tokenizer import TextTokenizer
from rollpacker.policy.alarms import ALARMS, PREFIX
from rollpacker.rpc.errors import NotFoundError
from rollpacker.settings import parse_run_settings
from rollpacker.store.records import RunState
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator.outputs.queue_chart import queue_chart
from services.coordinator.outputs.report_tables import visible
from services.coordinator.outputs.run_directory import RunDirectory
from services.coordinator.outputs.samples import read_rows
from services.coordinator.runs import Runs
from services.coordinator.web.live_run import LiveRun
from services.coordinator.workers import Worker, WorkerRegistry

SAMPLES_PER_PAGE = 16


class Views:
    """All of them; remembers what is costly to read again."""

    def __init__(self, runs: Runs, workers: WorkerRegistry) -> None:
        self._runs = runs
        self._workers = workers
        self._live: dict[str, LiveRun] = {}
        self._tokenizers: dict[str, TextTokenizer | None] = {}

    async def runs(self) -> list[dict[str, Any]]:
        """All runs, newest first."""
        return [self._run(state) for state in await self._runs.list()]

    async def workers(self) -> list[dict[str, Any]]:
        """Who holds a lease."""
        return [_worker(worker) for worker in self._workers.alive()]

    async def now(self, run_id: str) -> dict[str, Any]:
        """Where a run is at this moment. Raises NotFoundError."""
        state = await self._runs.get(run_id)
        newest = await self._runs.store(run_id).records_before(state.step, 1)
        metrics = newest[0].metrics if newest else {}
        ages = Counter((item.draw.level, item.draw.age(state.step)) for item in state.deferred)
        return {
            **self._run(state),
            "progress": self._progress(run_id),
            "alarms": [alarm.text for alarm in ALARMS if metrics.get(PREFIX + alarm.name)],
            "queue_length": len(state.deferred),
            "queue": queue_chart(ages),
        }

    async def overview(self, run_id: str) -> dict[str, Any]:
        """Figures and pictures of its steps. Raises NotFoundError."""
        return await (await self._live_run(run_id)).overview()

    async def round(self, run_id: str, step: int) -> dict[str, Any]:
        """The timeline of one round. Raises NotFoundError."""
        picture = await (await self._live_run(run_id)).round_picture(step)
        return {"step": step, "picture": picture}

    async def samples(self, run_id: str, step: int, start: int) -> dict[str, Any]:
        """A page of a step's trained responses, with their prompts. Raises NotFoundError."""
        state = await self._runs.get(run_id)
        path = RunDirectory(self._runs.directory(run_id)).samples_file(step)
        if not path.exists():
            raise NotFoundError(
                "STEP_NOT_FOUND",
                f"run {run_id} has no samples of step {step}; {state.step} steps are committed",
            )
        rows = await asyncio.to_thread(read_rows, path, start, SAMPLES_PER_PAGE + 1)
        tokenizer = await self._tokenizer(state)
        return {
            "step": step,
            "start": start,
            "previous": max(0, start - SAMPLES_PER_PAGE) if start else None,
            "next": start + SAMPLES_PER_PAGE if len(rows) > SAMPLES_PER_PAGE else None,
            "samples": [_sample(row, tokenizer) for row in rows[:SAMPLES_PER_PAGE]],
        }

    async def _live_run(self, run_id: str) -> LiveRun:
        await self._runs.get(run_id)
        return self._live.setdefault(run_id, LiveRun(self._runs.directory(run_id)))

    async def _tokenizer(self, state: RunState) -> TextTokenizer | None:
        if state.run_id not in self._tokenizers:
            self._tokenizers[state.run_id] = await asyncio.to_thread(_load_tokenizer, state)
        return self._tokenizers[state.run_id]

    def _run(self, state: RunState) -> dict[str, Any]:
        schedule = state.settings.get("tail_batching", {})
        return {
            "run_id": state.run_id,
            "state": state.status,
            "failure": state.failure,
            "step": state.step,
            "planned_steps": state.planned_steps,
            "create_time": state.create_time,
            "mode": schedule.get("mode", ""),
            "prompts_per_step": schedule.get("prompts_per_step"),
            "responses_per_prompt": schedule.get("responses_per_prompt"),
        }

    def _progress(self, run_id: str) -> dict[str, Any] | None:
        progress = self._runs.progress if self._runs.is_active(run_id) else None
        if progress is None:
            return None
        return {
            "step": progress.step,
            "phase": progress.phase,
            "round_kind": progress.round_kind.value,
            "level": progress.level,
            "launched": progress.launched,
            "finished": progress.finished,
            "kept": progress.kept,
        }


def _load_tokenizer(state: RunState) -> TextTokenizer | None:
    """That of the run, or None where its files are gone."""
    settings = parse_run_settings(state.settings)
    try:
        return TextTokenizer.load(Path(settings.data.tokenizer or settings.model))
    except DataError:
        return None


def _worker(worker: Worker) -> dict[str, Any]:
    stats = worker.engine_stats
    kind = pb.WorkerKind.Name(worker.kind).removeprefix("WORKER_KIND_").lower()
    return {
        "worker_id": worker.worker_id,
        "kind": kind,
        "address": worker.address,
        "lease_seconds": max(0.0, worker.lease_end - time.time()),
        "running": stats.running_response_count if stats else None,
        "waiting": stats.waiting_response_count if stats else None,
        "slots": stats.slot_count if stats else None,
        "kv_usage": stats.kv_cache_usage if stats else None,
    }


def _sample(row: dict[str, Any], tokenizer: TextTokenizer | None) -> dict[str, Any]:
    """One response; a group without any has only its draw."""
    ids = row["prompt_token_ids"]
    prompt = _turn("prompt, as token ids", " ".join(map(str, ids)))
    if tokenizer:
        prompt = _turn("prompt", tokenizer.decode(ids, skip_special_tokens=False))
    names = ("index", "reward", "advantage", "verdict", "finish_reason", "token_count")
    draw = row["draw"]
    return {
        **{name: row.get(name) for name in names},
        "draw": visible(f"{draw['epoch']}:{draw['prompt_id']}"),
        "level": draw["level"],
        "first_step": draw["first_step"],
        "turns": [prompt, *_response_turns(row, tokenizer)],
    }


def _response_turns(row: dict[str, Any], tokenizer: TextTokenizer | None) -> list[dict[str, str]]:
    """A response as the roles in it spoke; one that is all of one role as the grader saw it."""
    segments = row.get("segments", [])
    if tokenizer is None or len(segments) < 2:
        return [_turn("assistant", row["text"])]
    turns, at = [], 0
    for role, count, _ in segments:
        ids = row["token_ids"][at : at + count]
        turns.append(_turn(role, tokenizer.decode(ids, skip_special_tokens=False)))
        at += count
    return turns


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "text": visible(text)}
