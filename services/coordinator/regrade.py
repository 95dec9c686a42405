"""RegradeSamples: the stored samples of a run, scored again.

Reads samples/, asks the reward services, and writes one file per step in regraded/<regrade_id>/,
whole or not at all. Nothing of the run itself changes, so it may train meanwhile. Each line holds
the new score and the old one:

    {"step", "draw": {"epoch", "prompt_id"}, "index", "response_id",
     "reward", "verdict", "old_reward", "old_verdict"}
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.data.errors import DataError
from rollpacker.data.rows import parse_row
from rollpacker.data.run_data import load_run_data, prompt_rules
from rollpacker.rpc.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from rollpacker.settings import RunSettings, parse_run_settings
from rollpacker.tasks import end_tasks
from rollpacker.types import Prompt, PromptGroup, ScoredResponse
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator.outputs.run_directory import RunDirectory, to_json, write_atomic
from services.coordinator.outputs.samples import read_groups
from services.coordinator.reward_client import RewardClient
from services.coordinator.runs import Runs
from services.coordinator.workers import WorkerRegistry

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_AT_ONCE = 64  # responses that are being scored; training's own go beside them
Row = dict[str, Any]


async def regrade_samples(
    runs: Runs, workers: WorkerRegistry, request: pb.RegradeSamplesRequest
) -> AsyncIterator[pb.RegradeSamplesResponse]:
    """See the proto. Raises NotFoundError, InvalidArgumentError, FailedPreconditionError."""
    if not _NAME.fullmatch(request.regrade_id):
        raise InvalidArgumentError.field(
            "regrade_id",
            f"{request.regrade_id!r} is not 1 to 64 of a-z, 0-9, - and _; choose such a name",
        )
    state = await runs.get(request.run_id)
    directory = RunDirectory(runs.directory(request.run_id))
    steps = _steps(directory, request)
    settings = parse_run_settings(state.settings)
    added = await runs.store(request.run_id).added_prompts(0, state.added_known)
    prompts = await asyncio.to_thread(_prompts, settings, added)
    rewards = RewardClient(workers, settings.reward, request.run_id)
    for step in steps:
        regrade = _StepRegrade(directory, request.regrade_id, step, prompts, rewards)
        yield await regrade.run()


def _steps(directory: RunDirectory, request: pb.RegradeSamplesRequest) -> list[int]:
    last = request.last_step if request.HasField("last_step") else None
    found = [
        step
        for step in directory.sampled_steps()
        if step >= request.first_step and (last is None or step <= last)
    ]
    if not found:
        to = "the newest" if last is None else last
        raise NotFoundError(
            "STEP_NOT_FOUND",
            f"run {request.run_id} has no samples of steps {request.first_step} to {to}; see"
            " ListSteps",
        )
    return found


def _prompts(settings: RunSettings, added: Sequence[str | bytes]) -> dict[str, Prompt]:
    """Every prompt of a run by id: its data as it is now, and what was added to it."""
    try:
        data, rules = load_run_data(settings), prompt_rules(settings)
        of_rows = [
            parse_row(json.loads(row), index, data.tokenizer, rules)
            for index, row in enumerate(added)
        ]
    except DataError as error:
        raise InvalidArgumentError.field("settings.data", str(error)) from error
    return {prompt.prompt_id: prompt for prompt in (*data.dataset, *of_rows)}


@dataclass(frozen=True, slots=True)
class _StepRegrade:
    directory: RunDirectory
    regrade_id: str
    step: int
    prompts: Mapping[str, Prompt]
    rewards: RewardClient

    async def run(self) -> pb.RegradeSamplesResponse:
        """Score what has no score yet, write the file, and say what came out."""
        file = self.directory.regraded_file(self.regrade_id, self.step)
        known = await asyncio.to_thread(_scored_before, file)
        groups = await asyncio.to_thread(read_groups, self.directory.samples_file(self.step))
        prompts = [self._prompt(group) for group in groups]
        free = asyncio.Semaphore(_AT_ONCE)
        tasks = [
            asyncio.create_task(self._row(group, scored, prompt, known, free))
            for group, prompt in zip(groups, prompts, strict=True)
            for scored in group.responses
        ]
        try:
            rows = await asyncio.gather(*tasks)
        finally:
            await end_tasks(*tasks)
        text = "".join(to_json(row) + "\n" for row in rows)
        await asyncio.to_thread(write_atomic, file, text)
        return _message(self.step, rows, file)

    def _prompt(self, group: PromptGroup) -> Prompt:
        try:
            return self.prompts[group.draw.prompt_id]
        except KeyError as error:
            raise FailedPreconditionError(
                "PROMPT_MISSING",
                f"prompt {group.draw.prompt_id} of step {self.step} is not in the run's data any"
                " more; restore it",
            ) from error

    async def _row(
        self,
        group: PromptGroup,
        scored: ScoredResponse,
        prompt: Prompt,
        known: Mapping[str, Row],
        free: asyncio.Semaphore,
    ) -> Row:
        response_id = scored.response.response_id
        if response_id in known:
            return known[response_id]
        async with free:
            score = await self.rewards.score(response_id, scored.text, prompt)
        return {
            "step": self.step,
            "draw": {"epoch": group.draw.epoch, "prompt_id": group.draw.prompt_id},
            "index": scored.response.index,
            "response_id": response_id,
            "reward": score.reward,
            "verdict": score.verdict.value if score.verdict else None,
            "old_reward": scored.reward,
            "old_verdict": scored.verdict.value if scored.verdict else None,
        }


def _scored_before(file: Path) -> dict[str, Row]:
    """The lines of an earlier call that have a reward, by response."""
    if not file.exists():
        return {}
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {row["response_id"]: row for row in rows if row["reward"] is not None}


def _message(step: int, rows: Sequence[Row], file: Path) -> pb.RegradeSamplesResponse:
    return pb.RegradeSamplesResponse(
        step=step,
        response_count=len(rows),
        changed_count=sum(row["reward"] != row["old_reward"] for row in rows),
        none_count=sum(row["reward"] is None for row in rows),
        mean_reward=_mean(row["reward"] for row in rows),
        old_mean_reward=_mean(row["old_reward"] for row in rows),
        file=str(file),
    )


def _mean(rewards: Iterable[float | None]) -> float | None:
    given = [reward for reward in rewards if reward is not None]
    return sum(given) / len(given) if given else None
