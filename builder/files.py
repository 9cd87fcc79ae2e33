"""YAML files read into frozen dataclasses, with errors that name the file, the key and the nearest known key; text written whole;
room on a disk.

A library for this exists, and importing it took a third of the time of an invocation that has nothing to do.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml

from builder.errors import DefinitionError, UsageError, nearest

Model = TypeVar("Model")

_KINDS = {str: "a string", int: "a whole number", bool: "true or false", dict: "a mapping", tuple: "a list"}


def free_bytes(folder: Path) -> int:
    """Room for an ordinary user. Errors: OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def read_yaml(path: Path, model: type[Model]) -> Model:
    """``model`` is a dataclass; its ``__post_init__`` may raise ValueError. Errors: DefinitionError, every problem at once."""
    try:
        # CSafeLoader reads the same language some ten times faster, where libyaml is there.
        data = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise DefinitionError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DefinitionError(f"{path}: is not YAML: {error}") from error
    problems: list[str] = []
    value = _read({} if data is None else data, model, "", problems)
    if problems:
        raise DefinitionError("\n".join(f"{path}: {problem}" for problem in problems))
    return cast(Model, value)


def _read(value: Any, kind: Any, place: str, problems: list[str]) -> Any:
    """``value`` as ``kind``: a dataclass, str, int, bool, dict[str, …], tuple[…, ...] or … | None."""
    if get_origin(kind) is UnionType:
        return None if value is None else _read(value, get_args(kind)[0], place, problems)
    wanted = dict if is_dataclass(kind) else get_origin(kind) or kind
    if type(value) is not (list if wanted is tuple else wanted):
        problems.append(f"{place or 'the file'}: should be {_KINDS[wanted]} (found: {value!r:.80})")
        return None
    if wanted is tuple:
        return tuple(_read(item, get_args(kind)[0], f"{place}.{at}", problems) for at, item in enumerate(value))
    return _read_mapping(cast(dict[Any, Any], value), kind, place, problems) if wanted is dict else value


def _read_mapping(value: dict[Any, Any], kind: Any, place: str, problems: list[str]) -> Any:
    odd = [key for key in value if type(key) is not str]
    problems += [f"{place or 'the file'}: keys should be strings (found: {key!r:.80})" for key in odd]
    inside = {key: item for key, item in value.items() if type(key) is str}
    return (_read_fields if is_dataclass(kind) else _read_items)(inside, kind, place, problems)


def _read_items(value: dict[str, Any], kind: Any, place: str, problems: list[str]) -> dict[str, Any]:
    return {key: _read(item, get_args(kind)[1], _below(place, key), problems) for key, item in value.items()}


def _read_fields(value: dict[str, Any], kind: Any, place: str, problems: list[str]) -> Any:
    before = len(problems)
    types, known = get_type_hints(kind), {field.name: field for field in fields(kind)}
    problems += [f"unknown key '{_below(place, key)}'." + nearest(key, known) for key in value if key not in known]
    problems += [f"key '{_below(place, name)}' is missing" for name, field in known.items()
                 if name not in value and field.default is MISSING and field.default_factory is MISSING]  # fmt: skip
    found = {key: _read(item, types[key], _below(place, key), problems) for key, item in value.items() if key in known}
    if len(problems) > before:
        return None
    try:
        return kind(**found)
    except ValueError as error:
        problems.append(f"{place}: {error}" if place else str(error))
        return None


def _below(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def write_whole(path: Path, text: str) -> None:
    """A text file, there only when it is whole. Errors: UsageError."""
    import tempfile

    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with open(handle, "w") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.rename(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
