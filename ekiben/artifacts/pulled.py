"""Images of registries as SIF files of this user's: pulled once by digest, and taken from there afterwards.

    pulled/<digest>-<platform>.sif     the image: of several in an index, the one for this platform
    pulled/<digest>-<platform>.json    its record: reference, digest, the file's SHA-256 and state
    pulled/references/<hash>.json      the digest that a tag named when its registry was last asked

A tag's digest is asked of the registry each time; nothing else is. Where the registry does not answer, the digest that
the tag had is used, and a line says so. The file is compared with its record by its state (ekiben/run/image.py), and
read again where that differs. The time of a record is that of the last use, by which prune_pulled() decides.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ekiben.artifacts.pull import pull
from ekiben.artifacts.push import MEDIA_SIF, MEDIA_SIF_CONFIG
from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.environment import platform
from ekiben.core.errors import FetchError, StoreError
from ekiben.core.files import atomic_write, digest_of, make_folders
from ekiben.core.process import which
from ekiben.core.progress import Progress
from ekiben.registry.client import Registry
from ekiben.registry.reference import Reference
from ekiben.registry.session import BrokenConnection
from ekiben.run.contract import is_private_folder
from ekiben.run.image import PULLED, PulledImage, SifState, sif_state
from ekiben.run.launch import OF_SIF
from ekiben.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The record of a pulled file. ``engine``: its reference by digest where it is a Docker image, else ""."""

    digest: str
    state: SifState
    engine: str

    @classmethod
    def parse(cls, data: bytes) -> _Record:
        """Read a record. Raises ValueError."""
        fields = Fields.of(parse_json(data))
        state = fields.object("state")
        known = SifState(state.text("stat"), state.text("header"), state.hex_digest("sha256"))
        return cls(digest=fields.digest("digest"), state=known, engine=fields.text("engine", ""))


def pull_once(reference: Reference, store: Store, progress: Progress, *, offline: bool = False) -> PulledImage:
    """Return the image that ``reference`` names now as a SIF, which is pulled where it is not there.

    A Docker image is left to an engine where no program here runs SIF files. ``offline``: no registry is asked.
    Raises FetchError, StoreError with the reference and what was looked for.
    """
    folder = _folder(store)
    digest, note = _digest_of(reference, folder, offline=offline)
    sif = folder / f"{_stem(digest)}.sif"
    if (record := _known(sif)) is not None:
        with contextlib.suppress(OSError):
            os.utime(sif.with_suffix(".json"))
        return PulledImage(sif, record.state.sha256, record.engine, note)
    if offline:
        return _kept_by_engine(sif, reference, digest, note)
    if note:
        raise FetchError(
            f"{note}, and that image is not in {folder}", hint="pull it where the registry answers, or try again later"
        )
    by_digest = replace(reference, tag="", digest=digest)
    manifest = Registry(by_digest).manifest(platform())
    is_sif = manifest.config.media_type == MEDIA_SIF_CONFIG or manifest.layers[0].media_type == MEDIA_SIF
    engine = "" if is_sif else str(by_digest)
    if engine and not which(*OF_SIF):
        return _left_to_engine(sif, engine)
    try:
        pull(by_digest, store, sif, progress)
    except FetchError:
        if engine and which("docker", "podman"):  # built by another program: an engine runs it
            return _left_to_engine(sif, engine)
        raise
    sha256 = (manifest.layers[0].digest if is_sif else digest_of(sif)).removeprefix("sha256:")
    state = sif_state(sif, sha256)
    _write(
        sif.with_suffix(".json"),
        {"digest": digest, "reference": str(reference), "state": asdict(state), "engine": engine},
    )
    return PulledImage(sif, sha256, engine, "")


def prune_pulled(store: Store, unused_for: float, *, dry_run: bool = False) -> list[tuple[str, int]]:
    """Remove the pulled images that nothing used for ``unused_for`` days, and files without a record that are as old.

    Returns the reference and the bytes of each; what the registry still has is pulled again when it is named.
    Raises StoreError where the folder is not this user's alone, or a file cannot be removed.
    """
    if not (store.downloads / PULLED).is_dir():
        return []
    folder, since, removed = _folder(store), time.time() - unused_for * 86400, []
    for sif in sorted(folder.glob("*.sif")):
        record = sif.with_suffix(".json")
        used = (record if record.is_file() else sif).stat().st_mtime
        if used > since:
            continue
        removed.append((_reference_of(record) or sif.name, sif.stat().st_size))
        if not dry_run:
            record.unlink(missing_ok=True)  # first: a file without its record is pulled again
            sif.unlink()
    return removed


def _reference_of(record: Path) -> str:
    """Return the reference that an image was pulled by, "" where its record cannot be read."""
    try:
        return Fields.of(parse_json(read_regular(record))).text("reference")
    except (OSError, ValueError):
        return ""


def _stem(digest: str) -> str:
    """Return the name of an image's files: a home may be that of machines of several architectures."""
    return f"{digest.removeprefix('sha256:')}-{platform().replace('/', '-')}"


def _left_to_engine(sif: Path, engine: str) -> PulledImage:
    """Return an image without its SIF; a file without a record is removed."""
    sif.unlink(missing_ok=True)
    return PulledImage(sif, "", engine, "")


def _kept_by_engine(sif: Path, reference: Reference, digest: str, note: str) -> PulledImage:
    """Return an image that an engine may have pulled before. Raises StoreError where no engine is here."""
    if not which("docker", "podman"):
        raise StoreError(f"--offline: {reference} is not in {sif.parent}", hint="run it once without --offline")
    return PulledImage(sif, "", str(replace(reference, tag="", digest=digest)), note)


def _folder(store: Store) -> Path:
    """Return the folder of pulled images, made where it is not there, for this user alone. Raises StoreError."""
    folder = store.downloads / PULLED
    try:
        make_folders(folder.parent)
        folder.mkdir(0o700, exist_ok=True)
        (folder / "references").mkdir(0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder}, for images of registries, cannot be made: {error.strerror}") from error
    if not is_private_folder(folder):
        raise StoreError(
            f"{folder} can be written by others, and images that you run are in it", hint=f"chmod 700 {folder}"
        )
    return folder


def _digest_of(reference: Reference, folder: Path, *, offline: bool) -> tuple[str, str]:
    """Return the digest of what a reference names, and a line where the registry did not say it now."""
    if reference.digest:
        return reference.digest, ""
    name = hashlib.sha256(str(replace(reference, tag=reference.tag_or_digest)).encode()).hexdigest()[:32]
    note = folder / "references" / f"{name}.json"
    if offline:
        if (known := _noted(note)) is None:
            raise StoreError(f"--offline: {reference} was not pulled before", hint="run it once without --offline")
        return known[0], f"--offline: {reference} is what it was on {known[1][:10]}, {known[0][:19]}"
    try:
        digest = Registry(reference).tag_digest(reference.tag_or_digest)
    except FetchError as error:
        known = _noted(note)
        if known is None or not isinstance(error.__cause__, BrokenConnection):
            raise
        digest, when = known
        return digest, f"{reference.host} does not answer: {reference} is what it was on {when[:10]}, {digest[:19]}"
    if digest is None:
        raise FetchError(
            f"{reference}: {reference.host} has no image {reference.repository} with the tag {reference.tag_or_digest}"
        )
    _write(note, {"reference": str(reference), "digest": digest, "asked": datetime.now(UTC).isoformat()})
    return digest, ""


def _noted(note: Path) -> tuple[str, str] | None:
    try:
        fields = Fields.of(parse_json(read_regular(note)))
        return fields.digest("digest"), fields.time("asked")
    except (OSError, ValueError):
        return None


def _known(sif: Path) -> _Record | None:
    """Return the record of a file that is there and has not changed."""
    try:
        record = _Record.parse(read_regular(sif.with_suffix(".json")))
        is_same = _stem(record.digest) == sif.stem and record.state.is_same(sif)
    except (OSError, ValueError):
        return None
    return record if is_same else None


def _write(path: Path, data: object) -> None:
    atomic_write(path, json.dumps(data).encode(), error=StoreError)
