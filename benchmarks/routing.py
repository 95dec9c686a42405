"""Least outstanding tokens against round robin, in the simulator and on the embedded engine.

    python benchmarks/routing.py
    python benchmarks/routing.py --run runs/demo --model demo/gcd/model     (a finished run)

Whole groups are placed on replicas that have room, longest expected first. `least_tokens` is what
rounds do: replicas that get ready together are given their groups at once. `round_robin` deals in
turn. `as_they_come` hands one replica after the other its even share of what waits, so the first
one gets the longest groups.

simulation  the 14B model of the paper on its cluster, the ladder of mode `exact`; deferred draws
            are expected to need what they had. Seconds of rollout.
engine      the rounds of a finished run, placed on two replicas by what each group really needed
            (the most that a rule could know); each replica's groups are decoded for real, with
            their lengths. Seconds of the slower replica, CPU time, summed over the rounds.

One JSON line per figure; `over_as_they_come` above 1 is faster than that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rollpacker.policy.commands import LaunchGroup
from rollpacker.policy.events import ReplicaJoined
from rollpacker.policy.round import Round
from rollpacker.policy.tail_batching import RoundPlan, Routing, TailBatchingRules
from rollpacker.simulation.parameters import MODELS, load_parameters
from rollpacker.simulation.scenario import Scenario, ladder
from rollpacker.simulation.schedule import PLAIN, Schedule, deferred_tokens
from rollpacker.simulation.simulator import Simulator
from rollpacker.simulation.workload import WorkloadRules
from rollpacker.types import DrawId, PromptGroup, RoundKind
from services.coordinator.outputs.samples import read_groups
from services.rollout.engine import GenerationRequest
from services.rollout.torch_engine.decode_loop import DecodeLoop

BASE = "as_they_come"
PLACEMENTS = {
    BASE: (Routing.LEAST_TOKENS, False),
    "least_tokens": (Routing.LEAST_TOKENS, True),
    "round_robin": (Routing.ROUND_ROBIN, True),
}  # the rule, and whether all replicas are there before anything is placed
REPLICAS = ("left", "right")


def simulated(steps: int, seeds: int) -> Iterator[dict[str, Any]]:
    parameters, model = load_parameters(), MODELS["14B"]
    for correlation in (0.3, 0.9):  # of lengths within a prompt
        for admission in (0, 64):
            seconds: defaultdict[str, float] = defaultdict(float)
            for seed in range(seeds):
                for name, (routing, together) in PLACEMENTS.items():
                    workload = WorkloadRules(
                        model.max_response_tokens, correlation, parameters["never_stop_share"]
                    )
                    scenario = Scenario(
                        model,
                        dataclasses.replace(workload, seed=seed),
                        dataclasses.replace(ladder(1.75, 2.0), routing=routing),
                        steps=steps,
                        schedule=Schedule(deferred_tokens) if together else PLAIN,
                        admission_responses=admission,
                    )
                    done = Simulator(scenario, parameters).steps()
                    seconds[name] += sum(step.rollout_seconds for step in done)
            yield {
                "benchmark": "routing",
                "where": "simulation",
                "model": model.name,
                "replicas": model.gpus // model.tensor_parallel_size,
                "length_correlation": correlation,
                "responses_per_replica": admission or "engine's limit",
                "runs": seeds,
                **compared(seconds),
            }


def placed(groups: Sequence[PromptGroup], name: str) -> dict[str, list[DrawId]]:
    """Draws by replica, as the round machine places them."""
    routing, together = PLACEMENTS[name]
    count = len(groups[0].responses)
    expected = {
        group.draw.id: max(len(scored.response.token_ids) for scored in group.responses)
        for group in groups
    }
    round_ = Round(
        TailBatchingRules(len(groups), count, routing=routing),
        RoundPlan(0, RoundKind.LONG, 0, (), len(groups), len(groups), count),
        [group.draw for group in groups],
        expected,
    )
    share = -(-len(groups) // len(REPLICAS)) * count
    found: dict[str, list[DrawId]] = {replica: [] for replica in REPLICAS}
    for replica in REPLICAS:
        follows = together and replica != REPLICAS[-1]
        for command in round_.handle(ReplicaJoined(0, replica, share, others_follow=follows)):
            assert isinstance(command, LaunchGroup)
            found[command.replica_id].append(command.draw)
    return found


def decoded(loop: DecodeLoop, groups: Sequence[PromptGroup]) -> float:
    """CPU seconds to decode these groups, each response with its own length."""
    start = time.process_time()
    for group in groups:
        requests = [
            GenerationRequest(
                f"{group.draw.id}:{scored.response.index}",
                (1, 3, 4, 5),
                scored.response.seed,
                1.0,
                max(1, len(scored.response.token_ids)),
                frozenset(),
            )
            for scored in group.responses
        ]
        loop.submit(requests, 1 << 20, lambda _event: None)
    while loop.step():
        pass
    return time.process_time() - start


def replayed(run: Path, model: Path, steps: int) -> dict[str, Any]:
    loop = DecodeLoop(
        slot_count=512,
        kv_budget_tokens=1 << 20,
        max_context_tokens=0,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    seconds: defaultdict[str, float] = defaultdict(float)
    paths = sorted((run / "samples").glob("step_*.jsonl"))[:steps]
    with torch.inference_mode():
        loop.load_weights(model)
        for path in paths:
            groups = read_groups(path)
            by_id = {group.draw.id: group for group in groups}
            for name in PLACEMENTS:
                places = placed(groups, name).values()
                seconds[name] += max(decoded(loop, [by_id[draw] for draw in p]) for p in places)
    return {
        "benchmark": "routing",
        "where": "engine",
        "run": run.name,
        "replicas": len(REPLICAS),
        "rounds": len(paths),
        **compared(seconds),
    }


def compared(seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "over_as_they_come": {
            name: round(seconds[BASE] / value, 3) for name, value in seconds.items() if name != BASE
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3, help="of the simulated workload")
    parser.add_argument("--run", type=Path, help="replay this finished run instead")
    parser.add_argument("--model", type=Path, default=Path("demo/gcd/model"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.run is not None:
        print(json.dumps(replayed(args.run, args.model, args.steps)))
        return
    for line in simulated(args.steps, args.seeds):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
