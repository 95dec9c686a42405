"""Garbage collection around a step.

Until a step ends, what its round has made is in use. A full collection looks at all of it, finds
nothing (rounds leave no reference cycles behind, as `gc.DEBUG_SAVEALL` shows), and stops the event
loop meanwhile: for 1.2 s with 30,000 responses under way. When the step has ended, little is left
to look at.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_NEVER = 1 << 30  # collections of the generation before


@contextlib.contextmanager
def full_collections_wait() -> Iterator[None]:
    """Objects that have outlived two collections are not looked at again before the end of this;
    a collection that was due meanwhile is made then."""
    young, middle, old = gc.get_threshold()
    if old == _NEVER:  # they wait already, and whoever began that ends it
        yield
        return
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
    if gc.get_count()[2] > old:
        gc.collect()
