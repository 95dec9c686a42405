"""Seeds of responses, and the counter-based noise that they drive.

A response is a pure function of (weights, prompt, seed, sampling parameters): its seed is derived
from the draw's identity and its place in the group, and stays with the draw while it is deferred.
"""

from __future__ import annotations

import hashlib

from rollpacker.types import DrawId

_SEED_MASK = 2**63 - 1


def response_seed(run_seed: int, draw: DrawId, index: int, attempt: int = 0) -> int:
    """The seed of response `index` of a draw: 63 bits of BLAKE2b.

    `attempt` is 0 for seeds that are kept; mode `paper` counts the launches of the draw there,
    because it samples a deferred prompt afresh.
    """
    parts = (run_seed, draw.epoch, draw.prompt_id, index, attempt)
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & _SEED_MASK


def response_seeds(run_seed: int, draw: DrawId, count: int, attempt: int = 0) -> tuple[int, ...]:
    """The seeds of the `count` responses of one launch."""
    return tuple(response_seed(run_seed, draw, index, attempt) for index in range(count))
