"""The commands that change a run which is there: pause, resume, step, set, draws, prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from rollpacker.cli import run_view
from rollpacker.cli.coordinator import DEFAULT_ADDRESS, Coordinator, CoordinatorAddress
from rollpacker.cli.failures import WRONG_INPUT, CommandError, told_in_one_line
from rollpacker.cli.reports import LARGEST, RunId, ask
from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.settings import SettingsError
from rollpacker.strict_yaml import load_yaml
from rollpacker.types import DrawId
from rollpacker.v1 import coordinator_service_pb2 as pb

Draws = Annotated[list[str], typer.Argument(metavar="EPOCH:PROMPT", help="As `deferred` lists.")]
_ROWS_PER_CALL = 500
_WHOLE = 1 << 53  # a double holds every integer below it
_ROW_FIELD = re.compile(r"rows\[(\d+)\](.*)")
_EPOCH = re.compile(r"[0-9]{1,9}")


def pause(
    run_id: RunId,
    now: Annotated[
        bool, typer.Option("--now", help="Abandon the open step; it is repeated later.")
    ] = False,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Pause a run after its current step; it keeps its place and its workers."""
    mode = pb.PAUSE_MODE_IMMEDIATELY if now else pb.PAUSE_MODE_AFTER_STEP

    async def work(server: Coordinator) -> None:
        print(run_view.run_line(await server.pause_run(run_id, mode)))

    ask(coordinator, work)


def resume(
    run_id: RunId,
    steps: Annotated[
        int, typer.Option(min=0, max=LARGEST, help="Pause again after so many steps; 0: do not.")
    ] = 0,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Let a paused run go on."""

    async def work(server: Coordinator) -> None:
        until = (await server.get_run(run_id)).step + steps if steps else 0
        print(run_view.run_line(await server.resume_run(run_id, until)))

    ask(coordinator, work)


def update(
    run_id: RunId,
    changes: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE", help="trainer.learning_rate=1e-6")
    ],
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Change settings of a run, from its next round on."""
    with told_in_one_line():
        settings = nested(changes)

    async def work(server: Coordinator) -> None:
        print(run_view.run_line(await server.update_run(run_id, settings)))

    ask(coordinator, work)


def long_round(run_id: RunId, coordinator: CoordinatorAddress = DEFAULT_ADDRESS) -> None:
    """Make the next round a long one: it trains deferred draws."""

    async def work(server: Coordinator) -> None:
        print(run_view.run_line(await server.force_long_round(run_id)))

    ask(coordinator, work)


def checkpoint(run_id: RunId, coordinator: CoordinatorAddress = DEFAULT_ADDRESS) -> None:
    """Have the trainer write a checkpoint now."""

    async def work(server: Coordinator) -> None:
        print(f"{run_id}: weight version {await server.save_checkpoint(run_id)} is saved")

    ask(coordinator, work)


def add(
    run_id: RunId,
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="JSONL, each with a prompt_id.")],
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Add prompts to a run; those that it has already are skipped."""
    with told_in_one_line():
        values = read_rows(rows)

    async def work(server: Coordinator) -> None:
        added = known = 0
        for first in range(0, len(values), _ROWS_PER_CALL):
            try:
                answer = await server.add_prompts(run_id, values[first : first + _ROWS_PER_CALL])
            except InvalidArgumentError as error:
                before = f"; of the {first} rows before, {added} were added" if first else ""
                raise CommandError(_in_file(error, rows, first) + before, WRONG_INPUT) from error
            added, known = added + answer.added_count, known + answer.known_count
        print(f"{run_id}: {added} prompts added, {known} known already")

    ask(coordinator, work)


def requeue(
    run_id: RunId,
    draws: Draws,
    level: Annotated[int, typer.Option(min=1, max=LARGEST, help="Of the queue.")] = 1,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Move deferred draws to the front of a level; dropped ones come back."""
    with told_in_one_line():
        names = [draw_id(text) for text in draws]

    async def work(server: Coordinator) -> None:
        print(run_view.run_line(await server.requeue_draws(run_id, names, level)))

    ask(coordinator, work)


def drop(
    run_id: RunId,
    draws: Draws,
    reason: Annotated[str, typer.Option(help="For the list of dropped draws.")],
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Take draws out of the queue, or out of the data that are not drawn yet."""
    with told_in_one_line():
        names = [draw_id(text) for text in draws]

    async def work(server: Coordinator) -> None:
        print(run_view.run_line(await server.drop_draws(run_id, names, reason)))

    ask(coordinator, work)


def nested(changes: list[str]) -> dict[str, Any]:
    """Dotted overrides as nested settings. Raises SettingsError."""
    values: dict[str, Any] = {}
    for change in changes:
        key, separator, text = change.partition("=")
        if not separator or not key:
            raise SettingsError([(change, "not a change; write section.key=value")])
        *sections, last = key.split(".")
        place: Any = values
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise SettingsError([(change, "sets a part of a value that is set too; keep one")])
        try:
            place[last] = load_yaml(text)
        except ValueError as error:
            raise SettingsError([(change, f"is not YAML: {error}")]) from error
    return values


def draw_id(text: str) -> DrawId:
    """ "EPOCH:PROMPT". Raises CommandError."""
    epoch, colon, prompt_id = text.partition(":")
    if not (colon and _EPOCH.fullmatch(epoch) and prompt_id):
        raise CommandError(f"{text!r:.80} is not EPOCH:PROMPT, for example 0:17", WRONG_INPUT)
    return DrawId(int(epoch), prompt_id)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file. Raises CommandError."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read as JSONL: {error}", WRONG_INPUT) from error
    rows = [
        _row(f"{path}, line {number}", line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise CommandError(f"{path} holds no rows; write one object per line", WRONG_INPUT)
    return rows


def _row(place: str, line: str) -> dict[str, Any]:
    """Raises CommandError."""
    try:
        row = json.loads(line, parse_int=_row_integer)
    except ValueError as error:
        raise CommandError(f"{place}: cannot be read as JSON: {error}", WRONG_INPUT) from error
    if not isinstance(row, dict):
        raise CommandError(f"{place}: is no object; write one object per line", WRONG_INPUT)
    return row


def _in_file(error: InvalidArgumentError, path: Path, first: int) -> str:
    """What is wrong with rows that were sent, the first of them number `first` of the file."""
    problems = []
    for field, what in error.violations:
        place = _ROW_FIELD.fullmatch(field)
        row = f"{path}, row {first + int(place[1]) + 1}{place[2]}" if place else field
        problems.append(f"{row}: {what}")
    return "\n".join(problems) or error.message


def _row_integer(text: str) -> int:
    """Rows travel in a Struct, whose numbers are doubles. Raises ValueError."""
    if len(text) > len(str(-_WHOLE)) or abs(int(text)) >= _WHOLE:
        raise ValueError(f"{text:.40} is too large a number for a row; write it as text")
    return int(text)
