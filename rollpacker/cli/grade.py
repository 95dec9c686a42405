"""`grade math FILE`: what the reward service would give, without any service."""

from __future__ import annotations

import json
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
    from services.reward.offline import GradeFileError, grade_math_file

    with told_in_one_line():
        try:
            for line in grade_math_file(file):
                print(json.dumps(line.as_json()), flush=True)
        except GradeFileError as error:
            raise CommandError(str(error), WRONG_INPUT) from error
        except OSError as error:
            raise CommandError(f"{file}: cannot be read: {error.strerror}", WRONG_INPUT) from error
