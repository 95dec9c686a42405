"""`check`: everything that a run needs, looked at before anything is started.

    run file -> settings -> model, tokenizer -> rows of all sources -> arithmetic   (run_findings)
             -> coordinator, workers, reward function                             (service_findings)
             -> this machine: /dev/shm, ports, disk, limits                                 (doctor)

Every finding is ok, note or bad, and has its fix. The command ends with 2 where the run file, its
model or its data is bad, with 1 where only the services or the machine are, else with 0. What one
part needs of an earlier one that is bad is left out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from rollpacker.cli import doctor
from rollpacker.cli.console import print_table, printable
from rollpacker.cli.coordinator import DEFAULT_ADDRESS, CoordinatorAddress
from rollpacker.cli.doctor import Finding
from rollpacker.cli.failures import WORK_FAILED, WRONG_INPUT, told_in_one_line
from rollpacker.cli.model_files import ModelFacts, inspect_model
from rollpacker.cli.run_findings import (
    all_prompts,
    batch_findings,
    domain_rows,
    leak_findings,
    length_findings,
    look_at_source,
    named_sources,
    source_findings,
    step_rows,
    tokenizer_findings,
)
from rollpacker.cli.runs import Config, Overrides
from rollpacker.cli.service_findings import service_findings
from rollpacker.data import DataError, RunData, TextTokenizer
from rollpacker.data.run_data import assemble, load_tokenizer, prompt_rules
from rollpacker.settings import RunSettings, SettingsError, load_run_settings
from rollpacker.types import Prompt

_OF_THE_MACHINE = ("/dev/shm", "port", "disk", "open files", "security", "redis")  # noqa: S108


@dataclass(frozen=True, slots=True)
class RunLook:
    """What a run file comes to; None: something before it is bad."""

    findings: tuple[Finding, ...]
    model: ModelFacts | None = None
    data: RunData | None = None

    @property
    def is_bad(self) -> bool:
        return any(finding.level == "bad" for finding in self.findings)


def check(
    config: Config,
    overrides: Overrides = None,
    only_run: Annotated[
        bool, typer.Option("--only-run", help="Leave out the services and this machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    coordinator: CoordinatorAddress = DEFAULT_ADDRESS,
) -> None:
    """Find what is wrong with a run before anything starts; each finding with its fix."""
    with told_in_one_line():
        settings = load_run_settings(config, overrides or ())
    look = look_at_run(settings)
    around: list[Finding] = []
    if not only_run:
        prompts = all_prompts(look.data) if look.data else []
        around = asyncio.run(service_findings(coordinator, settings, prompts))
        served = any(f.subject == "coordinator" and f.level == "ok" for f in around)
        around += machine_findings(Path("runs"), served=served)
    rows = [] if look.model is None or look.data is None else facts(settings, look.model, look.data)
    first = look.data.dataset[0] if look.data else None
    (_print_json if as_json else _print)([*look.findings, *around], rows, first)
    if look.is_bad:
        raise typer.Exit(WRONG_INPUT)
    if any(finding.level == "bad" for finding in around):
        raise typer.Exit(WORK_FAILED)


def look_at_run(settings: RunSettings) -> RunLook:
    """Model, tokenizer, data and arithmetic of a run."""
    try:
        model = inspect_model(Path(settings.model))
    except SettingsError as error:
        return RunLook(tuple(Finding(name, "bad", what) for name, what in error.problems))
    try:
        tokenizer = load_tokenizer(settings)
    except DataError as error:
        fix = "give a directory with tokenizer.json as data.tokenizer"
        return RunLook((Finding("tokenizer", "bad", str(error), fix),), model)
    found = [*tokenizer_findings(settings, model, tokenizer)]
    if any(finding.subject == "chat template" and finding.level == "bad" for finding in found):
        return RunLook(tuple(found), model)
    wrong, data = _look_at_data(settings, tokenizer)
    found += wrong
    if data is not None:
        found += [*leak_findings(data), *batch_findings(settings, data)]
        found += length_findings(settings, model, data)
    return RunLook(tuple(found), model, data)


def _look_at_data(
    settings: RunSettings, tokenizer: TextTokenizer
) -> tuple[list[Finding], RunData | None]:
    rules = prompt_rules(settings)
    looks = [
        look_at_source(name, source, tokenizer, rules) for name, source in named_sources(settings)
    ]
    found = [finding for look in looks for finding in source_findings(look)]
    if any(finding.level == "bad" for finding in found) or not all(x.prompts for x in looks):
        return found, None
    count = len(settings.data.resolved_sources)
    loaded = [look.loaded() for look in looks]
    names = [source.name for source in settings.held_out_sets]
    held_out = dict(zip(names, loaded[count:], strict=True))
    return found, assemble(settings, tokenizer, loaded[:count], held_out)


def machine_findings(runs: Path, *, served: bool) -> list[Finding]:
    """What doctor finds bad or doubtful here; a port that a coordinator serves is no trouble."""
    return [
        finding
        for finding in doctor.findings(doctor.gather(runs))
        if finding.level != "ok"
        and finding.subject in _OF_THE_MACHINE
        and not (served and finding.subject == "port")
    ]


def facts(settings: RunSettings, model: ModelFacts, data: RunData) -> list[tuple[str, str]]:
    """What the run is, in the words and figures of the arithmetic."""
    return [
        ("mode", f"{settings.tail_batching.mode}, seed {settings.seed}"),
        ("model", f"{model.architecture}, {model.parameters:,} parameters, {settings.model}"),
        (
            "data",
            f"{len(data.dataset)} prompts of {_token_range(data.dataset)} tokens,"
            f" {data.dataset.epochs} epochs",
        ),
        *domain_rows(settings, data),
        *(
            (f"held-out {name}", f"{len(prompts)} prompts of {_token_range(prompts)} tokens")
            for name, prompts in data.validation.items()
        ),
        ("stop tokens", _stop_tokens(settings, data)),
        *step_rows(settings, data),
    ]


def _token_range(prompts: Sequence[Prompt]) -> str:
    counts = [len(prompt.token_ids) for prompt in prompts]
    return f"{min(counts)} to {max(counts)}"


def _stop_tokens(settings: RunSettings, data: RunData) -> str:
    ids = settings.sampling.stop_token_ids or data.tokenizer.eos_token_ids
    return ", ".join(map(str, ids)) or "none"


def _print(
    findings: Sequence[Finding], rows: Sequence[tuple[str, str]], first: Prompt | None
) -> None:
    if rows:
        print_table(("", ""), rows, "")
    if first is not None:
        print(f"\nfirst prompt ({first.prompt_id}, {len(first.token_ids)} tokens):")
        for line in first.text.split("\n"):
            print(f"  {printable(line)}")
    print()
    cells = [(f.level, f.subject, printable(f.what), printable(f.fix)) for f in findings]
    print_table(("", "subject", "found", "fix"), cells, "nothing is wrong")


def _print_json(
    findings: Sequence[Finding], rows: Sequence[tuple[str, str]], first: Prompt | None
) -> None:
    print(
        json.dumps(
            {
                "bad": sum(finding.level == "bad" for finding in findings),
                "findings": [asdict(finding) for finding in findings],
                "facts": dict(rows),
                "first_prompt": first
                and {
                    "prompt_id": first.prompt_id,
                    "text": first.text,
                    "token_ids": first.token_ids,
                },
            }
        )
    )
