"""The errors that a user can meet, and the exit code of each kind.

EkibenError                  1   something expected went wrong
├── UsageError               2   the command line or a name on it (click's own code)
├── DefinitionError          3   a definition file, a recipe or a stack says something wrong
├── EngineError              4   no executor or runtime can be used here
├── LayerError               5   a layer's %post failed
├── StoreError               6   the store cannot be read or written
├── FetchError               7   a mirror, index or registry does not answer, or answers with other bytes
├── VerifyError              8   an image fails its verification
├── LockMismatchError        9   a package differs from its lock under --locked
├── IncompatibleHostError   10   an image will not run on the host that was named
└── SchedulerError          11   a scheduler refuses a job, or does not answer
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EkibenError(Exception):
    """An expected error. The message says what failed and where; ``hint`` says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(EkibenError):
    """The command line is wrong, or names something that does not exist."""

    exit_code = 2


class DefinitionError(EkibenError):
    """A recipe, stack, definition file, site profile or config.yaml is wrong."""

    exit_code = 3


class EngineError(EkibenError):
    """No executor, runtime or scheduler on this machine can do it."""

    exit_code = 4


class LayerError(EkibenError):
    """A layer could not be made."""

    exit_code = 5


class StoreError(EkibenError):
    """A store, a file or a folder is damaged, or cannot be read or written."""

    exit_code = 6


class FetchError(EkibenError):
    """Something could not be downloaded or uploaded."""

    exit_code = 7


class VerifyError(EkibenError):
    """A test of an image failed, or a file is not what it should be."""

    exit_code = 8


class LockMismatchError(EkibenError):
    """Something is not as locked."""

    exit_code = 9


class IncompatibleHostError(EkibenError):
    """The image cannot run on this machine."""

    exit_code = 10


class SchedulerError(EkibenError):
    """The scheduler refused or failed."""

    exit_code = 11


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest of ``known``, or the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Known: {', '.join(names)}." if names else ""


OR_SYNC = ", or --sync with build, run and submit"  # the end of its hint


class NotLockedError(DefinitionError):
    """A lock file is missing or out of date: `lock` mends it, and --sync does so by itself."""


class CorruptBlob(StoreError):
    """A blob's bytes are not those of its digest."""

    def __init__(self, digest: str, path: object) -> None:
        super().__init__(f"blob {digest} is damaged: {path} has other bytes than its name says")
        self.digest, self.path = digest, str(path)

    def __reduce__(self) -> tuple[type[CorruptBlob], tuple[str, str]]:
        return CorruptBlob, (self.digest, self.path)  # pickled from one process to another
