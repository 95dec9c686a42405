"""The reference of a code task: its test cases, in the shapes that data sets use.

By standard input and output (all tests must pass):
  {"tests": [[stdin, expected], ...]}, or {"input": ..., "output": ...} objects in the list;
  {"inputs": [stdin, ...], "outputs": [expected, ...]}           APPS, TACO, verl's prime_code
By calling a function (or a method of `Solution`):
  {"fn_name": "f", "inputs": [[argument, ...], ...], "outputs": [value, ...]}      APPS, prime_code
  {"fn_name": "f", "inputs": ["JSON\\nJSON", ...], "outputs": ["JSON", ...]}       LiveCodeBench
By test code, which runs in a sandbox of its own (`sandbox/inside/checks.py`):
  {"asserts": ["assert f(1) == 2", ...], "setup": "import math"}                    MBPP, KodCode
  {"test": "def check(candidate): ...", "entry_point": "f"}                            HumanEval
  {"test": "from solution import f\\ndef test_f(): ..."}                                 KodCode

An expected text may be an object, so that long ones stay short: {"repeat": [text, count],
"then": {...}, "end": text}, concatenated in that order. Nothing of it is evaluated.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from services.reward.graders.grader import BadReferenceError
from services.reward.sandbox.inside.calls import NAMED_MODULES
from services.reward.sandbox.inside.values import read_int

MOST_EXPECTED_CHARACTERS = 64 << 20
_MOST_NESTED_PARTS = 100
KEYS = frozenset(
    {"tests", "inputs", "outputs", "fn_name", "asserts", "setup", "test", "entry_point"}
)
_MODULES = frozenset(NAMED_MODULES)
_IGNORED = frozenset({"testtype", "metadata"})


@dataclass(frozen=True, slots=True)
class ProgramCase:
    """Standard input and the output that it must give."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallCase:
    """A call of `function` and the JSON value that it must give."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any
    unwrapped: Any = None  # also right, where the data set wraps values in a list (see `wrapped`)
    wrapped: bool = False


@dataclass(frozen=True, slots=True)
class CheckCase:
    """Test code, and the names in it that the solution must define."""

    source: str
    names: tuple[str, ...]
    entry_point: str = ""


Case = ProgramCase | CallCase | CheckCase


@dataclass(frozen=True, slots=True)
class CodeReference:
    """All test cases of a task, of one kind, at least one."""

    cases: tuple[Case, ...]
    names: tuple[str, ...] = ()  # what function tests call


@lru_cache(maxsize=8)
def parse_reference(reference_json: str) -> CodeReference:
    """Read reference_json. Raises BadReferenceError."""
    values = _object(reference_json)
    unknown = sorted(values.keys() - KEYS)
    if unknown:
        raise BadReferenceError(f"{unknown[0]}: unknown key; code knows {', '.join(sorted(KEYS))}")
    if "asserts" in values or "test" in values:
        return _check_reference(values)
    if "tests" in values:
        pairs = [_pair(number, item) for number, item in enumerate(_list(values, "tests"))]
    elif "inputs" in values:
        inputs, outputs = _list(values, "inputs"), _list(values, "outputs")
        if len(inputs) != len(outputs):
            raise BadReferenceError(f"outputs: {len(outputs)} for {len(inputs)} inputs")
        pairs = list(zip(inputs, outputs, strict=True))
    else:
        raise BadReferenceError('has no tests; write {"tests": [["1\\n", "2\\n"]]}')
    if not pairs:
        raise BadReferenceError("tests: there is none; nothing could be graded")
    function = values.get("fn_name")
    if not function:
        return CodeReference(tuple(_program_case(*pair) for pair in pairs))
    return _call_reference(_text("fn_name", function), pairs)


def expected_text(value: Any) -> str:
    """An expected text, or the text that its object form stands for. Raises BadReferenceError."""
    parts: list[str] = []
    ends: list[str] = []
    while isinstance(value, dict):
        unknown = sorted(value.keys() - {"repeat", "then", "end"})
        if unknown:
            raise BadReferenceError(f"expected: {unknown[0]}: unknown; known: repeat, then, end")
        parts.append(_repeated(value.get("repeat", ["", 0])))
        ends.append(_text("expected.end", value.get("end", "")))
        if len(ends) > _MOST_NESTED_PARTS:
            raise BadReferenceError(f"expected: more than {_MOST_NESTED_PARTS} parts")
        value = value.get("then", "")
    text = "".join([*parts, _text("expected", value), *reversed(ends)])
    if len(text) > MOST_EXPECTED_CHARACTERS:
        raise BadReferenceError(f"expected: more than {MOST_EXPECTED_CHARACTERS} characters")
    return text


def _repeated(value: Any) -> str:
    try:
        text, count = value
    except (TypeError, ValueError):
        text, count = None, None
    if not isinstance(text, str) or type(count) is not int or count < 0:
        raise BadReferenceError(f"expected.repeat: {value!r:.60} is not [text, count >= 0]")
    if len(text) * count > MOST_EXPECTED_CHARACTERS:
        raise BadReferenceError(f"expected.repeat: more than {MOST_EXPECTED_CHARACTERS} characters")
    return text * count


def _pair(number: int, item: Any) -> tuple[Any, Any]:
    if isinstance(item, Mapping) and {"input", "output"} <= item.keys():
        unknown = sorted(item.keys() - {"input", "output"} - _IGNORED)
        if not unknown:
            return item["input"], item["output"]
    if isinstance(item, list) and len(item) == 2:
        return item[0], item[1]
    raise BadReferenceError(f"tests[{number}]: {item!r:.60} is not [stdin, expected stdout]")


def _program_case(stdin: Any, expected: Any) -> ProgramCase:
    """APPS also writes texts as lists of lines."""
    if isinstance(stdin, list):
        stdin = "\n".join(_text("inputs", line) for line in stdin)
    if isinstance(expected, list):
        expected = "\n".join(_text("outputs", line) for line in expected)
    text = expected_text(expected)
    for name, value in (("input", stdin), ("output", text)):
        try:
            _text(name, value).encode()
        except UnicodeEncodeError as error:
            raise BadReferenceError(f"{name}: is no valid text: {error}") from error
    return ProgramCase(stdin, text)


def _call_reference(function: str, pairs: list[tuple[Any, Any]]) -> CodeReference:
    parsed = [_call(*pair) for pair in pairs]
    wrapped = all(isinstance(item[0], list) for item in pairs) and all(
        isinstance(value, list) and len(value) == 1 for _, value in parsed
    )
    cases = tuple(
        CallCase(function, arguments, value, value[0] if wrapped else None, wrapped)
        for arguments, value in parsed
    )
    return CodeReference(cases, (function,))


def _call(arguments: Any, expected: Any) -> tuple[tuple[Any, ...], Any]:
    if isinstance(arguments, str):
        lines = [_json("inputs", line) for line in arguments.split("\n") if line.strip()]
        return tuple(lines), _json("outputs", expected) if isinstance(expected, str) else expected
    if isinstance(arguments, list):
        return tuple(arguments), expected
    raise BadReferenceError(
        f"inputs: {arguments!r:.60} is neither a list of arguments nor JSON lines"
    )


def _check_reference(values: Mapping[str, Any]) -> CodeReference:
    setup = _text("setup", values.get("setup", ""))
    entry_point = _text("entry_point", values.get("entry_point", ""))
    if "asserts" in values:
        tests = [_text("asserts", item) for item in _list(values, "asserts")]
    else:
        tests = [_text("test", values["test"])]
    if not tests:
        raise BadReferenceError("asserts: there is none; nothing could be graded")
    cases, wanted = [], dict.fromkeys([entry_point] if entry_point else [])
    for test in tests:
        source = f"{setup}\n{test}"
        _require_tests(source, entry_point)
        names = _undefined_names(source)
        wanted.update(dict.fromkeys(names + _imported(source)))
        cases.append(CheckCase(source, names, entry_point))
    return CodeReference(tuple(cases), tuple(wanted))


def _require_tests(source: str, entry_point: str) -> None:
    """Raise BadReferenceError for test code that would pass whatever the solution does."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadReferenceError(f"test: is no Python: {error}") from error
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            if statement.name == "check" and not entry_point:
                raise BadReferenceError("entry_point: is missing; `check` must be called with it")
            runs = statement.name == "check" or statement.name.startswith("test")
        else:
            runs = not isinstance(statement, ast.ClassDef | ast.AsyncFunctionDef)
        if runs and any(_tests_something(node) for node in ast.walk(statement)):
            return
    raise BadReferenceError(
        "test: tests nothing; write assert statements, check(candidate) or functions test_*"
        f" (classes of unittest are not run), not {source.strip()[:60]!r}"
    )


def _tests_something(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert | ast.Raise) or (
        isinstance(node, ast.Attribute) and node.attr == "raises"
    )


def _undefined_names(source: str) -> tuple[str, ...]:
    """Names that test code uses and does not make: the solution's."""
    tree = ast.parse(source)
    used: dict[str, None] = {}
    made = set(vars(builtins)) | {"candidate"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                used[node.id] = None
            else:
                made.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            made.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            made |= {node.value.id} & _MODULES
    return tuple(name for name in used if name not in made)


def _imported(source: str) -> tuple[str, ...]:
    """What test code imports from the solution."""
    return tuple(
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module == "solution"
        for alias in node.names
    )


def _object(text: str) -> dict[str, Any]:
    values = _json("reference_json", text)
    if not isinstance(values, dict):
        raise BadReferenceError(f'must be an object such as {{"tests": ...}}, not {values!r:.40}')
    return values


def _json(name: str, text: Any) -> Any:
    try:
        return json.loads(text, parse_int=read_int)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadReferenceError(f"{name}: {text!r:.60} is not JSON: {error}") from error


def _list(values: Mapping[str, Any], key: str) -> list[Any]:
    value = values.get(key)
    if not isinstance(value, list):
        raise BadReferenceError(f"{key}: {value!r:.60} is not a list")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadReferenceError(f"{name}: {value!r:.60} is not text")
    return value
