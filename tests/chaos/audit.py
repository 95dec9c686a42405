"""Recounts what a run trained, from its files alone: whoever doubts a run can do it again.

Nothing here asks a service. A run that was disturbed has to leave what the undisturbed one left:
the same draws with the same seeds in the same steps, each prompt once per epoch, each group whole
and from one weight version, step records without a gap.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rollpacker.types import PromptGroup
from services.coordinator.outputs import read_step_samples

Schedule = list[dict[str, tuple[int, ...]]]  # per step the seeds of each draw


def schedule_of(run: Path) -> Schedule:
    """What each step of a run trained."""
    return [{str(group.draw.id): group.draw.seeds for group in groups} for groups in _samples(run)]


def violations(
    run: Path, undisturbed: Path, *, prompts: int, epochs: int, responses: int
) -> list[str]:
    """Everything that is wrong with a run, one line each; none for a run that is right.

    `prompts`: rows of the data set. `responses`: of a group.
    """
    return [
        *_records(run),
        *_counts(run, prompts, epochs),
        *(line for step, groups in enumerate(_samples(run)) for line in _groups(step, groups)),
        *(
            line
            for groups in _samples(run)
            for group in groups
            for line in _whole(group, responses)
        ),
        *_same(schedule_of(run), schedule_of(undisturbed)),
    ]


def _samples(run: Path) -> Iterator[list[PromptGroup]]:
    for step in range(sum(1 for _ in (run / "samples").iterdir())):
        yield read_step_samples(run, step) or []


def _records(run: Path) -> Iterator[str]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    if steps != list(range(len(steps))):
        yield f"step records are not contiguous: {steps}"
    samples = sum(1 for _ in (run / "samples").iterdir())
    if samples != len(steps):
        yield f"{len(steps)} step records but samples of {samples} steps"


def _counts(run: Path, prompts: int, epochs: int) -> Iterator[str]:
    trained = Counter(group.draw.id for groups in _samples(run) for group in groups)
    for draw, count in trained.items():
        if count != 1:
            yield f"draw {draw} was trained {count} times"
    for epoch in range(epochs):
        of_epoch = sum(1 for draw in trained if draw.epoch == epoch)
        if of_epoch != prompts:
            yield f"epoch {epoch} trained {of_epoch} of {prompts} prompts"


def _groups(step: int, groups: list[PromptGroup]) -> Iterator[str]:
    if not groups:
        yield f"step {step} has no samples"
    for group in groups:
        if group.step != step or group.weight_version != step:
            yield (
                f"step {step}: group {group.draw.id} is of step {group.step}"
                f" and weight version {group.weight_version}"
            )


def _whole(group: PromptGroup, responses: int) -> Iterator[str]:
    name = f"step {group.step}, group {group.draw.id}"
    answers = [scored.response for scored in group.responses]
    if sorted(answer.index for answer in answers) != list(range(responses)):
        yield f"{name}: responses {[answer.index for answer in answers]}, not {responses}"
    for scored in group.responses:
        answer = scored.response
        if answer.weight_version != group.weight_version:
            yield f"{name}: response {answer.index} is of weight version {answer.weight_version}"
        if answer.seed != group.draw.seeds[answer.index]:
            yield f"{name}: response {answer.index} has another seed than its draw"
        if scored.reward is None:
            yield f"{name}: response {answer.index} has no reward"


def _same(schedule: Schedule, expected: Schedule) -> Iterator[str]:
    if len(schedule) != len(expected):
        yield f"{len(schedule)} steps, the undisturbed run has {len(expected)}"
    for step, (ours, theirs) in enumerate(zip(schedule, expected, strict=False)):
        if ours != theirs:
            more, less = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
            yield f"step {step} trained other draws or seeds: more {more}, less {less}"
