"""The table of graders: how many of the project's mathematics cases each gets right, and how fast.

    python benchmarks/grading.py
    pip install --target DIR "math-verify[antlr4_13_2]" pylatexenc
    pip install --target DIR --no-deps verl
    python benchmarks/grading.py --packages DIR --slime CHECKOUT_OF_SLIME

Ours grades as the service does. The others are measured where they are given: plain math-verify,
verl's graders, slime's graders, each in a process of its own that is killed after --limit seconds
at a case (the case counts as wrong: a hang is no verdict). One JSON line per grader, with the cases
that it gets wrong; `raised` are those on which it raised. Graders that only read their own format
(the DAPO ones want `Answer:`, deepscaler a `</think>`) lose the cases that are not in it. verl's
math_verify.py is not measured: it calls math-verify, which is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollpacker.types import GraderKind
from services.reward import grading
from services.reward.graders.grader import GradingTask
from services.reward.worker_pool import WorkerPool

CASES = Path(__file__).parent.parent / "tests" / "data" / "math_cases.jsonl"

# Reads a case a line, answers {reward} or {error}; `score` is defined by the source before it.
_SERVE = """
import json, sys
out, sys.stdout = sys.stdout, sys.stderr
print("ready", file=out, flush=True)
for line in sys.stdin:
    case = json.loads(line)
    try:
        answer = {"reward": float(score(case["response"], case["ground_truth"]))}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:200]}
    print(json.dumps(answer), file=out, flush=True)
"""
_LOAD = """
import importlib.util, sys, types
def load(name, path, package=None):
    if package:
        holder = sys.modules.setdefault(package, types.ModuleType(package))
        holder.__path__ = [str(path.rpartition("/")[0])]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
"""
_MATH_VERIFY = """
from math_verify import parse, verify
def score(response, truth):
    return verify(parse(f"${truth}$"), parse(response))
"""
_VERL = """
module = load("grader", "{file}")
def score(response, truth):
    result = module.compute_score(response, truth)
    return max(0.0, result["score"] if isinstance(result, dict) else result)
"""
_VERL_PRIME = """
for name in ("verl", "verl.utils", "verl.utils.reward_score"):  # without what these import
    holder = sys.modules[name] = types.ModuleType(name)
    holder.__path__ = ["{packages}/" + name.replace(".", "/")]
from verl.utils.reward_score.prime_math import compute_score
def score(response, truth):
    return compute_score(response, truth)[0]
"""
_SLIME_DAPO = _VERL
_SLIME_DEEPSCALER = """
module = load("rm_hub.deepscaler", "{file}", "rm_hub")
def score(response, truth):
    return module.get_deepscaler_rule_based_reward(response, truth)
"""
_SLIME_MATH = """
module = load("grader", "{file}")
def score(response, truth):
    return module.grade_answer_verl(response, truth)
"""


@dataclass
class Row:
    """What a grader did with the cases."""

    grader: str
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def as_json(self, cases: int) -> dict[str, Any]:
        return {
            "benchmark": "grading",
            "grader": self.grader,
            "right": cases - len(self.wrong),
            "cases": cases,
            "wrong": self.wrong,
            "hangs": self.hangs,
            "raised": self.raised,
            "median_ms": round(1000 * statistics.median(self.seconds), 2),
            "max_ms": round(1000 * max(self.seconds), 1),
        }


class Other:
    """A grader in a process of its own, started again when a case hangs it."""

    def __init__(self, source: str, packages: Path | None) -> None:
        self._source = _LOAD + source + _SERVE
        self._packages = packages
        self._start()

    def _start(self) -> None:
        paths = {"PYTHONPATH": str(self._packages)} if self._packages else {}
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **paths},
        )
        assert self._process.stdout
        if not self._process.stdout.readline():
            raise SystemExit("this grader cannot be loaded; its error stands above")

    def score(self, case: dict[str, Any], limit: float) -> dict[str, Any] | None:
        """Its answer, or None when it takes longer than the limit."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(case), file=self._process.stdin, flush=True)
        if select.select([self._process.stdout], [], [], limit)[0]:
            answer: dict[str, Any] = json.loads(
                self._process.stdout.readline() or '{"error": "died"}'
            )
            return answer
        self.end()
        self._start()
        return None

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


async def ours(cases: list[dict[str, Any]]) -> Row:
    row = Row("rollpacker")
    async with WorkerPool(1, 5.0) as pool:
        for case in cases:
            reference = json.dumps({"answer": case["ground_truth"]})
            start = time.perf_counter()
            task = GradingTask(GraderKind.MATH, case["response"], reference)
            outcome = await grading.grade(pool, task)
            row.seconds.append(time.perf_counter() - start)
            if outcome.score.reward != case["reward"]:
                row.wrong.append(case["id"])
    return row


def measure(name: str, other: Other, cases: list[dict[str, Any]], limit: float) -> Row:
    row = Row(name)
    for case in cases:
        start = time.perf_counter()
        answer = other.score(case, limit)
        row.seconds.append(time.perf_counter() - start)
        if answer is None:
            row.hangs.append(case["id"])
        elif "error" in answer:
            row.raised.append(case["id"])
        if answer is None or answer.get("reward") != case["reward"]:
            row.wrong.append(case["id"])
    other.end()
    return row


def others(packages: Path | None, slime: Path | None) -> Iterator[tuple[str, str]]:
    """Name and source of each grader that is there."""
    if packages and (packages / "math_verify").is_dir():
        yield "math-verify", _MATH_VERIFY
    if packages and (packages / "verl").is_dir():
        directory = packages / "verl" / "utils" / "reward_score"
        for file in ("math_reward.py", "math_dapo.py"):
            yield f"verl {file}", _VERL.replace("{file}", str(directory / file))
        yield "verl prime_math", _VERL_PRIME.replace("{packages}", str(packages))
    if slime:
        directory = slime / "slime" / "rollout" / "rm_hub"
        for file, source in (
            ("math_utils.py", _SLIME_MATH),
            ("math_dapo_utils.py", _SLIME_DAPO),
            ("deepscaler.py", _SLIME_DEEPSCALER),
        ):
            yield f"slime {file}", source.replace("{file}", str(directory / file))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--packages", type=Path, help="directory with math_verify and verl")
    parser.add_argument("--slime", type=Path, help="a checkout of slime")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds at one case")
    arguments = parser.parse_args()
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    print(json.dumps(asyncio.run(ours(cases)).as_json(len(cases))), flush=True)
    for name, source in others(arguments.packages, arguments.slime):
        other = Other(source, arguments.packages)
        row = measure(name, other, cases, arguments.limit)
        print(json.dumps(row.as_json(len(cases))), flush=True)


if __name__ == "__main__":
    main()
