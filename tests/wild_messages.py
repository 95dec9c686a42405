"""Messages that are well formed and make no sense: a hypothesis strategy for any protobuf type."""

from __future__ import annotations

import struct
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_DEPTH = 2  # messages within messages
_TEXTS = ["", "r", "r:0:1:0", "0", "..", "../../etc/passwd", "file:///etc", "\x00", "é" * 300]
_TEXT = st.sampled_from(_TEXTS) | st.text(max_size=8)
_FLOAT = st.sampled_from([0.0, -1.0, 1e308, float("inf"), float("nan")]) | st.floats(width=32)


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.sampled_from([0, 1, 2, low, high]) | st.integers(low, high)


_BY_TYPE: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: _integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: _integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: _integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: _FLOAT,
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: _integers(-1, 99),
}
# So that some messages come past the first check.
_BY_NAME = {
    "run_id": st.sampled_from(["r", "r", "r", "", "R/.."]),
    "fence": st.sampled_from([10**6, 10**6, 10**6, 0, -1]),
}


def messages(kind: Descriptor, depth: int = _DEPTH) -> st.SearchStrategy[Any]:
    """Messages of a type; each field is set or left out."""
    optional = {f.name: _field(f, depth) for f in kind.fields if depth or f.message_type is None}
    return st.fixed_dictionaries({}, optional=optional).map(lambda values: _made(kind, values))


def cut(data: bytes, at: float, junk: bytes) -> bytes:
    """The beginning of a message, and something else behind it."""
    return data[: int(len(data) * at)] + junk


def _field(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    one = _value(field, depth)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return st.dictionaries(
            _value(entry["key"], 0), _value(entry["value"], depth - 1), max_size=2
        )
    return st.lists(one, max_size=3) if field.is_repeated else one


def _value(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, max(0, depth - 1))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=8)
    return _BY_NAME.get(field.name, _BY_TYPE.get(field.cpp_type, _TEXT))


def _made(kind: Descriptor, values: dict[str, Any]) -> Any:
    message = GetMessageClass(kind)()
    for name, value in values.items():
        field = kind.fields_by_name[name]
        if isinstance(value, dict):
            for key, item in value.items():
                if field.message_type.fields_by_name["value"].message_type is None:
                    getattr(message, name)[key] = item
                else:
                    getattr(message, name)[key].CopyFrom(item)
        elif field.is_repeated:
            getattr(message, name).extend(value)
        elif field.message_type is not None:
            getattr(message, name).CopyFrom(value)
        else:
            _set(message, name, value)
    return message


def _set(message: Any, name: str, value: Any) -> None:
    """Numbers too large for a float are infinite in it."""
    try:
        setattr(message, name, value)
    except OverflowError:
        setattr(message, name, struct.unpack("<f", b"\x00\x00\x80\x7f")[0])
