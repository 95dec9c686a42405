"""From a model and some GPUs to a placement, or to a refusal with its arithmetic.

*separate*: the trainer has GPUs of its own, as few as it fits on; the engines have the others, and
both sides work at the same time. *colocated*: every GPU serves both in turn: the engine releases
weights, keys and values while the trainer works, the trainer keeps its shards in host memory while
the engine does. Moving takes time, so it is proposed only where it is wished or nothing else fits.

An engine gets the smallest tensor-parallel size with which a whole group fits at its full length;
where none is large enough, the one that holds most. The trainer keeps all activations where a
micro-batch then still holds the longest response, and computes them again otherwise.

What never happens: a proposal one of whose accounts is over its limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from rollpacker.placement import memory
from rollpacker.placement.memory import GIB, Account, Part
from rollpacker.placement.shape import ModelShape

_RESERVED_SHARE = 0.06  # of a GPU: fragments of the allocator
_CONTEXT_BYTES = 2 * GIB  # CUDA context, communication buffers
_ENGINE_BYTES = 4 * GIB  # prefill activations, graphs
_RELEASED_BYTES = 2 * GIB  # what a side keeps of a GPU that it has given to the other one
_ROUND_TOKENS = 1024  # micro-batches are multiples of it
_LARGEST_MICRO_BATCH = 131_072  # tokens; beyond that a larger one gains nothing


class Placement(Enum):
    SEPARATE = "separate"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs: all alike, the same number in each node."""

    gpus: int
    gpu_bytes: int
    gpus_per_node: int = 8

    @property
    def usable(self) -> int:
        """Bytes of a GPU that a plan may use."""
        return int(self.gpu_bytes * (1 - _RESERVED_SHARE)) - _CONTEXT_BYTES


@dataclass(frozen=True, slots=True)
class Job:
    """What of a run decides about memory."""

    sequence_tokens: int  # longest prompt and response together
    responses_per_prompt: int = 8  # R0
    reference_model: bool = False  # kl_coefficient above 0


@dataclass(frozen=True, slots=True)
class TrainerSide:
    """The trainer: one replica over all of its GPUs."""

    gpus: int
    micro_batch_tokens: int
    activation_checkpointing: bool
    accounts: tuple[Account, ...]


@dataclass(frozen=True, slots=True)
class EngineSide:
    """The engines."""

    tensor_parallel_size: int
    replicas: int
    kv_budget_tokens: int  # of a replica
    account: Account  # of one GPU

    def whole_sequences(self, job: Job) -> int:
        """Responses of full length that a replica holds at once."""
        return self.kv_budget_tokens // job.sequence_tokens


@dataclass(frozen=True, slots=True)
class Proposal:
    placement: Placement
    trainer: TrainerSide
    engine: EngineSide


class PlacementError(Exception):
    """Nothing fits; `accounts` are those that came nearest, over their limits."""

    def __init__(self, message: str, accounts: tuple[Account, ...] = ()) -> None:
        super().__init__(message)
        self.accounts = accounts


def propose(
    shape: ModelShape, machine: Machine, job: Job, placement: Placement | None = None
) -> Proposal:
    """The placement to start with; without a wish separate where that fits, else colocated.

    Raises PlacementError.
    """
    if job.sequence_tokens > shape.context_tokens:
        raise PlacementError(
            f"sequence tokens {job.sequence_tokens} exceed the model's context of"
            f" {shape.context_tokens}; give --sequence-tokens {shape.context_tokens} at most"
        )
    tries = {Placement.SEPARATE: _separate, Placement.COLOCATED: _colocated}
    refusals: list[PlacementError] = []
    for attempt in [tries[placement]] if placement else tries.values():
        try:
            return attempt(shape, machine, job)
        except PlacementError as error:
            refusals.append(error)
    raise PlacementError(
        "; ".join(map(str, refusals)), tuple(a for error in refusals for a in error.accounts)
    )


def _separate(shape: ModelShape, machine: Machine, job: Job) -> Proposal:
    if machine.gpus < 2:
        raise PlacementError("separate: needs 2 GPUs at least")
    refusal: PlacementError | None = None
    for gpus in range(1, machine.gpus):
        try:
            trainer = _trainer(shape, job, gpus, machine.usable)
        except PlacementError as error:
            refusal = error
            continue
        free = _free_by_node(machine, taken=gpus)
        engine = _engine(shape, job, free, machine.usable - _ENGINE_BYTES)
        return Proposal(Placement.SEPARATE, trainer, engine)
    assert refusal is not None, "there was at least one try"
    raise PlacementError(f"separate: {refusal}", refusal.accounts)


def _colocated(shape: ModelShape, machine: Machine, job: Job) -> Proposal:
    try:
        trainer = _trainer(shape, job, machine.gpus, machine.usable - _RELEASED_BYTES)
        free = _free_by_node(machine, taken=0)
        engine = _engine(shape, job, free, machine.usable - _ENGINE_BYTES - _RELEASED_BYTES)
    except PlacementError as error:
        raise PlacementError(f"colocated: {error}", error.accounts) from error
    return Proposal(Placement.COLOCATED, trainer, engine)


def _staying(shape: ModelShape, job: Job, shards: int) -> tuple[Part, ...]:
    """What the trainer has on its GPUs at all times."""
    states = memory.trainer_states(shape, shards)
    return (states, memory.reference_weights(shape, shards)) if job.reference_model else (states,)


def _trainer(shape: ModelShape, job: Job, gpus: int, limit: int) -> TrainerSide:
    """Raises PlacementError, with the account that is over its limit."""
    staying = _staying(shape, job, gpus)
    update = Account("trainer, update", limit, (*staying, memory.optimizer_work(shape, gpus)))
    if update.free < 0:
        raise PlacementError(_over(f"{gpus} GPUs for the trainer", update), (update,))
    work = (*staying, memory.gathered(shape, gpus), memory.head_work(shape))
    for recompute in (False, True):
        each = memory.activation_bytes_per_token(shape, gpus, recompute)
        tokens = max(0, limit - sum(part.size for part in work)) // each
        tokens = min(tokens // _ROUND_TOKENS * _ROUND_TOKENS, _LARGEST_MICRO_BATCH)
        tokens = max(tokens, job.sequence_tokens)
        activations = Part("activations", tokens * each, f"{tokens} tokens x {each} B")
        passes = Account("trainer, forward and backward", limit, (*work, activations))
        if passes.free >= 0:
            return TrainerSide(gpus, tokens, recompute, (passes, update))
    raise PlacementError(_over(f"{gpus} GPUs for the trainer", passes), (passes,))


def _engine(shape: ModelShape, job: Job, free_by_node: list[int], limit: int) -> EngineSide:
    """Raises PlacementError, with the account of the largest tensor-parallel size."""
    best: EngineSide | None = None
    refused: Account | None = None
    for ranks in _tensor_parallel_sizes(shape, max(free_by_node)):
        weights = memory.engine_weights(shape, ranks)
        each = memory.kv_bytes_per_token(shape, ranks)
        left = limit - weights.size
        tokens = max(left // each, job.sequence_tokens)
        kv = Part("keys and values", tokens * each, f"{tokens} tokens x {each} B")
        account = Account(f"engine, TP {ranks}", limit, (weights, kv))
        if account.free < 0:
            refused = account
            continue
        replicas = sum(free // ranks for free in free_by_node)
        side = EngineSide(ranks, replicas, tokens, account)
        if side.whole_sequences(job) >= job.responses_per_prompt:
            return side
        if best is None or side.kv_budget_tokens > best.kv_budget_tokens:
            best = side
    if best is not None:
        return best
    assert refused is not None, "size 1 divides everything"
    raise PlacementError(_over("the engine", refused), (refused,))


def _tensor_parallel_sizes(shape: ModelShape, most: int) -> Iterable[int]:
    """Powers of two that divide the heads and fit into a node."""
    size = 1
    while size <= most and shape.query_heads % size == 0:
        if shape.kv_heads % size == 0 or size % shape.kv_heads == 0:
            yield size
        size *= 2


def _free_by_node(machine: Machine, taken: int) -> list[int]:
    """GPUs of each node that are left when the first `taken` are gone."""
    node, gpus = machine.gpus_per_node, machine.gpus
    ends = range(node, gpus + node, node)
    return [max(0, min(end, gpus) - max(end - node, taken)) for end in ends]


def _over(who: str, account: Account) -> str:
    return (
        f"{who}: {account.name} needs {account.size / GIB:.1f} GiB of"
        f" {account.limit / GIB:.1f} GiB on each GPU"
    )
