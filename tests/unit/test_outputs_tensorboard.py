"""TensorBoard events: an independent reader finds every scalar once, also after a resume.

The reader checks the record format, parses events by protobuf descriptors, and forgets from a
session start on what older files said, which is TensorBoard's rule.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from services.coordinator.outputs.tensorboard import EventLog

_FIELD = descriptor_pb2.FieldDescriptorProto
Curves = dict[str, dict[int, float]]


def _message(name: str, **fields: tuple[int, Any]) -> descriptor_pb2.DescriptorProto:
    message = descriptor_pb2.DescriptorProto(name=name)
    for field, (number, kind) in fields.items():
        added = message.field.add(name=field, number=number, label=_FIELD.LABEL_OPTIONAL)
        if isinstance(kind, str):
            added.type, added.type_name = _FIELD.TYPE_MESSAGE, f".events.{kind}"
        else:
            added.type = kind
    return message


def _event_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="events.proto", package="events")
    file.message_type.extend(
        [
            _message("Value", tag=(1, _FIELD.TYPE_STRING), simple_value=(2, _FIELD.TYPE_FLOAT)),
            _message("Summary", value=(1, "Value")),
            _message("SessionLog", status=(1, _FIELD.TYPE_INT32)),
            _message(
                "Event",
                wall_time=(1, _FIELD.TYPE_DOUBLE),
                step=(2, _FIELD.TYPE_INT64),
                file_version=(3, _FIELD.TYPE_STRING),
                summary=(5, "Summary"),
                session_log=(7, "SessionLog"),
            ),
        ]
    )
    file.message_type[1].field[0].label = _FIELD.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("events.Event"))


_EVENT = _event_class()


def _crc32c(data: bytes) -> int:
    """Bit by bit, from the definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    crc = _crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _events(path: Path) -> list[Any]:
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        body = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 8)[0] == _masked(data[at : at + 8])
        assert struct.unpack_from("<I", data, at + 12 + length)[0] == _masked(body)
        found.append(_EVENT.FromString(body))
        at += 16 + length
    return found


def _curves(directory: Path) -> Curves:
    curves: Curves = {}
    for path in sorted(directory.iterdir()):
        events = _events(path)
        assert events[0].file_version == "brain.Event:2"
        for event in events:
            if event.session_log.status == 1:
                for curve in curves.values():
                    for step in [step for step in curve if step >= event.step]:
                        del curve[step]
            for value in event.summary.value:
                curve = curves.setdefault(value.tag, {})
                assert event.step not in curve, f"{value.tag} has step {event.step} twice"
                curve[event.step] = pytest.approx(value.simple_value)
    return curves


def test_the_crc_is_the_castagnoli_one() -> None:
    assert _crc32c(b"123456789") == 0xE3069283


def test_every_scalar_is_found_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for step in (0, 1, 300):
        log.write(step, 1.5e9, {"reward/mean": step / 10, "bias/ratio": -1.25})
    assert _curves(tmp_path) == {
        "reward/mean": {0: 0.0, 1: 0.1, 300: 30.0},
        "bias/ratio": {0: -1.25, 1: -1.25, 300: -1.25},
    }
    [path] = tmp_path.iterdir()
    assert _events(path)[-1].wall_time == 1.5e9


def test_curves_do_not_double_after_a_resume(tmp_path: Path) -> None:
    first = EventLog(tmp_path)
    for step in range(5):
        first.write(step, 0.0, {"reward/mean": 1.0})
    second = EventLog(tmp_path)
    for step in range(3, 6):
        second.write(step, 0.0, {"reward/mean": 2.0})
    assert _curves(tmp_path)["reward/mean"] == {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 2.0}


def test_a_repeat_in_one_process_replaces(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for step, value in [(0, 1.0), (1, 1.0), (1, 2.0), (0, 3.0), (1, 4.0)]:
        log.write(step, 0.0, {"reward/mean": value})
    assert _curves(tmp_path)["reward/mean"] == {0: 3.0, 1: 4.0}


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    EventLog(tmp_path).write(0, 0.0, {"a/x": float("nan"), "a/y": float("inf"), "a/z": 1.0})
    assert _curves(tmp_path) == {"a/z": {0: 1.0}}


def test_a_tag_may_hold_any_text(tmp_path: Path) -> None:
    EventLog(tmp_path).write(2**40, 0.0, {"größe/mittel" * 30: 1.0})
    assert _curves(tmp_path) == {"größe/mittel" * 30: {2**40: 1.0}}
