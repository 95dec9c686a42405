"""Prompt groups as JSON lines: one line per trained response, in the order of the update.

A line repeats its group's draw and prompt, so that each line can be read alone; lines of one draw
stand together. `read_groups` gives back exactly the groups that were written. A group without a
response is one line whose `index` is null.

The heavy fields (text, tokens, logprobs) come last in a line. `scan` cuts a line before them and
parses only its head, so that lengths, rewards and times of a whole run are read at disk speed. The
cut is exact: inside a JSON string every quote is escaped, so the bytes of HEAVY occur only as keys.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.types import (
    Draw,
    FinishReason,
    PromptGroup,
    Response,
    ResponseTiming,
    ScoredResponse,
    Segment,
    Verdict,
)
from services.coordinator.outputs.run_directory import RunDirectoryError, read_lines, to_json

HEAVY = b',"text":'


@dataclass(frozen=True, slots=True)
class ResponseRow:
    """The light fields of one trained response."""

    step: int
    epoch: int
    prompt_id: str
    level: int
    index: int
    seed: int
    token_count: int
    reward: float | None
    verdict: str | None
    finish_reason: str
    timing: ResponseTiming | None
    score_start_time: float  # seconds since the Unix epoch; 0 when unknown
    score_time: float


def group_to_lines(group: PromptGroup) -> list[str]:
    """One JSON line per response, without newlines."""
    head = {
        "run_id": group.run_id,
        "step": group.step,
        "draw": {
            "epoch": group.draw.epoch,
            "prompt_id": group.draw.prompt_id,
            "level": group.draw.level,
            "first_step": group.draw.first_step,
            "seeds": group.draw.seeds,
        },
        "group": {
            "weight_version": group.weight_version,
            "race_key": group.race_key,
            "selection_weight": group.selection_weight,
        },
    }
    prompt = {"prompt_token_ids": group.prompt_token_ids}
    if not group.responses:
        return [to_json(head | {"index": None, "text": ""} | prompt)]
    return [to_json(head | _light(scored) | _heavy(scored, prompt)) for scored in group.responses]


def _light(scored: ScoredResponse) -> dict[str, Any]:
    response, timing = scored.response, scored.timing
    return {
        "index": response.index,
        "response_id": response.response_id,
        "seed": response.seed,
        "reward": scored.reward,
        "advantage": scored.advantage,
        "verdict": scored.verdict.value if scored.verdict else None,
        "finish_reason": response.finish_reason.value,
        "weight_version": response.weight_version,
        "token_count": len(response.token_ids),
        "carried_token_count": response.carried_token_count,
        "near_tie_count": response.near_tie_count,
        "accepted_draft_token_count": response.accepted_draft_token_count,
        "segments": [[s.role, s.token_count, s.trainable] for s in response.segments],
        "timing": timing
        and {
            "start_time": timing.start_time,
            "end_time": timing.end_time,
            "slot": timing.slot,
            "replica_id": timing.replica_id,
        },
        "score_start_time": scored.score_start_time,
        "score_time": scored.score_time,
    }


def _heavy(scored: ScoredResponse, prompt: Mapping[str, Any]) -> dict[str, Any]:
    tokens = {"token_ids": scored.response.token_ids, "logprobs": scored.response.logprobs}
    return {"text": scored.text, **prompt, **tokens}


def read_groups(path: Path) -> list[PromptGroup]:
    """The groups of one samples file, as they were written. Raises RunDirectoryError."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        row = _parse(line, path, number)
        draw = row["draw"]
        groups.setdefault((draw["epoch"], draw["prompt_id"]), []).append(row)
    return [_group(rows) for rows in groups.values()]


def _group(rows: Sequence[Mapping[str, Any]]) -> PromptGroup:
    first = rows[0]
    return PromptGroup(
        run_id=first["run_id"],
        step=first["step"],
        draw=Draw(**(first["draw"] | {"seeds": tuple(first["draw"]["seeds"])})),
        prompt_token_ids=tuple(first["prompt_token_ids"]),
        responses=tuple(_scored(row) for row in rows if row["index"] is not None),
        weight_version=first["group"]["weight_version"],
        race_key=first["group"]["race_key"],
        selection_weight=first["group"].get("selection_weight", 1.0),  # older: all counted 1
    )


def _scored(row: Mapping[str, Any]) -> ScoredResponse:
    return ScoredResponse(
        response=Response(
            response_id=row["response_id"],
            index=row["index"],
            token_ids=tuple(row["token_ids"]),
            logprobs=tuple(row["logprobs"]),
            finish_reason=FinishReason(row["finish_reason"]),
            weight_version=row["weight_version"],
            seed=row["seed"],
            segments=tuple(Segment(*segment) for segment in row["segments"]),
            carried_token_count=row["carried_token_count"],
            near_tie_count=row["near_tie_count"],
            accepted_draft_token_count=row.get("accepted_draft_token_count", 0),
        ),
        reward=row["reward"],
        advantage=row["advantage"],
        verdict=Verdict(row["verdict"]) if row["verdict"] else None,
        text=row["text"],
        timing=_timing(row),
        score_start_time=row["score_start_time"],
        score_time=row["score_time"],
    )


def _timing(row: Mapping[str, Any]) -> ResponseTiming | None:
    return ResponseTiming(**row["timing"]) if row["timing"] else None


def scan(path: Path) -> Iterator[ResponseRow]:
    """The light fields of every response of one samples file. Raises RunDirectoryError."""
    for number, line in enumerate(read_lines(path), start=1):
        head, found, _ = line.partition(HEAVY)
        row = _parse(head + b"}" if found else line, path, number)
        if row["index"] is None:
            continue
        yield ResponseRow(
            step=row["step"],
            epoch=row["draw"]["epoch"],
            prompt_id=row["draw"]["prompt_id"],
            level=row["draw"]["level"],
            index=row["index"],
            seed=row["seed"],
            token_count=row["token_count"],
            reward=row["reward"],
            verdict=row["verdict"],
            finish_reason=row["finish_reason"],
            timing=_timing(row),
            score_start_time=row["score_start_time"],
            score_time=row["score_time"],
        )


def read_rows(path: Path, start: int, count: int) -> list[dict[str, Any]]:
    """Some lines of a samples file, whole, as JSON values. Raises RunDirectoryError."""
    lines = itertools.islice(enumerate(read_lines(path), start=1), start, start + count)
    return [_parse(line, path, number) for number, line in lines]


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise RunDirectoryError(
            f"{path}, line {number}: not JSON ({error}); restore the file or delete it"
        ) from error
    return row
