"""A response that was cut, and then comes out shorter than it was, is drawn again.

A race tells of a response that it cuts only that it is longer than what it had. Launched again
under newer weights it may come out shorter, and then long ones are missing from what is trained.
So such a response may be sampled anew, with another seed under the same weights, a few times.
Nothing of an attempt but its time is left.

Live runs do not do this: `search` and `compare --ladder` tell what it is worth (decision 42).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rollpacker.simulation.workload import RecordedWorkload, Workload
from rollpacker.types import DeferredDraw

Attempts = Mapping[int, Sequence[int]]  # tokens of those before the last one, by index of response

_LAUNCHES = 64  # that a draw may have
_FIRST = 2000  # number of a launch that no run reaches


def redrawn(
    lengths: Sequence[int],
    draft: DeferredDraw,
    most: int,
    again: Callable[[int], Sequence[int]],
) -> tuple[list[int], Attempts]:
    """What the responses of a deferred draw come out as, and the attempts before.

    `lengths`: of the first attempt, in tokens. `again(n)`: of attempt n, from 1 to `most`.
    """
    last = list(lengths)
    before: dict[int, list[int]] = {}
    for index, (had, finished) in enumerate(
        zip(draft.response_tokens, draft.finished, strict=True)
    ):
        for attempt in range(1, most + 1):
            if finished or last[index] > had:
                break
            before.setdefault(index, []).append(last[index])
            last[index] = again(attempt)[index]
    return last, before


def fresh_lengths(
    workload: Workload | RecordedWorkload, number: int, launch: int, attempt: int
) -> list[int]:
    """Tokens of the responses of a draw with other seeds, in this launch and attempt."""
    return workload.lengths(number, 0.0, _FIRST + _LAUNCHES * attempt + launch)
