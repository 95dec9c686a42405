"""A grading worker: `python -m services.reward.grading_worker`, started by the reward service only.

It speaks `framing` over the socket that is its standard input, one task after the other, and holds
nothing between two tasks. It ends when the service closes the socket, and the kernel kills it when
the service dies. The service may kill it at any moment: that is how a time limit ends.

There are two kinds. A sealed worker serves the graders of model text, which need nothing outside
their process: it is under a seccomp filter before its first request, and the seal is closed while a
task is graded (`graders.seal`). Where the filter cannot be installed it refuses every request. An
open worker (`framing.OPEN_WORKER`) serves the others, which start sandboxes, ask other hosts or run
the operator's functions. Neither knows the graders of the other.

Memory is limited, so that one answer cannot take the host's; a task over it is a verdict.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import socket
import sys
from contextlib import nullcontext, suppress
from dataclasses import asdict

from rollpacker.observability import set_up_logging
from rollpacker.types import GraderKind, Verdict
from services.reward import framing
from services.reward.graders.grader import (
    BadReferenceError,
    GraderFailedError,
    GraderUnavailableError,
    GradingLostError,
    GradingTask,
    ProgramTask,
    Score,
)
from services.reward.graders.registry import code_grader, graders
from services.reward.graders.seal import EvaluationRefusedError, Seal, confine

MEMORY_LIMIT_BYTES = 2 << 30
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


def main() -> None:
    """Serve until the socket is closed."""
    set_up_logging("reward worker", "WARNING")
    sealed = framing.OPEN_WORKER not in sys.argv
    _die_with_the_service()
    _limit_memory(sealed)
    own_pid = os.getpid()
    with socket.socket(fileno=_take_connection()) as connection:
        worker = _Worker(sealed)
        while (request := framing.receive(connection)) is not None:
            reply = framing.encode(worker.answer(request))
            if os.getpid() != own_pid:  # a fork that a reward function made and left
                os._exit(1)
            connection.sendall(reply)
            worker.prepare(request)


def _limit_memory(sealed: bool) -> None:
    """For ever, or for an open worker until it starts a sandbox, which may be given more."""
    hard = MEMORY_LIMIT_BYTES if sealed else resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _take_connection() -> int:
    """The connection; standard input is empty from then on, for reward functions that read it."""
    connection = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return connection


class _Worker:
    """The graders of one kind of worker, and what holds while they grade."""

    def __init__(self, sealed: bool) -> None:
        self._graders = {kind: it for kind, it in graders().items() if it.sealed == sealed}
        self._seal = Seal() if sealed else None
        self._refusal = ""
        if sealed:
            try:
                confine()
            except GraderUnavailableError as error:
                self._refusal = str(error)

    def answer(self, request: framing.Message) -> framing.Message:
        if self._refusal:
            return {"unavailable": self._refusal}
        if "load" in request:
            return self._load(request)
        if "run" in request:
            return self._run(request)
        return self._grade(framing.task_from_message(request["grade"]))

    def prepare(self, request: framing.Message) -> None:
        """After a reply. What fails now fails again in the next task, and is told there."""
        with suppress(GradingLostError):
            if "grade" in request:
                self._graders[GraderKind(request["grade"]["grader_kind"])].prepare()
            elif "run" in request:
                code_grader().prepare()

    def _load(self, request: framing.Message) -> framing.Message:
        try:
            self._graders[GraderKind(request["load"])].load(request["settings"])
        except GraderUnavailableError as error:
            return {"unavailable": str(error)}
        return {"loaded": request["load"]}

    def _run(self, request: framing.Message) -> framing.Message:
        try:
            return {"ran": asdict(code_grader().run(ProgramTask(**request["run"])))}
        except GradingLostError as error:
            return {"lost": str(error)}

    def _grade(self, task: GradingTask) -> framing.Message:
        grader = self._graders[task.grader_kind]
        try:
            with self._seal.closed() if self._seal else nullcontext():
                score = grader.grade(task)
        except BadReferenceError as error:
            return {"bad_reference": str(error)}
        except GradingLostError as error:
            return {"lost": str(error)}
        except GraderFailedError as error:
            return {"failed": str(error)}
        except EvaluationRefusedError as error:
            return {"failed": f"{_scorer_name(task)}: {error}"}
        except MemoryError:
            score = Score(0.0, Verdict.MEMORY_LIMIT)
        except Exception as error:  # noqa: BLE001  a bug of ours: no reward, the next task goes on
            name = task.grader_kind.value
            _log.exception("grader %s failed", name)
            return {"failed": f"grader {name} raised {type(error).__name__}: {error}"}
        return {"score": framing.score_to_message(score)}


def _scorer_name(task: GradingTask) -> str:
    return f"grader {task.grader_kind.value} with reference {task.reference_json:.80}"


def _die_with_the_service() -> None:
    """Ask the kernel to kill this process with its parent (Linux; elsewhere the socket ends it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
