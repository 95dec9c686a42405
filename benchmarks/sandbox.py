"""What the sandbox costs, and that it leaks nothing.

    python benchmarks/sandbox.py                     latency and throughput
    python benchmarks/sandbox.py --mixed 10000       also so many mixed programs, and what is left

The program prints one number. `bare_python` starts an interpreter for it, without any sandbox;
`cold` starts a sandbox for it; `pooled` finds one ready, as a response does that comes to an idle
worker; `next_case` is a further test case in the same sandbox. nsjail is measured beside them where
it is installed. One JSON line per figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rollpacker.types import GraderKind
from services.reward.graders.grader import GradingTask
from services.reward.sandbox.command import SandboxSettings
from services.reward.sandbox.process import Program, Sandbox, drive
from services.reward.worker_pool import WorkerPool

SOURCE = "print(2 * int(input()))"
MIXED = (
    SOURCE, SOURCE, SOURCE, "print(1)", "raise ValueError", "def f(:", "import os\nos.fork()",
    "print(open('/etc/shadow').read())", "import socket\nsocket.socket()", "while True: print('x')",
    "open('f', 'w').write('x' * (17 << 20))", "a = bytearray(8 << 30)", "import os\nos._exit(0)",
    "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()",
    "import os\nfor fd in range(3, 99):\n    try: os.close(fd)\n    except OSError: pass",
)  # fmt: skip
Figure = dict[str, Any]


def task(source: str) -> GradingTask:
    reference = json.dumps({"tests": [["21", "42"]]})
    return GradingTask(GraderKind.CODE, f"```python\n{source}\n```", reference)


def bare_python() -> None:
    subprocess.run([sys.executable, "-c", SOURCE], input=b"21", capture_output=True, check=True)


def cold() -> None:
    sandbox = Sandbox.start(SandboxSettings())
    run_in(sandbox)
    sandbox.kill()


def run_in(sandbox: Sandbox) -> None:
    output = bytearray()
    job = SandboxSettings().job(SOURCE, "program", 5.0)
    program = Program(sandbox, job, output.extend)
    program.feed(b"21")
    program.end_input()
    drive([program])
    assert output == b"42\n"


def nsjail() -> None:
    command = ["nsjail", "-Mo", "-q", "--disable_proc", "-R", "/", "-u", "65534", "-g", "65534"]
    command += ["--", sys.executable, "-c", SOURCE]
    subprocess.run(command, input=b"21", capture_output=True, check=True)


def times_of(action: Callable[[], None], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times


def pooled_times(repeats: int) -> tuple[list[float], list[float]]:
    """Of the first program in a sandbox that is ready, and of the second in it."""
    firsts, seconds = [], []
    for _ in range(repeats):
        sandbox = Sandbox.start(SandboxSettings())
        sandbox.wait_ready()
        first, second = times_of(lambda ready=sandbox: run_in(ready), 2)  # type: ignore[misc]
        firsts.append(first)
        seconds.append(second)
        sandbox.kill()
    return firsts, seconds


def latencies(repeats: int) -> Iterator[Figure]:
    """Bare Python, a cold sandbox, one that is ready, a further case; nsjail where it is."""
    yield latency("bare_python", times_of(bare_python, repeats))
    yield latency("cold", times_of(cold, repeats))
    pooled, next_case = pooled_times(repeats)
    yield latency("pooled", pooled)
    yield latency("next_case", next_case)
    if shutil.which("nsjail"):
        yield latency("nsjail", times_of(nsjail, repeats))
    else:
        yield {"benchmark": "sandbox_latency", "how": "nsjail", "skipped": "not installed"}


def latency(how: str, times: list[float]) -> Figure:
    return {
        "benchmark": "sandbox_latency",
        "how": how,
        "median_ms": round(1000 * statistics.median(times), 1),
        "p90_ms": round(1000 * statistics.quantiles(times, n=10)[-1], 1),
        "repeats": len(times),
        "load_average": round(os.getloadavg()[0], 1),
    }


async def throughput(samples: int, slots: int) -> Figure:
    """Responses of one test case each, through the pool of the service."""
    async with WorkerPool(slots, 5.0) as pool:
        await asyncio.gather(*(pool.grade(task(SOURCE)) for _ in range(slots)))  # loads the grader
        start = time.perf_counter()
        outcomes = await asyncio.gather(*(pool.grade(task(SOURCE)) for _ in range(samples)))
        seconds = time.perf_counter() - start
    assert all(outcome.score.reward == 1.0 for outcome in outcomes)
    return {
        "benchmark": "sandbox_throughput",
        "samples_per_second": round(samples / seconds, 1),
        "samples": samples,
        "slots": slots,
        "load_average": round(os.getloadavg()[0], 1),
    }


async def mixed(samples: int, slots: int) -> Figure:
    """Right, wrong and hostile programs; what they leave behind."""
    limits = {"timeouts": {"min_seconds": 2.0, "max_seconds": 2.0}}
    settings = {GraderKind.CODE: limits}
    verdicts: dict[str, int] = {}
    async with WorkerPool(slots, 5.0, settings=settings) as pool:
        await asyncio.gather(*(pool.grade(task(SOURCE)) for _ in range(4 * slots)))
        await asyncio.sleep(2)  # the sandboxes of the next responses start
        before = left_over(pool)
        for start in range(0, samples, 100):
            sources = [
                MIXED[number % len(MIXED)] for number in range(start, min(start + 100, samples))
            ]
            outcomes = await asyncio.gather(*(pool.grade(task(source)) for source in sources))
            for source, outcome in zip(sources, outcomes, strict=True):
                assert (outcome.score.reward == 1.0) == (source == SOURCE), (source, outcome)
                name = outcome.score.verdict.value
                verdicts[name] = verdicts.get(name, 0) + 1
        await asyncio.gather(*(pool.grade(task(SOURCE)) for _ in range(4 * slots)))
        await asyncio.sleep(2)  # the sandboxes of the next responses start
        after = left_over(pool)
    return {
        "benchmark": "sandbox_leaks",
        "samples": samples,
        "verdicts": verdicts,
        "worker_restarts": pool.worker_restart_count,
        **{f"{name}_before": value for name, value in before.items()},
        **{f"{name}_after": value for name, value in after.items()},
    }


def left_over(pool: WorkerPool) -> dict[str, int]:
    """Processes below the workers, and the workers' descriptors and memory."""
    workers = pool.worker_pids
    status = [Path(f"/proc/{pid}/status").read_text(encoding="ascii") for pid in workers]
    resident = [int(text.partition("VmRSS:")[2].split()[0]) for text in status]
    return {
        "processes": sum(len(descendants(pid)) for pid in workers),
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in workers),
        "resident_mib": sum(resident) // 1024,
    }


def descendants(pid: int) -> set[int]:
    found, waiting = set[int](), [pid]
    while waiting:
        parent = waiting.pop()
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii")
        waiting += [int(word) for word in text.split()]
        found |= set(waiting)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--slots", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mixed", type=int, default=0)
    arguments = parser.parse_args()
    for figure in latencies(arguments.repeats):
        print(json.dumps(figure), flush=True)
    print(json.dumps(asyncio.run(throughput(arguments.samples, arguments.slots))), flush=True)
    if arguments.mixed:
        print(json.dumps(asyncio.run(mixed(arguments.mixed, arguments.slots))), flush=True)


if __name__ == "__main__":
    main()
