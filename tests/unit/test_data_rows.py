"""JSONL rows to prompts, tokenizer files and chat templates."""

import json
import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from rollpacker.data import (
    DataCursor,
    DataError,
    PromptRules,
    TextTokenizer,
    load_prompts,
    load_run_data,
)
from rollpacker.data_settings import DataSource
from rollpacker.settings import parse_run_settings
from rollpacker.types import GraderKind

WORDS = ["<s>", "</s>", "<|user|>", "<|bot|>", *"abcdefghijklmnopqrstuvwxyz0123456789+= ."]
TEMPLATE = (
    "{%- if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{%- endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    """A model directory without weights: characters as tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}))
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    write(directory / "tokenizer_config.json", {"eos_token": "</s>", "chat_template": TEMPLATE})
    write(directory / "config.json", {"eos_token_id": 1})
    return directory


@pytest.fixture
def rows(tmp_path):
    """Writes rows to a file and loads them."""

    def load(model_directory, *values, **options):
        path = tmp_path / "rows.jsonl"
        lines = [value if isinstance(value, str) else json.dumps(value) for value in values]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        options.setdefault("default_grader", GraderKind.MATH)
        source, rules = DataSource(path=str(path)), PromptRules(**options)
        return load_prompts(source, TextTokenizer.load(model_directory), rules).prompts

    return load


def write(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


def test_a_row_becomes_a_tokenized_prompt(model, rows):
    first, second = rows(
        model,
        {"prompt": "1+1", "answer": 2, "answer_after": "=", "source": "ignored"},
        "",
        {"prompt": "ab", "prompt_id": 17, "reference": {"answer": "x"}, "grader": "math"},
    )
    assert first.prompt_id == "1"
    assert first.text == "1+1"
    assert first.token_ids == (0, *(WORDS.index(c) for c in "1+1"))
    assert json.loads(first.reference_json) == {"answer": "2", "answer_after": "="}
    assert second.prompt_id == "17"
    assert json.loads(second.reference_json) == {"answer": "x"}


def test_the_default_prompt_id_is_the_line_number(model, rows):
    row = {"prompt": "a", "answer": "1"}
    assert [prompt.prompt_id for prompt in rows(model, row, "", row)] == ["1", "3"]


def test_equal_prompts_in_two_rows_are_two_prompts(model, rows):
    row = {"prompt": "a", "answer": "1"}
    assert len(rows(model, row, row)) == 2


def test_a_reasoning_gym_row_keeps_its_reference(model, rows):
    reference = {"dataset": "chain_sum", "entry": {"question": "q", "answer": "é"}}
    (prompt,) = rows(
        model, {"prompt": "a", "reference": reference}, default_grader=GraderKind.REASONING_GYM
    )
    assert prompt.grader_kind is GraderKind.REASONING_GYM
    assert json.loads(prompt.reference_json) == reference


GOOD = {"prompt": "a", "answer": "1"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"answer": "1"}, "prompt: is missing (columns: answer); give the prompt"),
        ({**GOOD, "prompt": ""}, "prompt: must be text (not empty) or a list of messages, got ''"),
        ({**GOOD, "prompt": 7}, "prompt: must be text (not empty) or a list of messages, got 7"),
        ({**GOOD, "prompt": []}, "prompt: is an empty list; give at least one message"),
        ({**GOOD, "prompt": [{"role": "user"}]}, "prompt[0].content: must be text"),
        (
            {**GOOD, "prompt": [{"role": "user", "content": "a"}]},
            "prompt: is a list of chat messages; set data.apply_chat_template: true",
        ),
        (
            {**GOOD, "prompt": "a" * 9},
            "prompt: has 10 tokens, more than data.max_prompt_tokens 8; shorten it, raise",
        ),
        (
            {"prompt": "a"},
            "answer: is missing (columns: prompt); grader math needs the reference answer",
        ),
        ({"prompt": "a", "answer": True}, "answer: must be text or a number, got True"),
        ({"prompt": "a", "answer": ""}, "answer: must be text or a number, got ''"),
        ({**GOOD, "answer_after": ""}, "answer_after: must be text (not empty), got ''"),
        ({**GOOD, "reference": {"answer": "1"}}, "reference: stands beside `answer`"),
        ({"prompt": "a", "reference": "1"}, "reference: must be an object, got '1'"),
        ({"prompt": "a", "reference": {}}, "reference: has no 'answer', which grader math needs"),
        (
            {**GOOD, "grader": "reasoning_gym"},
            "reference: is missing; grader reasoning_gym needs one",
        ),
        (
            {"prompt": "a", "grader": "reasoning_gym", "reference": {"dataset": "x"}},
            "reference: has no 'entry', which grader reasoning_gym needs",
        ),
        (
            {**GOOD, "grader": "maths"},
            "grader: must be one of math, code, judge, reasoning_gym, custom, got 'maths'",
        ),
        ({**GOOD, "prompt_id": "x"}, "prompt_id: 'x' is also the id of row 1"),
        ({**GOOD, "prompt_id": ""}, "prompt_id: must be printable text or a whole number, got ''"),
        ({**GOOD, "prompt_id": 1.5}, "prompt_id: must be printable text or a whole number"),
        ({**GOOD, "prompt_id": "a\nb"}, "prompt_id: must be printable text or a whole number"),
        ({**GOOD, "prompt_id": "a" * 201}, "has 201 characters; the limit is 200"),
        ("{", "is not JSON"),
        ('{"prompt": "a", "answer": NaN}', "is not JSON: NaN is not a JSON number"),
        ('{"prompt": "\\ud800", "answer": "1"}', "is not JSON: 'utf-8' codec can't encode"),
        ("[1]", "must be a JSON object, got [1]"),
    ],
)
def test_a_wrong_row_is_refused_with_file_row_field_and_fix(model, rows, bad, message):
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        rows(model, {**GOOD, "prompt_id": "x"}, bad, max_prompt_tokens=8)
    assert "rows.jsonl, row 2" in str(caught.value)
    assert caught.value.row == 2


def test_a_file_without_rows_and_a_missing_file_are_refused(model, rows, tmp_path):
    with pytest.raises(DataError, match="holds no rows"):
        rows(model, "")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        load_prompts(
            DataSource(path=str(tmp_path / "none.jsonl")),
            TextTokenizer.load(model),
            PromptRules(GraderKind.MATH),
        )


def test_text_that_the_tokenizer_does_not_know_is_refused(model, rows):
    with pytest.raises(DataError, match="prompt: 'é' cannot be tokenized: .*UNK"):
        rows(model, {"prompt": "é", "answer": "1"})
    Tokenizer(models.BPE()).save(str(model / "tokenizer.json"))
    with pytest.raises(DataError, match="prompt: 'ab' has no token"):
        rows(model, {"prompt": "ab", "answer": "1"})


def test_a_chat_prompt_is_rendered_up_to_the_answer_without_a_second_bos(model, rows):
    messages = [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]
    chat, plain = rows(
        model,
        {"prompt": messages, "answer": "1"},
        {"prompt": "a", "answer": "1"},
        apply_chat_template=True,
    )
    assert chat.text == "<|user|>a<|bot|>b<|bot|>"
    assert chat.token_ids == tuple(
        WORDS.index(word) for word in ("<|user|>", "a", "<|bot|>", "b", "<|bot|>")
    )
    assert plain.text == "<|user|>a<|bot|>"


def test_what_the_template_refuses_is_an_error_of_the_row(model, rows):
    messages = [{"role": "system", "content": "a"}]
    with pytest.raises(DataError, match="row 1, prompt: .* refused by .*: no system role"):
        rows(model, {"prompt": messages, "answer": "1"}, apply_chat_template=True)


def test_the_template_file_wins_and_a_named_default_is_found(model):
    config = {
        "chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    }
    write(model / "tokenizer_config.json", config)
    assert TextTokenizer.load(model).render_chat([]) == "d"
    (model / "chat_template.jinja").write_text(
        "{% generation %}{{ messages | tojson }}{% endgeneration %}", encoding="utf-8"
    )
    tokenizer = TextTokenizer.load(model)
    assert tokenizer.render_chat([{"content": "<é>"}]) == '[{"content": "<é>"}]'


def test_without_a_template_chat_prompts_are_refused(model, rows):
    write(model / "tokenizer_config.json", {})
    assert not TextTokenizer.load(model).has_chat_template
    with pytest.raises(DataError, match="add one or set data.apply_chat_template: false"):
        rows(model, GOOD, apply_chat_template=True)


def test_a_template_reaches_no_python_internals(model, rows):
    (model / "chat_template.jinja").write_text(
        "{{ messages.__class__.__mro__[1].__subclasses__() }}", encoding="utf-8"
    )
    with pytest.raises(DataError, match="refused by the chat template: .*unsafe"):
        rows(model, GOOD, apply_chat_template=True)
    (model / "chat_template.jinja").write_text("{% if %}", encoding="utf-8")
    with pytest.raises(DataError, match="chat_template: is no usable template"):
        TextTokenizer.load(model)


def test_decoding_gives_the_text_back_and_leaves_special_tokens_out(model):
    tokenizer = TextTokenizer.load(model)
    token_ids = (*tokenizer.encode("1+1=2."), 1)
    assert tokenizer.decode(token_ids) == "1+1=2."
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<s>1+1=2.</s>"


def test_stop_tokens_come_from_generation_config_then_config_then_the_eos_token(model):
    write(model / "generation_config.json", {"eos_token_id": [3, 1]})
    assert TextTokenizer.load(model).eos_token_ids == (3, 1)
    (model / "generation_config.json").unlink()
    assert TextTokenizer.load(model).eos_token_ids == (1,)
    write(model / "config.json", {"eos_token_id": None})
    write(model / "tokenizer_config.json", {"eos_token": {"content": "<|bot|>"}})
    assert TextTokenizer.load(model).eos_token_ids == (3,)
    write(model / "tokenizer_config.json", {})
    assert TextTokenizer.load(model).eos_token_ids == ()


def test_wrong_tokenizer_files_are_refused(model):
    write(model / "config.json", {"eos_token_id": "</s>"})
    with pytest.raises(DataError, match="config.json, eos_token_id: must be a token id"):
        TextTokenizer.load(model)
    (model / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match="must be a JSON object"):
        TextTokenizer.load(model)
    (model / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be read as JSON"):
        TextTokenizer.load(model)
    (model / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="is no tokenizer"):
        TextTokenizer.load(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="is missing; give a directory with tokenizer.json"):
        TextTokenizer.load(model)


def test_run_data_holds_what_the_settings_name(model, tmp_path):
    for name, count in (("train", 4), ("held_out", 3)):
        lines = [json.dumps({"prompt": "a", "answer": n}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    settings = {
        "seed": 5,
        "model": str(model),
        "data": {
            "path": str(tmp_path / "train.jsonl"),
            "validation_path": str(tmp_path / "held_out.jsonl"),
            "epochs": 2,
        },
        "validation": {"prompts": 2},
    }
    data = load_run_data(parse_run_settings(settings))
    assert data.dataset.remaining(DataCursor()) == 8
    assert [prompt.prompt_id for prompt in data.validation["held_out"]] == ["1", "2"]
    assert data.tokenizer.eos_token_ids == (1,)
