"""Messages between the service and its grading workers: four bytes of length, then JSON.

Service to worker: {"load": kind, "settings": {...}}, {"grade": task} or {"run": program}. Worker to
service: {"loaded": kind}, {"unavailable": message}; {"score": score}, {"ran": outcome},
{"bad_reference": message}, {"failed": message} or {"lost": message}. One reply per request, in
order. Nothing is pickled.

A worker runs reward functions of others, which may write anywhere: what is no message of this form
is a FramingError, and then nothing that follows it can be trusted.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from dataclasses import asdict
from typing import Any

from rollpacker.types import GraderKind, Verdict
from services.reward.graders.grader import GradingTask, Score, TestRun

OPEN_WORKER = "--open"  # argument of a worker that is not sealed
_LENGTH = struct.Struct(">I")
_MOST_BYTES = 1 << 28  # of a message; four printable characters read as a length are more

Message = dict[str, Any]


class FramingError(Exception):
    """The peer sent something else than a message."""


def encode(message: Message) -> bytes:
    """The bytes of one message."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> Message:
    """The next message. Raises asyncio.IncompleteReadError when the peer is gone,
    FramingError.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _MOST_BYTES:
        raise FramingError(f"a message of {length} bytes")
    return _decode(await reader.readexactly(length))


def receive(connection: socket.socket) -> Message | None:
    """The next message, waiting for it; None when the peer is gone."""
    head = _receive_exactly(connection, _LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(connection, _LENGTH.unpack(head)[0])
    return None if body is None else _decode(body)


def task_to_message(task: GradingTask) -> Message:
    return {
        "grader_kind": task.grader_kind.value,
        "response_text": task.response_text,
        "reference_json": task.reference_json,
        "prompt_text": task.prompt_text,
        "time_anchors": dict(task.time_anchors),
        "only_case": task.only_case,
    }


def task_from_message(message: Message) -> GradingTask:
    return GradingTask(**{**message, "grader_kind": GraderKind(message["grader_kind"])})


def score_to_message(score: Score) -> Message:
    return {
        "reward": score.reward,
        "verdict": score.verdict.value,
        "extracted_answer": score.extracted_answer,
        "breakdown": dict(score.breakdown),
        "reward_range": list(score.reward_range),
        "runs": [{**asdict(run), "verdict": run.verdict.value} for run in score.runs],
    }


def score_from_message(message: Message) -> Score:
    runs = tuple(TestRun(**{**run, "verdict": Verdict(run["verdict"])}) for run in message["runs"])
    return Score(
        **{
            **message,
            "verdict": Verdict(message["verdict"]),
            "runs": runs,
            "reward_range": tuple(message["reward_range"]),
        }
    )


def _decode(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FramingError(f"no JSON: {error}") from error
    if not isinstance(message, dict):
        raise FramingError(f"no object: {message!r:.40}")
    return message


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
