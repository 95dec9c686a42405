"""The order of prompts and the cursor: each test's name is the rule."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.data import DataCursor, PromptDataset
from rollpacker.types import DrawId, GraderKind, Prompt


def make_dataset(size: int, *, seed: int = 0, epochs: int = 1, shuffle: bool = True):
    prompts = [Prompt(f"p{n}", (n,), f"text {n}", GraderKind.MATH, "{}") for n in range(size)]
    return PromptDataset(prompts, seed=seed, epochs=epochs, shuffle=shuffle)


datasets = st.builds(
    make_dataset,
    st.integers(1, 12),
    seed=st.integers(0, 2**53 - 1),
    epochs=st.integers(1, 4),
    shuffle=st.booleans(),
)


def ids(taken):
    return [(epoch, prompt.prompt_id) for epoch, prompt in taken]


@given(datasets)
def test_every_prompt_comes_exactly_once_per_epoch(dataset):
    taken, cursor = dataset.take(DataCursor(), 1000)
    expected = [(e, prompt.prompt_id) for e in range(dataset.epochs) for prompt in dataset]
    assert Counter(ids(taken)) == Counter(expected)
    assert [epoch for epoch, _ in taken] == sorted(epoch for epoch, _ in taken)
    assert cursor == DataCursor(dataset.epochs, 0)
    assert dataset.remaining(cursor) == 0
    assert dataset.take(cursor, 5) == ([], cursor)


@given(datasets, st.integers(0, 60), st.integers(0, 60))
def test_taking_twice_is_taking_the_sum_once(dataset, first, second):
    one, cursor = dataset.take(DataCursor(), first)
    two, cursor = dataset.take(cursor, second)
    assert (one + two, cursor) == dataset.take(DataCursor(), first + second)


@given(st.data())
def test_a_cursor_resumes_exactly_in_a_new_process(data):
    size, epochs = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    seed, counts = data.draw(st.integers(0, 99)), data.draw(st.lists(st.integers(0, 9), max_size=9))
    undisturbed, _ = make_dataset(size, seed=seed, epochs=epochs).take(DataCursor(), sum(counts))
    resumed, text = [], json.dumps(DataCursor().to_json())
    for count in counts:
        dataset = make_dataset(size, seed=seed, epochs=epochs)
        taken, cursor = dataset.take(DataCursor.from_json(json.loads(text)), count)
        resumed, text = resumed + taken, json.dumps(cursor.to_json())
    assert resumed == undisturbed


@given(datasets, st.integers(0, 60))
def test_remaining_falls_by_what_was_taken(dataset, count):
    taken, cursor = dataset.take(DataCursor(), count)
    assert dataset.remaining(cursor) == dataset.epochs * len(dataset) - len(taken)
    assert len(taken) == min(count, dataset.epochs * len(dataset))


def test_an_order_depends_on_seed_and_epoch_and_not_on_the_place_in_the_file():
    dataset = make_dataset(50, seed=1, epochs=2)
    taken, _ = dataset.take(DataCursor(), 100)
    first, second = ids(taken)[:50], ids(taken)[50:]
    assert [name for _, name in first] != [name for _, name in second]
    assert ids(make_dataset(50, seed=2).take(DataCursor(), 50)[0]) != first
    turned = PromptDataset(reversed(dataset), seed=1, epochs=2)
    assert turned.take(DataCursor(), 100)[0] == taken


def test_an_order_stays_the_same_over_versions():
    taken, _ = make_dataset(8, seed=7).take(DataCursor(), 8)
    assert " ".join(prompt.prompt_id for _, prompt in taken) == "p0 p3 p7 p6 p1 p5 p4 p2"


def test_without_shuffle_every_epoch_has_the_order_of_the_file():
    taken, _ = make_dataset(3, epochs=2, shuffle=False).take(DataCursor(), 6)
    assert ids(taken) == [(e, f"p{n}") for e in (0, 1) for n in range(3)]


class OrderedEpochs(PromptDataset):
    """Notes each epoch that it puts into order, which is what a walk over the data costs."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.ordered = []

    def _order_of_epoch(self, epoch):
        self.ordered.append(epoch)
        return super()._order_of_epoch(epoch)


def test_what_is_ahead_is_looked_for_only_in_the_epochs_of_its_draws():
    dataset = OrderedEpochs(make_dataset(4), seed=0, epochs=100_000)
    cursor = DataCursor(7, 1)
    ahead = {DrawId(7, name) for name in ("p0", "p1", "p2", "p3")} | {DrawId(90_000, "p1")}
    first, _ = dataset.take(DataCursor(7, 0), 1)
    dataset.ordered.clear()
    found = dataset.ahead(cursor, ahead | {DrawId(6, "p0"), DrawId(100_000, "p0")})
    assert found == ahead - {DrawId(*draw) for draw in ids(first)}
    assert set(dataset.ordered) <= {7, 90_000}


@pytest.mark.parametrize("weights", [None, {"": 1.0}])
def test_nothing_is_looked_for_where_no_draw_is_asked_about(weights):
    dataset = OrderedEpochs(make_dataset(4), seed=0, epochs=100_000, weights=weights)
    assert dataset.ahead(DataCursor(7, 1), set()) == set()
    assert dataset.ordered == []


def test_a_prompt_is_found_by_its_id():
    dataset = make_dataset(3)
    assert dataset.by_id("p2") is dataset[2]
    with pytest.raises(KeyError):
        dataset.by_id("p3")


@pytest.mark.parametrize("cursor", [DataCursor(0, 3), DataCursor(1, 1), DataCursor(-1, 0)])
def test_a_cursor_outside_the_data_set_is_refused(cursor):
    with pytest.raises(ValueError, match="cursor: .*outside 1 epochs of 3 prompts"):
        make_dataset(3).take(cursor, 1)


def test_no_prompts_and_repeated_ids_are_refused():
    prompt = make_dataset(1)[0]
    with pytest.raises(ValueError, match="prompts: none given"):
        PromptDataset([], seed=0)
    with pytest.raises(ValueError, match="prompts: an id occurs twice"):
        PromptDataset([prompt, prompt], seed=0)
    with pytest.raises(ValueError, match="epochs: must be at least 1"):
        PromptDataset([prompt], seed=0, epochs=0)
    with pytest.raises(ValueError, match="count: must be at least 0"):
        make_dataset(3).take(DataCursor(), -1)
