"""What drafts from siblings would gain in the tail of a round: an exact replay of finished runs.

    python benchmarks/sibling_drafts.py runs/demo --model demo/gcd/model

Within a group a response may guess its next tokens: the longest suffix of its own tokens that
occurs in the prompt or in a sibling (as far as that one has come) is taken for a match, and what
follows there is the draft. Responses are functions of their seeds, so what an engine would accept
is known from the samples of a run, token for token. Rounds are replayed from them: all responses
of a step start together and each step moves every one on by 1 + accepted tokens. The cost of a step
is measured on the embedded engine in the same run: one that feeds n rows is charged as n responses,
so attention to a long cache is counted in full and a verifying step is not charged for more.

One JSON line per draft length: accepted tokens per draft token, and the speed-up of whole rounds
when drafts are used only while at most `--tail` responses run. 1 means no gain.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from services.coordinator.outputs.samples import read_groups
from services.rollout.engine import GenerationRequest
from services.rollout.torch_engine.decode_loop import DecodeLoop

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COST_TOKENS = 64  # steps per measured size


@dataclass
class Row:
    """A response on its way."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # all that it will sample
    done: int = 0
    siblings: list[Row] = field(default_factory=list, repr=False)

    @property
    def so_far(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens[: self.done])


def draft(row: Row, length: int, suffix: int) -> tuple[int, ...]:
    """What follows the longest match (of at most 16, at least `suffix` tokens) of its end."""
    own = row.so_far
    best: tuple[int, ...] = ()
    best_match = suffix - 1
    for other in (row, *row.siblings):
        text = own if other is row else other.so_far
        for end in range(len(text) - 1, 0, -1):
            if text[end - 1] != own[-1]:
                continue
            match = 0
            while match < min(16, end, len(own)) and text[end - 1 - match] == own[-1 - match]:
                match += 1
            if match > best_match:
                best_match, best = match, text[end : end + length]
    return best


def step_costs(model: Path) -> dict[int, float]:
    """Seconds of one decode step by rows."""
    loop = DecodeLoop(
        slot_count=512,
        kv_budget_tokens=262_144,
        max_context_tokens=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    costs = {}
    with torch.inference_mode():
        loop.load_weights(model)
        for rows in ROWS:
            requests = [
                GenerationRequest(f"{k}", (1, 2, 3), k, 1.0, COST_TOKENS, frozenset())
                for k in range(rows)
            ]
            times = []
            for _ in range(3):
                loop.submit(requests, 1 << 20, lambda _event: None)
                loop.step()
                start = time.process_time()
                while loop.step():
                    pass
                times.append((time.process_time() - start) / (COST_TOKENS - 1))
            costs[rows] = min(times)
    return costs


def cost(costs: dict[int, float], rows: int) -> float:
    """Between the measured sizes, in proportion; beyond them, as the last one grows."""
    below = max((n for n in costs if n <= rows), default=1)
    above = min((n for n in costs if n >= rows), default=below)
    if above == below:
        return costs[below] * rows / below
    share = (rows - below) / (above - below)
    return costs[below] + share * (costs[above] - costs[below])


def rounds(run: Path, count: int) -> list[list[list[tuple[tuple[int, ...], tuple[int, ...]]]]]:
    """Per step, per group: prompt (empty: samples do not hold it) and tokens of each response."""
    paths = sorted((run / "samples").glob("step_*.jsonl"))[:count]
    return [
        [
            [(group.prompt_token_ids, scored.response.token_ids) for scored in group.responses]
            for group in read_groups(path)
        ]
        for path in paths
    ]


def replay(
    groups: Sequence[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]],
    costs: dict[int, float],
    length: int,
    suffix: int,
    tail: int,
) -> dict[str, float]:
    """One round. With `length` 0, as it is today."""
    rows = []
    for group in groups:
        family = [Row(prompt, tokens) for prompt, tokens in group]
        for row in family:
            row.siblings = [other for other in family if other is not row]
        rows += family
    figures: defaultdict[str, float] = defaultdict(float)
    while running := [row for row in rows if row.done < len(row.tokens)]:
        in_tail = len(running) <= tail
        fed, moves = 0, []
        for row in running:
            guess = draft(row, length, suffix) if length and in_tail and row.so_far else ()
            right = row.tokens[row.done : row.done + len(guess)]
            pairs = zip(guess, right, strict=False)
            accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(right))
            fed += 1 + len(guess)
            moves.append(min(len(row.tokens) - row.done, accepted + 1))
            figures["drafted"] += len(guess)
            figures["accepted"] += accepted
        for row, move in zip(running, moves, strict=True):
            row.done += move
        spent = cost(costs, fed)
        figures["seconds"] += spent
        figures["tail_seconds"] += spent * in_tail
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="directory of a finished run")
    parser.add_argument("--model", type=Path, default=Path("demo/gcd/model"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--suffix", type=int, default=3, help="shortest match, in tokens")
    parser.add_argument("--tail", type=int, nargs="+", default=[8, 32])
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = step_costs(args.model)
    print(
        json.dumps(
            {
                "benchmark": "sibling_drafts",
                "step_milliseconds_by_rows": {n: round(1e3 * c, 3) for n, c in costs.items()},
            }
        )
    )
    steps = rounds(args.run, args.steps)
    for tail in args.tail:
        before = [replay(groups, costs, 0, args.suffix, tail) for groups in steps]
        seconds = sum(each["seconds"] for each in before)
        tail_seconds = sum(each["tail_seconds"] for each in before)
        for length in (2, 4, 8, 16):
            after = [replay(groups, costs, length, args.suffix, tail) for groups in steps]
            total = {name: sum(each[name] for each in after) for name in after[0]}
            line = {
                "benchmark": "sibling_drafts",
                "run": args.run.name,
                "steps": len(steps),
                "tail_responses": tail,
                "draft_tokens": length,
                "accepted_per_draft_token": round(total["accepted"] / total["drafted"], 3),
                "tail_share_of_round": round(tail_seconds / seconds, 3),
                "speedup_of_tail": round(tail_seconds / total["tail_seconds"], 3),
                "speedup_of_round": round(seconds / total["seconds"], 3),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
