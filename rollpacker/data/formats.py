"""What the columns of each format mean: prompt, answer, id, domain, and how an answer is read.

| format        | prompt               | answer                               | domain        |
|---------------|----------------------|--------------------------------------|---------------|
| rollpacker    | prompt               | answer                               | domain        |
| verl          | prompt               | reward_model.ground_truth            | data_source   |
| slime         | prompt               | label                                |               |
| openrlhf      | input                | label                                | datasource    |
| roll          | messages (JSON text) | ground_truth, or test_cases for code | tag           |
| gsm8k         | question             | answer, behind ####                  |               |
| math          | problem              | answer, else solution, in \\boxed    | type, subject |
| trl           | prompt               | solution, ground_truth, answer       |               |
| reasoning_gym | made by the library  | made by the library                  |               |

`prompt_key`, `answer_key` and `prompt_id_key` of a source take the place of a format's own columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rollpacker.data.errors import shorten
from rollpacker.data.row import Row
from rollpacker.data_settings import DataSource, RowFormat

_GSM8K_MARK = "####"
_BOXED = ("\\boxed", "\\fbox")


def _as_it_is(row: Row, column: str) -> Any:
    return row.get(column)


def _behind_the_mark(row: Row, column: str) -> Any:
    """GSM8K: the answer stands behind the last ####, thousands with commas."""
    value = row.get(column)
    if not isinstance(value, str):
        return value
    _, mark, answer = value.rpartition(_GSM8K_MARK)
    if not mark:
        raise row.error(
            column, f"has no {_GSM8K_MARK} before its answer, got {shorten(value)}; add it"
        )
    return answer.strip().replace(",", "")


def _boxed(row: Row, column: str) -> Any:
    """MATH: a `solution` holds its answer in the last \\boxed{}; any other column is the answer."""
    value = row.get(column)
    if column != "solution" or not isinstance(value, str):
        return value
    answer = last_boxed(value)
    if answer is None:
        raise row.error(column, f"has no \\boxed{{...}}, got {shorten(value)}; add it")
    return answer


def last_boxed(text: str) -> str | None:
    """What stands in the braces of the last \\boxed or \\fbox; None without a closed one."""
    start = max(text.rfind(mark) for mark in _BOXED)
    opening = text.find("{", start) if start >= 0 else -1
    depth = 0
    for place in range(opening, len(text) if opening >= 0 else -1):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[opening + 1 : place]
    return None


def _messages_text(row: Row, column: str) -> Any:
    """ROLL: the chat messages as JSON text."""
    value = row.get(column)
    if not isinstance(value, str):
        return value
    try:
        messages = json.loads(value)
    except ValueError as error:
        raise row.error(
            column, f"is not JSON: {error}, got {shorten(value)}; write a list of messages"
        ) from error
    if not isinstance(messages, list):
        raise row.error(column, f"must hold a list of messages, got {shorten(value)}")
    return messages


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a format. Of several, the first that a row has counts."""

    prompt: str = "prompt"
    answer: tuple[str, ...] = ("answer",)
    domain: tuple[str, ...] = ()
    prompt_id: str = ""  # "": the number of the row
    read_prompt: Callable[[Row, str], Any] = _as_it_is
    read_answer: Callable[[Row, str], Any] = _as_it_is

    def answer_column(self, row: Row) -> str:
        return next((name for name in self.answer if row.get(name) is not None), self.answer[0])

    def domain_of(self, row: Row) -> str:
        values = (row.get(name) for name in self.domain)
        return next((str(value) for value in values if value not in (None, "")), "")


_LAYOUTS: dict[RowFormat, Layout] = {
    "rollpacker": Layout(domain=("domain",), prompt_id="prompt_id"),
    "verl": Layout(answer=("reward_model.ground_truth",), domain=("data_source",)),
    "slime": Layout(answer=("label",)),
    "openrlhf": Layout(prompt="input", answer=("label",), domain=("datasource",)),
    "roll": Layout(
        prompt="messages",
        answer=("ground_truth",),
        domain=("tag",),
        read_prompt=_messages_text,
    ),
    "gsm8k": Layout(prompt="question", read_answer=_behind_the_mark),
    "math": Layout(
        prompt="problem",
        answer=("answer", "solution"),
        domain=("type", "subject"),
        read_answer=_boxed,
    ),
    "trl": Layout(answer=("solution", "ground_truth", "answer")),
    "reasoning_gym": Layout(),
}


def layout_of(source: DataSource) -> Layout:
    """The columns of a source: its format's, and in their place the keys that it names."""
    layout = _LAYOUTS[source.format]
    if source.prompt_key:
        layout = replace(layout, prompt=source.prompt_key)
    if source.answer_key:
        layout = replace(layout, answer=(source.answer_key,))
    if source.prompt_id_key:
        layout = replace(layout, prompt_id=source.prompt_id_key)
    return layout
