"""A SIF as a base: what its /.singularity.d says, as files by which it holds in images on it.

The recipe's own files replace the SIF's (/.singularity.d/env/90-environment.sh, runscript, labels.json), so
they are kept under other names first.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ekiben.builder.base_config import RESERVED_LABELS
from ekiben.core.checked import Fields, parse_json
from ekiben.core.environment import DEFAULT_PATH
from ekiben.core.files import format_size
from ekiben.core.paths import TESTS
from ekiben.formats.base_config import (
    BASE,
    BASE_HELP,
    BASE_RUNSCRIPT,
    BASE_STARTSCRIPT,
    SIF_ENVIRONMENT,
    BaseConfig,
)
from ekiben.spec.environment import expand, is_known, read_table

if TYPE_CHECKING:
    from ekiben.formats.changeset import Lower

_FOLDER = ".singularity.d"
_ENVIRONMENT = SIF_ENVIRONMENT.lstrip("/")
_MAX_SIZE = 1 << 20  # bytes of a script
# Of each image that Apptainer makes, and of no build on it.
_OF_BUILD = ("org.label-schema.build-", "org.label-schema.schema-version", "org.label-schema.usage")
# Scripts of Apptainer's own, which set nothing that an image says of itself.
_OF_APPTAINER = ("01-base.sh", "90-environment.sh", "95-apps.sh", "99-base.sh", "99-runtimevars.sh")
# Apptainer sets PATH before 90-environment.sh, and not before scripts of other names.
_PATH = f'#!/bin/sh\n[ -n "${{PATH+x}}" ] || export PATH={DEFAULT_PATH}\n'.encode()
_NO_RUNSCRIPT = b'#!/bin/sh\nexec /bin/sh "$@"\n'


def sif_files(below: Lower) -> dict[str, tuple[int, bytes]]:
    """Return the files: path → (mode, content). Raises ValueError for what cannot be read."""
    config = BaseConfig(environment={}, user=_user(below), labels=_labels(below))
    files = {"/" + BASE: (0o644, config.record().encode("utf-8", "surrogateescape"))}
    if _has_code(environment := _script(below, f"{_ENVIRONMENT}/90-environment.sh", ".")):
        files[f"/{_ENVIRONMENT}/{_free_name(below)}"] = (0o755, _PATH + environment)
    run = _script(below, f"{_FOLDER}/runscript") or _NO_RUNSCRIPT
    if BASE_RUNSCRIPT.encode() not in run:  # an image of Ekiben's calls that of its own base
        files[BASE_RUNSCRIPT] = (0o755, run)
    start, test = _script(below, f"{_FOLDER}/startscript"), _script(below, f"{_FOLDER}/test")
    if _has_code(start) and BASE_STARTSCRIPT.encode() not in start:
        files[BASE_STARTSCRIPT] = (0o755, start)
    if _has_code(test) and TESTS.encode() not in test:
        files[f"{TESTS}/00-base.sh"] = (0o755, test)
    if text := _read(below, f"{_FOLDER}/runscript.help"):
        files[BASE_HELP] = (0o644, text)
    return files


def base_scripts(below: Lower) -> list[str]:
    """Return the texts of a SIF's scripts that set its environment, of which there need not be any."""
    return [text.removeprefix(_PATH).decode("utf-8", "replace") for text in _base_scripts(below)]


def known_environment(scripts: Sequence[str]) -> dict[str, str] | None:
    """Return what scripts set that are tables of values; None where only a shell knows."""
    environment: dict[str, str] = {"PATH": DEFAULT_PATH}
    for text in scripts:
        table = read_table(text.split("\n"))
        if table is None or not is_known(table, environment):
            return None
        environment = expand(table, environment)
    return environment


def _base_scripts(below: Lower) -> Iterator[bytes]:
    for name in map(posixpath.basename, below.children(_ENVIRONMENT)):
        text = b"" if name in _OF_APPTAINER else _script(below, f"{_ENVIRONMENT}/{name}", ".")
        if name.endswith(".sh") and _has_code(text):
            yield text


def _free_name(below: Lower) -> str:
    """Return the name of a script that comes after those below it, and before that of the recipe."""
    names = {posixpath.basename(name) for name in below.children(_ENVIRONMENT)}
    return next(name for number in range(100) if (name := f"89-base-{number:02}.sh") not in names)


def _read(below: Lower, path: str) -> bytes:
    entry = below.lookup(path)
    if entry is None or entry.kind != "file":
        return b""
    if entry.size > _MAX_SIZE:
        raise ValueError(f"/{path} has {format_size(entry.size)}, more than {format_size(_MAX_SIZE)}")
    return below.read_file(path)


def _script(below: Lower, path: str, verb: str = "exec") -> bytes:
    """Return a script, for a link one that runs its target; nothing where neither exists."""
    entry = below.lookup(path)
    if entry is not None and entry.kind == "symlink":
        target = posixpath.normpath(posixpath.join("/", posixpath.dirname(path), entry.target))
        arguments = "" if verb == "." else ' "$@"'
        return f"#!/bin/sh\n{verb} {shlex.quote(target)}{arguments}\n".encode("utf-8", "surrogateescape")
    return _read(below, path)


def _has_code(script: bytes) -> bool:
    return any(line.strip() and not line.lstrip().startswith(b"#") for line in script.split(b"\n"))


def _user(below: Lower) -> str:
    """Return the user of an image of Ekiben's, which had one of its own base."""
    text = _read(below, BASE)
    try:
        return BaseConfig.parse(text).user if text else ""
    except ValueError as error:
        raise ValueError(f"/{BASE} {error}") from error


def _labels(below: Lower) -> dict[str, str]:
    text = _read(below, f"{_FOLDER}/labels.json")
    try:
        labels = Fields.of({"labels": parse_json(text)}).texts("labels") if text.strip() else {}
    except ValueError as error:
        raise ValueError(f"/{_FOLDER}/labels.json {error}") from error
    return {name: value for name, value in labels.items() if not name.startswith((*RESERVED_LABELS, *_OF_BUILD))}
