"""Check values from untrusted files before they are used as file names or sizes.

A published folder, a registry's answer and a bundle are written by others. What they say is checked here, field by
field: ``Fields`` wraps one JSON object, and each of its methods returns a value of one kind or raises ValueError with
the field's name. Fields nobody asks for are ignored, so that a later version may add some.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import reprlib
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

NAME = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")  # names of recipes and images are Docker repository names
TASK = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)  # the name of a task, which is a command in the image
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEX = re.compile(r"[0-9a-f]{64}")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_MAX_SIZE = 2**63 - 1  # bytes; the limit of file systems
_MAX_BASENAME = 255  # bytes of a file's name, the limit of Linux file systems
_MAX_DEPTH = 32
_MAX_DIGITS = 40
MAX_JSON = 16 << 20  # bytes
_CHECKSUM = "checksum"


def is_digest(value: object) -> bool:
    """Return whether ``value`` is ``sha256:`` and 64 lower-case hex digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def is_basename(value: object) -> bool:
    """Return whether ``value`` names a file of one folder: one component, not hidden, and printable."""
    return (
        isinstance(value, str)
        and bool(value)
        and not value.startswith(".")
        and "/" not in value
        and value.isprintable()
        and len(value.encode(errors="replace")) <= _MAX_BASENAME
    )


def shorten(value: object) -> str:
    """Return ``value`` shortened for an error: the full text of a few nested YAML aliases can be gigabytes."""
    return f"{reprlib.repr(value):.80}"


def check_variables(names: Iterable[str]) -> None:
    """Raise ValueError when one of the keys of ``environment:`` is not the name of a variable."""
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"environment: '{name}' is not the name of a variable: letters, digits and '_'")


def parse_json(data: bytes | str, *, max_size: int = MAX_JSON, nan: bool = False) -> Any:
    """Parse JSON of limited size and depth. Raises ValueError, also for NaN and Infinity unless ``nan``."""
    if len(data) > max_size:
        raise ValueError(f"has {len(data)} bytes, more than {max_size}")
    try:
        value = json.loads(data, parse_constant=float if nan else _refuse_constant, parse_int=_parse_int)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"is nested more than {_MAX_DEPTH} levels deep") from error
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        level = [item for outer in level for item in _inside(outer)]
        if not level:
            return value
    raise ValueError(f"is nested more than {_MAX_DEPTH} levels deep")


def _inside(value: Any) -> Iterator[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (item for item in items if isinstance(item, dict | list))


def _parse_int(text: str) -> int:
    """Return an integer.

    A float cannot represent 400 digits, and parsing many digits takes quadratic time.
    """
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"has an integer of {len(text)} digits, more than {_MAX_DIGITS}")
    return int(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"is not JSON: {name} is not a JSON number")


def with_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` with a checksum of its fields, whatever their order and the layout of the file are."""
    return {**record, _CHECKSUM: _checksum(record)}


def without_checksum(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without its checksum, which must match.

    A record of an earlier version has none. Raises ValueError when it does not fit.
    """
    fields = {name: value for name, value in record.items() if name != _CHECKSUM}
    if _CHECKSUM in record and record[_CHECKSUM] != _checksum(fields):
        raise ValueError("is damaged: checksum mismatch")
    return fields


def _checksum(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def read_regular(path: Path, *, max_size: int = MAX_JSON, follow: bool = False) -> bytes:
    """Read a file of a folder that others write to.

    Raises OSError; ValueError for a link, a pipe or a file above ``max_size``.

    A link may lead anywhere, and a pipe would block. ``follow`` takes links, too: for the files that a user works on.
    """
    if path.is_symlink() and not follow:
        raise ValueError("is a link")
    handle = os.open(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        if status.st_size > max_size:
            raise ValueError(f"has {status.st_size} bytes, more than {max_size}")
        with open(handle, "rb", closefd=False) as stream:
            return stream.read(status.st_size)  # reading max_size would allocate all of it
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object. ``where`` names it in messages: ``layers[2]``, or nothing for the outermost."""

    data: Mapping[str, Any]
    where: str = ""

    @classmethod
    def of(cls, value: object, where: str = "") -> Fields:
        """Wrap ``value``. Raises ValueError when it is not an object."""
        if not isinstance(value, dict):
            raise ValueError(f"'{where}' is not an object" if where else "is not an object")
        return cls(value, where)

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise ValueError for the field ``name``."""
        field = f"{self.where}.{name}" if self.where else name
        if name not in self.data:
            raise ValueError(f"has no '{field}'")
        raise ValueError(f"'{field}' is not {expected}: {shorten(self.data[name])}")

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; ``default`` where there is none."""
        value = self.data.get(name)
        if value is None and default is not None:
            return default
        return value if isinstance(value, str) else self.refuse(name, "a string")

    def matching(self, name: str, pattern: re.Pattern[str], expected: str) -> str:
        """Return a string that ``pattern`` matches; ``expected`` describes it in errors."""
        value = self.data.get(name)
        return value if isinstance(value, str) and pattern.fullmatch(value) else self.refuse(name, expected)

    def digest(self, name: str) -> str:
        """Return a digest: sha256: and 64 hex digits."""
        return self.matching(name, _DIGEST, "a digest (sha256: and 64 hex digits)")

    def hex_digest(self, name: str) -> str:
        """Return a SHA-256: 64 hex digits."""
        return self.matching(name, _HEX, "a SHA-256 (64 hex digits)")

    def name(self, name: str) -> str:
        """Return the name of a recipe or an image."""
        return self.matching(name, NAME, "a name (lower-case letters, digits, '.', '_' and '-')")

    def basename(self, name: str) -> str:
        """Return the name of a file in one folder, or a text of the same form."""
        value = self.data.get(name)
        return str(value) if is_basename(value) else self.refuse(name, "a plain file name")

    def absolute(self, name: str) -> str:
        """Return an absolute path without ``.`` and ``..``, as of a file in an image."""
        value = self.data.get(name)
        if (
            isinstance(value, str)
            and value.startswith("/")
            and posixpath.normpath(value) == value
            and "\0" not in value
        ):
            return value
        return self.refuse(name, "an absolute path")

    def size(self, name: str) -> int:
        """Return a number of bytes, or of other things: an integer from 0 up."""
        value = self.data.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE:
            return value
        return self.refuse(name, "a size (an integer from 0 up)")

    def number(self, name: str) -> float:
        """Return a finite number."""
        value = self.data.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_SIZE:
            return value
        return self.refuse(name, "a number")

    def time(self, name: str) -> str:
        """Return an ISO 8601 time as it is written."""
        value = self.data.get(name)
        try:
            datetime.fromisoformat(value if isinstance(value, str) else "")
        except ValueError:
            return self.refuse(name, "an ISO 8601 time")
        return str(value)

    def mapping(self, name: str, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return an object as a dictionary; ``default`` where there is none."""
        value = self.data.get(name)
        if value is None and default is not None:
            return dict(default)
        return value if isinstance(value, dict) else self.refuse(name, "an object")

    def texts(self, name: str, default: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return an object whose values are strings."""
        value = self.mapping(name, default)
        return (
            value if all(isinstance(item, str) for item in value.values()) else self.refuse(name, "names and strings")
        )

    def tasks(self, name: str) -> dict[str, Any]:
        """Return an object whose names are those of tasks. They become part of lines for a shell."""
        value = self.mapping(name)
        for task in value:
            if not (isinstance(task, str) and TASK.fullmatch(task)):
                raise ValueError(f"{self._below(name)}: {shorten(task)} is not a name of a task")
        return value

    def object(self, name: str) -> Fields:
        """Return an object as Fields of its own, whose errors name the path."""
        value = self.data.get(name)
        return Fields(value, self._below(name)) if isinstance(value, dict) else self.refuse(name, "an object")

    def objects(self, name: str) -> list[Fields]:
        """Return a list of objects."""
        value = self.data.get(name)
        if not isinstance(value, list):
            return self.refuse(name, "a list")
        return [Fields.of(item, f"{self._below(name)}[{at}]") for at, item in enumerate(value)]

    def strings(self, name: str) -> list[str]:
        """Return a list of strings."""
        value = self.data.get(name)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        return self.refuse(name, "a list of strings")

    def _below(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name
