"""Verified carry-over on the demo job: how many draft tokens are accepted, and what that saves.

    python benchmarks/carry_over.py --steps 24
    python benchmarks/carry_over.py --with runs/a --without runs/b     (two finished runs)

Two real runs of the demo job (real services, real Redis) with the same seed, one of them with
`tail_batching.carry_over_max_tokens` 0. The schedule is the same; responses are the same up to
near-ties, and what follows from one: `same_responses` tells how many are. One JSON line per
figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollpacker.cli.coordinator import connect
from rollpacker.local_stack import LocalStack
from rollpacker.settings import load_run_settings
from rollpacker.v1 import coordinator_service_pb2 as pb
from services.coordinator.outputs.samples import read_groups

Steps = list[dict[str, Any]]
_AGE = re.compile(r"carry/draft_tokens_after_(\d+)_to_(\d+)")


async def run_once(config: Path, overrides: list[str], directory: Path) -> Path:
    """Train to the end; returns the run directory."""
    settings = load_run_settings(config, overrides)
    async with (
        LocalStack(directory / "stack", run_directory=directory / "runs") as stack,
        connect(stack.coordinator_address, 300.0) as coordinator,
    ):
        await coordinator.start_run("run", settings)
        while (run := await coordinator.get_run("run")).state != pb.Run.STATE_SUCCEEDED:
            if run.state not in (pb.Run.STATE_RUNNING, pb.Run.STATE_STOPPING):
                raise SystemExit(f"the run ended early: {run.failure}")
            await asyncio.sleep(1)
    return directory / "runs" / "run"


def read_steps(directory: Path) -> Steps:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def total(steps: Steps, name: str) -> float:
    return sum(step.get(name, 0.0) for step in steps)


def acceptance(steps: Steps) -> Iterator[dict[str, Any]]:
    """Accepted per draft token, by the updates between draft and check."""
    ages = {tuple(map(int, m.groups())) for step in steps for n in step if (m := _AGE.fullmatch(n))}
    for least, most in sorted(ages):
        suffix = f"_after_{least}_to_{most}"
        drafted = total(steps, f"carry/draft_tokens{suffix}")
        accepted = total(steps, f"carry/accepted_tokens{suffix}")
        yield {
            "figure": "acceptance",
            "updates_between": [least, most],
            "draft_tokens": int(drafted),
            "accepted_tokens": int(accepted),
            "accepted_per_draft_token": round(accepted / drafted, 4) if drafted else None,
        }


def saved_tokens(carried: Steps, without: Steps) -> dict[str, Any]:
    """Decoded tokens of the whole run; `waste` is decoded per trained token."""
    last, last_without = carried[-1], without[-1]
    return {
        "figure": "tokens",
        "draft_tokens": int(total(carried, "carry/draft_tokens")),
        "accepted_tokens": int(total(carried, "carry/accepted_tokens")),
        "decoded": int(last["perf/generated_tokens"]),
        "decoded_without": int(last_without["perf/generated_tokens"]),
        "trained": int(last["perf/trained_tokens"]),
        "trained_without": int(last_without["perf/trained_tokens"]),
        "waste": round(last["perf/waste"], 4),
        "waste_without": round(last_without["perf/waste"], 4),
    }


def round_times(carried: Steps, without: Steps) -> Iterator[dict[str, Any]]:
    """Rollout seconds by kind and level of the round, rounds of the same step compared."""
    kinds = sorted({(step["round_kind"], step["level"]) for step in carried})
    for kind, level in kinds:
        pairs = [
            (a["timing_s/rollout"], b["timing_s/rollout"])
            for a, b in zip(carried, without, strict=False)
            if (a["round_kind"], a["level"]) == (b["round_kind"], b["level"]) == (kind, level)
        ]
        seconds, seconds_without = (sum(column) for column in zip(*pairs, strict=True))
        yield {
            "figure": "rollout_seconds",
            "round": kind,
            "level": level,
            "rounds": len(pairs),
            "seconds": round(seconds, 2),
            "seconds_without": round(seconds_without, 2),
            "speedup": round(seconds_without / seconds, 3),
            "speedup_median_round": round(statistics.median(b / a for a, b in pairs), 3),
        }


def same_responses(with_directory: Path, without_directory: Path, steps: int) -> dict[str, Any]:
    """Trained responses of the two runs, draw by draw."""
    same = different = 0
    first_different = None
    for step in range(steps):
        found, expected = (
            {
                (group.draw.id, scored.response.index): scored.response.token_ids
                for group in read_groups(directory / "samples" / f"step_{step:06d}.jsonl")
                for scored in group.responses
            }
            for directory in (with_directory, without_directory)
        )
        equal = sum(expected.get(name) == tokens for name, tokens in found.items())
        same, different = same + equal, different + len(found) - equal
        if equal < len(found) and first_different is None:
            first_different = step
    return {
        "figure": "same_responses",
        "same": same,
        "different": different,
        "first_step_with_a_difference": first_different,
    }


def report(with_directory: Path, without_directory: Path) -> Iterator[dict[str, Any]]:
    carried, without = read_steps(with_directory), read_steps(without_directory)
    yield from acceptance(carried)
    yield saved_tokens(carried, without)
    yield from round_times(carried, without)
    yield same_responses(with_directory, without_directory, len(carried))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("demo/gcd/run.yaml"))
    parser.add_argument("--steps", type=int, default=24, help="of each run; 0: all of the data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--with", dest="carried", type=Path, help="a finished run with carry-over")
    parser.add_argument("--without", type=Path, help="the same run with carry_over_max_tokens 0")
    args = parser.parse_args()
    if (args.carried is None) != (args.without is None):
        raise SystemExit("give both --with and --without, or neither")
    with tempfile.TemporaryDirectory() as name:
        places = args.carried, args.without
        if args.carried is None:
            common = [f"max_steps={args.steps}", f"seed={args.seed}"]
            off = [*common, "tail_batching.carry_over_max_tokens=0"]
            places = (
                asyncio.run(run_once(args.config, common, Path(name) / "with")),
                asyncio.run(run_once(args.config, off, Path(name) / "without")),
            )
        for line in report(*places):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
