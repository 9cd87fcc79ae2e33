"""Write event files of TensorBoard, without its package: scalars alone.

A file is a sequence of records of TensorFlow (length, its CRC, data, its CRC), each an Event in Protocol Buffers:
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/util/event.proto
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reversed (RFC 3720, section 12.1)
_START = 1  # a status of SessionLog


class EventFile:
    """Append scalars to a new event file in a folder, in which earlier starts of a run have theirs."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Create the file. first_step: readers drop values of this step and later ones in earlier files.

        Raises:
            OSError: it cannot be written.
        """
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self.file = folder / name
        self._append(_event(file_version=_VERSION), _event(step=first_step, starts=True))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step.

        Raises:
            OSError: the file cannot be written.
        """
        self._append(_event(step=step, values=values))

    def _append(self, *events: bytes) -> None:
        with self.file.open("ab") as out:
            out.write(b"".join(map(_frame, events)))


def _event(
    *, step: int = 0, file_version: bytes = b"", values: Mapping[str, float] | None = None, starts: bool = False
) -> bytes:
    event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step)
    if file_version:
        event += b"\x1a" + _sized(file_version)
    if starts:
        event += b"\x3a" + _sized(b"\x08" + _varint(_START))
    summary = b""
    for name, value in (values or {}).items():
        summary += b"\x0a" + _sized(b"\x0a" + _sized(name.encode()) + b"\x15" + struct.pack("<f", value))
    return event + (b"\x2a" + _sized(summary) if summary else b"")


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _frame(data: bytes) -> bytes:
    size = struct.pack("<Q", len(data))
    return size + struct.pack("<I", _masked_crc(size)) + data + struct.pack("<I", _masked_crc(data))


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE = _table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
