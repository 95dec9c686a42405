"""What a run remembers of its rollout engines, by tensor-parallel size, for its planner.

Where the run may choose the size, one that was never had is hoped to be as good as can be, one
doubling or halving at a time; from its first round on it is known.

    base of a decode step = reading the weights + launches, all-reduces, sampling
                              shrinks with the size   does not: communication only grows

Weights are read as fast as KV, and what a KV token costs is measured: so the first part is
`weight_kv_tokens` times that, at most the whole base. A running response is not hoped to cost less:
its matrix products hide behind the reading of the weights, what is seen of it is host and
communication. Where rounds do not show what KV costs, memory is taken not to limit them, and
no size is tried. Where `weight_kv_tokens` is not known, a doubling is hoped to halve the whole step
and a halving to cost nothing.

Once two sizes are known, a further one is not hoped to change a step by more than the step between
these did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from rollpacker.policy.engine_forecast import EngineMeasure
from rollpacker.policy.engine_meter import EngineMeter, SpeedSums, decode_seconds
from rollpacker.policy.ladder_forecast import PlannerRules

_MIN_EQUATIONS = 50  # before a speed counts as measured
_UNLIMITED = 1 << 50  # KV tokens


@dataclass(frozen=True, slots=True)
class EnginesSeen:
    """The engines of a finished round."""

    speed: SpeedSums
    replicas: int
    kv_capacity: int  # tokens per replica; 0: not known, no limit
    prompt_tokens: float  # of a prompt, on average
    size: int = 0  # tensor-parallel size; 0: they keep their own
    apply_seconds: float = 0.0  # until the first one was at the weights, and at this size
    weight_kv_tokens: int = 0  # so many KV tokens are as many bytes as the weights; 0: not known

    @staticmethod
    def of(meter: EngineMeter, size: int = 0, apply_seconds: float = 0.0) -> EnginesSeen:
        """What a round's meter has measured."""
        return EnginesSeen(
            meter.sums,
            meter.replicas,
            meter.kv_capacity,
            meter.prompt_tokens,
            size,
            apply_seconds,
            meter.weight_kv_tokens,
        )


@dataclass(frozen=True, slots=True)
class SizeMemory:
    """Engines of one size."""

    speed: SpeedSums = field(default_factory=SpeedSums)
    replicas: int = 1
    kv_capacity: int = 0


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Engines of all sizes, and what it takes to get from one to another."""

    sizes: Mapping[int, SizeMemory] = field(default_factory=dict)
    prompt_tokens: float = 0.0
    last_size: int = -1  # of the last round; -1: there was none
    refit_seconds: float = 0.0  # the least until engines of the same size had new weights
    resizes: float = 0.0  # of which older ones fade
    resizing_seconds: float = 0.0  # of these, until engines had new weights and another size
    weight_kv_tokens: int = 0  # of the model, at any size

    @property
    def resize_seconds(self) -> float:
        """What a resize takes beyond a refit; while there was none as much again: it loads all
        weights, as a refit does."""
        if not self.resizes:
            return self.refit_seconds
        return max(0.0, self.resizing_seconds / self.resizes - self.refit_seconds)

    @property
    def equations(self) -> float:
        """Ends of responses that were timed."""
        return sum(seen.speed.equations for seen in self.sizes.values())


def engines_remembered(memory: EngineMemory, seen: EnginesSeen, fades: float) -> EngineMemory:
    """The memory after a round; what it had of this size counts `fades` times from now on."""
    before = memory.sizes.get(seen.size, SizeMemory())
    size = SizeMemory(
        before.speed.faded(fades, seen.speed),
        seen.replicas or before.replicas,
        seen.kv_capacity or before.kv_capacity,
    )
    sizes = {**memory.sizes, seen.size: size}
    memory = replace(
        memory,
        sizes=sizes,
        prompt_tokens=seen.prompt_tokens,
        weight_kv_tokens=seen.weight_kv_tokens or memory.weight_kv_tokens,
    )
    if memory.last_size < 0:  # says nothing: engines may have been started for it
        return replace(memory, last_size=seen.size)
    if seen.size == memory.last_size:
        least = min(memory.refit_seconds or math.inf, seen.apply_seconds)
        return replace(memory, refit_seconds=least)
    return replace(
        memory,
        last_size=seen.size,
        resizes=fades * memory.resizes + 1.0,
        resizing_seconds=fades * memory.resizing_seconds + seen.apply_seconds,
    )


def measured_engines(
    memory: EngineMemory, other_seconds: Sequence[float]
) -> dict[int, EngineMeasure]:
    """The engines by size as they were measured; not those of which too little was."""
    found: dict[int, EngineMeasure] = {}
    for size, seen in memory.sizes.items():
        step = decode_seconds(seen.speed)
        if step is None or seen.speed.equations < _MIN_EQUATIONS:
            continue
        found[size] = EngineMeasure(
            replicas=seen.replicas,
            base_seconds=step.base,
            per_sequence_seconds=step.per_sequence,
            per_kv_token_seconds=step.per_kv_token,
            kv_capacity=seen.kv_capacity or _UNLIMITED,
            prompt_tokens=round(memory.prompt_tokens),
            other_seconds=max(0.0, median(other_seconds)) if other_seconds else 0.0,
        )
    return found


def engines_to_be_had(
    rules: PlannerRules,
    measured: Mapping[int, EngineMeasure],
    present: Sequence[int],
    weight_kv_tokens: int = 0,
) -> dict[int, EngineMeasure]:
    """The measured engines, and what others may be hoped to be: those of the `present` sizes, and
    of the sizes next to the measured ones, within the limits. None while none is measured.

    `weight_kv_tokens`: whose KV is as many bytes as the weights; 0: not known.
    """
    if not rules.largest_size:
        return dict(measured)
    found = {size: engine for size, engine in measured.items() if size}  # 0: nobody knew which
    if not found:
        return {}
    next_ones = {2 * max(found), min(found) // 2}
    allowed = {
        size
        for size in next_ones
        if rules.smallest_size <= size <= rules.largest_size
        and (not weight_kv_tokens or found[_by_distance(found, size)[0]].per_kv_token_seconds > 0.0)
    }
    hoped = {
        size: _hoped(found, size, weight_kv_tokens)
        for size in allowed.union(present) - found.keys()
    }
    for size, engine in sorted(hoped.items()):
        if engine.replicas:
            found[size] = engine
        elif size in present:  # devices have gone; what is in force is forecast all the same
            found[size] = replace(engine, replicas=1)
    return found


def _by_distance(sizes: Iterable[int], size: int) -> list[int]:
    return sorted(sizes, key=lambda known: abs(math.log(known / size)))


def _hoped(
    measured: Mapping[int, EngineMeasure], size: int, weight_kv_tokens: int
) -> EngineMeasure:
    """The best that engines of a size can be, on the devices of the measured ones: no part of
    their step is less than either limit allows, the model's or that of two measured sizes."""
    by_distance = _by_distance(measured, size)
    engine = measured[by_distance[0]]
    ratio = size / by_distance[0]
    base, per_sequence = _least_seconds(engine, ratio, weight_kv_tokens)
    if len(by_distance) > 1:
        change = partial(_change, measured, by_distance[:2], ratio)
        base = max(base, engine.base_seconds * change(lambda one: one.base_seconds))
        per_sequence = max(
            per_sequence,
            engine.per_sequence_seconds * change(lambda one: one.per_sequence_seconds),
        )
    return replace(
        engine,
        replicas=int(engine.replicas / ratio),
        base_seconds=base,
        per_sequence_seconds=per_sequence,
        per_kv_token_seconds=engine.per_kv_token_seconds / ratio,
        kv_capacity=int(engine.kv_capacity * ratio),
    )


def _least_seconds(
    engine: EngineMeasure, ratio: float, weight_kv_tokens: int
) -> tuple[float, float]:
    """Base and per_sequence of engines `ratio` times as large, see the top of the file."""
    if not weight_kv_tokens:
        saved = 1.0 / max(1.0, ratio)
        return engine.base_seconds * saved, engine.per_sequence_seconds * saved
    weights = min(engine.base_seconds, weight_kv_tokens * engine.per_kv_token_seconds)
    return engine.base_seconds + weights * (1.0 / ratio - 1.0), engine.per_sequence_seconds


def _change(
    measured: Mapping[int, EngineMeasure],
    sizes: Sequence[int],
    ratio: float,
    seconds: Callable[[EngineMeasure], float],
) -> float:
    """By how much a part of the decode step changes with the size, at best: as it did between the
    two measured sizes, each doubling saving less than the one before."""
    small, large = sorted(sizes)
    before, after = (max(1e-12, seconds(measured[size])) for size in (small, large))
    power = math.log(after / before) / math.log(large / small)
    return float(ratio ** min(0.0, max(-1.0, power)))


def engines_to_json(memory: EngineMemory) -> dict[str, Any]:
    """As JSON values."""
    return {
        **asdict(memory),
        "sizes": [[size, asdict(seen)] for size, seen in memory.sizes.items()],
    }


def engines_from_json(values: Mapping[str, Any]) -> EngineMemory:
    """The inverse of `engines_to_json`."""
    sizes = {
        size: SizeMemory(_speed(**seen["speed"]), seen["replicas"], seen["kv_capacity"])
        for size, seen in values["sizes"]
    }
    return EngineMemory(**{**values, "sizes": sizes})


def _speed(equations: float, products: Sequence[float], targets: Sequence[float]) -> SpeedSums:
    return SpeedSums(equations, tuple(products), tuple(targets))
