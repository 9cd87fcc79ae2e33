"""Define the errors that a user can fix, and suggest the nearest known word for an unknown one."""

from __future__ import annotations

import difflib
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


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of ``known``, else all of them, else an empty string."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(names)}." if names else ""
