"""Rows of a JSONL file to prompts.

| column         | type                               | meaning                                  |
|----------------|------------------------------------|------------------------------------------|
| `prompt`       | text, or a list of chat messages   | what the model sees                      |
| `prompt_id`    | text or whole number               | unique; default: the line number, from 1 |
| `answer`       | text or number                     | reference answer of grader `math`        |
| `answer_after` | text                               | the response's answer is what follows it |
| `reference`    | object                             | what the grader gets, in place of both   |
| `grader`       | math, code, reasoning_gym, custom  | default: `reward.grader` of the run      |

Other columns are ignored; empty lines are skipped, and counted. A file is taken whole or refused
at its first wrong row: no row is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.data.chat_template import ChatTemplateError
from rollpacker.data.errors import DataError, shorten
from rollpacker.data.tokenizer import TextTokenizer, UnknownTextError
from rollpacker.types import GraderKind, Prompt

MAX_PROMPT_ID_LENGTH = 200
# What a reference must hold for its grader to work at all; the grader checks the rest.
_REFERENCE_KEYS: Mapping[GraderKind, tuple[str, ...]] = {
    GraderKind.MATH: ("answer",),
    GraderKind.REASONING_GYM: ("dataset", "entry"),
}


@dataclass(frozen=True, slots=True)
class _Row:
    """One parsed line, and how to complain about it."""

    path: Path
    number: int  # line number from 1
    values: Mapping[str, Any]

    def error(self, field: str, problem: str) -> DataError:
        return DataError(self.path, problem, row=self.number, field=field)


def load_prompts(
    path: Path,
    tokenizer: TextTokenizer,
    *,
    default_grader: GraderKind,
    apply_chat_template: bool = False,
    max_prompt_tokens: int = 4096,
) -> list[Prompt]:
    """Every row of a JSONL file as a tokenized prompt, in the order of the file.

    Raises DataError at the first row that is wrong, and for a file without rows.
    """
    prompts: list[Prompt] = []
    rows_by_id: dict[str, int] = {}
    for row in _read_rows(path):
        prompt_id = _prompt_id(row)
        if prompt_id in rows_by_id:
            raise row.error(
                "prompt_id",
                f"{prompt_id!r} is also the id of row {rows_by_id[prompt_id]}; give each row its"
                " own, or leave the column out",
            )
        rows_by_id[prompt_id] = row.number
        prompts.append(
            _prompt(
                row,
                prompt_id,
                tokenizer,
                default_grader=default_grader,
                apply_chat_template=apply_chat_template,
                max_prompt_tokens=max_prompt_tokens,
            )
        )
    if not prompts:
        raise DataError(path, "holds no rows; write one JSON object per line")
    return prompts


def parse_row(
    values: Mapping[str, Any],
    number: int,
    tokenizer: TextTokenizer,
    *,
    default_grader: GraderKind,
    apply_chat_template: bool = False,
    max_prompt_tokens: int = 4096,
) -> Prompt:
    """One row that came by another way than a file: row `number` of a request.

    It needs a `prompt_id`. Raises DataError.
    """
    row = _Row(Path("rows"), number, values)
    if values.get("prompt_id") is None:
        raise row.error("prompt_id", "is missing; a row that is added needs its own")
    return _prompt(
        row,
        _prompt_id(row),
        tokenizer,
        default_grader=default_grader,
        apply_chat_template=apply_chat_template,
        max_prompt_tokens=max_prompt_tokens,
    )


def _prompt(
    row: _Row,
    prompt_id: str,
    tokenizer: TextTokenizer,
    *,
    default_grader: GraderKind,
    apply_chat_template: bool,
    max_prompt_tokens: int,
) -> Prompt:
    text, token_ids = _tokenized(row, tokenizer, apply_chat_template)
    if len(token_ids) > max_prompt_tokens:
        raise row.error(
            "prompt",
            f"has {len(token_ids)} tokens, more than data.max_prompt_tokens"
            f" {max_prompt_tokens}; shorten it or raise the limit",
        )
    grader = _grader(row, default_grader)
    return Prompt(prompt_id, token_ids, text, grader, _reference_json(row, grader))


def _read_rows(path: Path) -> Iterator[_Row]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line, parse_constant=_refuse_constant)
            json.dumps(values, ensure_ascii=False).encode()  # fails on lone surrogates
        except ValueError as error:  # not UTF-8, not JSON, or text that is not Unicode
            raise DataError(
                path, f"is not JSON: {error}; write one object per line, in UTF-8", row=number
            ) from error
        if not isinstance(values, dict):
            raise DataError(path, f"must be a JSON object, got {shorten(values)}", row=number)
        yield _Row(path, number, values)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _prompt_id(row: _Row) -> str:
    value = row.values.get("prompt_id")
    if value is None:
        return str(row.number)
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise row.error(
            "prompt_id", f"must be printable text or a whole number, got {shorten(value)}"
        )
    if len(value) > MAX_PROMPT_ID_LENGTH:
        raise row.error(
            "prompt_id",
            f"{shorten(value)} has {len(value)} characters; the limit is {MAX_PROMPT_ID_LENGTH}",
        )
    return value


def _tokenized(
    row: _Row, tokenizer: TextTokenizer, apply_chat_template: bool
) -> tuple[str, tuple[int, ...]]:
    """The rendered text and its token ids, at least one."""
    text = _rendered(row, tokenizer, apply_chat_template)
    try:
        token_ids = tokenizer.encode(text, add_special_tokens=not apply_chat_template)
    except UnknownTextError as error:
        raise row.error("prompt", f"{shorten(text)} cannot be tokenized: {error}") from error
    if not token_ids:
        raise row.error(
            "prompt", f"{shorten(text)} has no token; the tokenizer knows none of its text"
        )
    return text, token_ids


def _rendered(row: _Row, tokenizer: TextTokenizer, apply_chat_template: bool) -> str:
    value = row.values.get("prompt")
    if value is None:
        raise row.error("prompt", "is missing; add the column, as text or as chat messages")
    if isinstance(value, list):
        messages = _checked_messages(row, value)
        if not apply_chat_template:
            raise row.error(
                "prompt", "is a list of chat messages; set data.apply_chat_template: true"
            )
    elif isinstance(value, str) and value:
        if not apply_chat_template:
            return value
        messages = [{"role": "user", "content": value}]
    else:
        raise row.error(
            "prompt", f"must be text (not empty) or a list of messages, got {shorten(value)}"
        )
    try:
        return tokenizer.render_chat(messages)
    except ChatTemplateError as error:
        raise row.error(
            "prompt", f"{shorten(value)} is refused by the chat template: {error}"
        ) from error


def _checked_messages(row: _Row, messages: list[Any]) -> list[dict[str, Any]]:
    if not messages:
        raise row.error("prompt", "is an empty list; give at least one message")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise row.error(
                    f"prompt[{index}].{key}",
                    f"must be text, got {shorten(message)}; a message is"
                    ' {"role": "user", "content": "..."}',
                )
    return messages


def _grader(row: _Row, default: GraderKind) -> GraderKind:
    value = row.values.get("grader")
    if value is None:
        return default
    names = [kind.value for kind in GraderKind]
    if value not in names:
        raise row.error("grader", f"must be one of {', '.join(names)}, got {shorten(value)}")
    return GraderKind(value)


def _reference_json(row: _Row, grader: GraderKind) -> str:
    """What the grader compares with, from `reference` or `answer`."""
    answer, reference = row.values.get("answer"), row.values.get("reference")
    if reference is None:
        reference = _reference_from_answer(row, grader, answer)
    elif answer is not None or row.values.get("answer_after") is not None:
        raise row.error("reference", "stands beside `answer` or `answer_after`; leave those out")
    if not isinstance(reference, dict):
        raise row.error("reference", f"must be an object, got {shorten(reference)}")
    for key in _REFERENCE_KEYS.get(grader, ()):
        if key not in reference:
            raise row.error(
                "reference", f"has no {key!r}, which grader {grader.value} needs: add it"
            )
    return json.dumps(reference, ensure_ascii=False)


def _reference_from_answer(row: _Row, grader: GraderKind, answer: Any) -> dict[str, str]:
    if grader is not GraderKind.MATH:
        raise row.error("reference", f"is missing; grader {grader.value} needs one: an object")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == "":
        got = "is missing" if answer is None else f"must be text or a number, got {answer!r}"
        raise row.error("answer", f"{got}; grader math needs the reference answer")
    reference = {"answer": answer if isinstance(answer, str) else json.dumps(answer)}
    answer_after = row.values.get("answer_after")
    if answer_after is not None:
        if not isinstance(answer_after, str) or not answer_after:
            raise row.error(
                "answer_after", f"must be text (not empty), got {shorten(answer_after)}"
            )
        reference["answer_after"] = answer_after
    return reference
