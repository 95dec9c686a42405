"""`plan`: on which GPUs a run fits, and the settings that say so. Pure arithmetic.

Only config.json of the model is read; no GPU is asked. Ends with 1 where nothing fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from rollpacker.cli.console import print_table
from rollpacker.cli.failures import WORK_FAILED, CommandError, told_in_one_line
from rollpacker.placement import (
    Job,
    Machine,
    ModelShape,
    Placement,
    PlacementError,
    Proposal,
    propose,
    read_shape,
)
from rollpacker.placement.memory import GIB, Account


def plan(
    model: Annotated[Path, typer.Option("--model", help="Directory with config.json.")],
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="In all nodes together.")],
    gpu_memory: Annotated[float, typer.Option(min=1, help="GiB of one GPU.")] = 80.0,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    sequence_tokens: Annotated[
        int, typer.Option(min=1, help="Longest prompt and response together.")
    ] = 8192,
    responses: Annotated[int, typer.Option(min=1, help="Per prompt.")] = 8,
    reference_model: Annotated[
        bool, typer.Option("--reference-model", help="trainer.kl_coefficient is above 0.")
    ] = False,
    placement: Annotated[
        Placement | None, typer.Option(help="Default: the first that fits well.")
    ] = None,
) -> None:
    """Propose where engines and trainer run, and refuse what cannot fit, with the arithmetic."""
    with told_in_one_line():
        shape = read_shape(model)
        machine = Machine(gpus, int(gpu_memory * GIB), gpus_per_node)
        job = Job(sequence_tokens, responses, reference_model)
        try:
            proposal = propose(shape, machine, job, placement)
        except PlacementError as error:
            print_accounts(error.accounts)
            raise CommandError(f"does not fit: {error}", WORK_FAILED) from error
        print_accounts([proposal.engine.account, *proposal.trainer.accounts])
        print()
        print_table(("", ""), rows(shape, machine, job, proposal), "")


def print_accounts(accounts: Iterable[Account]) -> None:
    """Each account with its parts and its sum, in GiB on one GPU."""
    lines: list[tuple[str, str, str, str]] = []
    for account in accounts:
        for part in account.parts:
            lines.append((account.name, part.name, _gib(part.size), part.arithmetic))
        verdict = "fits" if account.free >= 0 else "does not fit"
        total = f"{verdict} into {_gib(account.limit)}"
        lines.append((account.name, "together", _gib(account.size), total))
    print_table(("on each GPU", "what", ">GiB", "arithmetic"), lines, "")


def rows(
    shape: ModelShape, machine: Machine, job: Job, proposal: Proposal
) -> list[tuple[str, str]]:
    """What to run, and the settings for it."""
    engine, trainer = proposal.engine, proposal.trainer
    used = engine.replicas * engine.tensor_parallel_size
    idle = machine.gpus - trainer.gpus - used
    nodes = -(-machine.gpus // machine.gpus_per_node)
    table = [
        ("model", f"{shape.family}, {shape.parameters:,} parameters"),
        ("placement", f"placement={proposal.placement.value}"),
        (
            "engines",
            f"{engine.replicas} replicas of TP {engine.tensor_parallel_size}; each holds"
            f" {engine.whole_sequences(job)} responses of {job.sequence_tokens} tokens",
        ),
        ("", f"ROLLPACKER_ROLLOUT_REPLICAS={engine.replicas}"),
        ("", f"ROLLPACKER_ROLLOUT_KV_BUDGET_TOKENS={engine.kv_budget_tokens}"),
        *_tensor_parallel_rows(engine.tensor_parallel_size),
        ("trainer", f"{trainer.gpus} processes on {trainer.gpus} GPUs, one copy of the model"),
        ("", f"ROLLPACKER_TRAINER_PROCESSES={trainer.gpus}"),
        ("", f"trainer.micro_batch_tokens={trainer.micro_batch_tokens}"),
        ("", f"trainer.activation_checkpointing={str(trainer.activation_checkpointing).lower()}"),
        ("", "trainer.dtype=bfloat16"),
    ]  # fmt: skip
    if proposal.placement is Placement.SEPARATE and idle:
        table.append(("idle", f"{idle} GPUs: no replica of TP {engine.tensor_parallel_size} fits"))
    if nodes > 1:
        table.append(("nodes", f"{nodes} of {machine.gpus_per_node} GPUs"))
    return table


def _tensor_parallel_rows(size: int) -> list[tuple[str, str]]:
    """An engine of several GPUs is SGLang, and the run asks for its size."""
    if size == 1:
        return []
    names = ("tensor_parallel_size", "max_tensor_parallel_size")
    settings = [("", f"tail_batching.{name}={size}") for name in names]
    return [("", "ROLLPACKER_ROLLOUT_ENGINE=sglang"), *settings]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
