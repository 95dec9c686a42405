"""What history says about the tokens that a response will need."""

from __future__ import annotations

from rollpacker.store.records import RunState, Totals
from rollpacker.types import DeferredDraw, Draw, DrawId, GraderKind, Prompt
from services.coordinator.expected_lengths import expected_tokens

CAP = 100
DRAWS = [Draw(0, name, (1, 2)) for name in ("queued", "new")]
PROMPTS = {
    DrawId(0, name): Prompt(name, (1,) * 7, "", GraderKind.MATH, "{}") for name in ("queued", "new")
}


def state(**lengths: int) -> RunState:
    queue = (DeferredDraw(DRAWS[0], (30, 80), (True, False)),)
    trained = {int(length.removeprefix("of_")): count for length, count in lengths.items()}
    return RunState("r", {}, 0.0, deferred=queue, totals=Totals(trained_lengths=trained))


def test_a_deferred_draw_needs_what_it_had_and_a_new_one_what_was_trained_on_average() -> None:
    found = expected_tokens(state(of_10=3, of_50=1), DRAWS, PROMPTS, CAP)
    assert found == {DrawId(0, "queued"): 87, DrawId(0, "new"): 27}


def test_without_history_a_response_is_expected_to_need_half_of_the_cap() -> None:
    assert expected_tokens(state(), DRAWS, PROMPTS, CAP)[DrawId(0, "new")] == 57


def test_no_response_is_expected_to_need_more_than_the_cap() -> None:
    assert expected_tokens(state(), DRAWS, PROMPTS, 40)[DrawId(0, "queued")] == 47
