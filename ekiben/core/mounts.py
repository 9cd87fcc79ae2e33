"""Options of container runtimes that bind a host's folder, whatever characters its path has.

`--bind a:b` and `--volume a:b` end a path at ':' and Apptainer's also at ','. `--mount` takes a line of CSV, whose
quotes hold both. It is used where it is needed only: older versions of the programs lack it.
"""

from __future__ import annotations

import os
import re

_ENDS_PATH = re.compile(r'[:,"\\]|[^ -~\x80-\U0010ffff]')


def is_ambiguous(path: str | os.PathLike[str]) -> bool:
    """Return whether a path has characters that ``--bind`` and ``--volume`` read as their own."""
    return _ENDS_PATH.search(os.fspath(path)) is not None


def bind_args(source: str | os.PathLike[str], inside: str | None = None, *, read_only: bool = False) -> list[str]:
    """Return the arguments of Apptainer that bind ``source`` at ``inside``, by default at its own path."""
    path = os.fspath(source)
    if is_ambiguous(path) or (inside is not None and is_ambiguous(inside)):
        return ["--mount", _mount("destination", path, inside or path, read_only)]
    return ["--bind", path if inside is None else f"{path}:{inside}" + (":ro" if read_only else "")]


def volume_args(source: str | os.PathLike[str], inside: str, *, read_only: bool = False) -> list[str]:
    """Return the arguments of Docker and podman that bind ``source`` at ``inside``."""
    path = os.fspath(source)
    if is_ambiguous(path) or is_ambiguous(inside):
        return ["--mount", _mount("target", path, inside, read_only)]
    return ["--volume", f"{path}:{inside}" + (":ro" if read_only else "")]


def _mount(target: str, source: str, inside: str, read_only: bool) -> str:
    fields = [f"source={source}", f"{target}={inside}"]
    return ",".join(["type=bind", *(_quoted(field) for field in fields), *(["readonly"] if read_only else [])])


def _quoted(field: str) -> str:
    """Return a field of a CSV line (RFC 4180)."""
    return '"' + field.replace('"', '""') + '"'
