"""The formats that an image can be exported as: every module of this folder, and the entry points of
``ekiben.exporters``.

To add one, add a file here and nothing elsewhere: its name is what `build --format` takes, and it fits the Protocol
below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ekiben.core import plugins

if TYPE_CHECKING:
    from ekiben.core.progress import Progress
    from ekiben.store import Image, Store

GROUP = "ekiben.exporters"


@dataclass(frozen=True, slots=True)
class Artifact:
    """One exported image. ``ref``: a path or an image's tag; ``size`` in bytes; ``created``: False when it existed
    already; ``sha256``: 64 hex digits of a file, where they are known."""

    kind: str
    ref: str
    size: int
    created: bool
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export.

    ``squash``: one partition instead of one per layer; ``with_sha256``: a file's digest is needed afterwards;
    ``check``: tests the image of an artifact (a SIF at the path given), and raises VerifyError: what is new gets its
    name when it has passed. ``rewrite``: where only the last layer differs, the file that is there is rewritten, after
    ``check_layers`` has tested the stored layers.
    """

    squash: bool = False
    rewrite: bool = False
    check_layers: Callable[[Image], None] | None = None
    with_sha256: bool = False
    check: Callable[[Image, Artifact], None] | None = None


class Exporter(Protocol):
    """One format. As per PEP 544, ``self`` is ignored when the protocol is applied to a module."""

    PREFERENCE: int  # formats that nobody asked for are exported in this order
    SUFFIX: str | None  # suffix of its file; None: it writes no file
    FALLBACK: str | None  # the format used where this one cannot be

    def is_default(self) -> bool:
        """Return whether this format is exported when none is named."""

    def unavailable(self) -> str | None:
        """Return why this exporter cannot be used here, or None."""

    def export(self, image: Image, store: Store, target: Path, options: ExportOptions, progress: Progress) -> Artifact:
        """Export ``image``; what exists already is left.

        ``target`` is the file, which an exporter without SUFFIX ignores.
        """

    def run_commands(self, artifact: Artifact, task: str) -> Sequence[str]:
        """Return the commands that run ``task`` in what was exported, or that load it."""


def names() -> list[str]:
    """Name every exporter. Nothing is imported."""
    return plugins.names(__name__, GROUP)


def check_name(name: str) -> None:
    """Raise UsageError, with the nearest name, when there is no such exporter."""
    plugins.check(__name__, GROUP, name, option="--format", kind="format")


def load(name: str) -> Exporter:
    """Import one exporter. Raises UsageError when there is none of this name."""
    return cast(Exporter, plugins.load(__name__, GROUP, name, option="--format", kind="format"))


def run_commands(artifact: Artifact, task: str) -> Sequence[str]:
    """Return the commands that run ``task`` in an exported image."""
    return load(artifact.kind).run_commands(artifact, task)
