"""The settings of a task: a frozen dataclass, filled from its defaults, a YAML file and ``--set key=value``, in that order.

One way in for every task, so that a typo never trains for hours: unknown names, wrong types and bad YAML are said
together, each with where it was written and the nearest name.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import logging
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

T = TypeVar("T")


class TaskError(Exception):
    """Something a user can put right: what, where, and what to do about it."""

    exit_code = 1


class SettingError(TaskError):
    exit_code = 2


def option(default: Any, help: str) -> Any:
    """A dataclass field with its line of ``--help``."""
    return dataclasses.field(default=default, metadata={"help": help})


def load(settings: type[T], file: Path | None, assignments: Sequence[str] = ()) -> T:
    """``settings`` out of the YAML file with the assignments on top. Errors: SettingError, all problems in one."""
    problems: list[str] = []
    tree = _read(file) if file else {}
    _check_names(settings, tree, str(file), problems)
    for assignment in assignments:
        _assign(settings, tree, assignment, problems)
    made = _build(settings, tree, "", problems)
    if problems:
        raise SettingError("\n".join(dict.fromkeys(problems)))
    return typing.cast(T, made)


def describe(settings: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """(dotted name, value as written in YAML, help) of every setting, nested ones too."""
    rows: list[tuple[str, str, str]] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            rows += describe(value, f"{prefix}{field.name}.")
        else:
            rows.append((prefix + field.name, _as_yaml(value), field.metadata.get("help", "")))
    return rows


def help_table(settings: Any) -> str:
    rows = describe(settings)
    width = max(len(name) for name, _, _ in rows)
    lines = ["settings (change one with --set NAME=VALUE):"]
    for name, value, help in rows:
        lines.append(f"  {name:<{width}}  {value}\n  {'':<{width}}    {help}")
    return "\n".join(lines)


def command(
    prog: str, doc: str | None, settings: type[Any], arguments: Sequence[str] | None
) -> argparse.ArgumentParser:
    """A task's parser with what every task takes, --config and --set, and its settings in --help."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    config = first.parse_known_args(arguments)[0].config
    parser = argparse.ArgumentParser(
        prog=prog, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(doc or "").strip(), epilog=help_table(load(settings, config)),
    )  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change one setting")
    return parser


def recipe_folder(config: Path | None, script: str) -> Path:
    """Where the recipe's data lies: in an image, beside a config file, or above the recipe's own entrypoints."""
    given = os.environ.get("EKIBEN_RECIPE")
    return Path(given) if given else (config or Path(script)).resolve().parent.parent


def start_processes(script: str, count: int | None, arguments: Sequence[str] | None) -> None:
    """``script`` again, ``count`` times, in the place of this process: signals and the exit code are the run's.

    Returns where there is nothing to start: none were asked for, this is one of them, or it is the only one.
    Not by torchrun, which ends with 1 whatever its processes ended with. Errors: SettingError.
    """
    if count is None or "WORLD_SIZE" in os.environ:
        return
    check_gpus(count)
    if count == 1:
        return
    here = Path(script).resolve()
    # Beside this file: a recipe's own script has it there in the image alone.
    launcher = [
        sys.executable,
        str(Path(__file__).resolve().with_name("launch_node.py")),
        "--processes",
        str(count),
        "--",
    ]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // count, 1)))
    own = sys.argv[1:] if arguments is None else arguments
    os.execv(sys.executable, [*launcher, sys.executable, str(here), *own])


def check_gpus(count: int) -> None:
    """Errors: SettingError."""
    if count < 1:
        raise SettingError(f"--gpus {count}: at least 1 is needed")


def fail(error: TaskError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code)


def run(main: Callable[[], int]) -> NoReturn:
    """Run a task's main(): a TaskError becomes one message and an exit code, ^C becomes 130."""
    # PEFT imports it, and where there is no GPU it complains of kernels for the CPU that nobody asked for.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        raise SystemExit(main())
    except TaskError as error:
        fail(error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def nearest(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the closest of ``known``, or what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(names)}." if names else ""


def _read(file: Path) -> dict[str, Any]:
    file = _find_config(file)
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingError(f"{file}: no such file; --config takes a YAML file of settings") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{file}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise SettingError(f"{file}: is not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingError(f"{file}: must be a list of 'name: value' lines, not {_kind(tree)}")
    return tree


def _find_config(file: Path) -> Path:
    """A bare name is one of the recipe's own configs: --config lora. Errors: SettingError."""
    own = Path(os.environ.get("EKIBEN_RECIPE", "/nonexistent")) / "configs"
    if file.is_file() or file.name != str(file) or file.suffix or not own.is_dir():
        return file
    named = {path.stem: path for path in own.glob("*.yaml")}
    if file.name not in named:
        raise SettingError(f"--config {file}: neither a file nor a config of this recipe.{nearest(file.name, named)}")
    return named[file.name]


def _fields(settings: Any) -> dict[str, Any]:
    """Field name → type; a nested dataclass stays a class."""
    return typing.get_type_hints(settings)


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
        known = _fields(kind) if dataclasses.is_dataclass(kind) else {}
        if name not in known:
            prefix = "".join(f"{part}." for part in names[:depth])
            problems.append(f"--set {assignment}: no setting '{prefix}{name}'.{nearest(dotted, _dotted(settings))}")
            return
        if depth < len(names) - 1:
            branch = branch.setdefault(name, {})
        kind = known[name]
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    # Where text is wanted, {question} is text: a template has its columns in braces.
    branch[names[-1]] = text if kind is str and isinstance(value, dict) else value


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
    """``value`` as ``kind``. Errors: ValueError, as a sentence."""
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
                return float(value)
            except ValueError:
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
