"""The commands against a server that fulfils the coordinator's contract (`fake_coordinator`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from rollpacker.cli.main import app
from rollpacker.local_stack.ports import free_port
from tests import fake_coordinator

CONFIG = "model: /m\ndata: {path: /d}\n"


@contextmanager
def fake_at(address: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = (sys.executable, fake_coordinator.__file__, address, *options)
    process = subprocess.Popen(command)
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60)
        yield process
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    with fake_at(address):
        yield address


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return path


def invoke(address: str, *arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output (words joined by one space), standard error."""
    environment = {"ROLLPACKER_COORDINATOR": address}
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, words, env=environment)
    return result.exit_code, " ".join(result.stdout.split()), result.stderr


def test_status_lists_the_runs_newest_first(coordinator: str) -> None:
    status, out, _ = invoke(coordinator, "status")
    assert status == 0
    assert out.index("failed failed 1") < out.index("finished succeeded 250 250")


def test_status_of_one_run_tells_why_it_failed(coordinator: str) -> None:
    status, out, _ = invoke(coordinator, "status", "failed")
    assert status == 0
    assert "failure no worker: start one" in out
    assert "outputs /runs/failed" in out


def test_regrade_shows_each_step_and_where_the_scores_are(coordinator: str) -> None:
    status, out, _ = invoke(coordinator, "regrade", "finished", "--name", "new", "--last", 1)
    assert status == 0
    assert "0 8 1 0 - 0.500" in out
    assert "1 8 1 0 - 0.500" in out
    assert out.endswith("the scores are in /runs/finished/regraded/new")
    status, out, _ = invoke(coordinator, "regrade", "finished", "--name", "new", "--json")
    assert (status, out.count('"changed_count": 1')) == (0, 2)
    assert invoke(coordinator, "regrade", "nobody")[0] == 4


def test_an_unknown_run_is_one_line_and_status_4(coordinator: str) -> None:
    assert invoke(coordinator, "status", "nobody") == (4, "", "error: there is no run nobody\n")


def test_a_coordinator_that_is_away_is_status_3() -> None:
    status, _, err = invoke(f"127.0.0.1:{free_port()}", "status")
    assert status == 3
    assert "start one with `rollpacker up`" in err
    assert len(err.splitlines()) == 1


def test_the_coordinator_option_wins_over_the_environment(coordinator: str) -> None:
    away = f"127.0.0.1:{free_port()}"
    assert invoke(away, "status", "--coordinator", coordinator)[0] == 0


def test_steps_shows_the_newest_last_and_reads_on_over_pages(coordinator: str) -> None:
    status, out, _ = invoke(coordinator, "steps", "finished", "--limit", 2)
    assert status == 0
    assert "248 short 0 0.992 40" in out
    assert out.endswith("249 long 2 0.996 40 - - - 5.2 - 9.0")
    runner = CliRunner().invoke(
        app, ["steps", "finished", "--limit", "0", "--json", "--coordinator", coordinator]
    )
    numbers = [int(json.loads(line)["step"]) for line in runner.stdout.splitlines()]
    assert numbers == list(range(250))


def test_samples_prints_model_text_without_its_control_characters(coordinator: str) -> None:
    status, out, _ = invoke(coordinator, "samples", "finished", 0)
    assert status == 0
    assert out.endswith("p7 1 3 2 1.000 0.500 CORRECT \\x1b[2J= 12\\n")


def test_samples_of_a_step_that_has_none_is_status_4(coordinator: str) -> None:
    assert invoke(coordinator, "samples", "finished", 9)[0] == 4


def test_deferred_lists_draws_with_their_age(coordinator: str) -> None:
    status, out, _ = invoke(coordinator, "deferred", "finished")
    assert status == 0
    assert out == "level prompt epoch age 2 p9 0 7"


def test_workers_tells_when_there_is_none(coordinator: str) -> None:
    status, out, _ = invoke(coordinator, "workers")
    assert status == 0
    assert out.startswith("no worker is registered")


def test_submit_starts_a_run_and_watch_follows_it_to_its_end(
    coordinator: str, config: Path
) -> None:
    arguments = ("submit", config, "--run-id", "watched", "--watch")
    status, out, err = invoke(coordinator, *arguments)
    assert (status, err) == (0, "")
    assert out.startswith("watched running: 0 steps")
    positions = [out.index(f"step {number} round short") for number in range(3)]
    assert positions == sorted(positions)
    assert out.endswith("draws deferred outputs: /runs/watched")
    assert invoke(coordinator, *arguments)[1].startswith("watched succeeded")


def test_a_submit_that_watches_ends_where_until_step_pauses_the_run(
    coordinator: str, config: Path
) -> None:
    arguments = ("submit", config, "--run-id", "halted", "--until-step", 2, "--watch")
    for _ in range(2):  # the second time the run is paused there already
        status, out, err = invoke(coordinator, *arguments)
        assert (status, err) == (0, "")
        assert [f"step {number} round" in out for number in range(3)] == [True, True, False]
        assert out.endswith("run halted is paused at step 2; `rollpacker resume halted` goes on")


def test_a_submit_says_that_until_step_changes_nothing_of_a_run_that_is_under_way(
    coordinator: str, config: Path
) -> None:
    arguments = ("submit", config, "--run-id", "under-way")
    assert invoke(coordinator, *arguments)[0] == 0
    status, _, err = invoke(coordinator, *arguments, "--until-step", 2)
    assert status == 0
    assert "--until-step 2 changes nothing" in err


def test_rows_that_cannot_be_added_are_named_by_their_place_in_the_file(
    coordinator: str, config: Path, tmp_path: Path
) -> None:
    assert invoke(coordinator, "submit", config, "--run-id", "added-to")[0] == 0
    rows = [json.dumps({"prompt_id": f"r{i}"}) for i in range(700)]
    path = tmp_path / "rows.jsonl"
    for number, line, said in (
        (699, "{}", f"{path}, row 700.prompt_id: is missing; of the 500 rows before, 500 were"),
        (600, '{"prompt_id": ', f"{path}, line 601: cannot be read as JSON: "),
        (600, "7", f"{path}, line 601: is no object"),
    ):
        path.write_text("\n".join([*rows[:number], line, *rows[number + 1 :]]))
        status, _, err = invoke(coordinator, "add", "added-to", path)
        assert status == 2
        assert said in err


def test_a_run_id_that_is_taken_by_other_settings_is_status_4(
    coordinator: str, config: Path
) -> None:
    assert invoke(coordinator, "submit", config, "--run-id", "taken")[0] == 0
    status, _, err = invoke(coordinator, "submit", config, "seed=1", "--run-id", "taken")
    assert status == 4
    assert err == "error: run taken has other settings; take another run id\n"


def test_wrong_settings_are_status_2_and_never_sent(config: Path) -> None:
    status, _, err = invoke("127.0.0.1:1", "submit", config, "seed=-1")
    assert status == 2
    assert err.startswith("error: seed: ")


def test_watching_a_run_that_fails_is_status_1_with_its_reason(coordinator: str) -> None:
    status, _, err = invoke(coordinator, "watch", "failed")
    assert status == 1
    assert err == "error: run failed failed: no worker: start one\n"


def test_a_watch_goes_on_after_the_coordinator_died_without_gap_or_repeat(
    tmp_path: Path,
) -> None:
    address = f"127.0.0.1:{free_port()}"
    died = tmp_path / "died"
    restart = "import subprocess, sys\nwhile True: subprocess.run([sys.executable, *sys.argv[1:]])"
    words = (fake_coordinator.__file__, address, "--die-once", str(died))
    supervisor = subprocess.Popen((sys.executable, "-c", restart, *words), start_new_session=True)
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60)
        status, out, _ = invoke(address, "watch", "finished")
    finally:
        os.killpg(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
    assert (status, died.exists()) == (0, True)
    assert [out.count(f"step {number} round") for number in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("flags", "mode"),
    [((), "AFTER_STEP"), (("--drain",), "DRAIN"), (("--now",), "IMMEDIATELY")],
)
def test_stop_asks_for_the_end_that_was_named(
    coordinator: str, config: Path, flags: tuple[str, ...], mode: str
) -> None:
    run_id = f"stop-{mode.lower().replace('_', '-')}"
    assert invoke(coordinator, "submit", config, "--run-id", run_id)[0] == 0
    status, out, _ = invoke(coordinator, "stop", run_id, *flags)
    assert status == 0
    assert out.endswith(f"STOP_MODE_{mode}")


def test_two_ways_to_stop_at_once_are_refused(coordinator: str) -> None:
    assert invoke(coordinator, "stop", "finished", "--drain", "--now")[0] == 2


def test_a_run_is_paused_and_goes_on_for_some_steps(coordinator: str, config: Path) -> None:
    submit = ("submit", config, "--run-id", "control", "--until-step", "1")
    assert invoke(coordinator, *submit)[0] == 0
    assert "pauses at step 1" in invoke(coordinator, "status", "control")[1]
    assert "paused" in invoke(coordinator, "pause", "control", "--now")[1]
    assert "PAUSE_MODE_IMMEDIATELY" in invoke(coordinator, "status", "control")[1]
    assert invoke(coordinator, "resume", "control", "--steps", "2")[0] == 0
    assert "pauses at step 2" in invoke(coordinator, "status", "control")[1]


def test_settings_prompts_and_draws_of_a_run_are_changed(
    coordinator: str, config: Path, tmp_path: Path
) -> None:
    assert invoke(coordinator, "submit", config, "--run-id", "changed")[0] == 0
    changes = ("trainer.learning_rate=0.5", "max_steps=7")
    assert invoke(coordinator, "update", "changed", *changes)[0] == 0
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt_id": "a\u2028"}\r\n\n{"prompt_id": "b"}\n', encoding="utf-8")
    large = tmp_path / "large.jsonl"
    large.write_text(f'{{"prompt_id": "c", "answer": {1 << 53}}}\n')
    status, _, err = invoke(coordinator, "add", "changed", large)
    assert (status, "write it as text" in err) == (2, True)
    assert "2 prompts added" in invoke(coordinator, "add", "changed", rows)[1]
    assert invoke(coordinator, "drop", "changed", "0:p9", "--reason", "wrong")[0] == 0
    out = invoke(coordinator, "status", "changed")[1]
    assert '"learning_rate": 0.5' in out
    assert "added prompts 2" in out
    assert "dropped draws 1" in out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("update", "x", "trainer.learning_rate"), "write section.key=value"),
        (("update", "x", "max_steps=3", "max_steps.x=1"), "sets a part of a value"),
        (("update", "x", "max_steps=["), "is not YAML"),
        (("drop", "x", "p9", "--reason", "r"), "is not EPOCH:PROMPT"),
        (("drop", "x", f"{1 << 63}:p9", "--reason", "r"), "is not EPOCH:PROMPT"),
        (("add", "x", "/nowhere.jsonl"), "cannot be read as JSONL"),
    ],
)
def test_wrong_words_for_a_change_are_one_line_and_status_2(
    coordinator: str, command: tuple[str, ...], said: str
) -> None:
    status, _, err = invoke(coordinator, *command)
    assert (status, len(err.splitlines())) == (2, 1)
    assert said in err


@pytest.mark.parametrize(
    "command",
    [
        ("resume", "x", "--steps", 1 << 63),
        ("samples", "x", 1 << 63),
        ("samples", "x", 0, "--to", 1 << 63),
        ("requeue", "x", "0:p9", "--level", 1 << 63),
        ("regrade", "x", "--last", 1 << 63),
    ],
)
def test_a_number_that_no_message_holds_is_status_2(
    coordinator: str, command: tuple[object, ...]
) -> None:
    status, _, err = invoke(coordinator, *command)
    assert (status, "1000000000" in err) == (2, True)
