"""The bias meter: trained lengths against what first launches would have come to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.bias_meter import BiasMeter, LengthBias, kaplan_meier_mean
from rollpacker.policy.commands import FinishRound
from rollpacker.types import DeferredDraw, Draw, DrawId

Lengths = tuple[int, ...]
History = tuple[tuple[DeferredDraw, ...], Lengths]  # the launches that lost, what was trained
WIDTH = 3  # responses of a draw


def queued(name: str, tokens: Sequence[int], finished: Sequence[bool]) -> DeferredDraw:
    return DeferredDraw(Draw(0, name, ()), tuple(tokens), tuple(finished))


def cut_at(name: str, lengths: Sequence[int], tokens: int) -> DeferredDraw:
    """A launch whose responses would have these lengths, and that loses at so many tokens."""
    return queued(name, [min(tokens, n) for n in lengths], [n <= tokens for n in lengths])


class Run:
    """A meter and the queue beside it, as a run has them."""

    def __init__(self) -> None:
        self.meter = BiasMeter()
        self.queue: dict[DrawId, DeferredDraw] = {}

    def round(
        self,
        trained: dict[str, Lengths],
        deferred: Iterable[DeferredDraw] = (),
        cut: Lengths = (),
        flat: Iterable[str] = (),
    ) -> LengthBias:
        """What the meter reads behind it."""
        lost, dropped = tuple(deferred), tuple(DrawId(0, name) for name in flat)
        finish = FinishRound((), lost, 0, 0.0, 0.0, flat=dropped, cut_tokens=cut)
        kept = {DrawId(0, name): dict(enumerate(lengths)) for name, lengths in trained.items()}
        self.meter.add_round(self.queue.values(), kept, finish)
        for draw in (*kept, *dropped):
            self.queue.pop(draw, None)
        self.queue |= {item.draw.id: item for item in lost}
        return self.read()

    def read(self) -> LengthBias:
        return self.meter.read(self.queue.values())

    def resumed(self) -> Run:
        """It goes on from what was written down."""
        other = Run()
        first = json.loads(json.dumps(self.meter.first_lengths))
        other.meter = BiasMeter(self.meter.trained_lengths, self.meter.cut_lengths, first)
        other.queue = dict(self.queue)
        return other


@st.composite
def histories(draw: st.DrawFn, *, frozen: bool = False) -> list[History]:
    """Of some draws; with frozen weights every launch would come to the same lengths."""
    lengths = st.tuples(*[st.integers(1, 40)] * WIDTH)
    found = []
    for number in range(draw(st.integers(1, 8))):
        trained = draw(lengths)
        cuts = draw(st.lists(st.integers(0, 40), max_size=3))
        would = [trained if frozen else draw(lengths) for _ in cuts]
        lost = (cut_at(str(number), own, at) for own, at in zip(would, cuts, strict=True))
        found.append((tuple(lost), trained))
    return found


def fed(run: Run, items: Iterable[History]) -> Run:
    """One draw after the other, each to its end."""
    for lost, trained in items:
        for item in lost:
            run.round({}, [item])
        run.round({lost[0].draw.prompt_id if lost else f"new {trained}": trained})
    return run


@given(st.lists(st.integers(0, 50), min_size=1))
def test_without_censoring_the_kaplan_meier_mean_is_the_mean(lengths: list[int]) -> None:
    assert kaplan_meier_mean(Counter(lengths), {}) == pytest.approx(sum(lengths) / len(lengths))


def test_the_kaplan_meier_mean_equals_a_published_example() -> None:
    # Survival 1, 5/6, 5/6 (censored at 2), 5/6*3/4 at 3 (one of four), then 0 at 5.
    mean = kaplan_meier_mean({1: 1, 3: 1, 5: 3}, {2: 1})
    assert mean == pytest.approx(1 + 5 / 6 * 2 + 5 / 6 * 3 / 4 * 2)


@given(histories(frozen=True))
def test_with_frozen_weights_a_drained_run_has_no_bias(items: list[History]) -> None:
    bias = fed(Run(), items).read()
    assert (bias.ratio, bias.shorter_again_share) == (1.0, 0.0)


@given(histories())
def test_the_reading_depends_neither_on_the_order_nor_on_resumes(items: list[History]) -> None:
    once = fed(Run(), items).read()
    assert fed(Run(), reversed(items)).read() == once
    together = Run()
    for number in range(4):  # a launch of each draw is a round
        ends = {
            (lost[0].draw.prompt_id if lost else f"new {place}"): trained
            for place, (lost, trained) in enumerate(items)
            if len(lost) == number
        }
        together.round(ends, [lost[number] for lost, _ in items if len(lost) > number])
        together = together.resumed()
    assert together.read() == once
    assert together.meter.first_lengths["earlier"] == []


@given(histories())
def test_a_first_launch_is_never_taken_for_shorter_than_it_was(items: list[History]) -> None:
    least = sum(sum(lost[0].response_tokens if lost else trained) for lost, trained in items)
    ended = Counter(
        tokens
        for lost, trained in items
        for tokens in (
            [n for n, end in zip(lost[0].response_tokens, lost[0].finished, strict=True) if end]
            if lost
            else trained
        )
    )
    run = fed(Run(), items)
    first = run.meter._first.lengths(run.meter.trained_lengths, [])
    assert first.total() == WIDTH * len(items)
    assert sum(tokens * count for tokens, count in first.items()) >= least - 1e-6
    assert ended <= first


def test_a_response_that_comes_out_shorter_counts_as_longer_than_it_was() -> None:
    run = Run()
    run.round({}, [cut_at("a", (90, 99), 50), cut_at("b", (90, 99), 50)])
    run.round({"a": (70, 80)})  # by 20 and by 30 longer than they were seen
    bias = run.round({"b": (10, 90)})
    assert bias.trained_mean == (70 + 80 + 10 + 90) / 4
    assert bias.uncensored_mean == (70 + 80 + 90 + (50 + (20 + 30 + 40) / 3)) / 4
    assert bias.shorter_again_share == 1 / 4


def test_where_nothing_was_seen_the_reading_is_a_bound() -> None:
    run = Run()
    run.round({}, [cut_at("a", (90, 20), 50)])
    bias = run.round({"a": (10, 20)})
    assert bias.uncensored_mean == (50 + 20) / 2


def test_responses_of_prompts_that_decide_their_length_are_compared_with_their_like() -> None:
    """Six draws both of whose responses got as far again, by 100; six with one, by 10."""
    run = Run()
    names = [f"{kind}{number}" for number in range(6) for kind in ("long", "short")]
    run.round({}, [cut_at(name, (900, 900), 50) for name in names])
    run.round({name: (150, 150) if name.startswith("long") else (60, 1) for name in names})
    bias = run.read()
    assert bias.uncensored_mean == pytest.approx((150 * 12 + 60 * 12) / 24)


def test_a_deeper_launch_says_how_long_an_earlier_one_was() -> None:
    run = Run()
    run.round({}, [cut_at("a", (90,), 30)])
    run.round({}, [cut_at("a", (80,), 60)])
    assert run.read().uncensored_mean == 60
    bias = run.round({"a": (40,)})
    assert (bias.uncensored_mean, bias.shorter_again_share) == (60, 1)


def test_the_bias_ratio_falls_when_long_responses_wait_in_the_queue() -> None:
    run = Run()
    assert run.round({"a": (10, 10), "b": (10, 10)}).ratio == 1
    assert run.round({}, [queued("c", (100, 100), (False, True))]).ratio < 0.5
    assert run.round({"c": (120, 100)}).ratio == 1


def test_what_waits_is_expected_to_go_on_as_what_waited_before() -> None:
    run = Run()
    run.round({}, [cut_at("a", (90, 90), 50)])
    run.round({"a": (80, 70)}, [cut_at("b", (90, 90), 40)])
    assert run.read().uncensored_mean == (80 + 70 + 65 + 65) / 4


def test_the_bias_ratio_falls_when_groups_let_go_of_their_longest_responses() -> None:
    run = Run()
    bias = run.round({"a": (10, 10, 10, 40)}, cut=(10,))
    assert bias.ratio == pytest.approx(17.5 / 22.0)  # two of five go on to 40
    assert run.resumed().read() == bias


def test_what_a_group_let_go_of_is_compared_with_draws_that_were_launched_once() -> None:
    run = Run()
    run.round({"a": (10, 10, 10, 40)}, [cut_at("b", (900,) * 4, 50)], cut=(10,))
    bias = run.round({"b": (900,) * 4})
    assert bias.uncensored_mean == pytest.approx((22.0 + 900.0) / 2)


def test_a_draw_that_is_dropped_leaves_no_trace() -> None:
    run = Run()
    run.round({"a": (10,)}, [cut_at("b", (90,), 50), cut_at("c", (90,), 50)])
    run.round({}, [cut_at("b", (90,), 60), cut_at("c", (90,), 60)])
    assert len(run.meter.first_lengths["earlier"]) == 2
    run.round({}, flat=["b"])
    del run.queue[DrawId(0, "c")]  # by a person
    assert run.round({}).ratio == 1
    assert run.meter.first_lengths["earlier"] == []


def test_a_response_is_compared_with_the_one_of_its_index() -> None:
    """A group may be trained without some of its responses, and with ones that were not kept."""
    run = Run()
    run.round({}, [cut_at("a", (90, 20, 90), 50)])
    run.meter.add_round(
        run.queue.values(), {DrawId(0, "a"): {2: 40, 3: 7}}, FinishRound((), (), 0, 0.0, 0.0)
    )
    bias = run.meter.read([])
    assert (bias.trained_mean, bias.uncensored_mean) == (47 / 2, 57 / 2)
    assert bias.shorter_again_share == 1


def test_the_draws_of_two_epochs_are_two() -> None:
    run = Run()
    run.round({}, [cut_at("a", (90,), 50)])
    again = queued("a", (7,), (False,))
    later = DeferredDraw(Draw(1, "a", ()), again.response_tokens, again.finished)
    run.round({}, [later])
    assert run.meter.first_lengths["earlier"] == []
    assert run.read().uncensored_mean == (50 + 7) / 2
