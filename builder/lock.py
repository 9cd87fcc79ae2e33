"""Writes a stack's lock files: what each layer's .in asks for, resolved on top of the layers below, with hashes, by uv."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from builder.definition import read_definition
from builder.errors import DriftError, FetchError
from builder.process import ProcessError, run
from builder.recipe import HOUSE
from builder.stack import Stack, find_stack

_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)", re.MULTILINE)


def refresh(name: str, *, check: bool) -> Iterator[str]:
    """Lock every layer of a stack, lowest first; yields a line per change. With ``check`` nothing is written.

    Errors: FetchError when the index does not answer; DriftError (``check``) when a lock is out of date.
    """
    stack = find_stack(name, [HOUSE / "images"])
    below, changes = "", 0
    for source in _layer_inputs(stack):
        target = source.with_suffix(".lock")
        old = target.read_text() if target.exists() else ""
        new = _resolve(source, below, old if check else "", stack)
        for line in _differences(old, new):
            changes += 1
            yield f"{target.relative_to(HOUSE)}: {line}"
        if new != old and not check:
            _replace(target, new)
        below += new
    if check and changes:
        raise DriftError(
            f"{changes} locked versions are not what {name}'s .in files resolve to today", hint=f"build.py lock {name}"
        )
    if not changes:
        yield f"{name}: up to date"


def _layer_inputs(stack: Stack) -> list[Path]:
    """The stack's .in files, each named for a layer, lowest layer first."""
    return sorted(stack.folder.glob("*.in"), key=lambda path: (_depth(path.stem), path.stem))


def _depth(layer: str) -> int:
    depth, path = 0, HOUSE / "images" / f"{layer}.def"
    while path.exists() and (parent := read_definition(path, root=HOUSE).final.parent) and depth < 100:
        depth, path = depth + 1, path.with_name(f"{parent}.def")
    return depth


def _resolve(source: Path, below: str, old: str, stack: Stack) -> str:
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory(prefix="ekiben-lock-") as folder:
        constraints, out = Path(folder) / "below.txt", Path(folder) / "out.lock"
        constraints.write_text(below)
        if old:
            out.write_text(old)  # uv keeps what is there as long as it still fits: only what must change shows
        try:
            run([uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate",
                 "--python-version", stack.file.python, "--python-platform", "x86_64-manylinux_2_28", "--only-binary", ":all:",
                 "--constraints", constraints, source, "--output-file", out],
                env={"UV_SYSTEM_CERTS": "1", **os.environ})  # fmt: skip
        except ProcessError as error:
            raise FetchError(f"{source} could not be resolved:\n{error.stderr.strip()}") from error
        known = {match[1].lower() for match in _PIN.finditer(below)}
        blocks = re.split(r"^(?=\S)", out.read_text(), flags=re.MULTILINE)
        return "".join(block for block in blocks if (match := _PIN.match(block)) and match[1].lower() not in known)


def _differences(old: str, new: str) -> Iterator[str]:
    before, after = ({match[1]: match[2] for match in _PIN.finditer(text)} for text in (old, new))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name} {before.get(name, '(new)')} → {after.get(name, '(gone)')}"
    if before == after and old != new:
        yield "hashes changed"


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.rename(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
