"""Write records anew that are missing in a shared folder, each from its image.

Whoever may write to the folder can remove a record, and with it hide a version. The SIF says what it is: it is read
whole, and its name has the first digits of its checksum. Whoever repairs is the owner of the new record.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

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
    unrecorded_versions,
)
from ekiben.inspect.image_info import image_of_sif
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
                    _repair(shared, folder, version, store, progress)
                    repaired.append(RepairedVersion(version.file, ""))
                except (EkibenError, ValueError, OSError) as error:
                    repaired.append(RepairedVersion(version.file, str(error)))
    return repaired


def _repair(
    shared: SharedStore, folder: InnerPath, version: UnrecordedVersion, store: Store, progress: Progress
) -> None:
    if version.is_newer:
        raise StoreError(version.reason)
    sif = folder / version.file
    with progress.step(f"read {version.file}", total=version.size):
        sha256 = digest_of(sif).removeprefix("sha256:")
    if not version.stem.endswith(f"-{sha256[:12]}"):
        raise StoreError(f"{version.file} is damaged: its SHA-256 is {sha256}, and its name has another one")
    sif_image = image_of_sif(sif, store, progress, version.name)
    sbom = sbom_of_file(sif, store, progress)
    file = PublishedFile(stem=version.stem, sha256=sha256, size=version.size, id=sif_image.id, key=signer_of(sif))
    record = version_record(sif_image.image, file, (), sbom)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    record |= {"published": version.written, "previous": None, "repaired": now}
    parse_record(record, folder.name)  # what an image says of itself may be anything
    (folder / f"{version.stem}{REMOVED}").remove(missing_ok=True)
    shared.write_file(folder / f"{version.file}.sha256", sha256_line(sha256, version.file))
    if sbom is not None:
        shared.write_file(folder / f"{version.stem}{SBOM_SUFFIX}", sbom.encode())
    shared.write_file(folder / f"{version.stem}.json", json.dumps(with_checksum(record), indent=1).encode() + b"\n")
