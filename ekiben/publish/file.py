"""Publish a SIF file as it is, with its signatures: one that is built, published elsewhere, or pulled.

Its layers are not offered to builds: what a file says of their cache keys is the word of whoever made it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from ekiben.builder.verify import run_sif_tests
from ekiben.core.checked import with_checksum
from ekiben.core.errors import StoreError, UsageError
from ekiben.core.files import open_regular
from ekiben.core.inner_path import InnerPath
from ekiben.core.progress import Progress
from ekiben.formats.sif import read_sif
from ekiben.images.published import REMOVED, SBOM_SUFFIX, VersionRecord, parse_record, read_records
from ekiben.inspect.image_info import SifImage, image_of_sif
from ekiben.publish.publish import (
    ATTEMPTS,
    CURRENT,
    Published,
    PublishOptions,
    has_digest,
    link,
    new_stem,
    open_destination,
    put_module,
    put_sif,
    write,
    write_readme,
)
from ekiben.publish.record import PublishedFile, sbom_of_file, sha256_line, signer_of, version_record
from ekiben.run.modulefile import module_folder
from ekiben.signing.sif import signed_copy
from ekiben.store import Store
from ekiben.store.shared import IMAGES, SharedStore


@dataclass(frozen=True, slots=True)
class _Copy:
    """A file in the shared folder that has no name there yet, and which image it is."""

    file: InnerPath
    image: SifImage
    sha256: str


def publish_file(sif: Path, store: Store, shared_dir: Path, progress: Progress, options: PublishOptions) -> Published:
    """Copy a SIF into ``shared_dir``, tested before anyone sees it, and signed with the key of ``options``.

    Raises StoreError, VerifyError, UsageError for a SIF of another builder, EngineError when gpg does not sign.
    """
    read_sif(sif)  # before anything is copied
    shared = open_destination(shared_dir, options)
    with signed_copy(sif, store, options.key, progress) as source, shared.translated_errors():
        write_readme(shared)
        for _ in range(ATTEMPTS):
            with shared.new_folder() as staging:
                staged = staging / "image.sif"
                sha256 = _copy(source, staged, shared, progress)
                copy = _Copy(staged, _image_of(staged, sif, store, progress), sha256)
                with shared.building(_keys(copy, shared)):  # before the search: prune keeps these
                    if (published := _publish(copy, shared, store, progress, options)) is not None:
                        return published
    raise StoreError(
        f"{sif} was removed from {shared_dir} again and again while it was published",
        hint="another user prunes the folder: publish it again afterwards",
    )


def _image_of(staged: InnerPath, sif: Path, store: Store, progress: Progress) -> SifImage:
    """Return the image of a copy; errors name the file that the user named."""
    try:
        return image_of_sif(staged, store, progress)
    except (StoreError, UsageError) as error:
        raise type(error)(str(error).replace(str(staged), str(sif)), hint=error.hint) from error


def _keys(copy: _Copy, shared: SharedStore) -> set[str]:
    """Return the keys of the file's layers, and those that its records there have for them."""
    records, _ = read_records(shared.folder / IMAGES / copy.image.image.name)
    layers = [
        *copy.image.image.layers,
        *(item for record in records if record.sha256 == copy.sha256 for item in record.layers),
    ]
    return {layer.cache_key for layer in layers}


def _publish(
    copy: _Copy, shared: SharedStore, store: Store, progress: Progress, options: PublishOptions
) -> Published | None:
    """Return None where a prune that began before the announcement removed the version."""
    folder = shared.folder / IMAGES / copy.image.image.name
    shared.policy.make_folder(folder)
    record = _find(folder, copy.sha256, options.version)
    is_new = record is None
    if record is None:
        record = _put(copy, shared, store, progress, options)
    if options.pin:
        write(shared, folder / f"{record.stem}.pin", b"")
    for tag in (*([CURRENT] if options.current else []), *options.tags):
        link(folder / tag, record.file)
    module = None
    if options.module or (shared.folder / module_folder(record.name)).is_folder():
        module = put_module(shared, folder, copy.image.image, record.stem)
    if record.file not in (item.file for item in read_records(folder)[0]):
        return None
    return Published((folder / record.file).path, record, record.size if is_new else 0, is_new, module)


def _copy(source: Path, target: InnerPath, shared: SharedStore, progress: Progress) -> str:
    """Return the SHA-256 of what was copied."""
    sha, size = hashlib.sha256(), source.stat().st_size
    if shared.folder.free_bytes() < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with progress.step(f"copy {source}", total=size), open_regular(source) as original, target.create() as out:
        shared.apply_permissions(out.fileno(), 0o600)
        while chunk := original.read(1 << 20):
            sha.update(chunk)
            out.write(chunk)
            progress.count(len(chunk))
    return sha.hexdigest()


def _find(folder: InnerPath, sha256: str, version: str | None) -> VersionRecord | None:
    """Return the newest record of a version whose file has these bytes; the file itself is read."""
    records = [item for item in read_records(folder)[0] if item.sha256 == sha256 and version in (None, item.version)]
    return next((item for item in reversed(records) if has_digest(folder / item.file, sha256)), None)


def _put(copy: _Copy, shared: SharedStore, store: Store, progress: Progress, options: PublishOptions) -> VersionRecord:
    image, staged, sha256 = copy.image.image, copy.file, copy.sha256
    folder = shared.folder / IMAGES / image.name
    check = run_sif_tests(image, staged, store, progress.note) if options.check else None
    sbom, signer = sbom_of_file(staged, store, progress), signer_of(staged)
    stem = new_stem(folder, image.name, options.version, sha256)
    file = PublishedFile(stem=stem, sha256=sha256, size=staged.status().st_size, id=copy.image.id, key=signer)
    record = version_record(image, file, [check] if check else [], sbom)
    record = with_checksum({**record, "previous": (folder / CURRENT).link_target()})
    try:
        parsed = parse_record(record, image.name)  # an image's metadata may be anything
    except ValueError as error:
        raise StoreError(f"the image's metadata do not fit a record: it {error}") from error
    put_sif(shared, staged, folder / f"{stem}.sif", sha256)
    write(shared, folder / f"{stem}.sif.sha256", sha256_line(sha256, f"{stem}.sif"))
    if sbom is not None:
        write(shared, folder / f"{stem}{SBOM_SUFFIX}", sbom.encode())
    (folder / f"{stem}{REMOVED}").remove(missing_ok=True)  # it is there again
    write(shared, folder / f"{stem}.json", json.dumps(record, indent=1).encode() + b"\n")
    return parsed
