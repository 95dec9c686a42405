"""What a row gives its grader to compare with: the reference, as JSON.

Grader math gets the answer. The others need an object: a row's own `reference` (formats rollpacker
and reasoning_gym), an answer that is an object or JSON text of one, ROLL's test cases, or, for
grader custom with `reward.function`, what a function of the format's own trainer is called with.
"""

from __future__ import annotations

import json
from typing import Any

from rollpacker.data.errors import shorten
from rollpacker.data.formats import Layout
from rollpacker.data.row import Row
from rollpacker.data_settings import RowFormat
from rollpacker.types import GraderKind

# What a reference must hold for its grader to work at all; the grader checks the rest.
_KEYS: dict[GraderKind, tuple[str, ...]] = {
    GraderKind.MATH: ("answer",),
    GraderKind.REASONING_GYM: ("dataset", "entry"),
}
_STYLES: dict[RowFormat, str] = {"trl": "trl", "openrlhf": "openrlhf", "slime": "slime"}
_WITH_REFERENCE = ("rollpacker", "reasoning_gym")


def reference_json(
    row: Row, row_format: RowFormat, layout: Layout, grader: GraderKind, function: str
) -> str:
    """What the grader compares with. function: `reward.function`. Raises DataError."""
    column, reference = _reference(row, row_format, layout, grader, function)
    if not isinstance(reference, dict):
        raise row.error(column, f"must be an object, got {shorten(reference)}")
    for key in _KEYS.get(grader, ()):
        if key not in reference:
            raise row.error(column, f"has no {key!r}, which grader {grader.value} needs: add it")
    try:
        return json.dumps(reference, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise row.error(column, f"cannot be written as JSON: {error}") from error


def _reference(
    row: Row, row_format: RowFormat, layout: Layout, grader: GraderKind, function: str
) -> tuple[str, Any]:
    """(the column it comes from, the reference)."""
    own = row.get("reference") if row_format in _WITH_REFERENCE else None
    if own is not None:
        beside = row.get("answer") is not None or row.get("answer_after") is not None
        if beside and row_format == "rollpacker":
            raise row.error("reference", "stands beside `answer` or `answer_after`; leave them out")
        return "reference", own
    column = layout.answer_column(row)
    if grader is GraderKind.MATH:
        return column, _math(row, layout, column)
    if grader is GraderKind.CUSTOM and function:
        return column, _custom(row, row_format, layout, column, function)
    if row_format == "roll" and grader is GraderKind.CODE:
        return "test_cases", _roll_tests(row)
    if row_format in _WITH_REFERENCE:
        raise row.error("reference", f"is missing; grader {grader.value} needs one: an object")
    value = layout.read_answer(row, column)
    if value is None:
        raise row.missing(column, f"grader {grader.value} needs its reference there, an object")
    return column, _parsed(row, column, value) if isinstance(value, str) else value


def _math(row: Row, layout: Layout, column: str) -> dict[str, str]:
    answer = layout.read_answer(row, column)
    if answer is None:
        raise row.missing(column, "grader math needs the reference answer: text or a number")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == "":
        raise row.error(
            column, f"must be text or a number, got {answer!r}; grader math needs the answer"
        )
    reference = {"answer": answer if isinstance(answer, str) else json.dumps(answer)}
    answer_after = row.get("answer_after")
    if answer_after is not None:
        if not isinstance(answer_after, str) or not answer_after:
            raise row.error(
                "answer_after", f"must be text (not empty), got {shorten(answer_after)}"
            )
        reference["answer_after"] = answer_after
    return reference


def _custom(
    row: Row, row_format: RowFormat, layout: Layout, column: str, function: str
) -> dict[str, Any]:
    """The arguments of a reward function, in the style of the trainer that it was written for."""
    remote = function.startswith(("http://", "https://"))
    called = {"url" if remote else "function": function}
    style = _STYLES.get(row_format, "verl")
    if style == "trl":
        columns = {name: value for name, value in row.values.items() if name != layout.prompt}
        return {**called, "style": style, "columns": columns}
    answer = layout.read_answer(row, column)
    if answer is None:
        raise row.missing(column, f"{function} needs what it compares with")
    if style != "verl":
        return {**called, "style": style, "label": answer}
    return {
        **called,
        "style": style,
        "data_source": layout.domain_of(row),
        "ground_truth": answer,
        "extra_info": row.get("extra_info") or {},
    }


def _roll_tests(row: Row) -> dict[str, Any]:
    """ROLL's `test_cases` (JSON text) by its `case_type`, in the shapes of grader code."""
    column, kind = "test_cases", row.get("case_type") or "input"
    text = row.get(column)
    if not text:
        raise row.missing(column, "grader code needs the test cases, as JSON text of a list")
    cases = _parsed(row, column, text) if isinstance(text, str) else text
    if not isinstance(cases, list) or not cases:
        raise row.error(column, f"must be a list of at least one case, got {shorten(cases)}")
    if kind == "input":
        keys = ("stdin", "expected_stdout")
        return {"tests": [[_part(row, column, case, key) for key in keys] for case in cases]}
    if kind not in ("assert", "pytest"):
        raise row.error("case_type", f"{kind!r} is none of input, assert, pytest")
    code = [
        case if isinstance(case, str) else _part(row, column, case, "assert_code") for case in cases
    ]
    return {"asserts": code} if kind == "assert" else {"test": "\n".join(code)}


def _part(row: Row, column: str, case: Any, key: str) -> str:
    value = case.get(key) if isinstance(case, dict) else None
    if not isinstance(value, str):
        raise row.error(f"{column}.{key}", f"must be text, got {shorten(case)}; add it to the case")
    return value


def _parsed(row: Row, column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise row.error(
            column, f"is not JSON: {error}, got {shorten(text)}; write the reference as JSON"
        ) from error
