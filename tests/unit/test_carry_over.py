"""What a launch starts from, and what a loser leaves: the newest knowledge of each response."""

from __future__ import annotations

from rollpacker.types import ASSISTANT, Draft, Draw, DrawId, FinishReason, Response, Segment
from services.coordinator.carry_over import CarryOver, CheckedDraft
from services.coordinator.step_metrics import carry_over_metrics

DRAW = DrawId(0, "p")
NOW = 9  # weight version of the round
OLD = Draft(1, (1, 2, 3, 4), 7)


def carry_over(max_tokens: int = 100, drafts: tuple[Draft, ...] = (OLD,)) -> CarryOver:
    return CarryOver(NOW, {DRAW: drafts}, max_tokens, "run", {DRAW: Draw(0, "p", (4, 5))})


def response(tokens: tuple[int, ...], *, finished: bool, accepted: int = 0) -> Response:
    return Response(
        response_id="r",
        index=1,
        token_ids=tokens,
        logprobs=(-1.0,) * len(tokens),
        finish_reason=FinishReason.STOP if finished else FinishReason.INTERRUPTED,
        weight_version=NOW,
        seed=5,
        segments=(Segment(ASSISTANT, len(tokens), trainable=True),),
        accepted_draft_token_count=accepted,
    )


def test_a_draft_of_the_queue_goes_with_the_launch_and_stays_until_something_newer_is_known() -> (
    None
):
    carried = carry_over()
    parts = carried.launch(DRAW, (0, 1))
    assert (parts.resume_from, parts.drafts) == ((), (OLD,))
    assert carried.left(DRAW, range(2)) == (OLD,)
    carried.progressed(DRAW, 1, (1, 2))
    carried.progressed(DRAW, 1, (8,))
    assert carried.left(DRAW, range(2)) == (Draft(1, (1, 2, 8), NOW),)


def test_a_broken_stream_leaves_a_draft_of_the_same_weights() -> None:
    carried = carry_over()
    carried.launch(DRAW, (0, 1))
    carried.progressed(DRAW, 0, (6,))
    carried.progressed(DRAW, 1, (1, 2, 8))
    parts = carried.launch(DRAW, (0, 1))
    assert parts.drafts == (Draft(0, (6,), NOW), Draft(1, (1, 2, 8), NOW))
    carried.finished(DRAW, response((1, 2, 8, 9), finished=True, accepted=3))
    assert carried.checked == []  # not a draft of other weights


def test_a_broken_stream_that_told_logprobs_leaves_a_prefix() -> None:
    carried = carry_over()
    carried.launch(DRAW, (0, 1))
    carried.progressed(DRAW, 1, (1, 2), (-0.5, -1.0))
    carried.progressed(DRAW, 1, (8,), (-0.25,))
    carried.progressed(DRAW, 0, (6, 7), (-0.5,))  # not of all: they cannot stand unchecked
    parts = carried.launch(DRAW, (0, 1))
    assert parts.drafts == (Draft(0, (6, 7), NOW),)
    (prefix,) = parts.resume_from
    assert (prefix.token_ids, prefix.logprobs) == ((1, 2, 8), (-0.5, -1.0, -0.25))
    assert (prefix.index, prefix.seed, prefix.weight_version) == (1, 5, NOW)
    assert (prefix.response_id, prefix.finish_reason.name) == ("run:0:p:0001", "INTERRUPTED")
    prefix.check()
    assert carried.launch(DRAW, (1,)).resume_from == (prefix,), "it broke before it told more"
    assert carried.left(DRAW, (1,)) == (Draft(1, (1, 2, 8), NOW),)


def test_a_prefix_that_was_handed_back_stands_unless_a_draft_of_these_weights_is_longer() -> None:
    carried = carry_over()
    carried.launch(DRAW, (1,))
    prefix = response((1, 2, 8), finished=False)
    carried.interrupted(DRAW, prefix)
    parts = carried.launch(DRAW, (1,))
    assert (parts.resume_from, parts.drafts) == ((prefix,), ())
    assert carried.left(DRAW, (1,)) == (Draft(1, (1, 2, 8), NOW),)
    carried.progressed(DRAW, 1, (1, 2, 8, 4))
    parts = carried.launch(DRAW, (1,))
    assert (parts.resume_from, parts.drafts) == ((), (Draft(1, (1, 2, 8, 4), NOW),))


def test_a_response_that_was_handed_back_before_its_first_token_starts_from_its_draft() -> None:
    carried = carry_over()
    carried.launch(DRAW, (1,))
    carried.interrupted(DRAW, response((), finished=False))
    assert carried.launch(DRAW, (1,)).drafts == (OLD,)


def test_a_finished_response_tells_how_its_draft_fared_and_is_a_whole_draft() -> None:
    carried = carry_over(max_tokens=3)
    carried.launch(DRAW, (1,))
    carried.finished(DRAW, response((1, 2, 8, 9), finished=True, accepted=2))
    assert carried.checked == [CheckedDraft(2, 4, 2)]
    assert carried.left(DRAW, (1,)) == (Draft(1, (1, 2, 8), NOW),)


def test_with_no_room_nothing_is_left() -> None:
    carried = carry_over(max_tokens=0)
    carried.launch(DRAW, (1,))
    carried.progressed(DRAW, 1, (1, 2))
    assert carried.left(DRAW, range(2)) == ()


def test_metrics_tell_the_acceptance_of_drafts_by_the_updates_between() -> None:
    metrics = carry_over_metrics([CheckedDraft(1, 10, 9), CheckedDraft(3, 20, 6)])
    assert metrics["carry/drafts"] == 2
    assert (metrics["carry/draft_tokens"], metrics["carry/accepted_tokens"]) == (30, 15)
    assert metrics["carry/acceptance"] == 0.5
    assert metrics["carry/acceptance_after_1_to_1"] == 0.9
    assert metrics["carry/accepted_tokens_after_3_to_4"] == 6
    assert carry_over_metrics([])["carry/acceptance"] == 0.0
