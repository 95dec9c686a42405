"""One rank of the trainer: it executes commands, all of which come from the leader.

    leader's session --> Leader (leader.py) --queue per replica, scatter--> follow() on the others
                            |                                                  |
                            +------------- Replica.execute(command) -----------+

Every rank executes the same commands in the same order, so collectives always meet; only
Accumulate, which has none over all ranks, goes to one replica at a time, whichever is next or free.
A command's values may differ by rank (each gets its own micro-batches); its result is the leader's.

States of a replica: *empty*, *open* (a model and an optimizer; the sums of at most one step).
A refusal (the model cannot be loaded) is agreed on by all ranks and raised on all of them, and
leaves the replica empty. Any other exception means that this rank's state cannot be trusted: it
ends the process, and the run goes on from its newest checkpoint.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from services.trainer import checkpoint
from services.trainer.model import PolicyModel
from services.trainer.model_loading import ModelNotFoundError
from services.trainer.offload import Offload
from services.trainer.packing import Window
from services.trainer.ranks import Ranks
from services.trainer.settings import OpenRunSettings
from services.trainer.step_accumulator import StepAccumulator
from services.trainer.update import UpdateOutcome, apply_update, make_optimizer
from services.trainer.weight_publisher import Adapter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Open:
    """Load the model, and the state of a checkpoint if one is named. Raises ModelNotFoundError."""

    model_directory: Path
    settings: OpenRunSettings
    temperature: float
    checkpoint: Path | None
    devices: tuple[str, ...] = ()  # of this host's ranks, where they are claimed


@dataclass(frozen=True, slots=True)
class BeginStep:
    """The values that may differ from step to step."""

    learning_rate: float
    temperature: float


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add a window to the sums."""

    window: Window


@dataclass(frozen=True, slots=True)
class DropSums:
    """Forget the sums."""


@dataclass(frozen=True, slots=True)
class Update:
    """Apply the sums; returns an UpdateOutcome."""


@dataclass(frozen=True, slots=True)
class SaveTensors:
    """Copy model and optimizer and begin to write the copy into an empty directory.

    Returns a future that is done when all ranks have written. The one before must be.
    """

    directory: Path


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """Put the weights together on the leader; returns WholeWeights there."""

    with_base: bool = True  # False, where an adapter is published by itself: without the rest


@dataclass(frozen=True, slots=True)
class PutAway:
    """Between steps: keep the tensors in host memory; the next command that needs them brings them
    back. Without a run: free what it left."""


@dataclass(frozen=True, slots=True)
class Ping:
    """Nothing; shows that every rank is alive."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The last command."""


StepCommand = BeginStep | Accumulate | DropSums | Update
Command = Open | StepCommand | SaveTensors | GatherWeights | PutAway | Ping | Shutdown


@dataclass(frozen=True, slots=True)
class WholeWeights:
    """What is published, on the CPU; `config` is that of transformers."""

    tensors: dict[str, Tensor]  # in the compute dtype; empty: they are published already
    config: Any
    adapter: Adapter | None = None  # None: the tensors are all there is


@dataclass(frozen=True, slots=True)
class _Run:
    """What an open replica holds."""

    model: PolicyModel
    optimizer: torch.optim.Optimizer
    accumulator: StepAccumulator
    settings: OpenRunSettings
    offload: Offload


class Replica:
    """This rank's part of the trainer. Used from one thread only."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._run: _Run | None = None
        self._written: Future[Any] | None = None  # of the last SaveTensors

    def execute(self, command: Command) -> object:
        """Do what a command says and return its result."""
        match command:
            case Open():
                return self._open(command)
            case BeginStep(learning_rate, temperature):
                self._opened.accumulator.temperature = temperature
                for group in self._opened.optimizer.param_groups:
                    group["lr"] = learning_rate
            case Accumulate(window):
                for batch in window.micro_batches:
                    self._ready.accumulator.add(batch)
            case DropSums():
                self._opened.accumulator.drop()
            case Update():
                return self._update()
            case SaveTensors(directory):
                return self._save(directory)
            case GatherWeights(with_base):
                return self._gather(with_base)
            case Shutdown():
                self._finish_saving()
                self._forget()
                self._ranks.sum(torch.zeros(1))  # nobody leaves before all have heard of it
            case PutAway():
                self._put_away()
        return None

    @property
    def _opened(self) -> _Run:
        assert self._run is not None, "the leader sends Open first"
        return self._run

    @property
    def _ready(self) -> _Run:
        """With its tensors on the device."""
        self._opened.offload.bring_back()
        return self._opened

    def _open(self, command: Open) -> int:
        self._forget()
        self._ranks.use_devices(command.devices)
        failure: ModelNotFoundError | None = None
        try:
            model = PolicyModel(
                command.model_directory,
                command.settings.dtype,
                self._ranks.device,
                self._ranks.mesh,
                activation_checkpointing=command.settings.activation_checkpointing,
                lora=command.settings.lora,
            )
        except ModelNotFoundError as error:
            failure = error
        failures = self._ranks.sum(torch.tensor(float(failure is not None))).item()
        if failure or failures:
            raise failure or ModelNotFoundError("another rank could not load the model")
        reference = self._reference(command) if command.settings.kl_coefficient else None
        optimizer = make_optimizer(model, command.settings)
        if command.checkpoint is not None:
            checkpoint.load_tensors(command.checkpoint, model.module, optimizer)
        accumulator = StepAccumulator(
            model, command.settings, command.temperature, self._ranks, reference
        )
        modules = [model.module, *([reference.module] if reference else [])]
        offload = Offload(modules, optimizer, self._ranks.device, self._ranks.holds)
        self._run = _Run(model, optimizer, accumulator, command.settings, offload)
        return model.vocabulary_size

    def _put_away(self) -> None:
        if self._run is None:
            self._forget()
        else:
            self._run.offload.put_away()

    def _forget(self) -> None:
        """Free the memory of the run that was open."""
        self._run = None
        if self._ranks.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        self._ranks.holds(0)

    def _reference(self, command: Open) -> PolicyModel:
        """The initial model, which is never trained."""
        model = PolicyModel(
            command.model_directory, command.settings.dtype, self._ranks.device, self._ranks.mesh
        )
        model.module.requires_grad_(False)
        return model

    def _save(self, directory: Path) -> Future[Any]:
        self._finish_saving()
        run = self._opened  # wherever its tensors are: an engine may own the device
        self._written = checkpoint.start_saving(
            directory, run.model.module, run.optimizer, self._ranks.saving
        )
        return self._written

    def _finish_saving(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None

    def _update(self) -> UpdateOutcome:
        run = self._ready
        return apply_update(run.model, run.optimizer, run.accumulator, run.settings, self._ranks)

    def _gather(self, with_base: bool) -> WholeWeights:
        model, settings = self._ready.model, self._opened.settings
        config = cast(Any, model.module).config
        config.dtype = model.compute_dtype
        if model.lora is None or settings.lora_publish == "merged":
            whole = model.as_in_files(self._kept(model.whole_tensors()))
            return WholeWeights(whole, config)
        base = model.as_in_files(self._kept(model.base_tensors())) if with_base else {}
        tensors = self._kept(model.adapter_tensors())
        return WholeWeights(base, config, Adapter(tensors, model.lora.peft_config(tensors)))

    def _kept(self, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """All ranks iterate, the leader keeps."""
        return {name: tensor for name, tensor in tensors if self._ranks.is_leader}


def follow(ranks: Ranks) -> None:
    """The life of a rank that is not the leader: execute commands until Shutdown."""
    ranks.enter_thread()
    replica = Replica(ranks)
    while True:
        command: Command = ranks.take()
        try:
            replica.execute(command)
        except ModelNotFoundError as error:
            _log.warning("rank %d: %s", ranks.rank, error)
        if isinstance(command, Shutdown):
            return
        if ranks.queues is not None and ranks.shard == 0:
            ranks.queues.done(ranks.replica)
