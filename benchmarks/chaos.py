"""The demo job, hit by faults at random moments of its life: does it train what it should?

    python benchmarks/chaos.py --faults 50 --seed 0

Real processes (two rollout and two reward replicas, two trainer ranks, the coordinator) and a real
Redis with an append-only file, each reached through a proxy. One run goes undisturbed; the next one
is killed (SIGKILL), paused (SIGSTOP, 5 s) and cut off (connections refused, or silent, 5 s), as the
seed decides. Then both are recounted from their files alone (tests/chaos/audit.py). Prints one JSON
line: `faults`, `recoveries`, `seconds_lost_per_fault`, `violations`, `run_dir`, and exits with 1 if
there is a violation; each one is a line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollpacker.settings import RunSettings, load_run_settings
from tests.chaos.audit import violations
from tests.chaos.disturb import disturb, linked_stack
from tests.chaos.faults import Fault, schedule

DEMO = Path(__file__).parents[1] / "demo" / "gcd"
_SLOTS = 64
_STEPS_PER_FAULT = 1.5  # a step of the demo job takes about a second, a fault about five


def demo_settings(fault_count: int) -> tuple[RunSettings, int]:
    """The demo job, long enough for so many faults, and how many steps it takes.

    Trained in a fixed order of summation: what two runs do can be compared to the last bit.
    """
    demo = load_run_settings(DEMO / "run.yaml")
    per_epoch = _rows() // demo.tail_batching.prompts_per_step
    epochs = max(1, math.ceil(fault_count * _STEPS_PER_FAULT / per_epoch))
    changes = [f"data.epochs={epochs}", "trainer.deterministic=true", "validation.prompts=32"]
    return load_run_settings(DEMO / "run.yaml", changes), epochs * per_epoch


async def chaos(directory: Path, fault_count: int, seed: int) -> dict[str, Any]:
    """Both runs, in one stack; returns the figures."""
    settings, steps = demo_settings(fault_count)
    values = settings.model_dump(mode="json")
    async with linked_stack(directory, rollouts=2, rewards=2, trainers=2, slots=_SLOTS) as linked:
        faults = schedule(
            seed,
            fault_count,
            steps=steps,
            groups=settings.tail_batching.prompts_per_step,
            targets=linked.targets,
        )
        started = time.monotonic()
        await linked.real.start("undisturbed", values)
        await linked.real.succeeded("undisturbed")
        undisturbed_seconds = time.monotonic() - started
        started = time.monotonic()
        await linked.real.start("disturbed", values)
        recoveries = await disturb(linked, "disturbed", faults)
        await linked.real.succeeded("disturbed")
        seconds = time.monotonic() - started
        runs = linked.real.stack.layout.run_directory
    found = violations(
        runs / "disturbed",
        runs / "undisturbed",
        prompts=_rows(),
        epochs=settings.data.epochs,
        responses=settings.tail_batching.responses_per_prompt,
    )
    for line in found:
        print(line, file=sys.stderr)
    return {
        "benchmark": "chaos",
        "seed": seed,
        "faults": len(faults),
        "by_kind": _by_kind(faults),
        "recoveries": recoveries,
        "steps": steps,
        "undisturbed_seconds": round(undisturbed_seconds, 1),
        "disturbed_seconds": round(seconds, 1),
        "seconds_lost_per_fault": round((seconds - undisturbed_seconds) / len(faults), 2),
        "violations": len(found),
        "run_dir": str(runs / "disturbed"),
    }


def _by_kind(faults: list[Fault]) -> dict[str, int]:
    kinds = [fault.kind.value for fault in faults]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def _rows() -> int:
    return sum(1 for _ in (DEMO / "train.jsonl").open())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--directory", type=Path, help="where everything is kept; default: a new one"
    )
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="rollpacker-chaos-"))
    figures = asyncio.run(chaos(directory, options.faults, options.seed))
    print(json.dumps(figures), flush=True)
    sys.exit(1 if figures["violations"] else 0)


if __name__ == "__main__":
    main()
