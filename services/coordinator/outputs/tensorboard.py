"""TensorBoard event files, written directly: scalars only, synchronously, on the caller's thread.

An event file is a sequence of records (length, its CRC, data, its CRC; little endian, CRC-32C with
TensorFlow's mask); the data are `Event` protobuf messages. Only five fields are needed, so they
are encoded here: the usual client library would bring torch into the coordinator.

Curves never double. The first write of a process, and every write at or below an older step, opens
a new file that begins with a session start at its step: TensorBoard then forgets what older files
say from that step on. Each write is flushed, so a crash loses nothing that was written before.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

_CRC_POLYNOMIAL = 0x82F63B78  # CRC-32C, reflected
_CRC_MASK = 0xA282EAD8  # added by the record format
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # protobuf wire types
_SESSION_START = 1


class EventLog:
    """One curve set (a "run" in TensorBoard): the event files of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path: Path | None = None
        self._newest_step = -1

    def write(self, step: int, wall_time: float, scalars: Mapping[str, float]) -> None:
        """Record scalars of a step; a step that was written before is replaced.

        wall_time: seconds since the Unix epoch. Values that are not finite are left out.
        """
        records = b""
        if self._path is None or step <= self._newest_step:
            self._path = self._new_file()
            records += _record(_event(wall_time, 0, _field(3, _BYTES, b"brain.Event:2")))
            session = _field(1, _VARINT, _SESSION_START)
            records += _record(_event(wall_time, step, _field(7, _BYTES, session)))
        values = b"".join(
            _field(1, _BYTES, _scalar(tag, value))
            for tag, value in scalars.items()
            if math.isfinite(value)
        )
        records += _record(_event(wall_time, step, _field(5, _BYTES, values)))
        with self._path.open("ab") as file:
            file.write(records)
        self._newest_step = step

    def _new_file(self) -> Path:
        """A name that sorts behind every older file: TensorBoard reads in this order."""
        self._directory.mkdir(parents=True, exist_ok=True)
        older = sum(1 for _ in self._directory.glob("events.out.tfevents.*"))
        return self._directory / f"events.out.tfevents.{older:06d}"


def _scalar(tag: str, value: float) -> bytes:
    """A Summary.Value."""
    return _field(1, _BYTES, tag.encode()) + _field(2, _FIXED32, struct.pack("<f", value))


def _event(wall_time: float, step: int, content: bytes) -> bytes:
    head = _field(1, _FIXED64, struct.pack("<d", wall_time)) + _field(2, _VARINT, step)
    return head + content


def _field(number: int, wire_type: int, value: int | bytes) -> bytes:
    key = _varint(number << 3 | wire_type)
    if isinstance(value, int):
        return key + _varint(value)
    return key + (_varint(len(value)) if wire_type == _BYTES else b"") + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    rotated = crc >> 15 | crc << 17 & 0xFFFFFFFF
    return struct.pack("<I", rotated + _CRC_MASK & 0xFFFFFFFF)


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_CRC_POLYNOMIAL if byte & 1 else 0)
    return byte


_CRC_TABLE = tuple(_crc_of_byte(byte) for byte in range(256))
