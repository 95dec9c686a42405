"""Reads google.protobuf.Struct: it knows no integers, and JSON knows neither NaN nor infinity."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct

from rollpacker.rpc.errors import InvalidArgumentError

_WHOLE = 2.0**53  # below it a double holds every integer


def read_struct(name: str, struct: Struct) -> dict[str, Any]:
    """Its values; whole numbers below 2^53 are integers.

    Raises InvalidArgumentError for a number that is not finite; `name` is the field of `struct`.
    """
    try:
        values = json_format.MessageToDict(struct)
    except ValueError as error:
        raise InvalidArgumentError.field(
            name, f"holds NaN or an infinity ({error}); give a finite number, or text"
        ) from error
    return {key: _with_integers(value) for key, value in values.items()}


def _with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE:
        return int(value)
    return value
