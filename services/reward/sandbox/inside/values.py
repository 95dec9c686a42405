"""Plain data as JSON text, both ways: what calls and their results are made of.

Scalars stand for themselves; everything else is a list that starts with its kind. Decoding makes
built-in types only and looks at nothing but JSON, so data of a solution carries no behaviour.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">I")
_SCALARS: tuple[Any, ...] = (str, int, float)
_SEQUENCES: tuple[tuple[str, Any], ...] = (
    ("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset),
)  # fmt: skip
_BIG_INT_DIGITS = 4000  # longer ones are read as text: reading them takes quadratic time


class NotDataError(ValueError):
    """This is no plain data."""


def encode(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """A value as JSON. `other` encodes what is no data. Raises NotDataError, RecursionError."""
    if value is None or value is True or value is False:
        return value
    for scalar in _SCALARS:
        if isinstance(value, scalar):
            return scalar.__add__(value, scalar())  # of the type itself, not of a subclass
    for kind, sequence in _SEQUENCES:
        if isinstance(value, sequence):
            return [kind, *(encode(item, other) for item in sequence.__iter__(value))]
    if isinstance(value, dict):
        return ["dict", *([encode(k, other), encode(v, other)] for k, v in dict.items(value))]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), other)
    if other is None:
        raise NotDataError(f"{type(value).__name__} is no plain data")
    return other(value)


def decode(coded: Any, other: Callable[[list[Any]], Any] | None = None) -> Any:
    """What `encode` was given. Raises NotDataError."""
    if not isinstance(coded, list):
        return coded
    if not coded or not isinstance(coded[0], str):
        raise NotDataError("a list without a kind")
    kind, *items = coded
    for name, sequence in _SEQUENCES:
        if kind == name:
            try:
                return sequence(decode(item, other) for item in items)
            except TypeError as error:
                raise NotDataError(f"{kind}: {error}") from error
    try:
        if kind == "dict":
            return {decode(key, other): decode(value, other) for key, value in items}
        if kind == "bytes":
            return bytes.fromhex(*items)
        if kind == "complex":
            return complex(*items)
    except (TypeError, ValueError) as error:
        raise NotDataError(f"{kind}: {error}") from error
    if other is None:
        raise NotDataError(f"{kind}: unknown kind")
    return other(coded)


def pack(message: dict[str, Any]) -> bytes:
    """A message with its length before it."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes, parse_int: Callable[[str], Any] = int) -> dict[str, Any]:
    """The message of a body. Raises NotDataError, whatever the bytes are."""
    try:
        message = json.loads(body, parse_int=parse_int)
    except (ValueError, RecursionError) as error:
        raise NotDataError(f"no message: {error}") from error
    if not isinstance(message, dict):
        raise NotDataError("a message must be an object")
    return message


def read_int(text: str) -> Any:
    """An integer of JSON; a very long one stays text, marked."""
    return int(text) if len(text) <= _BIG_INT_DIGITS else f"integer:{text}"
