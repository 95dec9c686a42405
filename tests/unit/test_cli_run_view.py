"""What a watcher shows: events in, text out."""

from __future__ import annotations

from rollpacker.cli import run_view
from rollpacker.cli.console import printable
from rollpacker.cli.run_view import EventLines, RunView
from rollpacker.v1 import coordinator_service_pb2 as pb
from rollpacker.v1 import types_pb2
from tests.fake_coordinator import step


def test_a_step_is_shown_with_the_metrics_that_it_has() -> None:
    assert run_view.step_line(step(4)) == (
        "step 4  round long  level 2  reward 0.016  tokens 40  rollout s 5.2  step s 9.0"
    )


def test_a_repeated_event_changes_nothing() -> None:
    view = RunView()
    for _ in range(2):
        for number in (0, 1):
            view.apply(pb.WatchRunResponse(step_finished=step(number)))
    assert [it.step for it in view.newest_steps(5)] == [0, 1]
    assert view.series("reward/mean") == [0.0, 1 / 250]


def test_a_finished_step_ends_the_progress_of_its_round() -> None:
    view = RunView()
    progress = pb.RoundProgress(
        step=0,
        round_kind=types_pb2.ROUND_KIND_SHORT,
        launched_group_count=8,
        finished_group_count=3,
        kept_group_count=4,
        phase="rollout",
    )
    view.apply(pb.WatchRunResponse(round_progress=progress))
    assert view.progress is not None
    assert run_view.progress_line(view.progress) == (
        "step 0 (short, level 0) rollout: 3 of 8 groups finished, 4 to keep"
    )
    view.apply(pb.WatchRunResponse(step_finished=step(0)))
    assert view.progress is None


def test_a_run_counts_its_steps_and_tells_how_long_the_rest_takes() -> None:
    view = RunView(run=pb.Run(run_id="r", state=pb.Run.STATE_RUNNING, planned_steps=10))
    assert view.seconds_left is None
    for number in (0, 1, 2):
        view.apply(pb.WatchRunResponse(step_finished=step(number)))
    assert view.run is not None
    assert (view.run.step, view.run.weight_version) == (3, 3)
    assert view.seconds_left == 70.0  # ten seconds a step
    view.apply(pb.WatchRunResponse(run_changed=pb.Run(state=pb.Run.STATE_SUCCEEDED, step=10)))
    assert view.ended
    assert view.seconds_left is None


def test_a_run_is_told_with_the_reason_of_its_failure() -> None:
    run = pb.Run(run_id="r", state=pb.Run.STATE_FAILED, step=2, planned_steps=5, failure="no disk")
    assert run_view.run_line(run) == (
        "r failed: 2 of 5 steps, weight version 0, 0 draws deferred; no disk"
    )


def test_a_sparkline_spans_its_values_and_is_no_wider_than_asked() -> None:
    assert run_view.sparkline([0.0, 0.25, 1.0]) == "▁▃█"
    assert run_view.sparkline([1.0, 1.0]) == "▁▁"
    assert run_view.sparkline([]) == ""
    assert len(run_view.sparkline([float(n) for n in range(100)], width=7)) == 7


def test_text_of_a_model_cannot_command_the_terminal() -> None:
    assert printable("\x1b[2J\n= 12é") == "\\x1b[2J\\n= 12é"


def test_a_log_says_the_state_of_a_run_once_although_it_is_told_again() -> None:
    log = EventLines()
    ended = pb.Run(run_id="r", state=pb.Run.STATE_SUCCEEDED, step=2, planned_steps=2)
    told = [
        pb.WatchRunResponse(run_changed=ended),  # an old event shows the run as it is now
        pb.WatchRunResponse(step_finished=step(0)),
        pb.WatchRunResponse(round_progress=pb.RoundProgress(step=1)),
        pb.WatchRunResponse(step_finished=step(1)),
        pb.WatchRunResponse(run_changed=ended),
    ]
    lines = [line for event in told for line in log.of(event)]
    assert [line.split("  ")[0] for line in lines] == [
        "r succeeded: 2 of 2 steps, weight version 0, 0 draws deferred",
        "step 0",
        "step 1",
    ]


def test_a_log_says_which_ladder_was_chosen_and_why() -> None:
    chosen = pb.LadderChoice(step=8, speculation_factors=[1.5], reason="takes eta 1.5")
    event = pb.WatchRunResponse(ladder_chosen=chosen)
    assert EventLines().of(event) == ["step 8 takes eta 1.5"]


def test_an_alarm_is_said_when_it_begins_and_again_when_it_comes_back() -> None:
    log, view = EventLines(), RunView()
    said = []
    for number, raised in enumerate([False, True, True, False, True]):
        finished = step(number)
        if raised:
            finished.metrics["alarm/truncated"] = 1.0
        event = pb.WatchRunResponse(step_finished=finished)
        view.apply(event)
        said.append([line.partition(":")[0] for line in log.of(event)[1:]])
    assert said == [[], ["alarm truncated"], [], [], ["alarm truncated"]]
    assert [alarm.name for alarm in view.alarms] == ["truncated"]
    assert "raise sampling.max_response_tokens" in view.alarms[0].text
