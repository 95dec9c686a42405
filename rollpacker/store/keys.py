"""Every Redis key of a run, in one place. The braces keep a run in one cluster slot.

| key                                | type   | holds                                              |
|------------------------------------|--------|----------------------------------------------------|
| rollpacker:runs                    | zset   | run ids by creation time                           |
| rollpacker:queue                   | zset   | run ids that wait, by the time when they asked     |
| rollpacker:{run}:state             | hash   | the commit point: fence, step, status, stop_mode,  |
|                                    |        | pause_at, failure, state (JSON); scripts only      |
| rollpacker:{run}:changes           | list   | what UpdateRun and others asked for; only grows    |
| rollpacker:{run}:added_prompts     | list   | rows of AddPrompts (JSON); only grows              |
| rollpacker:{run}:added_prompt_ids  | hash   | their prompt ids, with nothing                     |
| rollpacker:{run}:deferred:{level}  | list   | deferred draws, oldest first; changed by scripts   |
| rollpacker:{run}:deferred_draw:    | list   | drafts of a deferred draw; may be lost or stale    |
|   {epoch}:{prompt_id}              |        |                                                    |
| rollpacker:{run}:step:{n}:samples  | stream | prompt groups, consumer group `trainer`            |
| rollpacker:{run}:step:{n}:outcome  | string | what step n will commit; written before FinishStep |
| rollpacker:{run}:step:{n}:result   | string | what FinishStep(n) returned                        |
| rollpacker:{run}:steps             | zset   | committed step records, by step                    |
| rollpacker:{run}:superseded_steps  | list   | records of steps that a rewind undid               |
| rollpacker:{run}:events            | stream | for WatchRun                                       |
| rollpacker:{run}:timeout_anchors:  | zset   | largest CPU time of a correct run, by test case;   |
|   {prompt_id}                      |        | ZADD GT by the reward service; expires             |
| rollpacker:{coordinator}:lease     | string | who coordinates; NX PX                             |
| rollpacker:{coordinator}:fence     | string | counter: the newest fencing number                 |
| rollpacker:{devices}:leases        | string | who holds which GPU (JSON)                         |
"""

from __future__ import annotations

from rollpacker.types import DrawId

RUNS = "rollpacker:runs"
QUEUE = "rollpacker:queue"
COORDINATOR_LEASE = "rollpacker:{coordinator}:lease"
COORDINATOR_FENCE = "rollpacker:{coordinator}:fence"
DEVICES = "rollpacker:{devices}:leases"
TRAINER_GROUP = "trainer"  # consumer group of the sample streams


def _key(run_id: str, *parts: str | int) -> str:
    return ":".join([f"rollpacker:{{{run_id}}}", *map(str, parts)])


def of_run(run_id: str, name: str) -> str:
    """A key of the run by its name without the prefix; the prefix itself for no name."""
    return _key(run_id, name)


def state(run_id: str) -> str:
    return _key(run_id, "state")


def deferred(run_id: str, level: int) -> str:
    return _key(run_id, "deferred", level)


def deferred_draw(run_id: str, draw: DrawId) -> str:
    return _key(run_id, "deferred_draw", *draw)


def step_samples(run_id: str, step: int) -> str:
    return _key(run_id, "step", step, "samples")


def step_outcome(run_id: str, step: int) -> str:
    return _key(run_id, "step", step, "outcome")


def step_result(run_id: str, step: int) -> str:
    return _key(run_id, "step", step, "result")


def steps(run_id: str) -> str:
    return _key(run_id, "steps")


def superseded_steps(run_id: str) -> str:
    return _key(run_id, "superseded_steps")


def events(run_id: str) -> str:
    return _key(run_id, "events")


def changes(run_id: str) -> str:
    return _key(run_id, "changes")


def added_prompts(run_id: str) -> str:
    return _key(run_id, "added_prompts")


def added_prompt_ids(run_id: str) -> str:
    return _key(run_id, "added_prompt_ids")


def timeout_anchors(run_id: str, prompt_id: str) -> str:
    return _key(run_id, "timeout_anchors", prompt_id)
