"""The files of demo/gcd: what ships is what the scripts make, and the run file fits it."""

import importlib
import json
import math
import random
import re
import sys
from pathlib import Path

import pytest

from rollpacker.data import DataCursor, load_run_data
from rollpacker.settings import load_run_settings
from rollpacker.types import GraderKind

GCD = Path(__file__).parents[2] / "demo" / "gcd"
SMOLLM2 = GCD.parent / "smollm2"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of demo/gcd as `python demo/gcd/NAME.py` would."""
    monkeypatch.syspath_prepend(str(GCD))
    for name in ("task", "make_data"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


@pytest.fixture
def run_data():
    return load_run_data(load_run_settings(GCD / "run.yaml"))


def pairs_in(name):
    rows = [json.loads(line) for line in (GCD / name).read_text(encoding="utf-8").splitlines()]
    return [tuple(map(int, re.findall(r"\d+", row["prompt"]))) for row in rows]


def test_make_data_writes_the_shipped_files_byte_for_byte(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_data.py", str(tmp_path)])
    script("make_data").main()
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / name).read_bytes() == (GCD / name).read_bytes(), name


def test_no_pair_occurs_twice_in_one_file_or_in_both():
    pairs = pairs_in("train.jsonl") + pairs_in("validation.jsonl")
    assert len(set(pairs)) == len(pairs)


def test_warm_start_and_training_see_no_held_out_pair(script):
    task = script("task")
    assert all(task.is_held_out(*pair) for pair in pairs_in("validation.jsonl"))
    assert not any(task.is_held_out(*pair) for pair in pairs_in("train.jsonl"))
    stream = task.random_pairs(random.Random(3), held_out=False)
    assert not any(task.is_held_out(*next(stream)) for _ in range(500))


def test_a_trace_subtracts_until_the_numbers_meet_at_the_gcd(script):
    task = script("task")
    assert task.trace_text(84, 36) == "48,36;12,36;12,24;12,12;=12"
    for a, b in pairs_in("train.jsonl"):
        trace = task.trace_text(a, b)
        assert trace.endswith(f";={math.gcd(a, b)}")
        assert set(trace) <= set(task.CHARACTERS)


def test_traces_have_a_long_tail_that_fits_the_cap(script):
    task = script("task")
    lengths = sorted(len(task.trace_text(*pair)) + 1 for pair in pairs_in("train.jsonl"))
    assert lengths[-1] > 5 * lengths[len(lengths) * 3 // 4]
    assert lengths[-1] <= load_run_settings(GCD / "run.yaml").sampling.max_response_tokens


def test_the_answers_are_what_the_grader_of_the_run_compares_with(run_data):
    for prompt in (*run_data.dataset, *run_data.validation["held_out"]):
        a, b = map(int, re.findall(r"\d+", prompt.text))
        assert prompt.grader_kind is GraderKind.MATH
        assert json.loads(prompt.reference_json) == {
            "answer": str(math.gcd(a, b)),
            "answer_after": "=",
        }


def test_the_data_is_a_whole_number_of_steps(run_data):
    settings = load_run_settings(GCD / "run.yaml")
    assert run_data.dataset.remaining(DataCursor()) % settings.tail_batching.prompts_per_step == 0
    assert len(run_data.validation["held_out"]) == settings.validation.prompts


def test_the_shipped_tokenizer_gives_a_trace_back(run_data, script):
    tokenizer = run_data.tokenizer
    text = script("task").trace_text(84, 36)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(token_ids) == len(text)
    assert tokenizer.decode((*token_ids, *tokenizer.eos_token_ids)) == text


def test_the_shipped_model_is_what_its_configuration_says():
    config = json.loads((GCD / "model" / "config.json").read_text(encoding="utf-8"))
    data = (GCD / "model" / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    shapes = {name: value["shape"] for name, value in header.items() if name != "__metadata__"}
    assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], config["hidden_size"]]
    assert sum(".input_layernorm." in name for name in shapes) == config["num_hidden_layers"]
    assert {value["dtype"] for name, value in header.items() if name != "__metadata__"} == {"F32"}


def test_the_run_file_of_smollm2_is_valid():
    settings = load_run_settings(SMOLLM2 / "run.yaml")
    assert settings.data.apply_chat_template
    assert settings.reward.grader == GraderKind.REASONING_GYM.value
