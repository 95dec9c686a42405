"""Which processes make up a local stack: their commands, settings and places. Pure.

Settings travel by environment (ROLLPACKER_<SERVICE>_<FIELD>); what the caller's environment says
beyond the fields named here reaches the services untouched.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollpacker.local_stack import child
from rollpacker.local_stack.redis_server import RedisServer
from rollpacker.local_stack.supervisor import ProcessSpec

REDIS = "redis"
COORDINATOR = "coordinator"
TRAINER = "trainer-0"
_COORDINATOR_GRACE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class StackSize:
    """How many of each worker."""

    rollouts: int = 1
    rewards: int = 1
    trainers: int = 1  # processes of the one trainer

    def worker_names(self) -> list[str]:
        """Worker ids, which are the process names too."""
        return [
            *(f"rollout-{index}" for index in range(self.rollouts)),
            *(f"reward-{index}" for index in range(self.rewards)),
            TRAINER,
        ]


@dataclass(frozen=True, slots=True)
class StackLayout:
    """Where everything is."""

    directory: Path  # absolute; everything the stack keeps
    run_directory: Path  # absolute; outputs of runs, one directory per run
    ports: Mapping[str, int]  # by process name, and "trainer-rendezvous"
    # Where the others reach a process, if not at its own address: a proxy in front of it.
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def weights(self) -> Path:
        return self.directory / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def coordinator_address(self) -> str:
        return self.address(COORDINATOR)

    def address(self, name: str) -> str:
        """Where a process listens."""
        return f"127.0.0.1:{self.ports[name]}"

    def reached_at(self, name: str) -> str:
        """What the other processes dial."""
        return self.links.get(name, self.address(name))


RENDEZVOUS = "trainer-rendezvous"  # name of the port at which the trainer's processes meet


def port_names(size: StackSize) -> list[str]:
    """Everything that needs a port."""
    return [COORDINATOR, *size.worker_names(), RENDEZVOUS]


def redis_spec(server: RedisServer) -> ProcessSpec:
    """Stopped last: SIGTERM makes it flush what it holds."""
    return ProcessSpec(REDIS, server.command, stop_stage=2)


def service_specs(
    size: StackSize,
    layout: StackLayout,
    redis_url: str,
    rollout_settings: Mapping[str, object] | None = None,
) -> list[ProcessSpec]:
    """The coordinator, which is stopped first and so ends its run cleanly, and the workers.

    `rollout_settings`: more settings of the rollout replicas, by field.
    """
    coordinator = ProcessSpec(
        COORDINATOR,
        _module("services.coordinator"),
        _environment(
            "COORDINATOR",
            address=layout.coordinator_address,
            redis_url=redis_url,
            run_directory=layout.run_directory,
        ),
        stop_stage=0,
        grace_seconds=_COORDINATOR_GRACE_SECONDS,
    )
    more = {"rollout": rollout_settings or {}}
    workers = [
        _worker_spec(name, size, layout, redis_url, more.get(name.partition("-")[0], {}))
        for name in size.worker_names()
    ]
    return [coordinator, *workers]


def _worker_spec(
    name: str, size: StackSize, layout: StackLayout, redis_url: str, more: Mapping[str, object]
) -> ProcessSpec:
    kind = name.partition("-")[0]
    settings: dict[str, object] = {
        "worker_id": name,
        "address": layout.address(name),
        "coordinator_address": layout.reached_at(COORDINATOR),
        "advertise_address": layout.reached_at(name),
    }
    if kind != "reward":
        settings["weights_root"] = layout.weights
    if kind == "trainer":
        settings |= {"redis_url": redis_url, "checkpoint_root": layout.checkpoints}
    settings |= more
    command = _module(f"services.{kind}")
    if kind == "trainer" and size.trainers > 1:
        command = _torchrun(size.trainers, layout.ports[RENDEZVOUS], command)
    return ProcessSpec(name, command, _environment(kind.upper(), **settings), stop_stage=1)


def _environment(service: str, **settings: object) -> dict[str, str]:
    """OMP_NUM_THREADS=1: several processes with OpenMP teams on few cores collapse."""
    named = {f"ROLLPACKER_{service}_{key.upper()}": str(value) for key, value in settings.items()}
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **named}


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)


def _torchrun(processes: int, port: int, command: tuple[str, ...]) -> tuple[str, ...]:
    """`command` as so many ranks; each rank dies with the torchrun agent."""
    options = (
        f"--nproc-per-node={processes}",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        "--max-restarts=0",
        "--no-python",
    )
    rank = (sys.executable, "-I", "-S", str(child.__file__), "agent", *command)
    return (sys.executable, "-m", "torch.distributed.run", *options, *rank)
