"""Read the records of a shared folder's versions, which any of its writers may have written.

A version is there when its record is: the record is written last, and removed first. Who published it is the owner of
its SIF, as the kernel knows it; its record may be another user's, who wrote it again. A SIF whose record somebody
removed or damaged is a version without a record (unrecorded_versions()): ekiben/publish/repair.py writes it again.

The record, one JSON object:

    format       1
    name, recipe, version, stack, description
    file         the SIF's name in this folder: <name>-<version>-<first 12 digits of sha256>.sif
    sha256, size the SIF's (bytes)
    sif          its UUID; equal ones promise equal files, but for their signatures
    signature    fingerprint and user id of the PGP key that signed the SIF; null when nobody did
    image        the digest of its config: the image id in a Docker daemon
    layers       bottom first: name, cache_key, diff_id, digest, size, tar_size, notes (drift, for one)
    tasks        name → what it does
    sbom         the name of its SBOM in this folder; null where a package database of the image is broken
    sbom_sha256  that file's; missing in records of earlier versions
    labels, environment
    checks       runtime and seconds of every test that passed before it was published
    published    when (UTC, ISO 8601); by: the login name of its writer, who may write anything here: readers take the
                 owner of the SIF
    repaired     when the record was written again from the image; missing where it was not
    previous     the file that `current` named before; null at first
    checksum     of all other fields (ekiben/core/checked.py); missing in records of earlier versions

A later version may add fields.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from ekiben.core.checked import Fields, is_basename, parse_json, without_checksum
from ekiben.core.inner_path import InnerPath
from ekiben.core.pgp_key import Key
from ekiben.formats import oci
from ekiben.formats.sif import DATA_AT
from ekiben.store import StoredLayer
from ekiben.store.shared import IMAGES, user_name

RECORD_FORMAT = 1
SBOM_SUFFIX = ".cdx.json"  # as CycloneDX has it
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+]{0,63}")
_RECORD_FILE = re.compile(r".+-[0-9a-f]{12}\.json")  # does not match <stem>.cdx.json
_SIF_FILE = re.compile(rf"(.+)-({VERSION.pattern})-[0-9a-f]{{12}}\.sif")
_MAX_RECORD = 4 << 20  # bytes
_MAX_REMOVAL = 1 << 16
RECORD_MISSING = "its record is missing"
REMOVED = ".removed"  # in the folder of a removed version: its owner is who removed it


@dataclass(frozen=True, slots=True)
class PassedCheck:
    """A test that passed before the version was published."""

    runtime: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One published version.

    ``by`` is the owner of the SIF; ``recorded_by``: the owner of the record where they differ, else "";
    ``data`` is the record as it was read, with fields that this version of Ekiben does not know.
    """

    name: str
    recipe: str
    version: str
    stack: str
    description: str
    file: str
    sha256: str
    size: int
    sif: str
    signature: Key | None
    image: str
    layers: tuple[StoredLayer, ...]
    tasks: Mapping[str, str]
    sbom: str | None
    sbom_sha256: str | None
    environment: Mapping[str, str]
    checks: tuple[PassedCheck, ...]
    published: str
    by: str
    previous: str | None
    data: Mapping[str, Any]
    recorded_by: str = ""

    @property
    def stem(self) -> str:
        """Return the name that the version's files begin with."""
        return self.file.removesuffix(".sif")

    @property
    def added_layers(self) -> tuple[str, ...]:
        """Return the layers added to the recipe's."""
        labels = self.data.get("labels")
        return tuple(str(labels.get(oci.LAYER_LABEL, "")).split()) if isinstance(labels, Mapping) else ()


class NewerRecord(ValueError):
    """A record of a later version of Ekiben, which is not damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrecordedVersion:
    """A SIF of a version whose record is missing or cannot be used; ``reason`` says which.

    ``by``: the owner of the SIF; ``written``: when it was (UTC, ISO 8601); ``is_newer``: its record is one of a later
    version of Ekiben.
    """

    name: str
    version: str
    file: str
    size: int
    by: str
    written: str
    reason: str
    is_newer: bool = False

    @property
    def stem(self) -> str:
        """Return the name that the version's files begin with."""
        return self.file.removesuffix(".sif")


@dataclass(frozen=True, slots=True)
class Removal:
    """A version that was removed: ``by`` is the owner of the note about it; ``removed``: when (UTC, ISO 8601)."""

    file: str
    by: str
    removed: str


def read_record(path: InnerPath) -> VersionRecord:
    """Read the record ``path`` of a version in its image's folder.

    Raises ValueError that says what is wrong with it.
    """
    try:
        data, owner = _read_owned(path, _MAX_RECORD)
        record = parse_record(parse_json(data), path.parent.name)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if record.stem != path.name.removesuffix(".json"):
        raise ValueError(f"'file' belongs to another version: {record.file}")
    try:
        status = path.with_name(record.file).status()
    except OSError as error:
        raise ValueError(f"its {record.file} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"its {record.file} is not a regular file")
    if status.st_size != record.size:
        raise ValueError(f"its {record.file} has {status.st_size} bytes of {record.size}")
    recorded_by = user_name(owner) if owner != status.st_uid else ""
    return replace(record, by=user_name(status.st_uid), recorded_by=recorded_by)


def _read_owned(path: InnerPath, max_size: int) -> tuple[bytes, int]:
    """Return the content of a file, and its owner. Raises OSError, ValueError for a larger one."""
    with path.open_file() as stream:
        status = os.fstat(stream.fileno())
        if status.st_size > max_size:
            raise ValueError(f"has {status.st_size} bytes, more than {max_size}")
        return stream.read(status.st_size), status.st_uid


def parse_record(data: object, name: str) -> VersionRecord:
    """Check the record of a version of the image ``name``. Raises ValueError."""
    fields = Fields.of(data)
    if fields.size("format") != RECORD_FORMAT:
        raise NewerRecord(f"is of format {fields.size('format')}; this Ekiben reads format {RECORD_FORMAT}")
    fields = Fields(without_checksum(fields.data))
    if fields.name("name") != name:
        raise ValueError(f"'name' belongs to another image: {fields.name('name')}")
    version, sha256 = fields.matching("version", VERSION, "a version"), fields.hex_digest("sha256")
    if fields.basename("file") != f"{name}-{version}-{sha256[:12]}.sif":
        raise ValueError(f"'file' belongs to another version: {fields.basename('file')}")
    layers = tuple(StoredLayer.parse(layer) for layer in fields.objects("layers"))
    if not layers:
        raise ValueError("'layers' is empty")
    signer = fields.object("signature") if "signature" in fields else None
    return VersionRecord(
        name=name,
        recipe=fields.name("recipe"),
        version=version,
        stack=fields.basename("stack"),
        description=fields.text("description"),
        file=fields.basename("file"),
        sha256=sha256,
        size=fields.size("size"),
        sif=fields.text("sif"),
        signature=Key(signer.text("fingerprint"), signer.text("user", "")) if signer else None,
        image=fields.digest("image"),
        layers=layers,
        tasks=fields.texts("tasks"),
        environment=fields.texts("environment"),
        checks=tuple(PassedCheck(check.text("runtime"), check.number("seconds")) for check in fields.objects("checks")),
        published=fields.time("published"),
        by=fields.text("by"),
        sbom=fields.basename("sbom") if "sbom" in fields else None,
        sbom_sha256=fields.hex_digest("sbom_sha256") if "sbom_sha256" in fields else None,
        previous=fields.basename("previous") if "previous" in fields else None,
        data=fields.data,
    )


def record_files(folder: InnerPath) -> list[InnerPath]:
    """Return the files of ``folder`` that are records by their names."""
    try:
        return [path for path in folder.entries() if _RECORD_FILE.fullmatch(path.name)]
    except FileNotFoundError:  # nothing was published under this name
        return []


def read_records(folder: InnerPath) -> tuple[list[VersionRecord], list[tuple[str, str]]]:
    """Return the versions of the image in ``folder``, oldest first, and (file, reason) of each record that cannot be
    used.
    """
    records, skipped = list[VersionRecord](), list[tuple[str, str]]()
    for path in record_files(folder):
        try:
            if not path.name.isprintable():
                raise ValueError("has a name that cannot be shown")
            records.append(read_record(path))
        except ValueError as error:
            skipped.append((path.name, str(error)))
    return sorted(records, key=lambda record: (record.published, record.file)), skipped


def unrecorded_versions(folder: InnerPath) -> list[UnrecordedVersion]:
    """Return the versions of the image in ``folder`` whose record is missing or cannot be used, sorted by file.

    No SIF is read: that would count as its last use. Raises OSError.
    """
    versions = []
    for path in folder.entries():
        match = _SIF_FILE.fullmatch(path.name)
        if match is None or match[1] != folder.name:
            continue
        reason, is_newer = RECORD_MISSING, False
        try:
            read_record(path.with_name(f"{path.name.removesuffix('.sif')}.json"))
            continue
        except ValueError as error:
            if path.with_name(f"{path.name.removesuffix('.sif')}.json").lexists():
                reason, is_newer = f"its record {error}", isinstance(error, NewerRecord)
        with contextlib.suppress(OSError):  # prune is at work
            status = path.status()
            if not stat.S_ISREG(status.st_mode) or status.st_size < DATA_AT:  # less than a SIF's header and table
                continue
            versions.append(
                UnrecordedVersion(
                    name=folder.name,
                    version=match[2],
                    file=path.name,
                    size=status.st_size,
                    by=user_name(status.st_uid),
                    written=datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="milliseconds"),
                    reason=reason,
                    is_newer=is_newer,
                )
            )
    return versions


def removals(folder: InnerPath) -> list[Removal]:
    """Return the versions of the image in ``folder`` that were removed, oldest first. Raises OSError."""
    removed = []
    for path in folder.entries():
        file = f"{path.name.removesuffix(REMOVED)}.sif"
        if path.name.endswith(REMOVED) and _SIF_FILE.fullmatch(file) and not path.with_name(file).lexists():
            with contextlib.suppress(OSError, ValueError):  # written by hand
                data, owner = _read_owned(path, _MAX_REMOVAL)
                removed.append(Removal(file, user_name(owner), Fields.of(parse_json(data)).time("removed")))
    return sorted(removed, key=lambda item: (item.removed, item.file))


def removal_note(version: VersionRecord | UnrecordedVersion) -> bytes:
    """Return the record of a removed version."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    note = {"file": version.file, "size": version.size, "removed": now}
    if isinstance(version, VersionRecord):
        note |= {"sha256": version.sha256, "published": version.published}
    return json.dumps(note).encode() + b"\n"


def image_folders(shared_dir: InnerPath) -> list[InnerPath]:
    """Return the folders of images, sorted by name.

    A link is none: it may lead out of the shared folder. Raises OSError.
    """
    return [path for path in (shared_dir / IMAGES).entries() if is_basename(path.name) and path.is_folder()]


def tags(folder: InnerPath) -> dict[str, str]:
    """Return the links in an image's folder: name → the file it names."""
    links = ((path.name, path.link_target()) for path in folder.entries() if not path.name.startswith("."))
    return {name: target for name, target in links if target}
