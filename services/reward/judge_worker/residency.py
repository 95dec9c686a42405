"""How many layers of the judge stay on the device, and which. Pure arithmetic.

The judge shares its device, so the memory that it finds differs from batch to batch, and long
sequences leave less of it for weights. What does not fit stays in host memory and is streamed
through two buffers, each as large as the largest layer, while other layers compute. Streamed layers
are spread evenly: a resident layer in between is time in which the next one arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BUFFERS = 2  # the layer that computes, and the next one on its way


class DeviceMemoryError(Exception):
    """A batch does not fit even with every layer streamed; the message has the figures."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides about memory, in bytes."""

    layer_bytes: tuple[int, ...]
    cache_bytes_per_token: int  # keys and values of all layers, for one token of one sequence
    work_bytes_per_token: int  # activations at their peak


def residents(
    shape: ModelShape, free_bytes: float, sequences: int, tokens: int
) -> tuple[bool, ...]:
    """For each layer whether it stays. `free_bytes`: for layers, cache and activations together.

    `tokens` is the length of the longest sequence at its end. Raises DeviceMemoryError.
    """
    work = sequences * tokens * (shape.cache_bytes_per_token + shape.work_bytes_per_token)
    room = free_bytes - work
    if sum(shape.layer_bytes) <= room:
        return (True,) * len(shape.layer_bytes)
    room -= BUFFERS * max(shape.layer_bytes)
    if room < 0:
        raise DeviceMemoryError(
            f"{sequences} sequences of {tokens} tokens need {work >> 20} MiB and {BUFFERS} layers"
            f" of {max(shape.layer_bytes) >> 20} MiB; {max(0, round(free_bytes)) >> 20} MiB are"
            " free"
        )
    count = len(shape.layer_bytes)
    streamed = next(
        number
        for number in range(1, count + 1)
        if _resident_bytes(shape.layer_bytes, spread(count, number)) <= room
    )
    return spread(count, streamed)


def spread(count: int, streamed: int) -> tuple[bool, ...]:
    """Which of `count` layers stay when `streamed` of them do not."""
    return tuple(
        (place + 1) * streamed // count == place * streamed // count for place in range(count)
    )


def _resident_bytes(layer_bytes: Sequence[int], stays: Sequence[bool]) -> int:
    return sum(size for size, stay in zip(layer_bytes, stays, strict=True) if stay)
