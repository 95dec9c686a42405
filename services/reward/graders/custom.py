"""Reward functions written for other trainers, unchanged, by file or by URL.

reference_json: {"function": "file.py:name", "style": ..., ...} or {"url": ..., "style": ..., ...}
with what that style passes on, and optionally "range": [low, high] (default [0, 1]).

| style    | called as                                                     | from the reference    |
|----------|---------------------------------------------------------------|-----------------------|
| verl     | f(data_source, solution_str, ground_truth, extra_info)        | all but the solution  |
| trl      | f(prompts=[...], completions=[...], **columns)                | "columns": {name: ..} |
| open_r1  | the same; a prompt and a completion are lists of one message  | "columns": {name: ..} |
| openrlhf | f(queries, prompts, labels), or POST {query, prompts, labels} | "label"               |
| slime    | POST {prompt, response, label}                                | "label"               |

A file lies in the directory that the service's settings name, and a URL is one that they list: a
request can name nothing else. Functions run in a worker with the pool's time limit. They are the
operator's code and no model's, so they are not sandboxed. One that raises or is late gives no
reward; the error names function and sample. A reward must be finite and within the range; the top
of it is CORRECT.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.types import Verdict
from services.reward.graders.grader import (
    BadReferenceError,
    GraderFailedError,
    GradingLostError,
    GradingTask,
    Score,
)
from services.reward.graders.http_client import post_json
from services.reward.graders.judge import declared_range

STYLES_BY_FILE = ("verl", "trl", "open_r1", "openrlhf")
STYLES_BY_URL = ("openrlhf", "slime")
_KEYS = (
    "function", "url", "style", "range",
    "data_source", "ground_truth", "extra_info", "columns", "label",
)  # fmt: skip
_REMOTE_SECONDS = 30.0
_MOST_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CustomReference:
    """Which function, called how, with what."""

    name: str  # "file.py:function" or a URL
    is_remote: bool
    style: str
    low: float
    high: float
    values: Mapping[str, Any]


class CustomGrader:
    """See the module. Loaded functions stay for the life of the worker."""

    sealed = False  # the operator's code may do what it likes
    keeps_own_limits = False
    late_is_verdict = False

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._urls: frozenset[str] = frozenset()
        self._functions: dict[str, Callable[..., Any]] = {}

    def load(self, settings: Mapping[str, Any]) -> None:
        """settings: {directory, urls}; either may be missing, and then nothing of it is allowed."""
        directory = settings.get("directory")
        self._directory = Path(directory).resolve() if directory else None
        self._urls = frozenset(settings.get("urls", ()))

    def prepare(self) -> None:
        """Nothing."""

    def check_reference(self, reference_json: str) -> None:
        parse_reference(reference_json)

    def grade_now(self, task: GradingTask) -> Score | None:
        parse_reference(task.reference_json)
        return None

    def grade(self, task: GradingTask) -> Score:
        """Call the function. What it prints goes to the worker's standard error."""
        reference = parse_reference(task.reference_json)
        if reference.is_remote:
            answer = self._ask(reference, task)
        else:
            function = self._function(reference.name)
            try:
                answer = _call(function, reference, task)
            except (Exception, SystemExit) as error:
                raise GraderFailedError(
                    f"{reference.name} raised {type(error).__name__}: {error};"
                    f" response {task.response_text!r:.200}"
                ) from error
        return _score(reference, answer)

    def _function(self, name: str) -> Callable[..., Any]:
        if name not in self._functions:
            self._functions[name] = self._load_function(name)
        return self._functions[name]

    def _load_function(self, name: str) -> Callable[..., Any]:
        file, _, attribute = name.rpartition(":")
        if self._directory is None:
            raise BadReferenceError(
                "function: no directory is allowed; set ROLLPACKER_REWARD_CUSTOM_DIRECTORY"
            )
        path = (self._directory / file).resolve()
        if not path.is_relative_to(self._directory) or path.suffix != ".py":
            raise BadReferenceError(f"function: {file!r} is no .py file in the allowed directory")
        spec = importlib.util.spec_from_file_location(f"custom_reward_{path.stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise BadReferenceError(f"function: there is no file {file!r} in the allowed directory")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise GraderFailedError(
                f"{file} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        function = getattr(module, attribute, None)
        if not callable(function):
            raise BadReferenceError(f"function: {file} has no function {attribute!r}")
        return function  # type: ignore[no-any-return]

    def _ask(self, reference: CustomReference, task: GradingTask) -> Any:
        """The answer of a remote function. Trouble on the way is no verdict: GradingLostError."""
        if reference.name not in self._urls:
            raise BadReferenceError(
                f"url: {reference.name} is not allowed; ROLLPACKER_REWARD_CUSTOM_URLS lists those"
            )
        label = reference.values.get("label")
        if reference.style == "slime":
            body = {"prompt": task.prompt_text, "response": task.response_text, "label": label}
        else:
            body = {
                "query": [task.prompt_text + task.response_text],
                "prompts": [task.prompt_text],
                "labels": [label],
            }
        try:
            reply = post_json(reference.name, body, _REMOTE_SECONDS, _MOST_ANSWER_BYTES)
            if 300 <= reply.status < 400:
                raise GraderFailedError(f"{reference.name}: redirects are not followed: {reply}")
            if not reply.is_success:
                raise GradingLostError(f"{reference.name}: {reply}")
            return json.loads(reply.body)
        except (OSError, ValueError, RecursionError) as error:
            raise GradingLostError(f"{reference.name}: {error}") from error


def _call(function: Callable[..., Any], reference: CustomReference, task: GradingTask) -> Any:
    values = reference.values
    if reference.style == "verl":
        result = function(
            data_source=values.get("data_source", ""),
            solution_str=task.response_text,
            ground_truth=values.get("ground_truth", ""),
            extra_info=values.get("extra_info"),
        )
    elif reference.style in ("trl", "open_r1"):
        columns = {name: [value] for name, value in values.get("columns", {}).items()}
        prompt: Any = task.prompt_text
        completion: Any = task.response_text
        if reference.style == "open_r1":
            prompt = [{"role": "user", "content": prompt}]
            completion = [{"role": "assistant", "content": completion}]
        result = function(prompts=[prompt], completions=[completion], **columns)
    else:
        query = task.prompt_text + task.response_text
        result = function([query], [task.prompt_text], [values.get("label")])
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _score(reference: CustomReference, answer: Any) -> Score:
    """A number, a list or tensor of one, or a dict of it under score, reward or rewards."""
    breakdown: dict[str, float] = {}
    value = answer
    if isinstance(value, Mapping):
        breakdown = {str(name): float(part) for name, part in value.items() if _is_finite(part)}
        value = next((value[key] for key in ("score", "rewards", "reward") if key in value), None)
    if hasattr(value, "tolist"):
        value = value.tolist()
    while isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not _is_finite(value):
        raise GraderFailedError(f"{reference.name} gave {answer!r:.100}, which holds no number")
    if not reference.low <= value <= reference.high:
        raise GraderFailedError(
            f"{reference.name} gave {value}, which is outside its range"
            f' [{reference.low}, {reference.high}]; declare "range" in the reference'
        )
    verdict = Verdict.CORRECT if value == reference.high else Verdict.INCORRECT
    bounds = (reference.low, reference.high)
    return Score(float(value), verdict, breakdown=breakdown, reward_range=bounds)


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def parse_reference(reference_json: str) -> CustomReference:
    """Read reference_json. Raises BadReferenceError."""
    try:
        values = json.loads(reference_json)
    except (ValueError, RecursionError) as error:
        raise BadReferenceError(f"is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadReferenceError('must be an object such as {"function": "file.py:compute_score"}')
    unknown = sorted(values.keys() - set(_KEYS))
    if unknown:
        raise BadReferenceError(f"{unknown[0]}: unknown key; custom knows {', '.join(_KEYS)}")
    name, url = values.get("function"), values.get("url")
    if (name is None) == (url is None):
        raise BadReferenceError("function: give either it or url")
    styles = STYLES_BY_FILE if url is None else STYLES_BY_URL
    style = values.get("style", styles[0])
    if style not in styles:
        raise BadReferenceError(f"style: {style!r} is none of {', '.join(styles)}")
    if not isinstance(name or url, str) or (url is None and ":" not in str(name)):
        raise BadReferenceError(f'function: {name!r} is not "file.py:name"')
    if not isinstance(values.get("columns", {}), dict):
        raise BadReferenceError("columns: must be an object of column names and values")
    low, high = declared_range(values.get("range", [0, 1]))
    return CustomReference(str(name or url), url is not None, style, low, high, values)
