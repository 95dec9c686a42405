"""`grade math FILE`, `grade code FILE`: what the reward service would give, without any service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rollpacker.cli.failures import WRONG_INPUT, CommandError, told_in_one_line

app = typer.Typer(no_args_is_help=True)


@app.callback()
def grade() -> None:
    """Grade responses offline, with the graders of the reward service."""


@app.command("math")
def grade_math(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSONL of {id, ground_truth, response}.")
    ],
) -> None:
    """Print {id, reward, verdict} for each line, in the same order."""
    from services.reward.offline import grade_math_file

    with _wrong_files_told(file):
        for line in grade_math_file(file):
            print(json.dumps(line.as_math_json()), flush=True)


@app.command("code")
def grade_code(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="JSONL of {id, response, tests: [[stdin, stdout]]}."),
    ],
    time_limit: Annotated[
        float, typer.Option(min=0.01, help="CPU seconds that one test case may take.")
    ] = 10.0,
    slots: Annotated[
        int, typer.Option(min=0, help="Programs that run at the same time; 0: one per core.")
    ] = 0,
) -> None:
    """Run each line's program in a sandbox; print {id, verdict, reward, cpu_seconds}, in order."""
    from services.reward.offline import grade_code_file

    with _wrong_files_told(file):
        for line in grade_code_file(file, slots=slots or None, time_limit_seconds=time_limit):
            print(json.dumps(line.as_code_json()), flush=True)


@contextmanager
def _wrong_files_told(file: Path) -> Iterator[None]:
    from services.reward.offline import GradeFileError, GraderUnavailableError

    with told_in_one_line():
        try:
            yield
        except GradeFileError as error:
            raise CommandError(str(error), WRONG_INPUT) from error
        except GraderUnavailableError as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            raise CommandError(f"{file}: cannot be read: {error.strerror}", WRONG_INPUT) from error
