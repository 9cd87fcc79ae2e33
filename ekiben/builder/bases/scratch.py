"""An empty base: ``Bootstrap: scratch``. %files and %files from fill it; a %post needs a shell among these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben.formats.changeset import PLACEHOLDERS
from ekiben.formats.layer import Entry, sort_key

if TYPE_CHECKING:
    from ekiben.formats.layer import LayerEntry
    from ekiben.packages.host_config import PackageSources
    from ekiben.resolve.graph import Layer

# Where runtimes mount, as Apptainer makes them; other users than root need the last two.
_FOLDERS = ("", "dev", "etc", "home", "proc", "root", "run", "sys", "var")
_OPEN = ("tmp", "var/tmp")


def header_problems(header: Mapping[str, str]) -> list[str]:
    """Return nothing: the header has no further key."""
    return []


def key_inputs(header: Mapping[str, str]) -> dict[str, str]:
    """Return the agent's name, which says all."""
    return {"bootstrap": header["bootstrap"]}


def entries(
    layer: Layer, staging: Path, notes: dict[str, Any], sources: PackageSources, log: Callable[[str], None]
) -> Iterator[LayerEntry]:
    """Yield the folders that runtimes mount over."""
    yield from ((entry, None) for entry in sorted(folder_entries(layer.epoch), key=lambda entry: sort_key(entry.path)))


def folder_entries(epoch: int) -> list[Entry]:
    """Return the folders of a root file system, and the empty files that runtimes mount over."""
    items = [Entry(path, "dir", 0o755, mtime=epoch) for path in _FOLDERS]
    items += [Entry(path, "dir", 0o1777, mtime=epoch) for path in _OPEN]
    return items + [Entry(path, "file", 0o644, mtime=epoch) for path in PLACEHOLDERS]
