"""Weighted mixes: each test's name is the rule."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollpacker.data import DataCursor, PromptDataset
from rollpacker.data.mix import WeightedMix
from rollpacker.data_settings import DataSettings
from rollpacker.types import DrawId, GraderKind, Prompt

weight = st.sampled_from([0.1, 0.25, 1.0, 1 / 3, 2.5, 7, 100])


def make_dataset(sizes, weights, seed=0, epochs=2):
    prompts = [
        Prompt(f"{domain}/{n}", (n,), "", GraderKind.MATH, "{}", str(domain))
        for domain, size in enumerate(sizes)
        for n in range(size)
    ]
    by_domain = {str(domain): value for domain, value in enumerate(weights)}
    return PromptDataset(prompts, seed=seed, epochs=epochs, weights=by_domain)


@st.composite
def mixes(draw):
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    weights = draw(st.lists(weight, min_size=len(sizes), max_size=len(sizes)))
    return sizes, weights, draw(st.integers(0, 99)), draw(st.integers(1, 3))


@given(st.lists(weight, min_size=1, max_size=6), st.integers(0, 300))
def test_after_any_number_each_source_has_given_its_share_to_within_one(weights, number):
    chosen = WeightedMix(weights).following([0] * len(weights), number)
    total = sum(Fraction(str(value)) for value in weights)
    counts = [0] * len(weights)
    for position, source in enumerate(chosen, 1):
        counts[source] += 1
        for value, count in zip(weights, counts, strict=True):
            assert abs(Fraction(str(value)) / total * position - count) < 1


@given(mixes(), st.lists(st.integers(0, 7), max_size=9))
def test_a_cursor_gives_the_same_prompts_whoever_takes_them(mix, counts):
    undisturbed, _ = make_dataset(*mix).take(DataCursor(), sum(counts))
    resumed, cursor = [], DataCursor()
    for count in counts:
        taken, cursor = make_dataset(*mix).take(cursor, count)
        cursor = DataCursor.from_json(json.loads(json.dumps(cursor.to_json())))
        resumed += taken
    assert resumed == undisturbed


@given(mixes())
def test_no_draw_comes_twice_and_each_pass_takes_every_prompt_of_its_domain(mix):
    dataset = make_dataset(*mix)
    taken, end = dataset.take(DataCursor(), 10_000)
    assert len(taken) == dataset.epochs * len(dataset)
    assert end == DataCursor(dataset.epochs, 0)
    draws = [(epoch, prompt.prompt_id) for epoch, prompt in taken]
    assert len(set(draws)) == len(draws)
    last = {prompt.domain: epoch for epoch, prompt in taken}
    passes = Counter((epoch, prompt.domain) for epoch, prompt in taken)
    for (epoch, domain), count in passes.items():
        assert count == dataset.domains[domain] or epoch == last[domain]


def test_without_weights_every_prompt_comes_once_per_epoch():
    prompts = list(make_dataset([3, 5], [1, 1]))
    taken, _ = PromptDataset(prompts, seed=1).take(DataCursor(), 100)
    assert sorted(p.prompt_id for _, p in taken) == sorted(p.prompt_id for p in prompts)


TAKER = """
import json, sys
from tests.unit.test_data_mix import make_dataset
from rollpacker.data import DataCursor
dataset = make_dataset([7, 30], [3, 1], seed=4, epochs=50)
cursor = DataCursor.from_json(json.loads(sys.argv[1]))
while True:
    taken, cursor = dataset.take(cursor, 5)
    ids = [[epoch, prompt.prompt_id] for epoch, prompt in taken]
    print(json.dumps([ids, cursor.to_json()]), flush=True)
    if not taken:
        break
"""


def test_a_process_killed_at_any_moment_is_resumed_at_its_last_cursor_without_gap_or_repeat():
    """The cursor is what a commit keeps; each process is killed by kill -9 and knows nothing."""
    resumed, cursor = [], DataCursor().to_json()
    for lines in (1, 7, 40):
        child = subprocess.Popen(
            [sys.executable, "-c", TAKER, json.dumps(cursor)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(lines):
            taken, cursor = json.loads(child.stdout.readline())
            resumed += taken
        child.send_signal(signal.SIGKILL)
        child.stdout.close()
        assert child.wait(60) == -signal.SIGKILL
    taken, _ = make_dataset([7, 30], [3, 1], seed=4, epochs=50).take(DataCursor(), 5 * 48)
    assert resumed == [[epoch, prompt.prompt_id] for epoch, prompt in taken]


def source(name, **values):
    return {"name": name, "path": f"{name}.jsonl", **values}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "path: neither is given, path and sources"),
        ({"path": "a", "sources": [source("a")]}, "path: both are given"),
        ({"sources": [source("a"), source("a")]}, "sources: a stands twice"),
        ({"sources": [source("a b")]}, "sources: name 'a b' of number 1 is not"),
        ({"sources": [source("a", weight=1), source("b")]}, "sources: b has no weight and others"),
        ({"format": "verl", "sources": [source("a")]}, "format: stands beside sources"),
    ],
)
def test_sources_that_do_not_fit_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        DataSettings.model_validate(values)


@given(mixes(), st.booleans(), st.integers(0, 60))
def test_ahead_is_what_is_still_to_be_taken(mix, weighted, count):
    dataset = make_dataset(*mix)
    if not weighted:
        dataset = PromptDataset(dataset, seed=mix[2], epochs=dataset.epochs)
    _, cursor = dataset.take(DataCursor(), count)
    rest, _ = dataset.take(cursor, 10_000)
    every = {DrawId(n, prompt.prompt_id) for n in range(200) for prompt in dataset}
    expected = {DrawId(epoch, prompt.prompt_id) for epoch, prompt in rest}
    assert dataset.ahead(cursor, every | expected) == expected
