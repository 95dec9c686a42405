"""The demo task: gcd(a, b) by repeated subtraction, written out as a trace.

A prompt is `84,36:`. A response either shows its work, `48,36;12,36;12,24;12,12;=12`, or jumps to
an answer, `=12`. The length of a trace is decided by the numbers: most take a few subtractions,
a lopsided pair such as 97,2 takes dozens. That is the long tail of the demo.

A pair belongs to the training side or to the held-out side by its hash, for ever: neither warm
start nor reinforcement learning sees a held-out pair.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator

LARGEST = 99  # of a and b
LARGEST_GCD = 9
CHARACTERS = "0123456789,:;="
LOPSIDED_SHARE = 1 / 20  # pairs whose trace takes dozens of subtractions
HELD_OUT_SHARE = 1 / 8


def prompt_text(a: int, b: int) -> str:
    return f"{a},{b}:"


def guess_text(generator: random.Random) -> str:
    """A response that skips the work: any answer that is possible."""
    return f"={generator.randint(1, LARGEST_GCD)}"


def trace_text(a: int, b: int) -> str:
    """The response that shows its work: the larger number loses the smaller until they meet."""
    steps = []
    while a != b:
        a, b = (a - b, b) if a > b else (a, b - a)
        steps.append(f"{a},{b};")
    return "".join(steps) + f"={a}"


def is_held_out(a: int, b: int) -> bool:
    digest = hashlib.blake2b(f"{a},{b}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def random_pairs(generator: random.Random, *, held_out: bool) -> Iterator[tuple[int, int]]:
    """Endless pairs of one side; one in twenty is lopsided, the others have a gcd up to 9."""
    while True:
        if generator.random() < LOPSIDED_SHARE:
            gcd, x, y = 1, generator.randint(40, LARGEST), generator.randint(1, 3)
        else:
            gcd = generator.randint(1, LARGEST_GCD)
            x, y = (generator.randint(1, LARGEST // gcd) for _ in range(2))
        a, b = (gcd * x, gcd * y) if generator.random() < 0.5 else (gcd * y, gcd * x)
        if a != b and math.gcd(x, y) == 1 and is_held_out(a, b) == held_out:
            yield a, b
