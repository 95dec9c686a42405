"""The tests' side of function tests: test code runs here, in a sandbox without the solution.

Test code holds the expected values, so the solution must not be near. Where it calls the solution,
the call goes out as data over standard output and the answer comes back as data over standard input
(`calls` says how). Test code may be: assert statements; `check(candidate)`, called with the entry
point; functions named test_*, called without arguments; `from solution import f`.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from . import calls, values

ASSERTION_FAILED, SOLUTION_RAISED, TEST_FAILED = 111, 112, 113


class SolutionGoneError(BaseException):
    """The solution's process has ended; its own report says how."""


def run(source: str, setup: dict[str, Any], names: dict[str, Any]) -> None:
    """Run test code; raises SystemExit with one of the codes above unless every test passes."""
    remote = _Remote(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    sys.modules["solution"] = _SolutionModule(remote)
    sys.modules["pytest"] = _pytest()
    names.update({name: importlib.import_module(name) for name in calls.NAMED_MODULES})
    names.update({name: remote.function(name) for name in setup["names"]})
    try:
        exec(compile(source, "test.py", "exec"), names)  # noqa: S102  the data set's test code
        if "check" in names and setup["entry_point"]:
            names["check"](remote.function(setup["entry_point"]))
        for name in [name for name in names if name.startswith("test")]:
            if isinstance(names[name], types.FunctionType):
                _run_test(names[name])
    except AssertionError:
        sys.exit(ASSERTION_FAILED)
    except SolutionGoneError:
        sys.exit(SOLUTION_RAISED)
    except Exception as error:  # noqa: BLE001  a test that raises has failed
        sys.exit(SOLUTION_RAISED if error is remote.last_raised else TEST_FAILED)


class _Remote:
    """Calls into the solution's process."""

    def __init__(self, answers: BinaryIO, requests: BinaryIO) -> None:
        self._answers, self._requests = answers, requests
        self.last_raised: Exception | None = None

    def function(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.call({"call": name}, args, kwargs)

    def call(self, what: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value that a call returns; raises what it raised."""
        answer = self._ask(
            {
                **what,
                "args": [values.encode(item, _handle) for item in args],
                "kwargs": {name: values.encode(item, _handle) for name, item in kwargs.items()},
            }
        )
        for argument, changed in zip(args, answer.get("args", ()), strict=False):
            _change(argument, changed)
        return values.decode(answer.get("value"), self._object)

    def get(self, what: dict[str, Any]) -> Any:
        return values.decode(self._ask(what).get("value"), self._object)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._requests.write(values.pack(request))
        self._requests.flush()
        head = self._answers.read(values.LENGTH.size)
        if len(head) < values.LENGTH.size:
            raise SolutionGoneError
        body = self._answers.read(*values.LENGTH.unpack(head))
        answer = values.unpack(body)
        if "raised" in answer:
            self.last_raised = _exception(answer)
            raise self.last_raised
        return answer

    def _object(self, coded: list[Any]) -> Any:
        if coded[0] != "object" or len(coded) != 2:
            raise values.NotDataError("an unknown kind of value")
        return _Object(self, coded[1])


class _Object:
    """An object that lives with the solution. Equal to nothing but itself."""

    def __init__(self, remote: _Remote, handle: int) -> None:
        self._remote, self._object_handle = remote, handle

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        of = {"of": self._object_handle}
        value = self._remote.get({**of, "get": name})
        if isinstance(value, _Object):  # a method, most likely
            return lambda *args, **kwargs: self._remote.call({**of, "call": name}, args, kwargs)
        return value

    def __len__(self) -> int:
        return int(self._remote.call({"of": self._object_handle, "call": "__len__"}, (), {}))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._remote.call({"call": "list"}, (self,), {}))


class _SolutionModule(types.ModuleType):
    """`from solution import f` gives calls into the solution."""

    def __init__(self, remote: _Remote) -> None:
        super().__init__("solution")
        self._remote = remote

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remote.function(name)


def _handle(value: Any) -> Any:
    if isinstance(value, _Object):
        return ["object", value._object_handle]
    raise values.NotDataError(f"{type(value).__name__} cannot be an argument: it is no plain data")


def _change(argument: Any, changed: Any) -> None:
    """Do to the caller's list, dict or set what the call did to its copy."""
    if changed is None:
        return
    new = values.decode(changed, lambda coded: coded)
    if isinstance(argument, list) and isinstance(new, list):
        argument[:] = new
    elif isinstance(argument, dict | set) and isinstance(new, type(argument)):
        argument.clear()
        argument.update(new)


def _exception(answer: dict[str, Any]) -> Exception:
    kind = getattr(builtins, str(answer["raised"]), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(answer.get("message"))
        except TypeError:  # such as UnicodeDecodeError, which wants more
            return RuntimeError(answer.get("message"))
    return RuntimeError(f"{answer['raised']}: {answer.get('message')}")


def _run_test(test: types.FunctionType) -> None:
    for arguments in getattr(test, "parameters", [()]):
        test(*arguments)


def _pytest() -> types.ModuleType:
    """As much of pytest as such tests use: raises, approx, mark.parametrize."""
    module = types.ModuleType("pytest")
    module.__dict__.update(
        raises=_Raises, approx=_Approx, mark=types.SimpleNamespace(parametrize=_sets)
    )
    return module


def _sets(names: str, values_: list[Any]) -> Callable[[Any], Any]:
    several = isinstance(names, list | tuple) or "," in names

    def mark(test: Any) -> Any:
        test.parameters = [tuple(item) if several else (item,) for item in values_]
        return test

    return mark


class _Raises:
    """`with pytest.raises(ValueError):`"""

    def __init__(self, expected: Any, match: str = "") -> None:
        self._expected, self._match = expected, match

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        import re

        assert kind is not None, "did not raise"
        self.value = error
        return issubclass(kind, self._expected) and bool(re.search(self._match, str(error)))


class _Approx:
    """`pytest.approx(0.3)`, for numbers and flat sequences of them."""

    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:  # noqa: A002
        self._expected, self._rel, self._abs = expected, rel, abs

    def __eq__(self, got: Any) -> bool:
        if isinstance(self._expected, list | tuple):
            pairs = list(zip(self._expected, got, strict=False))
            return len(self._expected) == len(got) and all(self._close(*pair) for pair in pairs)
        return self._close(self._expected, got)

    def _close(self, expected: Any, got: Any) -> bool:
        return bool(abs(expected - got) <= max(self._rel * abs(expected), self._abs))

    __hash__ = None  # type: ignore[assignment]
