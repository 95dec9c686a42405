"""Every Redis key of a run, in one place. The braces keep a run in one cluster slot.

| key                                | type   | holds                                              |
|------------------------------------|--------|----------------------------------------------------|
| rollpacker:runs                    | zset   | run ids by creation time                           |
| rollpacker:{run}:state             | hash   | the commit point, changed by scripts only          |
| rollpacker:{run}:deferred:{level}  | list   | deferred draws, oldest first; changed by commits   |
| rollpacker:{run}:step:{n}:samples  | stream | prompt groups, consumer group `trainer`            |
| rollpacker:{run}:step:{n}:result   | string | what FinishStep(n) returned                        |
| rollpacker:{run}:steps             | zset   | committed step records, by step                    |
| rollpacker:{run}:events            | stream | for WatchRun                                       |
| rollpacker:coordinator_lease       | string | who coordinates; NX PX                             |
| rollpacker:coordinator_fence       | string | counter: the newest fencing number                 |
"""

from __future__ import annotations

RUNS = "rollpacker:runs"
COORDINATOR_LEASE = "rollpacker:coordinator_lease"
COORDINATOR_FENCE = "rollpacker:coordinator_fence"
TRAINER_GROUP = "trainer"  # consumer group of the sample streams


def _key(run_id: str, *parts: str | int) -> str:
    return ":".join([f"rollpacker:{{{run_id}}}", *map(str, parts)])


def state(run_id: str) -> str:
    return _key(run_id, "state")


def deferred(run_id: str, level: int) -> str:
    return _key(run_id, "deferred", level)


def step_samples(run_id: str, step: int) -> str:
    return _key(run_id, "step", step, "samples")


def step_result(run_id: str, step: int) -> str:
    return _key(run_id, "step", step, "result")


def steps(run_id: str) -> str:
    return _key(run_id, "steps")


def events(run_id: str) -> str:
    return _key(run_id, "events")
