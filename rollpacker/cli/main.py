"""The `rollpacker` command: which commands there are. What they do stands beside them."""

from __future__ import annotations

import typer

from rollpacker.cli import (
    backup,
    check,
    control,
    demo,
    doctor,
    failures,
    grade,
    plan,
    regrade,
    reports,
    runs,
    stack,
)

app = typer.Typer(
    name="rollpacker",
    help=f"RL post-training of language models by tail batching.\n\n{failures.HELP}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(stack.up)
app.command("demo")(demo.demo)
app.command("check")(check.check)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("submit")(runs.submit)
app.command("status")(reports.status)
app.command("watch")(runs.watch_run)
app.command("steps")(reports.steps)
app.command("samples")(reports.samples)
app.command("regrade")(regrade.regrade)
app.command("deferred")(reports.deferred)
app.command("workers")(reports.workers)
app.command("devices")(reports.devices)
app.command("evaluate")(runs.evaluate)
app.command("stop")(runs.stop)
app.command("pause")(control.pause)
app.command("resume")(control.resume)
app.command("update")(control.update)
app.command("long-round")(control.long_round)
app.command("checkpoint")(control.checkpoint)
app.command("add")(control.add)
app.command("requeue")(control.requeue)
app.command("drop")(control.drop)
app.command("backup")(backup.backup)
app.command("restore")(backup.restore)
app.add_typer(grade.app, name="grade")
