"""Seeds of responses, and the counter-based noise that they drive.

A response is a pure function of (weights, prompt, seed, sampling parameters): its seed is derived
from the draw's identity and its place in the group, and stays with the draw while it is deferred.

The noise has no state. The token after position p (the absolute index, prompt included, of the
token fed last) is argmax over v of logit_v / temperature + gumbel(noise_bits(seed, p, v)). So it
depends on nothing else in the batch, and a response that is resumed after a prefix goes on as it
would have. The definition is SGLang's: MurmurHash3 (x86, 32 bit, seed 0) of the 16 bytes
(seed low, seed high, position, token id), little endian, turned into a Gumbel number in float64.

One definition serves Python ints, numpy int64 arrays and torch int64 tensors: it uses operators
only. Products may exceed 64 bits and wrap around; their low 32 bits, which the mask keeps, do not
depend on that. Shifts act on masked, hence non-negative, values.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

from rollpacker.types import DrawId

MAX_SEED = 2**63 - 1
NEAR_TIE = 1e-4  # two best perturbed scores closer than this: float32 engines may differ

_WORD = 0xFFFFFFFF
_C1 = 0xCC9E2D51
_C2 = 0x1B873593
_KEY_BYTES = 16
_LOG_MIN = -sys.float_info.max  # where log(0) = -inf is held
_LOG_MAX = -(2.0**-32)  # the spacing of the hash; without it u = 1 would win with gumbel = inf


def response_seed(run_seed: int, draw: DrawId, index: int, attempt: int = 0) -> int:
    """The seed of response `index` of a draw: 63 bits of BLAKE2b.

    `attempt` is 0 for seeds that are kept; mode `paper` counts the launches of the draw there,
    because it samples a deferred prompt afresh.
    """
    parts = (run_seed, draw.epoch, draw.prompt_id, index, attempt)
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & MAX_SEED


def response_seeds(run_seed: int, draw: DrawId, count: int, attempt: int = 0) -> tuple[int, ...]:
    """The seeds of the `count` responses of one launch."""
    return tuple(response_seed(run_seed, draw, index, attempt) for index in range(count))


def seed_state(seed: Any) -> Any:
    """The hash after the seed's two words: the part of `noise_bits` that a response can keep."""
    return _mix(_mix(seed & 0, seed & _WORD), (seed >> 32) & _WORD)


def noise_bits(state: Any, position: Any, token_id: Any) -> Any:
    """32 uniform bits for (seed, position, token), as an integer in 0..2^32-1.

    `state` is `seed_state(seed)`; `position` is the index of the token fed last; the arguments
    broadcast against each other.
    """
    h = _mix(_mix(state, position & _WORD), token_id & _WORD) ^ _KEY_BYTES
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def gumbel(bits: Any, namespace: Any = np) -> Any:
    """Standard Gumbel noise in float64: -log(-log(bits / (2^32 - 1))), always finite.

    `namespace` is the module of the arrays, `numpy` (also for an int) or `torch`.
    """
    uniform = namespace.asarray(bits, dtype=namespace.float64) / _WORD
    with np.errstate(divide="ignore"):
        log_uniform = namespace.clip(namespace.log(uniform), _LOG_MIN, _LOG_MAX)
    return -namespace.log(-log_uniform)


def _mix(h: Any, word: Any) -> Any:
    """One block of MurmurHash3 x86_32."""
    word = (word * _C1) & _WORD
    h = h ^ ((_rotate_left(word, 15) * _C2) & _WORD)
    return (_rotate_left(h, 13) * 5 + 0xE6546B64) & _WORD


def _rotate_left(word: Any, count: int) -> Any:
    return ((word << count) & _WORD) | (word >> (32 - count))
