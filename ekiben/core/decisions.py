"""Log of decisions and reasons for -v: one line each, to the stream of the command line; by default none.

A line is a comment of the shell, so that it can be pasted with the commands that ``core/process.py`` traces:

    # engine: buildah (apptainer: is not installed; usable here)

A caller whose reason takes time to find asks ``is_logging()`` first.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_write: Callable[[str], None] | None = None
_written: set[str] = set()
_LOGIN = re.compile(r"(?<=://)[^/\s]*@")


def set_decision_log(write: Callable[[str], None] | None) -> None:
    """Set the destination of the lines; None: no output."""
    global _write
    _write = write
    _written.clear()


def is_logging() -> bool:
    """Return whether lines go anywhere."""
    return _write is not None


def log_decision(subject: str, choice: object, reason: str = "") -> None:
    """Write ``# subject: choice (reason)``, each line once. The user name and password of a URL are left out."""
    if _write is None:
        return
    text = f"{subject}: {choice}" + (f" ({reason})" if reason else "")
    line = "# " + " ".join(_LOGIN.sub("…@", text).split())
    if line not in _written:
        _written.add(line)
        _write(line)
