"""One strategy for damaged bytes: valid samples with bits flipped, parts cut, repeated, spliced or replaced, fields
exchanged.

Damaged samples reach further into a parser than random bytes, most of which fail on the first line.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from support.hostile import VALUES

# What parsers stumble over: numbers at the edges of their types, paths that point out, deep nesting, bytes that are no
# text.
TOKENS = (
    b"",
    b"\0",
    b"\xff\xfe",
    b"\n",
    b"\r",
    b"-1",
    b"0",
    b"1e999",
    b"9" * 400,
    b"null",
    b"NaN",
    b"true",
    b"{}",
    b"[]",
    b"%",
    b"{{",
    b"../../x",
    b"/etc/passwd",
    b"sha256:../../x",
    b"\xe3\x81\x82",
    b"\xed\xa0\x80",
    b"[" * 3000,
    b'{"a":' * 300,
    b"&a [*a,*a]",
    b"!!python/name:os.system ",
    b"\xff" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\0" * 8,
    b"\x80\0\0\0",
    b"\x01\0\0\0\0\0\0\x80",
)


@st.composite
def damaged(draw: st.DrawFn, samples: Sequence[bytes]) -> bytes:
    """Draw one of ``samples`` with one to four damages. Samples that are JSON are damaged as values, too."""
    data = draw(st.sampled_from(samples))
    for _ in range(draw(st.integers(1, 4))):
        value = _json(data)
        if value is not None and draw(st.booleans()):
            data = _exchange(draw, value)
        else:
            data = draw(st.sampled_from(_DAMAGES))(draw, data, samples)
    return data


def _json(data: bytes) -> Any:
    try:
        return json.loads(data) if data[:1] in (b"{", b"[") else None
    except (ValueError, RecursionError):
        return None


def _exchange(draw: st.DrawFn, value: Any) -> bytes:
    """Replace, remove or double one value anywhere in a JSON document."""
    value = copy.deepcopy(value)
    positions = list(_positions(value))
    if not positions:
        return json.dumps(draw(st.sampled_from(VALUES))).encode()
    holder, key = draw(st.sampled_from(positions))
    what = draw(st.integers(0, 5))
    if what == 0:
        del holder[key]
    elif what == 1:
        other, name = draw(st.sampled_from(positions))
        holder[key] = copy.deepcopy(other[name])
    else:
        holder[key] = draw(st.sampled_from(VALUES))
    return json.dumps(value).encode()


def _positions(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key or index) of a document."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from _positions(item)


def _at(draw: st.DrawFn, data: bytes) -> tuple[int, int]:
    """Draw a range of a few bytes, or of many."""
    start = draw(st.integers(0, len(data)))
    return start, min(len(data), start + draw(st.sampled_from((1, 2, 4, 8, 64, 512, 1 << 20))))


def _flip(draw: st.DrawFn, data: bytes, samples: Sequence[bytes]) -> bytes:
    if not data:
        return data
    position, bit = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 7))
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def _cut(draw: st.DrawFn, data: bytes, samples: Sequence[bytes]) -> bytes:
    start, end = _at(draw, data)
    return data[:start] + data[end:]


def _repeat(draw: st.DrawFn, data: bytes, samples: Sequence[bytes]) -> bytes:
    start, end = _at(draw, data)
    times = draw(st.sampled_from((2, 3, 40)))
    return data[:start] + (data[start:end] * times)[: 1 << 20] + data[end:]


def _splice(draw: st.DrawFn, data: bytes, samples: Sequence[bytes]) -> bytes:
    other = draw(st.sampled_from(samples))
    start, end = _at(draw, other)
    into, until = _at(draw, data)
    return data[:into] + other[start:end] + data[until:]


def _insert(draw: st.DrawFn, data: bytes, samples: Sequence[bytes]) -> bytes:
    start, end = _at(draw, data)
    return data[:start] + draw(st.sampled_from(TOKENS)) + data[end if draw(st.booleans()) else start :]


_DAMAGES: tuple[Callable[[st.DrawFn, bytes, Sequence[bytes]], bytes], ...] = (_flip, _cut, _repeat, _splice, _insert)
