"""How many bytes each side needs on one GPU, part by part, with the arithmetic in words.

The trainer keeps float32 master weights, gradient sums and two Adam moments, divided over the
shards of a replica (services/trainer/model.py); it computes in bfloat16. The engine keeps bfloat16
weights, divided over the tensor-parallel ranks, and keys and values. An `Account` is what is on one
GPU at the same time; it fits if its parts are not more than its limit.

The activations that a layer keeps for its backward pass were counted from the tensors that autograd
saves, not derived: tests/unit/test_placement.py counts them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.placement.shape import ModelShape

GIB = 1024**3
_COMPUTE, _MASTER = 2, 4  # bytes of a bfloat16, of a float32
_STATES = 4  # float32 numbers per parameter: weight, gradient, two moments
_HEAD_BYTES = GIB // 2  # logits that exist at once: 2^26 and a chunk of 2^24 three times, float32
_ROUTE = 20  # numbers that a token keeps for each of its experts: places, weights
_PREFETCHED_LAYERS = 2  # gathered at once: the one at work and the next


@dataclass(frozen=True, slots=True)
class Part:
    """One line of an account."""

    name: str
    size: int  # bytes
    arithmetic: str


@dataclass(frozen=True, slots=True)
class Account:
    """What is on one GPU at the same time."""

    name: str
    limit: int  # bytes that may be used
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def free(self) -> int:
        """Negative where it does not fit."""
        return self.limit - self.size


def billions(count: int) -> str:
    """A count of parameters, as people say it."""
    return f"{count / 1e9:.2f}e9"


def trainer_states(shape: ModelShape, shards: int) -> Part:
    """Weights, gradients and moments of one shard."""
    size = _STATES * _MASTER * shape.parameters // shards
    words = f"({_STATES} x {_MASTER} B) x {billions(shape.parameters)} / {shards} shards"
    return Part("weights, gradients, Adam", size, words)


def reference_weights(shape: ModelShape, shards: int) -> Part:
    """The initial model, kept where the loss has a divergence from it."""
    size = _MASTER * shape.parameters // shards
    return Part("reference model", size, f"{_MASTER} B x {billions(shape.parameters)} / {shards}")


def optimizer_work(shape: ModelShape, shards: int) -> Part:
    """What the update of AdamW holds in between."""
    size = _MASTER * shape.parameters // shards
    return Part("update in between", size, f"{_MASTER} B x {billions(shape.parameters)} / {shards}")


def gathered(shape: ModelShape, shards: int) -> Part:
    """Weights and gradients in the compute type that exist whole for a while."""
    if shards == 1:
        size = _COMPUTE * shape.parameters
        words = f"{_COMPUTE} B x {billions(shape.parameters)}, cast for autocast"
        return Part("weights to compute with", size, words)
    layer, root = shape.layer_parameters, shape.root_parameters
    gradient = _COMPUTE + _MASTER  # as computed, and as reduced
    size = (_PREFETCHED_LAYERS * _COMPUTE + gradient) * layer + (_COMPUTE + gradient) * root
    words = (
        f"{_PREFETCHED_LAYERS * _COMPUTE + gradient} B x {billions(layer)} of a layer +"
        f" {_COMPUTE + gradient} B x {billions(root)} of embedding and head"
    )
    return Part("gathered weights, their gradients", size, words)


def head_work(shape: ModelShape) -> Part:
    """Logits of a chunk of positions, the head in the compute type, and its gradient."""
    table = shape.vocab_size * shape.hidden_size
    each = _COMPUTE + _MASTER
    words = f"0.5 GiB of logits + {each} B x {billions(table)} of the head"
    return Part("logits", _HEAD_BYTES + each * table, words)


def saved_layer_bytes(shape: ModelShape, shards: int) -> int:
    """Per token, what one layer keeps for its backward pass, without recomputing."""
    attention = (2 + (3 if shape.qk_norm else 0)) * (shape.query_size + shape.kv_size)
    statistics = 4 + 2 * shape.query_heads + (
        2 * (shape.query_heads + shape.kv_heads) if shape.qk_norm else 0
    )  # fmt: skip
    return _COMPUTE * (_stream_numbers(shape, shards) + attention + statistics)


def _stream_numbers(shape: ModelShape, shards: int) -> int:
    """Of the residual stream and the feed-forward part; one process keeps more, in float32."""
    hidden, inner, chosen = shape.hidden_size, shape.intermediate_size, shape.experts_per_token
    if not shape.experts:
        return (13 if shards == 1 else 8) * hidden + 4 * inner
    wide = 2 if shards == 1 else 1
    experts = chosen * (wide * (2 * hidden + 4 * inner) + _ROUTE)  # each has inputs of its own
    router = 2 * shape.experts
    return (12 if shards == 1 else 8) * hidden + experts + router


def activation_bytes_per_token(shape: ModelShape, shards: int, recompute: bool) -> int:
    """Of a whole forward pass; with `recompute` each layer keeps its input only."""
    layer = saved_layer_bytes(shape, shards)
    if not recompute:
        return shape.layers * layer
    kept = _MASTER if shards == 1 else _COMPUTE
    return shape.layers * kept * shape.hidden_size + layer


def engine_weights(shape: ModelShape, ranks: int) -> Part:
    """One tensor-parallel rank's."""
    size = _COMPUTE * shape.parameters // ranks
    return Part("weights", size, f"{_COMPUTE} B x {billions(shape.parameters)} / TP {ranks}")


def kv_bytes_per_token(shape: ModelShape, ranks: int) -> int:
    """On one rank; with more ranks than heads of keys each rank has a copy of one."""
    heads = max(1, shape.kv_heads // ranks)
    return 2 * shape.layers * heads * shape.head_dim * _COMPUTE
