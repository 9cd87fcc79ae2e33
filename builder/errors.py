"""Everything that can go wrong on purpose, and the exit code each kind ends with.

EkibenError                  1   something expected went wrong
├── UsageError               2   the command line or a name on it (click's own code)
├── DefinitionError          3   a definition file, a recipe or a stack says something wrong
├── EngineError              4   no executor or runtime can be used here
├── LayerError               5   a layer's %post failed
├── StoreError               6   the store cannot be read or written
├── FetchError               7   a mirror, index or registry does not answer, or answers with other bytes
├── VerifyError              8   an image is not what it should be
├── DriftError               9   --locked, and something could not be had as locked
├── UnfitError              10   an image will not run where it is wanted
└── SchedulerError          11   a scheduler refuses a job, or does not answer
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EkibenError(Exception):
    """One message a tired person understands: what, where, and (``hint``) what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(EkibenError):
    exit_code = 2


class DefinitionError(EkibenError):
    exit_code = 3


class EngineError(EkibenError):
    exit_code = 4


class LayerError(EkibenError):
    exit_code = 5


class StoreError(EkibenError):
    exit_code = 6


class FetchError(EkibenError):
    exit_code = 7


class VerifyError(EkibenError):
    exit_code = 8


class DriftError(EkibenError):
    exit_code = 9


class UnfitError(EkibenError):
    exit_code = 10


class SchedulerError(EkibenError):
    exit_code = 11


def nearest(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the closest of ``known``, or the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(names)}." if names else ""
