"""The demo job in several modes from the same weights on the same prompts, over several seeds.

    python benchmarks/mode_parity.py --seeds 0 1 2 --curves docs/curves

Every run trains the same number of prompt groups; modes differ in their order and, in `paper`, in
which responses they keep. One local stack per run (real services, real Redis) and one JSON line;
then one line per mode with the mean over seeds and a 95 % interval (Student's t; wide with three
seeds), and one per mode but the first of --modes with its difference from it, paired by seed.
`--curves DIR` also writes each run's reward by step and held-out scores to
DIR/<mode>_seed<seed>.json. `--jobs N` runs N at a time: wall times then say nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rollpacker.cli.coordinator import connect
from rollpacker.local_stack import LocalStack
from rollpacker.settings import RunSettings, load_run_settings, parse_run_settings
from rollpacker.v1 import coordinator_service_pb2 as pb

_T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}  # by degrees of freedom
FIGURES = (
    "reward_first",
    "reward_last",
    "validation_before",
    "validation_after",
    "response_tokens_p50",
    "response_tokens_p75",
    "response_tokens_p99",
    "response_tokens_max",
    "trained_tokens",
    "generated_tokens",
    "waste",
    "bias_ratio",
    "rollout_seconds_mean",
    "step_seconds_mean",
    "trained_tokens_per_second",
    "wall_seconds",
)


def in_mode(settings: RunSettings, mode: str) -> RunSettings:
    """The same run in another mode, with that mode's own defaults."""
    values = settings.model_dump(mode="json")
    tail = values["tail_batching"]
    if tail["mode"] != mode:
        tail |= {
            "mode": mode,
            "deferral_levels": None,
            "speculation_factors": None,
            "response_speculation_factor": None,
        }
    return parse_run_settings(values)


async def run_once(settings: RunSettings, directory: Path) -> Path:
    """Train to the end; returns the run directory."""
    async with (
        LocalStack(directory / "stack", run_directory=directory / "runs") as stack,
        connect(stack.coordinator_address, 300.0) as coordinator,
    ):
        await coordinator.start_run("run", settings)
        while True:
            run = await coordinator.get_run("run")
            if run.state == pb.Run.STATE_SUCCEEDED:
                return directory / "runs" / "run"
            if run.state not in (pb.Run.STATE_RUNNING, pb.Run.STATE_STOPPING):
                raise SystemExit(f"the run ended early: {run.failure}")
            await asyncio.sleep(1)


def curve(directory: Path) -> dict[str, Any]:
    """Reward and kind by step, and the held-out scores."""
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    held_out = directory / "validation.jsonl"
    rows = held_out.read_text().splitlines() if held_out.exists() else []
    return {
        "reward": [round(step["reward/mean"], 4) for step in steps],
        "response_tokens": [round(step["response_length/mean"], 1) for step in steps],
        "round": [f"{step['round_kind']}/{step['level']}" for step in steps],
        "held_out": [json.loads(row) for row in rows],
    }


def figures(directory: Path) -> dict[str, Any]:
    """The run's summary, flat, with its tokens."""
    summary = json.loads((directory / "summary.json").read_text())
    last = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    lengths = summary.pop("response_tokens")
    return {
        **summary,
        **{f"response_tokens_{name}": value for name, value in lengths.items()},
        "trained_tokens": last["perf/trained_tokens"],
        "generated_tokens": last["perf/generated_tokens"],
    }


def interval(values: list[float]) -> dict[str, float]:
    """Mean and half width of the 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "half_width": math.nan}
    error = statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "half_width": _T_95.get(len(values) - 1, 1.96) * error}


def measure(settings: RunSettings, mode: str, seed: int, curves: Path | None) -> dict[str, Any]:
    """Train once; its figures, which are printed too."""
    with tempfile.TemporaryDirectory() as name:
        start = time.monotonic()
        directory = asyncio.run(run_once(in_mode(settings, mode), Path(name)))
        run = {**figures(directory), "wall_seconds": time.monotonic() - start, "seed": seed}
        print(json.dumps(run), flush=True)
        if curves:
            curves.mkdir(parents=True, exist_ok=True)
            (curves / f"{mode}_seed{seed}.json").write_text(json.dumps(curve(directory)) + "\n")
    return run


def compare(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print a line per mode, and the differences from the first. Raises SystemExit if unfair."""
    groups = {run["trained_groups"] for of_mode in runs.values() for run in of_mode}
    if len(groups) != 1:
        raise SystemExit(f"the runs trained {sorted(groups)} groups; only equal ones compare")
    for mode, of_mode in runs.items():
        means = {name: interval([run[name] for run in of_mode]) for name in FIGURES}
        print(json.dumps({"mode": mode, "seeds": len(of_mode), **means}), flush=True)
    first, *others = runs
    for mode in others:
        pairs = list(zip(runs[mode], runs[first], strict=True))
        means = {name: interval([a[name] - b[name] for a, b in pairs]) for name in FIGURES}
        print(json.dumps({"mode": mode, "minus": first, "seeds": len(pairs), **means}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("demo/gcd/run.yaml"))
    parser.add_argument("--modes", nargs="+", default=["synchronous", "paper", "exact"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--curves", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    args = parser.parse_args()
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        started = {
            (mode, seed): pool.submit(
                measure,
                load_run_settings(args.config, [*args.overrides, f"seed={seed}"]),
                mode,
                seed,
                args.curves,
            )
            for seed in args.seeds
            for mode in args.modes
        }
        compare({m: [started[m, s].result() for s in args.seeds] for m in args.modes})


if __name__ == "__main__":
    main()
