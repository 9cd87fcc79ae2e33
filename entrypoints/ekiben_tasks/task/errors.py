"""Define the errors that a user can fix, and suggest the nearest known word for an unknown one."""

from __future__ import annotations

import difflib
import errno
import os
import traceback
from collections.abc import Iterable


class TaskError(Exception):
    """Report a problem that a user can fix. The message says what is wrong, where, and what to do about it."""

    exit_code = 1


class SettingError(TaskError):
    """Report a wrong setting or option."""

    exit_code = 2


class DoesNotFitError(TaskError):
    """Report that a run needs more memory than there is. Programs that submit jobs know it by the exit code."""

    exit_code = 3


def print_frames(error: BaseException) -> None:
    """Print the frames of an expected error to stderr if EKIBEN_TRACEBACK is set to anything but 0."""
    if os.environ.get("EKIBEN_TRACEBACK", "") not in ("", "0"):
        traceback.print_exception(error)


_DISK_FAILS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def explain_disk(error: BaseException) -> str | None:
    """Return the message for a disk that is full, over its quota or read-only; None: ``error`` is of another kind."""
    if not isinstance(error, OSError) or error.errno not in _DISK_FAILS:
        return None
    file = f"{error.filename}: cannot be written" if error.filename else "a file cannot be written"
    return f"{file} ({error.strerror}); make room and give the same command again: it resumes from the completed part"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of ``known``, else all of them, else an empty string."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(names)}." if names else ""
