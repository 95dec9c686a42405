"""`python -m rollpacker.simulation paper | compare | search | calibrate | regret | ...`.

Reports go to standard output, one JSON object per line with `--json`, else as a table; what is said
about the run (parameters, errors, seconds) goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rollpacker.policy.tail_batching import TailBatchingRules
from rollpacker.round_log import RoundLogError
from rollpacker.simulation import compare as comparison
from rollpacker.simulation.calibration import fig11, fit_engine, flat
from rollpacker.simulation.paper import (
    FIGURES,
    PREDICTED_PER_FITTED,
    Value,
    enough_predicted,
    reproduce,
)
from rollpacker.simulation.parameters import Parameters, load_parameters, paper_figures
from rollpacker.simulation.recorded_lengths import (
    RecordedLengthsError,
    coupling_rows,
    read_lengths,
)
from rollpacker.simulation.recorded_run import replay_rows
from rollpacker.simulation.regret import SETS, regret_rows, summary_row
from rollpacker.simulation.search import CAPS as SEARCH_CAPS
from rollpacker.simulation.search import IDEAS, search_rows
from rollpacker.simulation.search import RHOS as SEARCH_RHOS
from rollpacker.simulation.services_fit import fit_services
from rollpacker.simulation.sizes import size_rows
from rollpacker.simulation.speed import speed_rows

_PACKAGE_FILE = Path(__file__).with_name("parameters.json")


def main(arguments: list[str] | None = None) -> int:
    """Run a report; returns the exit status."""
    options = _parser().parse_args(arguments)
    parameters = load_parameters(options.parameters)
    started = time.perf_counter()
    try:
        status: int = options.run(options, parameters)
    except (comparison.SizeError, RecordedLengthsError, RoundLogError) as error:
        _say(str(error))
        return 2
    _say(f"{time.perf_counter() - started:.1f} s")
    return status


def _paper(options: argparse.Namespace, parameters: Parameters) -> int:
    values: list[Value] = []
    for value in reproduce(parameters, tuple(options.figures)):
        values.append(value)
        _row(options, value.to_row())
    fitted = len(parameters.fitted)
    predicted = sum(value.predicted for value in values)
    _say(f"{len(parameters)} parameters, {fitted} of them fitted; {predicted} values predicted")
    for name in dict.fromkeys(value.figure for value in values):
        errors = [abs(value.relative_error) for value in values if value.figure == name]
        _say(f"{name}: median error {median(errors):.1%}, largest {max(errors):.1%}")
    if not options.figures and not enough_predicted(parameters, values):
        _say(
            f"fails: {predicted} predictions for {fitted} fitted parameters; at least"
            f" {PREDICTED_PER_FITTED * fitted} are needed"
        )
        return 1
    return 0


def _compare(options: argparse.Namespace, parameters: Parameters) -> int:
    fixed = None
    if options.ladder:
        fixed = comparison.FixedLadders(tuple(options.ladder), options.size, options.redraws)
    elif options.size or options.redraws:
        _say("--size and --redraws are for fixed ladders: name one with --ladder")
        return 2
    if options.lengths is not None:
        recorded = read_lengths(options.lengths)
        for row in (*coupling_rows(recorded), *comparison.compare_recorded(parameters, recorded)):
            _row(options, dict(row))
        return 0
    caps: tuple[int, ...] = comparison.FULL_CAPS if options.full else comparison.DEFAULT_CAPS
    rhos: tuple[float, ...] = comparison.FULL_RHOS if options.full else comparison.DEFAULT_RHOS
    for row in comparison.compare(
        parameters,
        tuple(options.cap or caps),
        tuple(options.rho or rhos),
        options.steps,
        options.task,
        fixed,
        every=options.full,
    ):
        _row(options, row)
    return 0


def _calibrate(options: argparse.Namespace, parameters: Parameters) -> int:
    fitted = parameters
    if options.evaluations:
        fitted = fit_services(fit_engine(parameters, options.evaluations, options.rounds))
    for before, after in zip(parameters.fitted, fitted.fitted, strict=True):
        _row(options, {"parameter": after.name, "before": before.value, "after": after.value})
    published = flat(paper_figures()["fig11_rollout_seconds_full_period"])
    for key, ours in fig11(fitted, options.rounds).items():
        _row(options, Value("fig11", key, published[key], ours).to_row())
    if options.write:
        options.write.write_text(fitted.to_json(), encoding="utf-8")
        _say(f"written to {options.write}")
    return 0


def _regret(options: argparse.Namespace, parameters: Parameters) -> int:
    rows = []
    for row in regret_rows(parameters, options.steps, SETS[options.set], options.seeds):
        rows.append(row)
        _row(options, row)
    _row(options, summary_row(rows))
    return 0


def _search(options: argparse.Namespace, parameters: Parameters) -> int:
    for row in search_rows(
        parameters,
        tuple(options.cap or SEARCH_CAPS),
        tuple(options.rho or SEARCH_RHOS),
        options.steps,
        tuple(options.idea or ()),
        options.seeds,
    ):
        _row(options, row)
    return 0


def _sizes(options: argparse.Namespace, parameters: Parameters) -> int:
    for row in size_rows(parameters, options.steps):
        _row(options, row)
    return 0


def _speed(options: argparse.Namespace, parameters: Parameters) -> int:
    for row in speed_rows(parameters, options.responses):
        _row(options, row)
    return 0


def _replay(options: argparse.Namespace, parameters: Parameters) -> int:  # noqa: ARG001
    differences = 0
    for row in replay_rows(options.run_directory):
        _row(options, row)
        differences += row.get("differences", 0)
    return 1 if differences else 0


def _plot(options: argparse.Namespace, parameters: Parameters) -> int:
    from rollpacker.simulation.plots import draw_all

    for path in draw_all(parameters, options.directory):
        _say(f"drew {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rollpacker.simulation", description=__doc__)
    parser.add_argument("--parameters", type=Path, help="another parameters.json")
    commands = parser.add_subparsers(required=True)
    paper = _command(commands, "paper", _paper, "the paper's figures beside ours")
    paper.add_argument("--figures", nargs="*", choices=tuple(FIGURES), default=[])
    compare = _command(commands, "compare", _compare, "modes beyond the paper")
    compare.add_argument(
        "--full", action="store_true", help="every mode; caps 8k to 128k, rho 0.1 to 0.9"
    )
    compare.add_argument("--cap", type=int, action="append", help="tokens; may be repeated")
    compare.add_argument("--rho", type=float, action="append", help="may be repeated")
    compare.add_argument("--steps", type=_count, default=32)
    what = compare.add_mutually_exclusive_group()
    what.add_argument(
        "--ladder", type=_factors, action="append", help="ETA[,ETA...], instead of the modes"
    )
    what.add_argument("--lengths", type=Path, metavar="RUN_DIR", help="those of a real run")
    compare.add_argument(
        "--size", type=_count, default=0, help="of the engines of fixed ladders, at all levels"
    )
    compare.add_argument(
        "--redraws",
        type=partial(_count, least=0),
        default=0,
        help="how often fixed ladders draw a response again that was cut and comes out shorter",
    )
    compare.add_argument("--task", choices=("mix", "math", "code", "judge"), default="mix")
    calibrate = _command(commands, "calibrate", _calibrate, "fit to Fig. 11 and Fig. 10c")
    calibrate.add_argument(
        "--evaluations",
        type=partial(_count, least=0),
        default=390,
        help="0: no fit, only the bars of Fig. 11",
    )
    calibrate.add_argument("--rounds", type=_count, default=32, help="short rounds of each bar")
    calibrate.add_argument(
        "--write", type=Path, nargs="?", const=_PACKAGE_FILE, help="default: parameters.json"
    )
    search = _command(commands, "search", _search, "scheduling ideas against what runs today")
    search.add_argument("--cap", type=int, action="append", help="tokens; may be repeated")
    search.add_argument("--rho", type=float, action="append", help="may be repeated")
    search.add_argument("--idea", action="append", choices=[idea.name for idea in IDEAS])
    search.add_argument("--steps", type=_count, default=40)
    search.add_argument("--seeds", type=_count, default=1, help="runs of each, with other lengths")
    regret = _command(commands, "regret", _regret, "the planner against fixed ladders")
    regret.add_argument("--steps", type=_count, default=160)
    regret.add_argument("--set", choices=tuple(SETS), default="known", help="of scenarios")
    regret.add_argument("--seeds", type=_count, default=1, help="lengths drawn so many times")
    sizes = _command(commands, "sizes", _sizes, "a tensor-parallel size for each level")
    sizes.add_argument("--steps", type=_count, default=32)
    speed = _command(commands, "speed", _speed, "seconds that simulations take, by size")
    speed.add_argument("--responses", type=int, default=100_000, help="of the largest round")
    replay = _command(commands, "replay", _replay, "a real run beside its simulation")
    replay.add_argument("run_directory", type=Path, help="of a run, as runs/demo")
    plot = _command(commands, "plot", _plot, "SVG pictures; needs the extra `plot`")
    plot.add_argument("directory", type=Path)
    return parser


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least}")
    return int(text)


def _factors(text: str) -> tuple[float, ...]:
    try:
        factors = tuple(map(float, text.split(",")))
        TailBatchingRules(1, 1, factors)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a ladder: {error}") from error
    return factors


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    command.add_argument("--json", action="store_true", help="one JSON object per line")
    command.set_defaults(run=run)
    return command


def _row(options: argparse.Namespace, row: dict[str, Any]) -> None:
    print(json.dumps(row) if options.json else "  ".join(_cells(row.values())), flush=True)


def _cells(values: Iterable[Any]) -> list[str]:
    return [f"{v:<10.4g}" if isinstance(v, float) else f"{v!s:<12}" for v in values]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
