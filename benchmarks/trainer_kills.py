"""Does the demo job train every prompt once, though trainer processes are killed amid their work?

    python benchmarks/trainer_kills.py [--trainers 2 4] [--steps 5]

The job is that of demo/gcd (its model and settings) on the first prompts of its data, in a real
local stack whose trainer has so many processes. One of them gets kill -9 while gradients are
summed, and one while a checkpoint is written; the stack starts the trainer again. Prints one JSON
line per run: which kills came when, seconds, and whether the trained set is exact: every prompt
once with all its responses, no step superseded, and every response sampled by the weights of its
step. Exit status 1: one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollpacker.settings import load_run_settings
from rollpacker.store import keys
from tests.integration.real_runs import RealStack, running_stack, trained_draws

DEMO = Path(__file__).parents[1] / "demo" / "gcd"
RUN = "kills"


def job(directory: Path, steps: int) -> dict[str, Any]:
    """The demo's settings, for so many steps and without held-out evaluation."""
    values = load_run_settings(DEMO / "run.yaml").model_dump(mode="json")
    rows = (DEMO / "train.jsonl").read_text().splitlines(keepends=True)
    count = steps * values["tail_batching"]["prompts_per_step"]
    (directory / "train.jsonl").write_text("".join(rows[:count]))
    values["data"] |= {"path": str(directory / "train.jsonl"), "validation_path": None}
    return values


async def is_exact(real: RealStack, values: dict[str, Any], steps: int) -> bool:
    """Whether the finished run trained every prompt once, as the top of the file says."""
    tail = values["tail_batching"]
    groups = [(step, group) for step, some in enumerate(real.samples(RUN)) for group in some]
    times = Counter(trained_draws(await real.trace(RUN)))
    return (
        set(times.values()) == {1}
        and len(times) == steps * tail["prompts_per_step"]
        and Counter(str(group.draw.id) for _, group in groups).keys() == times.keys()
        and all(len(group.responses) == tail["responses_per_prompt"] for _, group in groups)
        and all(
            scored.response.weight_version == step
            for step, group in groups
            for scored in group.responses
        )
        and await real.redis.llen(keys.superseded_steps(RUN)) == 0
    )


async def run(trainers: int, steps: int) -> bool:
    """One run with its two kills; prints its line."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        values = job(directory, steps)
        async with running_stack(directory, trainers=trainers) as real:
            start = time.monotonic()
            await real.start(RUN, values, held=True)
            last, middle = trainers - 1, steps - 2
            summed = await real.kill_rank_amid_sums(RUN, range(1, middle), rank=last)
            saving = await real.kill_rank_amid_checkpoint(RUN, range(middle, steps), rank=last)
            finished = await real.succeeded(RUN)
            exact = finished.step == steps and await is_exact(real, values, steps)
            line = {
                "case": "demo job, kill -9 amid sums and amid a checkpoint",
                "trainers": trainers,
                "steps": finished.step,
                "groups_summed_at_kill": summed,
                "step_saving_at_kill": saving,
                "trained_prompts": steps * values["tail_batching"]["prompts_per_step"],
                "seconds": round(time.monotonic() - start, 1),
                "exact": exact,
            }
    print(json.dumps(line), flush=True)
    return exact and bool(summed and saving)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    results = [asyncio.run(run(count, options.steps)) for count in options.trainers]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
