"""Write records again that are missing in a shared folder, each from its image.

Whoever may write to the folder can remove a record, and with it hide a version. The SIF says what it is: it is read
whole, and its name has the first digits of its checksum. Whoever repairs is the owner of the new record; the publisher
is still the owner of the SIF.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ekiben.core.checked import with_checksum
from ekiben.core.errors import EkibenError, StoreError
from ekiben.core.files import digest_of
from ekiben.core.inner_path import InnerPath
from ekiben.core.progress import Progress
from ekiben.images.published import (
    REMOVED,
    SBOM_SUFFIX,
    UnrecordedVersion,
    image_folders,
    parse_record,
    read_record,
    unrecorded_versions,
)
from ekiben.inspect.image_info import image_of_sif
from ekiben.publish.prune import is_being_published
from ekiben.publish.record import PublishedFile, sbom_of_file, sha256_line, signer_of, version_record
from ekiben.store import Store
from ekiben.store.shared import SharedStore, open_shared


@dataclass(frozen=True, slots=True)
class RepairedVersion:
    """A version without a usable record; ``reason``: why it could not be written, "" where it was."""

    file: str
    reason: str


def repair(shared_dir: Path, store: Store, progress: Progress) -> list[RepairedVersion]:
    """Write the record of each version that lacks one. ``store``: the user's own.

    Raises StoreError when the folder cannot be read or written.
    """
    shared = open_shared(shared_dir)
    repaired = []
    with shared.translated_errors():
        shared.open_for_writing()
        for folder in image_folders(shared.folder):
            for version in unrecorded_versions(folder):
                try:
                    if _repair(shared, folder, version, store, progress):
                        repaired.append(RepairedVersion(version.file, ""))
                except (EkibenError, ValueError, OSError) as error:
                    repaired.append(RepairedVersion(version.file, str(error)))
    return repaired


def _repair(
    shared: SharedStore, folder: InnerPath, version: UnrecordedVersion, store: Store, progress: Progress
) -> bool:
    """Return False where the version has got a record meanwhile."""
    sif = folder / version.file
    if version.is_newer:
        raise StoreError(version.reason)
    if (folder / f"{version.stem}{REMOVED}").lexists():
        raise StoreError(f"its removal was interrupted; to keep it, remove {version.stem}{REMOVED}")
    if is_being_published(shared, version, sif.status()):
        raise StoreError("another process publishes in this folder, and may be writing it: repair it afterwards")
    with sif.open_file() as stream:  # opened once: its name may change to another file
        status = os.fstat(stream.fileno())
        record, sbom = _read(Path(f"/proc/self/fd/{stream.fileno()}"), version, status, store, progress)
    parse_record(record, folder.name)  # an image's metadata may be anything
    with contextlib.suppress(ValueError):  # reading it took minutes
        read_record(folder / f"{version.stem}.json")
        return False
    if not _is_same(sif, status) or (folder / f"{version.stem}{REMOVED}").lexists():
        raise StoreError("it was changed or removed while it was read")
    shared.write_file(folder / f"{version.file}.sha256", sha256_line(record["sha256"], version.file))
    if sbom is not None:
        shared.write_file(folder / f"{version.stem}{SBOM_SUFFIX}", sbom.encode())
    shared.write_file(folder / f"{version.stem}.json", json.dumps(with_checksum(record), indent=1).encode() + b"\n")
    return True


def _is_same(path: InnerPath, before: os.stat_result) -> bool:
    """Return whether the file of this status still has this path."""
    with contextlib.suppress(FileNotFoundError):
        now = path.status()
        return all(
            getattr(now, name) == getattr(before, name) for name in ("st_dev", "st_ino", "st_size", "st_mtime_ns")
        )
    return False


def _read(
    sif: Path, version: UnrecordedVersion, status: os.stat_result, store: Store, progress: Progress
) -> tuple[dict[str, Any], str | None]:
    """Return the record of an open file, and its SBOM. Raises StoreError, UsageError."""
    with progress.step(f"read {version.file}", total=status.st_size):
        sha256 = digest_of(sif).removeprefix("sha256:")
    if not version.stem.endswith(f"-{sha256[:12]}"):
        raise StoreError(f"{version.file} is damaged: its SHA-256 is {sha256}, and that in its name differs")
    try:
        sif_image = image_of_sif(sif, store, progress, version.name)
        sbom = sbom_of_file(sif, store, progress)
    except EkibenError as error:
        raise StoreError(str(error).replace(str(sif), version.file)) from error
    file = PublishedFile(stem=version.stem, sha256=sha256, size=status.st_size, id=sif_image.id, key=signer_of(sif))
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    record = version_record(sif_image.image, file, (), sbom)
    return record | {"published": version.written, "previous": None, "repaired": now}, sbom
