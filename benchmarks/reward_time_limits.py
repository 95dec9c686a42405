"""Adaptive time limits against a fixed one, on a workload shaped like the paper's Fig. 7a.

    python benchmarks/reward_time_limits.py
    python benchmarks/reward_time_limits.py --real --epochs 2 --prompts 8 --scale 0.05

By default on a virtual clock, with the policy that the service uses: programs take CPU time drawn
from the figure's quantiles (p10 0.18 s ... p94 2.3 s), 5 % never end. A prompt's programs share its
difficulty; half of those that end are correct. So many slots take the responses of a step in order;
the time of a step is when its last response is scored. `--real` runs the same workload in real
sandboxes through the reward scheduler, all times multiplied by --scale. One JSON line per figure.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from rollpacker.policy.timeouts import TimeoutRules, next_anchor, time_limit
from rollpacker.types import GraderKind, Verdict
from services.reward.graders.code import CodeSettings
from services.reward.graders.grader import GradingTask
from services.reward.scheduler import RewardScheduler
from services.reward.worker_pool import WorkerPool

# Fig. 7a of the paper, read off the plot: share of test runs, CPU seconds.
QUANTILES = ((0.0, 0.1), (0.10, 0.18), (0.25, 0.25), (0.50, 0.36), (0.75, 0.56), (0.90, 0.9),
             (0.92, 0.98), (0.94, 2.3), (0.95, 4.0))  # fmt: skip
ENDLESS_SHARE, FIXED_SECONDS, CORRECT_SHARE = 0.05, 30.0, 0.5


@dataclass(frozen=True, slots=True)
class Program:
    """One response's program: what it would take, and whether it is right."""

    prompt: int
    cpu_seconds: float  # infinity: it never ends
    correct: bool


@dataclass
class Outcome:
    """What a schedule of limits cost."""

    step_seconds: float = 0.0
    cpu_seconds: float = 0.0
    kills: int = 0
    false_kills: int = 0


def quantile(share: float) -> float:
    """CPU seconds below which this share of the programs ends."""
    for (low, low_seconds), (high, high_seconds) in pairwise(QUANTILES):
        if share <= high:
            place = (share - low) / (high - low)
            return math.exp((1 - place) * math.log(low_seconds) + place * math.log(high_seconds))
    return math.inf


def epoch(
    prompts: int, responses: int, alike: float, rng: random.Random, difficulty: list[float]
) -> list[Program]:
    """The programs of one epoch, in the order in which they arrive."""
    programs = []
    for prompt in range(prompts):
        for _ in range(responses):
            share = alike * difficulty[prompt] + (1 - alike) * rng.random()
            endless = rng.random() < ENDLESS_SHARE
            seconds = math.inf if endless else quantile(share * (1 - ENDLESS_SHARE))
            programs.append(Program(prompt, seconds, not endless and rng.random() < CORRECT_SHARE))
    rng.shuffle(programs)
    return programs


def simulate(
    programs: list[Program], rules: TimeoutRules, anchors: dict[int, float], slots: int
) -> Outcome:
    """Grade an epoch; `anchors` is what is known before, and learns."""
    outcome = Outcome()
    free = [0.0] * slots
    learned: list[tuple[float, int, float]] = []  # (when, prompt, CPU seconds of a correct run)
    for program in programs:
        start = heapq.heappop(free)
        while learned and learned[0][0] <= start:
            _, prompt, seconds = heapq.heappop(learned)
            known = next_anchor(anchors.get(prompt), seconds, correct=True)
            assert known is not None
            anchors[prompt] = known
        limit = time_limit(rules, anchors.get(program.prompt))
        took = min(program.cpu_seconds, limit)
        if program.cpu_seconds > limit:
            outcome.kills += 1
            outcome.false_kills += program.correct
        elif program.correct:
            heapq.heappush(learned, (start + took, program.prompt, took))
        outcome.cpu_seconds += took
        outcome.step_seconds = max(outcome.step_seconds, start + took)
        heapq.heappush(free, start + took)
    for _, prompt, seconds in learned:
        anchors[prompt] = max(seconds, anchors.get(prompt, 0.0))
    return outcome


async def run_real(
    epochs: list[list[Program]], rules: TimeoutRules, slots: int, scale: float
) -> list[Outcome]:
    """The same in real sandboxes; times in the outcomes are unscaled again."""
    settings = {GraderKind.CODE: CodeSettings(timeouts=rules).as_json()}
    outcomes = []
    async with (
        WorkerPool(slots, 5.0, settings=settings) as pool,
        RewardScheduler(pool, rules, 0.0) as scheduler,
    ):
        for programs in epochs:
            start, outcome = time.monotonic(), Outcome()
            tasks = [(program, _task(program, scale)) for program in programs]
            graded = await asyncio.gather(
                *(scheduler.grade("run", str(program.prompt), task) for program, task in tasks)
            )
            for (program, _), result in zip(tasks, graded, strict=True):
                killed = result.score.verdict is Verdict.TIMED_OUT
                outcome.kills += killed
                outcome.false_kills += killed and program.correct
                outcome.cpu_seconds += result.score.cpu_seconds / scale
            outcome.step_seconds = (time.monotonic() - start) / scale
            outcomes.append(outcome)
    return outcomes


def _task(program: Program, scale: float) -> GradingTask:
    seconds = 1e9 if math.isinf(program.cpu_seconds) else program.cpu_seconds * scale
    source = (
        f"import time\nwhile time.process_time() < {seconds}: pass\nprint({int(program.correct)})"
    )
    reference = json.dumps({"tests": [["", "1"]]})
    return GradingTask(GraderKind.CODE, f"```python\n{source}\n```", reference)


def compare(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One line per epoch."""
    rng = random.Random(arguments.seed)
    difficulty = [rng.random() for _ in range(arguments.prompts)]
    epochs = [
        epoch(arguments.prompts, arguments.responses, arguments.alike, rng, difficulty)
        for _ in range(arguments.epochs)
    ]
    fixed_rules = TimeoutRules(FIXED_SECONDS, FIXED_SECONDS)
    if arguments.real:
        scale = arguments.scale
        scaled = [
            replace(rules, min_seconds=rules.min_seconds * scale, max_seconds=FIXED_SECONDS * scale)
            for rules in (fixed_rules, TimeoutRules())
        ]
        fixed, adaptive = (
            asyncio.run(run_real(epochs, rules, arguments.slots, scale)) for rules in scaled
        )
    else:
        anchors: dict[int, float] = {}
        fixed = [simulate(programs, fixed_rules, {}, arguments.slots) for programs in epochs]
        adaptive = [simulate(item, TimeoutRules(), anchors, arguments.slots) for item in epochs]
    for number, (old, new) in enumerate(zip(fixed, adaptive, strict=True), start=1):
        yield {
            "benchmark": "reward_time_limits",
            "clock": "real" if arguments.real else "virtual",
            "epoch": number,
            "responses": arguments.prompts * arguments.responses,
            "slots": arguments.slots,
            "alike": arguments.alike,
            "fixed_step_seconds": round(old.step_seconds, 2),
            "adaptive_step_seconds": round(new.step_seconds, 2),
            "step_time_ratio": round(old.step_seconds / new.step_seconds, 2),
            "cpu_time_ratio": round(old.cpu_seconds / new.cpu_seconds, 2),
            "kills": new.kills,
            "false_kills": new.false_kills,
            "false_kill_share_of_responses": round(new.false_kills / len(epochs[number - 1]), 5),
        }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--alike", type=float, default=0.7, help="how much of a program's time is its prompt's"
    )
    parser.add_argument("--real", action="store_true", help="real sandboxes")
    parser.add_argument("--scale", type=float, default=0.05, help="of all times, with --real")
    for line in compare(parser.parse_args()):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
