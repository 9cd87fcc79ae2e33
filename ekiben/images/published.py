"""Read what a shared folder says of its versions: records that any of its writers may have written.

A version is there when its record is: the record is written last, and removed first. The record, one JSON object:

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
    published    when (UTC, ISO 8601); by: the login name
    previous     the file that `current` named before; null at first
    checksum     of all other fields (ekiben/core/checked.py); missing in records of earlier versions

A later version may add fields.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ekiben.core.checked import Fields, is_basename, parse_json, without_checksum
from ekiben.core.inner_path import InnerPath
from ekiben.core.pgp_key import Key
from ekiben.formats import oci
from ekiben.store import StoredLayer
from ekiben.store.shared import IMAGES

RECORD_FORMAT = 1
SBOM_SUFFIX = ".cdx.json"  # as CycloneDX has it
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+]{0,63}")
_RECORD_FILE = re.compile(r".+-[0-9a-f]{12}\.json")  # and not <stem>.cdx.json, say
_MAX_RECORD = 4 << 20  # bytes


@dataclass(frozen=True, slots=True)
class PassedCheck:
    """A test that passed before the version was published."""

    runtime: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One published version.

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

    @property
    def stem(self) -> str:
        """Return the name that the version's files begin with."""
        return self.file.removesuffix(".sif")

    @property
    def added_layers(self) -> tuple[str, ...]:
        """Return the layers that were put on the recipe's."""
        labels = self.data.get("labels")
        return tuple(str(labels.get(oci.LAYER_LABEL, "")).split()) if isinstance(labels, Mapping) else ()


def read_record(path: InnerPath) -> VersionRecord:
    """Read the record ``path`` of a version in its image's folder.

    Raises ValueError that says what is wrong with it.
    """
    try:
        record = parse_record(parse_json(path.read(max_size=_MAX_RECORD)), path.parent.name)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if record.stem != path.name.removesuffix(".json"):
        raise ValueError(f"'file' is of another version: {record.file}")
    try:
        status = path.with_name(record.file).status()
    except OSError as error:
        raise ValueError(f"its {record.file} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"its {record.file} is not a regular file")
    if status.st_size != record.size:
        raise ValueError(f"its {record.file} has {status.st_size} bytes of {record.size}")
    return record


def parse_record(data: object, name: str) -> VersionRecord:
    """Check the record of a version of the image ``name``. Raises ValueError."""
    fields = Fields.of(data)
    if fields.size("format") != RECORD_FORMAT:
        raise ValueError(f"is of format {fields.size('format')}; this Ekiben reads format {RECORD_FORMAT}")
    fields = Fields(without_checksum(fields.data))
    if fields.name("name") != name:
        raise ValueError(f"'name' is of another image: {fields.name('name')}")
    version, sha256 = fields.matching("version", VERSION, "a version"), fields.hex_digest("sha256")
    if fields.basename("file") != f"{name}-{version}-{sha256[:12]}.sif":
        raise ValueError(f"'file' is of another version: {fields.basename('file')}")
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


def image_folders(shared_dir: InnerPath) -> list[InnerPath]:
    """Return the folders of images, sorted by name.

    A link is none: it may lead out of the shared folder. Raises OSError.
    """
    return [path for path in (shared_dir / IMAGES).entries() if is_basename(path.name) and path.is_folder()]


def tags(folder: InnerPath) -> dict[str, str]:
    """Return the links in an image's folder: name → the file it names."""
    links = ((path.name, path.link_target()) for path in folder.entries() if not path.name.startswith("."))
    return {name: target for name, target in links if target}
