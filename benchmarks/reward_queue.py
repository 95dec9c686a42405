"""Rewards that cannot keep up: complete groups first, or every response as it finishes.

    python benchmarks/reward_queue.py --steps 8

The demo job twice, on real services, with a grader that takes --seconds a response: once with the
coordinator's reward queue, once with room for everything. Both train the same
draws in the same steps, or the benchmark fails. One JSON line each (seconds are means of a step),
then one with the ratios, with it over without: on a shared machine only these say something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from mode_parity import run_once

from rollpacker.settings import RunSettings, load_run_settings, parse_run_settings

_GRADER = """
import time


def score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({seconds})
    return float(ground_truth in solution_str)
"""
_EVERYTHING = 1_000_000  # responses at once
_FIGURES = ("timing_s/rollout", "timing_s/reward_wait", "timing_s/step")


def with_room(settings: RunSettings, steps: int, room: int) -> RunSettings:
    """The job with the slow grader, some steps long."""
    values = settings.model_dump(mode="json")
    values["max_steps"] = steps
    values["validation"] = {}
    values["data"]["validation_path"] = ""
    values["reward"] |= {
        "grader": "custom",
        "function": "slow.py:score",
        "max_concurrent_responses": room,
    }
    return parse_run_settings(values)


def measure(settings: RunSettings, name: str) -> tuple[dict[str, Any], list[Any]]:
    """Train; print the figures. Returns them and what was trained in which step."""
    with tempfile.TemporaryDirectory() as directory:
        run = asyncio.run(run_once(settings, Path(directory)))
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {"order": name, **{key: statistics.fmean(s[key] for s in steps) for key in _FIGURES}}
    print(json.dumps(found), flush=True)
    return found, [(s["step"], s["reward/mean"], s["response_length/mean"]) for s in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("demo/gcd/run.yaml"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.05)
    options = parser.parse_args()
    settings = load_run_settings(options.run)
    with tempfile.TemporaryDirectory() as graders:
        (Path(graders) / "slow.py").write_text(_GRADER.format(seconds=options.seconds))
        os.environ["ROLLPACKER_REWARD_CUSTOM_DIRECTORY"] = graders
        os.environ["ROLLPACKER_REWARD_SLOTS"] = str(options.slots)
        rooms = {"complete first": 2 * options.slots, "as they finish": _EVERYTHING}
        runs = {
            name: measure(with_room(settings, options.steps, room), name)
            for name, room in rooms.items()
        }
    (ours, trained), (without, trained_without) = runs.values()
    if trained != trained_without:
        raise SystemExit("the two runs did not train the same")
    ratios = {key: round(ours[key] / max(1e-9, without[key]), 3) for key in _FIGURES}
    print(json.dumps({"figure": "ratio", **ratios}), flush=True)


if __name__ == "__main__":
    main()
