"""Remove versions that nobody uses from a shared folder, and the layers that no other version has."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from ekiben.core.errors import StoreError, UsageError, nearest
from ekiben.core.inner_path import InnerPath
from ekiben.images.published import (
    REMOVED,
    SBOM_SUFFIX,
    UnrecordedVersion,
    VersionRecord,
    image_folders,
    read_records,
    removal_note,
    tags,
    unrecorded_versions,
)
from ekiben.run.modulefile import MODULES
from ekiben.store.shared import IMAGES, SharedStore, open_shared

_OF_A_VERSION = re.compile(r"(.+)\.(sif|sif\.sha256|cdx\.json|runs|module|bin)")
_DAY = 86400

Version: TypeAlias = VersionRecord | UnrecordedVersion


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """The decision to keep or remove one version, with its reason. ``size`` in bytes."""

    file: str
    size: int
    keep: bool
    reason: str


def published(shared_dir: Path) -> dict[str, list[VersionRecord]]:
    """Return every image of the folder: name → its versions, oldest first. Raises StoreError."""
    try:
        return {folder.name: read_records(folder)[0] for folder in image_folders(open_shared(shared_dir).folder)}
    except OSError as error:
        raise StoreError(f"{shared_dir / IMAGES} cannot be read: {error.strerror}") from error


def _all_versions(shared: SharedStore) -> dict[str, list[Version]]:
    """Return every version, with and without its record: image → its versions. Raises StoreError."""
    try:
        folders = image_folders(shared.folder)
        return {folder.name: [*read_records(folder)[0], *unrecorded_versions(folder)] for folder in folders}
    except OSError as error:
        raise StoreError(f"{shared.shared_dir / IMAGES} cannot be read: {error.strerror}") from error


def prune(
    shared_dir: Path, *, names: Sequence[str] = (), unused_for: float = 30, grace: float = 7, dry_run: bool = False
) -> tuple[list[PruneDecision], int, int]:
    """Remove versions that nobody used for ``unused_for`` days, and with them layers that no other version has.

    What is pinned or tagged stays. A version whose record is missing is treated like the others. ``names`` are files,
    or images whose other versions are all removed. A removed version is moved to trash/ and deleted ``grace`` days
    later: until then, a job that started with it continues.
    Returns the decisions, and the bytes moved aside and removed for good. Raises StoreError, UsageError.
    """
    shared = open_shared(shared_dir)
    known = _all_versions(shared)
    _refuse_unknown(names, known)
    decisions = []
    for record in (record for versions in known.values() for record in versions):
        with contextlib.suppress(FileNotFoundError):  # another prune is running
            decisions.append(_decide(shared, record, names, unused_for))
    going = [decision.file.removesuffix(".sif") for decision in decisions if not decision.keep]
    with shared.translated_errors():
        if not dry_run:
            shared.open_for_writing()
            for name, versions in known.items():
                for record in versions:
                    if record.stem in going and _is_kept_by_now(shared, record, names, unused_for):
                        going.remove(record.stem)
                    elif record.stem in going:
                        _discard_version(shared, shared.folder / IMAGES / name, record)
                _discard_strays(shared, shared.folder / IMAGES / name)
            _discard_dangling(shared)
            shared.drop_dangling()
        removed = shared.empty_trash(grace * _DAY, dry_run=dry_run)
    return decisions, sum(decision.size for decision in decisions if not decision.keep), removed


def _refuse_unknown(names: Sequence[str], known: Mapping[str, Sequence[Version]]) -> None:
    files = [record.file for versions in known.values() for record in versions]
    for name in names:
        if name not in known and name not in files:
            raise UsageError(f"nothing named '{name}' was published there." + nearest(name, [*known, *files]))


def _decide(shared: SharedStore, record: Version, names: Sequence[str], unused_for: float) -> PruneDecision:
    folder = shared.folder / IMAGES / record.name
    named = [tag for tag, target in sorted(tags(folder).items()) if target == record.file]
    status = (folder / record.file).status()
    days = (time.time() - shared.last_use(status)) / _DAY
    if (folder / f"{record.stem}.pin").lexists():
        keep, reason = True, "pinned"
    elif named:
        keep, reason = True, f"tagged {', '.join(named)}"
    elif is_being_published(shared, record, status):
        keep, reason = True, "being published"
    elif isinstance(record, UnrecordedVersion) and (folder / f"{record.stem}{REMOVED}").lexists():
        keep, reason = False, "its removal was interrupted"
    elif record.name in names or record.file in names:
        keep, reason = False, "asked for"
    elif not shared.knows_last_use():
        keep, reason = True, "its last use is not known here (noatime): name it to remove it"
    else:
        keep, reason = days < unused_for, f"last used {days:.0f} days ago"
    missing = f", and {record.reason}" if isinstance(record, UnrecordedVersion) else ""
    return PruneDecision(record.file, record.size, keep, reason + missing)


def is_being_published(shared: SharedStore, record: Version, status: os.stat_result) -> bool:
    """Return whether a running publisher needs it; a SIF without a record may be its new one."""
    announced = shared.announced_keys()
    if isinstance(record, VersionRecord):
        return record.layers[-1].cache_key in announced
    return bool(announced) and status.st_mtime > time.time() - _DAY


def _is_kept_by_now(shared: SharedStore, record: Version, names: Sequence[str], unused_for: float) -> bool:
    """Return whether a version is kept now: a publisher may have announced it after the first look."""
    try:
        return _decide(shared, record, names, unused_for).keep
    except FileNotFoundError:  # another prune removed it
        return False


def _discard_version(shared: SharedStore, folder: InnerPath, version: Version) -> None:
    """Note that this user removes a version, and remove it, its record first: without it there is none."""
    stem = version.stem
    shared.write_file(folder / f"{stem}{REMOVED}", removal_note(version))
    beside = [path for path in folder.entries() if path.name.startswith(f"{stem}.") and path.name != f"{stem}{REMOVED}"]
    beside.sort(key=lambda path: path.name != f"{stem}.json")
    for path in beside:
        with contextlib.suppress(FileNotFoundError):
            shared.discard(path)
    if f"{stem}.sif" in tags(folder).values():  # a publisher creates the link, then checks that the file exists
        for path in beside[::-1]:
            shared.restore(path)
        (folder / f"{stem}{REMOVED}").remove(missing_ok=True)


def _discard_strays(shared: SharedStore, folder: InnerPath) -> None:
    """Remove files of killed publishers: without a record, or with a temporary name, both a day old."""
    entries = folder.entries()
    records = [path.name for path in entries if path.name.endswith(".json") and not path.name.endswith(SBOM_SUFFIX)]
    recorded = {name.removesuffix(".json") for name in records}
    recorded |= {version.stem for version in unrecorded_versions(folder)}
    for path in entries:
        with contextlib.suppress(FileNotFoundError):
            status = path.status()
            match = None if stat.S_ISLNK(status.st_mode) else _OF_A_VERSION.fullmatch(path.name)
            stray = path.name.startswith(".") or (match is not None and match[1] not in recorded)
            if stray and status.st_mtime < time.time() - _DAY:
                shared.discard(path)


def _discard_dangling(shared: SharedStore) -> None:
    """Remove links to modulefiles of versions that are gone.

    A folder that is a link is not entered: it may lead elsewhere.
    """
    folders = [shared.folder / MODULES]
    for _ in range(2):
        folders = [path for folder in folders if folder.is_folder() for path in folder.entries() if path.is_folder()]
    for path in (path for folder in folders for path in folder.entries()):
        with contextlib.suppress(FileNotFoundError):
            target = path.link_target()
            if target is not None and not _module_exists(shared, path, target):
                shared.discard(path)


def _module_exists(shared: SharedStore, link: InnerPath, target: str) -> bool:
    """Return whether a link of modulefiles/ekiben/IMAGE names a modulefile in images/IMAGE."""
    inner = PurePosixPath(os.path.normpath(PurePosixPath(*link.parts[:-1], target)))
    return ".." not in inner.parts and not inner.is_absolute() and (shared.folder / inner).is_regular()
