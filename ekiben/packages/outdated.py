"""Report locked Python packages with a newer release or a known advisory.

Newer releases are asked of the package index, by uv. Advisories come from a database file in the OSV format
(https://ossf.github.io/osv-schema/): osv.dev publishes one of all PyPI advisories as ``PyPI/all.zip``.
"""

from __future__ import annotations

import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.errors import DefinitionError, FetchError, UsageError
from ekiben.core.files import open_regular, read_source
from ekiben.core.process import ProcessError
from ekiben.packages.requirements import run_uv
from ekiben.spec.source_folders import SourceFolders
from ekiben.spec.stack import read_pins, shared_lock

_MAX_RECORD = 4 << 20  # bytes of one advisory; the longest of osv.dev have some 300 kB
_MAX_RECORDS = 1_000_000
_MAX_TOTAL = 4 << 30  # bytes of all records of a database


@dataclass(frozen=True, slots=True)
class Advisory:
    """A known weakness of a locked version. fixed: the version that ends it, "" where none is named."""

    name: str
    version: str
    identifier: str
    summary: str
    fixed: str

    def __str__(self) -> str:
        end = f"fixed in {self.fixed}" if self.fixed else "no fixed version is named"
        return f"{self.name} {self.version}: {self.identifier}, {end}: {self.summary}"


def read_locks(folder: Path, sources: SourceFolders | None = None) -> dict[Path, dict[str, str]]:
    """Return the pins of the Python lock files in ``folder``: file → name → version.

    Raises UsageError; DefinitionError, also for a file that is not in ``sources``.
    """
    locks: dict[Path, dict[str, str]] = {}
    for path in sorted(folder.glob("*.lock")):
        if shared_lock(path).name == "apt.lock":
            continue
        if sources:
            sources.check(path)
        pins = locks[path] = {}
        for name, version, _ in read_pins(read_source(path)):
            try:
                pins[canonicalize_name(name)] = str(Version(version))
            except InvalidVersion:
                raise DefinitionError(f"{path}: {name}=={version:.80}: this is not a version") from None
    if not locks:
        raise UsageError(f"{folder}: has no lock file of Python packages", hint="write one first: ekiben lock")
    return locks


def find_newer(versions: Mapping[str, str]) -> dict[str, str]:
    """Return name → newest release for each of ``versions`` that has a newer one. Pre-releases do not count,
    nor does what this interpreter cannot run.

    Args:
        versions: name → locked version.

    Raises:
        FetchError: no index answers.
    """
    with tempfile.TemporaryDirectory(prefix="ekiben-outdated-") as folder:
        for name, version in versions.items():  # uv compares what an environment has; its metadata is enough
            metadata = Path(folder) / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
            metadata.parent.mkdir()
            metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        try:
            done = run_uv(["list", "--outdated", "--quiet", "--format", "json", "--target", folder], Path(folder))
        except ProcessError as error:
            raise FetchError(f"no index answered which packages are newer:\n{error.stderr.strip()}") from error
    try:
        packages = Fields.of({"packages": parse_json(done.stdout)}).objects("packages")
        return {canonicalize_name(package.text("name")): package.text("latest_version") for package in packages}
    except ValueError as error:
        raise FetchError(f"uv's list of outdated packages cannot be read: {error}") from error


def find_advisories(versions: Mapping[str, str], database: Path) -> list[Advisory]:
    """Return the advisories of ``versions`` (name → version) in ``database``: a zip file or a folder of OSV records.

    Raises:
        UsageError: it cannot be read, or holds something else.
    """
    locked: dict[str, str] = {canonicalize_name(name): version for name, version in versions.items()}
    known: list[Advisory] = []
    try:
        for record_file, data in _read_records(database):
            try:
                known += _advisories_of(Fields.of(parse_json(data, max_size=_MAX_RECORD)), locked)
            except ValueError as error:
                raise UsageError(
                    f"{database}: {record_file}: {error}", hint="give an OSV database: PyPI/all.zip of osv.dev"
                ) from error
    # zipfile raises RuntimeError for an encrypted file, and a subclass of it for an unknown compression.
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, ValueError) as error:
        raise UsageError(
            f"{database}: cannot be read: {error}", hint="give an OSV database: PyPI/all.zip of osv.dev"
        ) from error
    return sorted(known, key=lambda one: (one.name, one.identifier))


def _read_records(database: Path) -> Iterator[tuple[str, bytes]]:
    if database.is_dir():
        for path in sorted(database.glob("*.json")):
            yield path.name, read_regular(path, max_size=_MAX_RECORD, follow=True)
        return
    with open_regular(database) as file, zipfile.ZipFile(file) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename.endswith(".json")]
        if not entries:
            raise ValueError("it has no .json file")
        if len(entries) > _MAX_RECORDS or sum(entry.file_size for entry in entries) > _MAX_TOTAL:
            raise ValueError(f"it has more than {_MAX_RECORDS} records or {_MAX_TOTAL >> 30} GiB")
        for entry in entries:
            with archive.open(entry) as stream:  # the size in the directory may be false
                data = stream.read(_MAX_RECORD + 1)
            yield entry.filename, data


def _advisories_of(record: Fields, locked: Mapping[str, str]) -> Iterator[Advisory]:
    identifier = record.text("id")
    if "withdrawn" in record or "affected" not in record:
        return
    for affected in record.objects("affected"):
        if "package" not in affected:
            continue
        package = affected.object("package")
        name = canonicalize_name(package.text("name"))
        if package.text("ecosystem") != "PyPI" or name not in locked:
            continue
        version = locked[name]
        ranges = [one for one in _objects(affected, "ranges") if one.text("type") == "ECOSYSTEM"]
        listed = affected.strings("versions") if "versions" in affected else []
        if version in listed or any(_is_inside(version, one.objects("events")) for one in ranges):
            events = [event for one in ranges for event in one.objects("events")]
            summary = record.text("summary", "no summary").splitlines() or ["no summary"]
            yield Advisory(name, version, identifier, summary[0][:200], _fixed_after(version, events))
            return


def _objects(fields: Fields, name: str) -> list[Fields]:
    return fields.objects(name) if name in fields else []


def _is_inside(version: str, events: Iterable[Fields]) -> bool:
    """Return whether a range of OSV events has ``version``: the last event up to it decides (osv-schema)."""
    inside, at = False, Version(version)
    for event in sorted(events, key=_moment):
        if "introduced" in event and at >= _moment(event):
            inside = True
        elif ("fixed" in event and at >= _moment(event)) or ("last_affected" in event and at > _moment(event)):
            inside = False
    return inside


def _moment(event: Fields) -> Version:
    for name in ("introduced", "fixed", "last_affected", "limit"):
        if name in event:
            try:
                return Version(event.text(name))
            except InvalidVersion as error:
                raise ValueError(f"'{event.where}.{name}' is not a version: {event.text(name):.80}") from error
    raise ValueError(f"'{event.where}' has none of introduced, fixed, last_affected, limit")


def _fixed_after(version: str, events: Iterable[Fields]) -> str:
    later = [_moment(event) for event in events if "fixed" in event and _moment(event) > Version(version)]
    return str(min(later, default=""))
