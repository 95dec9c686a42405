"""What SGLang imports from its kernel package, for a CPU on which that package does not run.

One function is real: the noise hash of seeded sampling, in plain torch. Every other name is a
function that refuses to be called: plain generation on a CPU calls none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_WORD = 0xFFFFFFFF
_KEY_BYTES = 16  # seed (8), position (4), column (4)

_library: Any = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit) of (seed, position, column): uint32 [rows, columns].

    `seed` is uint64 [rows], `positions` [rows], `col_indices` [columns]. Products of 32-bit words
    wrap around in int64; their low words, which are kept, are right all the same.
    """
    seeds = seed.view(torch.int64)[:, None]
    state = torch.zeros_like(seeds)
    words = (seeds, seeds >> 32, positions.to(torch.int64)[:, None], col_indices.to(torch.int64))
    for word in words:
        state = _block(state, word & _WORD)
    state = state ^ _KEY_BYTES
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _WORD
    return (state ^ (state >> 16)).to(torch.uint32)


def _block(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _rotate_left((word * 0xCC9E2D51) & _WORD, 15)
    state = _rotate_left(state ^ ((word * 0x1B873593) & _WORD), 13)
    return (state * 5 + 0xE6546B64) & _WORD


def _rotate_left(word: torch.Tensor, count: int) -> torch.Tensor:
    return ((word << count) & _WORD) | (word >> (32 - count))


_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_args: Any, **_options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} does not run on a CPU")

    return refuse
