"""The solution's side of function tests: it is called with data and answers with data.

Requests, from the service or a checker: {call, args, kwargs} a function or a method of `Solution`;
{of, get} an attribute and {of, call, args, kwargs} a method of an object that an answer named.
Answers: {value, args} (arguments as the call left them, for those changed in place) or
{raised, message}. The solution shares this process and may answer what it likes: it never learns
what answer would be right.
"""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Callable
from typing import Any, BinaryIO

from . import values

_STARRED = (
    "typing",
    "collections",
    "math",
    "heapq",
    "bisect",
    "itertools",
    "functools",
    "builtins",
)
NAMED_MODULES = (
    "collections", "math", "heapq", "bisect", "itertools", "functools", "string", "re", "operator",
    "copy", "random", "sys",
)  # fmt: skip
Streams = tuple[BinaryIO, BinaryIO]


def take_streams() -> Streams:
    """Keep standard input and output for requests and answers; the solution gets empty ones."""
    streams = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    return streams


def serve(code: types.CodeType, names: dict[str, Any], streams: Streams) -> None:
    """Run the module, then answer until the requests end."""
    requests, answers = streams
    names.update(_usual_names())
    exec(code, names)  # noqa: S102  the purpose
    server = _Server(names)
    while request := _read(requests):
        answers.write(values.pack(server.answer(request)))
        answers.flush()


def _usual_names() -> dict[str, Any]:
    """What such tasks take for granted to be imported, as their data sets do."""
    names: dict[str, Any] = {}
    for name in _STARRED:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", [key for key in vars(module) if key[0] != "_"])
        names.update({key: getattr(module, key) for key in public})
    names.update({name: importlib.import_module(name) for name in NAMED_MODULES})
    return names


def _read(requests: BinaryIO) -> dict[str, Any] | None:
    head = requests.read(values.LENGTH.size)
    if len(head) < values.LENGTH.size:
        return None
    return values.unpack(requests.read(*values.LENGTH.unpack(head)))


class _Server:
    """Calls, and the objects that answers have named."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._objects: list[Any] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "get" in request:
                value = getattr(self._objects[request["of"]], request["get"])
                return {"value": self._encode(value)}
            args = [values.decode(item, self._named) for item in request["args"]]
            kwargs = {k: values.decode(v, self._named) for k, v in request["kwargs"].items()}
            value = self._function(request)(*args, **kwargs)
            if isinstance(value, types.GeneratorType | map | filter | zip | range):
                value = list(value)
            return {"value": self._encode(value), "args": [self._changed(item) for item in args]}
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  the caller is told
            return {"raised": type(error).__name__, "message": str(error)[:1000]}

    def _function(self, request: dict[str, Any]) -> Callable[..., Any]:
        name = request["call"]
        found: Callable[..., Any]
        if "of" in request:
            found = getattr(self._objects[request["of"]], name)
        elif name not in self._names and "Solution" in self._names:
            found = getattr(self._names["Solution"](), name)
        else:
            found = self._names[name]
        return found

    def _changed(self, value: Any) -> Any:
        return self._encode(value) if isinstance(value, list | dict | set) else None

    def _encode(self, value: Any) -> Any:
        return values.encode(value, self._name)

    def _name(self, value: Any) -> Any:
        self._objects.append(value)
        return ["object", len(self._objects) - 1]

    def _named(self, coded: list[Any]) -> Any:
        return self._objects[coded[1]]
