"""Define the errors that a user can fix, and suggest the nearest known word for an unknown one."""

from __future__ import annotations

import difflib
import errno
import os
import re
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


_OS_ERROR = re.compile(r"\(os error (\d{1,4})\)")
_DISK_FAILS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def explain_disk(error: BaseException) -> str | None:
    """Return the message for a disk that is full, over its quota or read-only; None: ``error`` is of another kind."""
    path = error.filename if isinstance(error, OSError) else None
    if (reason := _disk_reason(error)) is None:
        return None
    file = f"{path}: cannot be written" if path else "a file cannot be written"
    return f"{file} ({reason}); make room and give the same command again: it resumes from the completed part"


def _disk_reason(error: BaseException) -> str | None:
    """Return why the disk takes no more, as the library that wrote tells it; None: ``error`` is of another kind."""
    if isinstance(error, OSError):
        return error.strerror if error.errno in _DISK_FAILS else None
    if match := _OS_ERROR.search(str(error)):  # safetensors' error is no OSError, and has the number in its text
        return os.strerror(int(match[1])) if int(match[1]) in _DISK_FAILS else None
    if "inline_container.cc" in str(error) and "unexpected pos" in str(error):  # torch.save's, without the reason
        return "torch could not write all of it: is the disk full, or your quota?"
    return None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of ``known``, else all of them, else an empty string."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(names)}." if names else ""
