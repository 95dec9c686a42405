"""Rows of other trainers, written by the real writers, become prompts with the right reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from rollpacker.data import DataError, PromptRules, TextTokenizer, load_prompts
from rollpacker.data.formats import last_boxed
from rollpacker.data.rows import read_prompts
from rollpacker.data_settings import DataSource
from rollpacker.types import GraderKind

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if brief %}!{% endif %}>"
)
MATH, CODE, CUSTOM = GraderKind.MATH, GraderKind.CODE, GraderKind.CUSTOM


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    """Every character is a token; with a chat template."""
    words = {chr(code): code for code in range(256)}
    model = Tokenizer(models.WordLevel(words, unk_token="\0"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return TextTokenizer.load(tmp_path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1)
    return str(path)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_saved(directory: Path, rows: list[dict[str, Any]], shards: int = 2) -> str:
    """What `datasets.Dataset.save_to_disk` leaves: arrow streams and a state."""
    directory.mkdir(parents=True)
    schema = pyarrow.Table.from_pylist(rows).schema
    names = [f"data-{n:05d}-of-{shards:05d}.arrow" for n in range(shards)]
    for n, name in enumerate(names):
        part = rows[n * len(rows) // shards : (n + 1) * len(rows) // shards]
        with (
            pyarrow.OSFile(str(directory / name), "wb") as file,
            pyarrow.ipc.new_stream(file, schema) as writer,
        ):
            writer.write_table(pyarrow.Table.from_pylist(part, schema), max_chunksize=1)
    state = {"_data_files": [{"filename": name} for name in names], "_indices_files": None}
    (directory / "state.json").write_text(json.dumps(state))
    return str(directory)


def load(tokenizer: TextTokenizer, grader: GraderKind = MATH, function: str = "", **source: Any):
    rules = PromptRules(
        grader, apply_chat_template=True, max_prompt_tokens=200, reward_function=function
    )
    return load_prompts(DataSource(**source), tokenizer, rules).prompts


def references(prompts):
    return [json.loads(prompt.reference_json) for prompt in prompts]


VERL = [
    {
        "data_source": f"openai/{name}",
        "prompt": [{"role": "user", "content": f"{name}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": n},
    }
    for n, (name, answer) in enumerate([("gsm8k", "72"), ("aime", "204")])
]


def test_verl_parquet(tokenizer, tmp_path):
    path = write_parquet(tmp_path / "train.parquet", VERL)
    prompts = load(tokenizer, path=path, format="verl")
    assert [prompt.text for prompt in prompts] == ["<user>gsm8k?>", "<user>aime?>"]
    assert references(prompts) == [{"answer": "72"}, {"answer": "204"}]
    assert [prompt.domain for prompt in prompts] == ["openai/gsm8k", "openai/aime"]
    assert [prompt.prompt_id for prompt in prompts] == ["1", "2"]
    named = load(tokenizer, path=path, format="verl", prompt_id_key="extra_info.index")
    assert [prompt.prompt_id for prompt in named] == ["0", "1"]


def test_verl_rows_carry_what_a_verl_function_is_called_with(tokenizer, tmp_path):
    path = write_parquet(tmp_path / "train.parquet", VERL)
    prompts = load(tokenizer, CUSTOM, "score.py:compute_score", path=path, format="verl")
    assert references(prompts)[0] == {
        "function": "score.py:compute_score",
        "style": "verl",
        "data_source": "openai/gsm8k",
        "ground_truth": "72",
        "extra_info": {"split": "train", "index": 0},
    }


def test_verl_code_rows_hold_their_tests_as_json_text(tokenizer, tmp_path):
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    row = VERL[0] | {"reward_model": {"style": "rule", "ground_truth": json.dumps(tests)}}
    path = write_parquet(tmp_path / "code.parquet", [row])
    assert references(load(tokenizer, CODE, path=path, format="verl")) == [tests]


def test_slime_and_openrlhf_jsonl_with_their_own_and_with_other_keys(tokenizer, tmp_path):
    messages = [{"role": "user", "content": "q"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": messages, "label": "34"}])
    slime = load(tokenizer, path=path, format="slime")
    path = write_jsonl(tmp_path / "b.jsonl", [{"input": "q", "label": 34, "datasource": "d"}])
    openrlhf = load(tokenizer, path=path, format="openrlhf")
    path = write_jsonl(tmp_path / "c.jsonl", [{"context": messages, "answer": "34"}])
    keys = {"prompt_key": "context", "answer_key": "answer"}
    keyed = load(tokenizer, path=path, format="openrlhf", **keys)
    for prompts in (slime, openrlhf, keyed):
        assert [(p.text, json.loads(p.reference_json)) for p in prompts] == [
            ("<user>q>", {"answer": "34"})
        ]
    assert openrlhf[0].domain == "d"
    remote = load(tokenizer, CUSTOM, "http://h/grade", path=path, format="slime", **keys)
    assert references(remote) == [{"url": "http://h/grade", "style": "slime", "label": "34"}]


def roll_row(**values: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    own = {"id": "1", "messages": json.dumps(messages), "ground_truth": "1", "tag": "deepmath"}
    return {**own, "case_type": "", "test_cases": "", **values}


def test_roll_jsonl(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "roll.jsonl", [roll_row()])
    (prompt,) = load(tokenizer, path=path, format="roll")
    assert (prompt.text, prompt.domain) == ("<system>s<user>q>", "deepmath")
    assert json.loads(prompt.reference_json) == {"answer": "1"}


@pytest.mark.parametrize(
    ("kind", "cases", "reference"),
    [
        ("input", [{"stdin": "1", "expected_stdout": "2"}], {"tests": [["1", "2"]]}),
        ("", [{"stdin": "1", "expected_stdout": "2"}], {"tests": [["1", "2"]]}),
        ("assert", [{"assert_code": "assert f(1)"}], {"asserts": ["assert f(1)"]}),
        ("pytest", ["def test_f(): ..."], {"test": "def test_f(): ..."}),
    ],
)
def test_roll_test_cases_become_the_reference_of_grader_code(
    tokenizer, tmp_path, kind, cases, reference
):
    row = roll_row(case_type=kind, test_cases=json.dumps(cases))
    path = write_jsonl(tmp_path / "roll.jsonl", [row])
    assert references(load(tokenizer, CODE, path=path, format="roll")) == [reference]


def test_gsm8k_and_math_rows(tokenizer, tmp_path):
    rows = [{"question": "q", "answer": "so 2 * 600 = 1,200\n#### 1,200"}]
    assert references(
        load(tokenizer, path=write_parquet(tmp_path / "g.parquet", rows), format="gsm8k")
    ) == [{"answer": "1200"}]
    rows = [
        {"problem": "p", "type": "Algebra", "solution": "thus $\\boxed{\\frac{1}{2}}$."},
        {"problem": "p", "subject": "Geometry", "solution": "s", "answer": "7"},
    ]
    prompts = load(tokenizer, path=write_jsonl(tmp_path / "m.jsonl", rows), format="math")
    assert references(prompts) == [{"answer": "\\frac{1}{2}"}, {"answer": "7"}]
    assert [prompt.domain for prompt in prompts] == ["Algebra", "Geometry"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\fbox{a{b}c}", "a{b}c"),
        ("\\boxed{open", None),
        ("", None),
    ],
)
def test_the_last_box_counts(text, answer):
    assert last_boxed(text) == answer


def test_trl_chat_rows_give_a_function_all_their_other_columns(tokenizer, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "q"}], "solution": "$4$", "level": 3}]
    path = write_parquet(tmp_path / "t.parquet", rows)
    assert references(load(tokenizer, path=path, format="trl")) == [{"answer": "$4$"}]
    called = references(load(tokenizer, CUSTOM, "f.py:reward", path=path, format="trl"))
    columns = {"solution": "$4$", "level": 3}
    assert called == [{"function": "f.py:reward", "style": "trl", "columns": columns}]


def test_a_saved_hugging_face_data_set_in_shards_and_splits(tokenizer, tmp_path):
    rows = [{"question": f"q{n}", "answer": f"#### {n}"} for n in range(5)]
    path = write_saved(tmp_path / "one", rows)
    assert [p.text for p in load(tokenizer, path=path, format="gsm8k")] == [
        f"<user>q{n}>" for n in range(5)
    ]
    write_saved(tmp_path / "many" / "train", rows)
    (tmp_path / "many" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    path = str(tmp_path / "many")
    assert len(load(tokenizer, path=path, split="train", format="gsm8k")) == 5
    with pytest.raises(DataError, match="has the splits train, not ''; set split"):
        load(tokenizer, path=path, format="gsm8k")


def test_a_directory_of_parquet_files_is_read_in_the_order_of_names(tokenizer, tmp_path):
    directory = tmp_path / "parts"
    directory.mkdir()
    for name in ("b", "a"):
        write_parquet(directory / f"{name}.parquet", [{"prompt": name, "answer": 1}])
    assert [p.text for p in load(tokenizer, path=str(directory))] == ["<user>a>", "<user>b>"]


def test_reasoning_gym_by_name_gives_the_same_rows_for_the_same_options(tokenizer):
    source = {"path": "gcd", "format": "reasoning_gym", "options": {"size": 4, "seed": 5}}
    prompts = load(tokenizer, **source)
    assert [prompt.grader_kind for prompt in prompts] == [GraderKind.REASONING_GYM] * 4
    assert {r["dataset"] for r in references(prompts)} == {"gcd"}
    assert all({"question", "answer"} <= r["entry"].keys() for r in references(prompts))
    assert load(tokenizer, **source) == prompts
    with pytest.raises(DataError, match="gcdd: is no data set of reasoning-gym; known are gcd"):
        load(tokenizer, path="gcdd", format="reasoning_gym")
    with pytest.raises(DataError, match="options: refuses its options"):
        load(tokenizer, path="gcd", format="reasoning_gym", options={"no_such": 1})


def test_the_chat_template_gets_its_variables(tokenizer):
    message = [{"role": "user", "content": "q"}]
    assert tokenizer.render_chat(message) == "<user>q>"
    assert tokenizer.render_chat(message, {"brief": True}) == "<user>q!>"


GSM8K = {"question": "q", "answer": "#### 1"}


@pytest.mark.parametrize(
    ("row_format", "grader", "bad", "message"),
    [
        (
            "verl",
            MATH,
            VERL[0] | {"reward_model": {"style": "rule", "ground_truth": None}},
            "reward_model.ground_truth: is missing (columns: ability, data_source, extra_info,"
            " prompt, reward_model); grader math needs the reference answer: text or a number",
        ),
        ("gsm8k", MATH, GSM8K | {"answer": None}, "answer: is null; grader math needs the"),
        ("gsm8k", MATH, GSM8K | {"answer": "42"}, "answer: has no #### before its answer, got"),
        ("gsm8k", MATH, GSM8K | {"question": None}, "question: is null; give the prompt"),
        ("math", MATH, {"problem": "p", "solution": "s"}, "solution: has no \\boxed{...}, got 's'"),
        ("roll", MATH, roll_row(messages="[{"), "messages: is not JSON: "),
        ("roll", MATH, roll_row(messages="{}"), "messages: must hold a list of messages, got"),
        ("roll", CODE, roll_row(), "test_cases: is null; grader code needs the test cases"),
        ("roll", CODE, roll_row(test_cases="[]"), "test_cases: must be a list of at least one"),
        (
            "roll",
            CODE,
            roll_row(test_cases='[{"stdin": "1"}]'),
            "test_cases.expected_stdout: must be text, got {'stdin': '1'}; add it",
        ),
        (
            "roll",
            CODE,
            roll_row(case_type="text", test_cases="[1]"),
            "case_type: 'text' is none of input, assert, pytest",
        ),
        ("slime", CODE, {"prompt": "p", "label": "x"}, "label: is not JSON: "),
        ("slime", CODE, {"prompt": "p", "label": "3"}, "label: must be an object, got 3"),
        ("slime", MATH, {"prompt": "p", "label": ["3"]}, "label: must be text or a number, got"),
        ("slime", MATH, {"prompt": "p" * 201, "label": 1}, "prompt: has 208 tokens, more than"),
    ],
)
def test_a_wrong_row_of_any_format_is_told_with_row_column_value_and_fix(
    tokenizer, tmp_path, row_format, grader, bad, message
):
    path = write_jsonl(tmp_path / "rows.jsonl", [bad])
    with pytest.raises(DataError, match=re.escape(f"rows.jsonl, row 1, {message}")):
        load(tokenizer, grader, path=path, format=row_format)


def test_every_row_gives_a_prompt_or_its_own_error(tokenizer, tmp_path):
    rows = [GSM8K, GSM8K | {"answer": None}, GSM8K, GSM8K | {"question": ""}]
    source = DataSource(path=write_jsonl(tmp_path / "r.jsonl", rows), format="gsm8k")
    items = list(read_prompts(source, tokenizer, PromptRules(MATH)))
    assert [item.row for item in items if isinstance(item, DataError)] == [2, 4]
    assert len(items) == 4


def test_over_long_prompts_are_left_out_and_counted_where_the_rules_say_so(tokenizer, tmp_path):
    rows = [{"prompt": "p" * length, "answer": 1} for length in (1, 9, 1, 9)]
    source = DataSource(path=write_jsonl(tmp_path / "r.jsonl", rows))
    rules = PromptRules(MATH, max_prompt_tokens=8, skip_overlong=True)
    loaded = load_prompts(source, tokenizer, rules)
    assert ([p.prompt_id for p in loaded.prompts], loaded.overlong) == (["1", "3"], 2)
    only_long = DataSource(path=write_jsonl(tmp_path / "l.jsonl", rows[1:2]))
    with pytest.raises(DataError, match="holds 1 prompts, all over-long"):
        load_prompts(only_long, tokenizer, rules)


def test_files_that_are_not_what_they_are_called_are_refused(tokenizer, tmp_path):
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load(tokenizer, path=str(tmp_path / "x.parquet"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=re.escape("is a directory without state.json")):
        load(tokenizer, path=str(tmp_path / "empty"))
    path = Path(write_saved(tmp_path / "cut", [GSM8K]))
    (path / "data-00000-of-00002.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DataError, match="cannot be read as an arrow stream"):
        load(tokenizer, path=str(path), format="gsm8k")
