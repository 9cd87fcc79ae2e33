"""Write the record of a published version; ekiben/images/published.py defines and reads it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ekiben.builder.verify import Check
from ekiben.core.errors import EngineError, VerifyError
from ekiben.core.files import digest_of, open_regular
from ekiben.core.inner_path import AnyPath
from ekiben.core.pgp_key import Key
from ekiben.core.progress import Progress
from ekiben.images.published import RECORD_FORMAT, SBOM_SUFFIX
from ekiben.inspect.image_reader import open_sif
from ekiben.signing.gpg import Keys, SignatureError
from ekiben.signing.sif import check_sif
from ekiben.store import Image, Store
from ekiben.store.shared import user_name


def sha256_line(sha256: str, file: str) -> bytes:
    """Return the content of a .sha256 file."""
    return f"{sha256}  {file}\n".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """The SIF of a version. ``stem``: its name without .sif; ``id``: its UUID; ``key``: who signed it."""

    stem: str
    sha256: str
    size: int
    id: str
    key: Key | None


def version_record(image: Image, file: PublishedFile, checks: Sequence[Check], sbom: str | None) -> dict[str, Any]:
    """Return the record of a version that this user publishes now, but for its checksum and the former version."""
    stem, key = file.stem, file.key
    return {
        "format": RECORD_FORMAT,
        "name": image.name,
        "recipe": image.recipe,
        "version": stem.removeprefix(f"{image.name}-").rpartition("-")[0],
        "stack": image.stack,
        "description": image.description,
        "file": f"{stem}.sif",
        "sha256": file.sha256,
        "size": file.size,
        "sif": file.id,
        "signature": {"fingerprint": key.fingerprint, "user": key.user} if key else None,
        "image": image.image_id,
        "layers": [
            {
                "name": layer.name,
                "cache_key": layer.cache_key,
                "diff_id": layer.diff_id,
                "digest": layer.digest,
                "size": layer.size,
                "tar_size": layer.tar_size,
                "notes": dict(layer.notes),
            }
            for layer in image.layers
        ],
        "tasks": dict(image.tasks),
        "sbom": f"{stem}{SBOM_SUFFIX}" if sbom else None,
        "sbom_sha256": digest_of(sbom.encode()).removeprefix("sha256:") if sbom else None,
        "labels": dict(image.labels),
        "environment": dict(image.environment),
        "checks": [{"runtime": item.runtime, "seconds": item.seconds} for item in checks],
        "published": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "by": user_name(os.geteuid()),
    }


def sbom_of_file(sif: AnyPath, store: Store, progress: Progress) -> str | None:
    """Return the SBOM, None where a package database is broken."""
    from ekiben.inspect.sbom import write_sbom  # imported here: its library is slow to import

    try:
        with open_sif(sif) as reader:
            return write_sbom(reader, store, progress)
    except VerifyError as error:
        progress.log(f"no SBOM: {error}")
        return None


def signer_of(sif: AnyPath) -> Key | None:
    """Return who signed the file, by the user's keyring; None where it has no such key."""
    try:
        with open_regular(sif) as stream:
            return check_sif(Path(f"/proc/self/fd/{stream.fileno()}"), Keys())[0]
    except (SignatureError, EngineError):
        return None
