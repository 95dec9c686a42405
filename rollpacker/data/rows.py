"""Rows of a source to tokenized prompts.

A row needs a prompt (text, or a list of chat messages) and what its grader compares with; in the
format `rollpacker` it may also hold `prompt_id` (default: the number of the row), `grader`
(default: the source's, then `reward.grader`), `answer_after` and `reference`. Other columns are
ignored.

`read_prompts` gives a prompt or an error for every row, so that a check can tell all of them;
`load_prompts` takes a source whole or refuses it at its first wrong row. Over-long prompts are
errors too, unless the rules say to leave them out; then they are counted. Ids are those of the
rows, behind the source's name where it has one: `code/17`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollpacker.data.chat_template import ChatTemplateError
from rollpacker.data.errors import DataError, OverlongPromptError, shorten
from rollpacker.data.formats import Layout, layout_of
from rollpacker.data.references import reference_json
from rollpacker.data.row import Row
from rollpacker.data.storage import read_rows
from rollpacker.data.tokenizer import TextTokenizer, UnknownTextError
from rollpacker.data_settings import DataSource
from rollpacker.types import GraderKind, Prompt

MAX_PROMPT_ID_LENGTH = 200


@dataclass(frozen=True, slots=True)
class PromptRules:
    """How the rows of all sources become prompts."""

    default_grader: GraderKind
    apply_chat_template: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int = 4096
    skip_overlong: bool = False
    reward_function: str = ""  # for grader custom


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    """What a source holds."""

    prompts: tuple[Prompt, ...]
    overlong: int = 0  # left out


def load_prompts(source: DataSource, tokenizer: TextTokenizer, rules: PromptRules) -> LoadedPrompts:
    """Every row of a source as a prompt, in its order.

    Raises DataError at the first row that is wrong, and for a source without a prompt.
    """
    prompts: list[Prompt] = []
    overlong = 0
    for item in read_prompts(source, tokenizer, rules):
        if isinstance(item, OverlongPromptError) and rules.skip_overlong:
            overlong += 1
        elif isinstance(item, DataError):
            raise item
        else:
            prompts.append(item)
    if not prompts and overlong:
        raise DataError(
            Path(source.path), f"holds {overlong} prompts, all over-long; raise max_prompt_tokens"
        )
    if not prompts:
        raise DataError(Path(source.path), "holds no rows; write one JSON object per line")
    return LoadedPrompts(tuple(prompts), overlong)


def read_prompts(
    source: DataSource, tokenizer: TextTokenizer, rules: PromptRules
) -> Iterator[Prompt | DataError]:
    """A prompt, or what is wrong, for every row. Raises DataError where rows cannot be read."""
    layout = layout_of(source)
    numbers: dict[str, int] = {}  # row of each id
    for row in read_rows(source):
        try:
            prompt = _prompt(row, source, layout, tokenizer, rules)
            _refuse_repeat(row, layout, prompt.prompt_id, numbers)
            yield prompt
        except DataError as error:
            yield error


def parse_row(
    values: Mapping[str, Any], number: int, tokenizer: TextTokenizer, rules: PromptRules
) -> Prompt:
    """One row in the format `rollpacker` that came by another way than a source: row `number` of a
    request. It needs a `prompt_id`. Raises DataError.
    """
    source = DataSource(path="rows")
    row = Row(Path("rows"), number, values)
    if values.get("prompt_id") is None:
        raise row.error("prompt_id", "is missing; a row that is added needs its own")
    return _prompt(row, source, layout_of(source), tokenizer, rules)


def _prompt(
    row: Row, source: DataSource, layout: Layout, tokenizer: TextTokenizer, rules: PromptRules
) -> Prompt:
    prompt_id = _prompt_id(row, layout.prompt_id)
    text, token_ids = _tokenized(row, layout, tokenizer, rules)
    if len(token_ids) > rules.max_prompt_tokens:
        raise OverlongPromptError(
            row.path,
            f"has {len(token_ids)} tokens, more than data.max_prompt_tokens"
            f" {rules.max_prompt_tokens}; shorten it, raise the limit or set"
            " data.overlong_prompts: skip",
            row=row.number,
            field=layout.prompt,
        )
    grader = _grader(row, source, rules.default_grader)
    reference = reference_json(row, source.format, layout, grader, rules.reward_function)
    return Prompt(
        f"{source.name}/{prompt_id}" if source.name else prompt_id,
        token_ids,
        text,
        grader,
        reference,
        source.name or layout.domain_of(row),
    )


def _refuse_repeat(row: Row, layout: Layout, prompt_id: str, numbers: dict[str, int]) -> None:
    if prompt_id in numbers:
        raise row.error(
            layout.prompt_id,
            f"{prompt_id!r} is also the id of row {numbers[prompt_id]}; give each row its"
            " own, or leave the column out",
        )
    numbers[prompt_id] = row.number


def _prompt_id(row: Row, column: str) -> str:
    value = row.get(column) if column else None
    if value is None:
        return str(row.number)
    if type(value) is int:
        return str(value)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise row.error(column, f"must be printable text or a whole number, got {shorten(value)}")
    if len(value) > MAX_PROMPT_ID_LENGTH:
        raise row.error(
            column,
            f"{shorten(value)} has {len(value)} characters; the limit is {MAX_PROMPT_ID_LENGTH}",
        )
    return value


def _tokenized(
    row: Row, layout: Layout, tokenizer: TextTokenizer, rules: PromptRules
) -> tuple[str, tuple[int, ...]]:
    """The rendered text and its token ids, at least one."""
    text = _rendered(row, layout, tokenizer, rules)
    try:
        token_ids = tokenizer.encode(text, add_special_tokens=not rules.apply_chat_template)
    except UnknownTextError as error:
        raise row.error(layout.prompt, f"{shorten(text)} cannot be tokenized: {error}") from error
    if not token_ids:
        raise row.error(
            layout.prompt, f"{shorten(text)} has no token; the tokenizer knows none of its text"
        )
    return text, token_ids


def _rendered(row: Row, layout: Layout, tokenizer: TextTokenizer, rules: PromptRules) -> str:
    column = layout.prompt
    value = layout.read_prompt(row, column)
    if value is None:
        raise row.missing(column, "give the prompt, as text or as chat messages")
    if isinstance(value, list):
        messages = _checked_messages(row, column, value)
        if not rules.apply_chat_template:
            raise row.error(
                column, "is a list of chat messages; set data.apply_chat_template: true"
            )
    elif isinstance(value, str) and value:
        if not rules.apply_chat_template:
            return value
        messages = [{"role": "user", "content": value}]
    else:
        raise row.error(
            column, f"must be text (not empty) or a list of messages, got {shorten(value)}"
        )
    try:
        return tokenizer.render_chat(messages, rules.chat_template_kwargs)
    except ChatTemplateError as error:
        raise row.error(
            column, f"{shorten(value)} is refused by the chat template: {error}"
        ) from error


def _checked_messages(row: Row, column: str, messages: list[Any]) -> list[dict[str, Any]]:
    if not messages:
        raise row.error(column, "is an empty list; give at least one message")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise row.error(
                    f"{column}[{index}].{key}",
                    f"must be text, got {shorten(message)}; a message is"
                    ' {"role": "user", "content": "..."}',
                )
    return messages


def _grader(row: Row, source: DataSource, default: GraderKind) -> GraderKind:
    value = row.get("grader") if source.format == "rollpacker" else None
    if source.format == "reasoning_gym":
        return GraderKind.REASONING_GYM
    if value is None:
        return GraderKind(source.grader) if source.grader else default
    names = [kind.value for kind in GraderKind]
    if value not in names:
        raise row.error("grader", f"must be one of {', '.join(names)}, got {shorten(value)}")
    return GraderKind(value)
