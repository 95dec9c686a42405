"""Writes train.jsonl and validation.jsonl: `python demo/gcd/make_data.py [DIRECTORY]`.

Seeded: the same files, byte for byte, every time. No pair occurs twice, in one file or in both.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import task

SEED = 0
TRAINING_PROMPTS = 40 * 32  # steps x prompts_per_step of run.yaml
VALIDATION_PROMPTS = 256


def distinct_pairs(count: int, *, held_out: bool) -> Iterator[tuple[int, int]]:
    """The first `count` different pairs of one side."""
    seen: set[tuple[int, int]] = set()
    pairs = task.random_pairs(random.Random(SEED), held_out=held_out)
    while len(seen) < count:
        pair = next(pairs)
        if pair not in seen:
            seen.add(pair)
            yield pair


def row(a: int, b: int) -> str:
    """One line of JSONL; grader math reads the answer behind `=`."""
    values = {
        "prompt_id": f"{a},{b}",
        "prompt": task.prompt_text(a, b),
        "answer": str(math.gcd(a, b)),
        "answer_after": "=",
    }
    return json.dumps(values) + "\n"


def write(path: Path, count: int, *, held_out: bool) -> None:
    lines = [row(a, b) for a, b in distinct_pairs(count, held_out=held_out)]
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the gcd prompts.")
    parser.add_argument("directory", type=Path, nargs="?", default=Path(__file__).parent)
    directory = parser.parse_args().directory
    write(directory / "train.jsonl", TRAINING_PROMPTS, held_out=False)
    write(directory / "validation.jsonl", VALIDATION_PROMPTS, held_out=True)


if __name__ == "__main__":
    main()
