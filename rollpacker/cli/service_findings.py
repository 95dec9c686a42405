"""Whether the services that a run needs are there and would take it: findings, each with its fix.

Asks what is running and changes nothing: the coordinator checks the settings without starting a
run (its host may see other paths), every worker is asked for its health, and the reward service
scores an empty response to one prompt of each kind, which loads the reward function as training
would.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rollpacker import wire
from rollpacker.cli.coordinator import DEFAULT_ADDRESS, Coordinator, connect
from rollpacker.cli.doctor import Finding
from rollpacker.rpc.client import call, open_channel
from rollpacker.rpc.errors import ServiceError, UnavailableError
from rollpacker.rpc.health_probe import probe
from rollpacker.settings import RunSettings
from rollpacker.types import GraderKind, Prompt
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import reward_service_pb2, reward_service_pb2_grpc

_PROBE_SECONDS = 60.0
_MOST_PROBES = 8
_DIRECTORY = "ROLLPACKER_REWARD_CUSTOM_DIRECTORY"
_IMPORT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("reward", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["reward"] = module
spec.loader.exec_module(module)
assert callable(getattr(module, sys.argv[2], None)), f"{sys.argv[2]} is no function of it"
"""


async def service_findings(
    address: str, settings: RunSettings, prompts: Iterable[Prompt]
) -> list[Finding]:
    """What a coordinator and its workers say to this run."""
    probes = list(_representatives(prompts))
    try:
        async with connect(address) as coordinator:
            workers = await coordinator.list_workers()
            found = [Finding("coordinator", "ok", f"answers at {address}")]
            found += await _coordinator_findings(coordinator, settings)
    except UnavailableError:
        expected = address != DEFAULT_ADDRESS
        return [
            Finding(
                "coordinator",
                "bad" if expected else "note",
                f"none answers at {address}; services are not checked",
                "start one with `rollpacker up`, or name it with --coordinator",
            ),
            *await asyncio.to_thread(lambda: list(function_findings(probes))),
        ]
    except ServiceError as error:
        return [Finding("coordinator", "bad", f"{address}: {error}", "docs/security.md")]
    health = await asyncio.gather(*(asyncio.to_thread(probe, worker.address) for worker in workers))
    found += _worker_findings(workers, health)
    rewards = [worker for worker in workers if worker.kind == pb.WORKER_KIND_REWARD]
    if rewards:
        found += [await _score_finding(rewards[0].address, prompt) for prompt in probes]
    return found


async def _coordinator_findings(coordinator: Coordinator, settings: RunSettings) -> list[Finding]:
    found = []
    open_states = (pb.Run.STATE_RUNNING, pb.Run.STATE_STOPPING)
    for run in await coordinator.list_runs():
        if run.state in open_states:
            what = f"drives run {run.run_id}, step {run.step} of {run.planned_steps}"
            found.append(Finding("coordinator", "note", what, "it must end first, or be stopped"))
    try:
        await coordinator.validate_run("check", settings)
    except ServiceError as error:
        if isinstance(error, UnavailableError):
            raise
        what = f"refuses the run: {error.message}"
        fix = "paths must be the same on the coordinator's host"
        found.append(Finding("coordinator", "bad", what, fix))
    return found


def _worker_findings(workers: list[pb.Worker], health: list[str]) -> Iterator[Finding]:
    for kind in pb.WorkerKind.values()[1:]:
        name = pb.WorkerKind.Name(kind).removeprefix("WORKER_KIND_").lower()
        if all(worker.kind != kind for worker in workers):
            yield Finding(
                name, "bad", "no worker is registered", f"start python -m services.{name}"
            )
    for worker, status in zip(workers, health, strict=True):
        name = pb.WorkerKind.Name(worker.kind).removeprefix("WORKER_KIND_").lower()
        if status == "SERVING":
            yield Finding(name, "ok", f"{worker.worker_id} serves at {worker.address}")
        else:
            what = f"{worker.worker_id} at {worker.address}: {status}"
            yield Finding(name, "bad", what, "look at its log; can this host reach it?")


async def _score_finding(address: str, prompt: Prompt) -> Finding:
    """Score an empty response to a prompt: does the reward service take its reference?"""
    subject = f"reward {prompt.grader_kind.value}"
    request = reward_service_pb2.ScoreResponseRequest(
        run_id="check",
        response_id=f"check:{prompt.prompt_id}",
        response_text="",
        grader_kind=wire.grader_kind_to_proto(prompt.grader_kind),
        reference_json=prompt.reference_json,
        prompt_text=prompt.text,
        prompt_id=prompt.prompt_id,
    )
    async with open_channel(address) as channel:
        stub = reward_service_pb2_grpc.RewardServiceStub(channel)
        try:
            await call(lambda: stub.ScoreResponse(request, timeout=_PROBE_SECONDS))
        except ServiceError as error:
            what = f"prompt {prompt.prompt_id}: {error.message}"
            if error.reason == "GRADER_FAILED" and " raised " in error.message:
                return Finding(subject, "note", what, "it should take an empty response too")
            return Finding(subject, "bad", what, "mend the reference or the function that it names")
    return Finding(subject, "ok", f"takes prompt {prompt.prompt_id}")


def function_findings(prompts: Iterable[Prompt]) -> Iterator[Finding]:
    """Without a reward service: whether the functions of grader custom can be imported here."""
    names = {_function(prompt) for prompt in prompts} - {""}
    directory = os.environ.get(_DIRECTORY, "")
    for name in sorted(names):
        if not directory:
            what = f"{name} is not checked: no reward service answers, {_DIRECTORY} is not set"
            yield Finding("reward custom", "note", what, f"set {_DIRECTORY}")
            continue
        file, _, function = name.rpartition(":")
        problem = _import_problem(Path(directory) / file, function)
        if problem:
            what = f"{name} cannot be imported: {problem}"
            yield Finding("reward custom", "bad", what, f"mend {Path(directory) / file}")
        else:
            yield Finding("reward custom", "ok", f"{name} can be imported")


def _import_problem(path: Path, function: str) -> str:
    """Why a function cannot be imported, in a process of its own; empty when it can."""
    if not path.is_file():
        return f"there is no file {path}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT, str(path), function],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its import takes more than {_PROBE_SECONDS:.0f} s"
    return "" if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]


def _representatives(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """One prompt of each grader and function, the first that comes."""
    seen: set[tuple[GraderKind, str]] = set()
    for prompt in prompts:
        kind = (prompt.grader_kind, _function(prompt))
        if kind not in seen and len(seen) < _MOST_PROBES:
            seen.add(kind)
            yield prompt


def _function(prompt: Prompt) -> str:
    """The function by file that a prompt is graded with; empty for none and for a URL."""
    if prompt.grader_kind is not GraderKind.CUSTOM:
        return ""
    return str(json.loads(prompt.reference_json).get("function", ""))
