"""The settings of StartRun, and what they say of a run before it starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from rollpacker.data.errors import DataError
from rollpacker.data.run_data import RunData, load_run_data
from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.settings import RunSettings, SettingsError, parse_run_settings
from rollpacker.store.records import RunState
from services.coordinator.workers import THE_MODEL, WorkerRegistry


def parse(values: Mapping[str, Any]) -> RunSettings:
    """Raises InvalidArgumentError (INVALID_SETTINGS) with every problem."""
    try:
        return parse_run_settings(values)
    except SettingsError as error:
        raise invalid_settings(error) from error


def invalid_settings(error: SettingsError) -> InvalidArgumentError:
    """Names each setting that is wrong."""
    return InvalidArgumentError(
        "INVALID_SETTINGS",
        f"the settings are wrong: {error}",
        violations=[(f"settings.{name}", what) for name, what in error.problems],
    )


def load_data(settings: RunSettings) -> RunData:
    """Raises InvalidArgumentError."""
    try:
        return load_run_data(settings)
    except DataError as error:
        raise InvalidArgumentError.field("settings.data", str(error)) from error


def check_cap(cap: int, longest: int, limit: int, who: str) -> None:
    """Raises SettingsError for a cap with which the longest prompt would be refused.

    `longest`: tokens of that prompt; `limit`: of a sequence, 0 if not known, set by `who`.
    """
    if limit and longest + cap > limit:
        room = limit - longest
        fix = (
            f"give {room} at most"
            if room > 0
            else "leave long prompts out (data.max_prompt_tokens)"
        )
        problem = (
            f"{cap} and the longest prompt of {longest} tokens make {longest + cap}; {who}"
            f" takes {limit}: {fix}{'' if who == THE_MODEL else ', or raise its limit'}"
        )
        raise SettingsError([("sampling.max_response_tokens", problem)])


async def new_state(
    run_id: str, settings: RunSettings, workers: WorkerRegistry | None = None
) -> RunState:
    """The first state of a run. Reads its data: what is wrong there is found now; so is a cap that
    the model or one of these workers does not take."""
    data = await asyncio.to_thread(load_data, settings)
    if workers is not None:
        limit = workers.shortest_context(data.context_tokens)
        try:
            check_cap(settings.sampling.max_response_tokens, data.longest_prompt(), *limit)
        except SettingsError as error:
            raise invalid_settings(error) from error
    steps = planned_steps(settings, len(data.dataset))
    resolved = settings.model_dump(mode="json")
    digest = data.dataset.digest
    return RunState(run_id, resolved, time.time(), planned_steps=steps, data_digest=digest)


def planned_steps(settings: RunSettings, prompt_count: int) -> int:
    """Steps that data and max_steps allow in all."""
    per_step = settings.tail_batching.prompts_per_step
    by_data = -(-prompt_count * settings.data.epochs // per_step)
    return min(by_data, settings.max_steps) if settings.max_steps else by_data


def in_force(settings: RunSettings) -> dict[str, Any]:
    """Values of the settings, one that is left out as the mode fills it in: to compare runs by."""
    values = settings.model_dump(mode="json")
    values["tail_batching"]["rebalance"] = settings.tail_batching.resolved_rebalance
    if settings.tail_batching.mode != "auto":
        weighs = settings.tail_batching.resolved_selection_weights
        values["tail_batching"]["selection_weights"] = weighs
    return values


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The names of the settings that differ, dotted."""
    names = _flat(old).items() ^ _flat(new).items()
    return ", ".join(sorted({name for name, _ in names}))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = repr(value)
    return flat
