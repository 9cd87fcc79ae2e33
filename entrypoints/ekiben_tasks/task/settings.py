"""Load a task's settings into a frozen dataclass: its defaults, then a YAML file, then ``--set key=value``.

Unknown names, wrong types and invalid YAML are reported together, each with its origin and the nearest name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import SettingError, TaskError, nearest

T = TypeVar("T")

_MAX_CONFIG = 1 << 20  # bytes of a YAML file
_MAX_VALUES = 100_000  # in it, those that aliases repeat included

_WARNED: set[str] = set()


def option(default: Any, help: str, *, old: str = "") -> Any:
    """Return a dataclass field with its line of ``--help``. old: its name before this release, accepted with a
    warning.
    """
    return dataclasses.field(default=default, metadata={"help": help, "old": old})


def warn_renamed(old: str, new: str) -> None:
    """Warn in the first process of a run, once, that the setting ``old`` is now called ``new``."""
    if old not in _WARNED and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: setting {old} is now {new}; the next release no longer accepts {old}",
            file=sys.stderr,
            flush=True,
        )
    _WARNED.add(old)


def load(settings: type[T], file: Path | None, assignments: Sequence[str] = ()) -> T:
    """Return the dataclass ``settings`` with the values of the YAML file and the assignments ``NAME=VALUE``.

    Raises:
        SettingError: the file cannot be read, or values are wrong; the message has all problems.
    """
    problems: list[str] = []
    tree = _rename_old(settings, _read(file)) if file else {}
    _check_names(settings, tree, str(file), problems)
    for assignment in assignments:
        _assign(settings, tree, assignment, problems)
    loaded = _build(settings, tree, "", problems)
    if problems:
        raise SettingError("\n".join(dict.fromkeys(problems)))
    return typing.cast(T, loaded)


def describe(settings: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return (dotted name, value as written in YAML, help) of every setting, those in groups included."""
    rows: list[tuple[str, str, str]] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            rows += describe(value, f"{prefix}{field.name}.")
        else:
            rows.append((prefix + field.name, _as_yaml(value), field.metadata.get("help", "")))
    return rows


def help_table(settings: Any) -> str:
    """Return every setting with its value and help, as a table."""
    rows = describe(settings)
    width = max(len(name) for name, _, _ in rows)
    lines = ["settings (change one with --set NAME=VALUE):"]
    for name, value, help in rows:
        shown = value if value.isprintable() and value == value.strip() else _shown(value)  # on one line
        lines.append(f"  {name:<{width}}  {shown}\n  {'':<{width}}    {help}")
    return "\n".join(lines)


def _read(file: Path) -> dict[str, Any]:
    file = _find_config(file)
    try:
        tree = _parse_yaml(input_files.read_text(file, "--config takes a YAML file of settings", max_size=_MAX_CONFIG))
    except TaskError as error:
        raise SettingError(str(error)) from None
    except ValueError as error:
        raise SettingError(f"{file}: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingError(f"{file}: must be a list of 'name: value' lines, not {_kind(tree)}")
    return tree


def _parse_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises ValueError with the reason if it is not YAML, or above the limits."""
    try:
        value = yaml.safe_load(text)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or an integer that Python does not take
        raise ValueError(f"is not valid YAML: {' '.join(str(error).split())}") from None
    input_files.check_limits(value, _MAX_VALUES)
    return value


def _find_config(file: Path) -> Path:
    """Resolve a bare name to one of the recipe's configs: --config lora. Raises SettingError if there is none."""
    configs = Path(os.environ.get("EKIBEN_RECIPE", "/nonexistent")) / "configs"
    if file.is_file() or file.name != str(file) or file.suffix or not configs.is_dir():
        return file
    named = {path.stem: path for path in configs.glob("*.yaml")}
    if file.name not in named:
        raise SettingError(f"--config {file}: neither a file nor a config of this recipe.{nearest(file.name, named)}")
    return named[file.name]


def _fields(settings: Any) -> dict[str, Any]:
    """Return field name → type; a nested dataclass stays a class."""
    return typing.get_type_hints(settings)


def _current_name(settings: Any, name: str) -> str:
    """Return the setting's name, also where ``name`` is its old one."""
    for field in dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ():
        if name and name == field.metadata.get("old"):
            warn_renamed(name, field.name)
            return field.name
    return name


def _rename_old(settings: Any, tree: Mapping[Any, Any]) -> dict[Any, Any]:
    renamed: dict[Any, Any] = {}
    for old, value in tree.items():
        name = _current_name(settings, old)
        if name in renamed or (name != old and name in tree):
            raise SettingError(f"setting {name}: is set twice, also by its former name; remove {old}")
        kind = _fields(settings).get(name)
        nested = dataclasses.is_dataclass(kind) and isinstance(value, dict)
        renamed[name] = _rename_old(kind, value) if nested else value
    return renamed


def _check_names(settings: Any, tree: Mapping[Any, Any], where: str, problems: list[str], prefix: str = "") -> None:
    known = _fields(settings)
    for name, value in tree.items():
        if name not in known:
            problems.append(f"{where}: no setting '{prefix}{name}'.{nearest(str(name), known)}")
        elif dataclasses.is_dataclass(known[name]) and isinstance(value, dict):
            _check_names(known[name], value, where, problems, f"{prefix}{name}.")


def _assign(settings: Any, tree: dict[str, Any], assignment: str, problems: list[str]) -> None:
    dotted, equals, text = assignment.partition("=")
    names = dotted.strip().split(".")
    if not equals or not all(names):
        problems.append(f"--set {assignment}: write it as --set NAME=VALUE, for example --set epochs=3")
        return
    branch, kind = tree, settings
    for depth, name in enumerate(names):
        name = names[depth] = _current_name(kind, name)
        known = _fields(kind) if dataclasses.is_dataclass(kind) else {}
        if name not in known:
            prefix = "".join(f"{parent}." for parent in names[:depth])
            problems.append(f"--set {assignment}: no setting '{prefix}{name}'.{nearest(dotted, _dotted(settings))}")
            return
        if depth < len(names) - 1:
            branch = branch.setdefault(name, {})
        kind = known[name]
    try:
        value = _parse_yaml(text)
    except ValueError:
        value = text
    # For a setting that is text, {question} is text: a template has its columns in braces. Nothing is an empty text.
    branch[names[-1]] = text if kind is str and (isinstance(value, dict) or not text) else value


def _dotted(settings: Any, prefix: str = "") -> list[str]:
    names = []
    for name, kind in _fields(settings).items():
        names += _dotted(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else [prefix + name]
    return names


def _build(settings: Any, tree: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    values = {}
    for name, kind in _fields(settings).items():
        if name not in tree:
            continue
        if dataclasses.is_dataclass(kind) and isinstance(tree[name], dict):
            values[name] = _build(kind, tree[name], f"{prefix}{name}.", problems)
            continue
        try:
            values[name] = _coerce(tree[name], kind)
        except ValueError as error:
            problems.append(f"setting {prefix}{name}: {error}")
    return settings(**values)


def _coerce(value: Any, kind: Any) -> Any:
    """Return ``value`` as ``kind``. Raises ValueError with a sentence."""
    if kind is object:
        return value
    if dataclasses.is_dataclass(kind):
        raise ValueError(f"is a group of settings ({', '.join(_fields(kind))}), not {_shown(value)}")
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _coerce_union(value, typing.get_args(kind))
    if origin is typing.Literal:
        if value in typing.get_args(kind):
            return value
        raise ValueError(f"must be one of {', '.join(map(str, typing.get_args(kind)))}, not {_shown(value)}")
    if origin in (list, tuple):
        inner = typing.get_args(kind)[0]
        items = value if isinstance(value, list) else [value]
        return origin(_coerce(item, inner) for item in items)
    return _coerce_plain(value, kind)


def _coerce_union(value: Any, kinds: Sequence[Any]) -> Any:
    reasons = []
    for kind in kinds:
        try:
            return _coerce(value, kind)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError("; or ".join(dict.fromkeys(reasons)))


def _coerce_plain(value: Any, kind: Any) -> Any:
    if kind is type(None):
        if value is None:
            return None
    elif kind is float:
        # PyYAML reads 3e-4 (no dot) as text; every user means the number.
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                number = float(value)
                if math.isfinite(number) or not any(map(str.isdigit, str(value))):  # .inf, but not 400 digits
                    return number
            except (ValueError, OverflowError):
                pass
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif isinstance(value, kind):
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "empty"}
    raise ValueError(f"must be {names.get(kind, kind)}, not {_shown(value)}")


def _kind(value: Any) -> str:
    names: dict[type, str] = {list: "a list", dict: "a group", str: "text"}
    return names.get(type(value), str(type(value).__name__))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _as_yaml(value: Any) -> str:
    if isinstance(value, float) and value and abs(value) < 1e-3:
        return f"{value:.6g}"
    if isinstance(value, str):
        return value
    return _shown(value)
