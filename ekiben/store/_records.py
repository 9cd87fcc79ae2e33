"""The JSON records of a store: layers by cache key, results of build stages, images by name, what was checked and
measured.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NotRequired, TypedDict, cast

from ekiben.core.checked import Fields, is_basename, parse_json, with_checksum, without_checksum
from ekiben.core.errors import StoreError
from ekiben.core.inner_path import InnerPath
from ekiben.formats.oci import MEDIA_INDEX, MEDIA_MANIFEST
from ekiben.store._staging import StagingArea

Kind = Literal["keys", "results", "refs", "last", "compile_stats", "checks"]  # the folders
_FORMER: Mapping[Kind, str] = {"compile_stats": "learnt"}  # former names of folders in stores of the same version
_FORMER_NOTES = {"handed over": "outputs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """A layer in the store. ``digest``/``size`` are of the squashfs blob, ``diff_id``/``tar_size`` of the tar form."""

    name: str
    cache_key: str
    diff_id: str
    tar_size: int
    digest: str
    size: int
    executor: str
    seconds: float
    inputs: Mapping[str, Any]
    notes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, record: Fields) -> StoredLayer:
        """Read a record that others may have written; unknown fields are ignored. Raises ValueError."""
        return cls(
            name=record.basename("name"),
            cache_key=record.basename("cache_key"),
            diff_id=record.text("diff_id"),
            tar_size=record.size("tar_size"),
            digest=record.digest("digest"),
            size=record.size("size"),
            executor=record.text("executor", ""),
            seconds=record.number("seconds") if "seconds" in record else 0.0,
            inputs=record.mapping("inputs", {}),
            notes=_notes(record),
        )

    @property
    def stage_keys(self) -> tuple[str, ...]:
        """Return the cache keys of the build stages whose files it holds."""
        copies = self.inputs.get("from")
        copies = copies if isinstance(copies, list | tuple) else ()
        return tuple(copy[0] for copy in copies if isinstance(copy, list | tuple) and copy and isinstance(copy[0], str))

    @property
    def drift(self) -> tuple[str, ...]:
        """Return the differences from its lock."""
        return tuple(self.notes.get("drift", ()))


@dataclass(frozen=True, slots=True)
class StageOutput:
    """A file of a build stage. ``path``: in the stage; ``digest``: of the blob that holds it."""

    path: str
    mode: int
    digest: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResult:
    """The outputs of a build stage.

    ``wheel``: the package that it compiled, if it is there to compile one; ``origin``: whether that was here, or
    imported; ``notes``: what was verified of it.
    """

    name: str
    key: str
    wheel: str | None
    files: tuple[StageOutput, ...]
    inputs: Mapping[str, Any]
    origin: str
    executor: str
    seconds: float
    notes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, record: Fields) -> StoredResult:
        """Read a record that others may have written; unknown fields are ignored. Raises ValueError."""
        return cls(
            name=record.basename("name"),
            key=record.basename("key"),
            wheel=record.text("wheel") if "wheel" in record else None,
            files=tuple(
                StageOutput(file.absolute("path"), file.size("mode"), file.digest("digest"), file.size("size"))
                for file in record.objects("files")
            ),
            inputs=record.mapping("inputs", {}),
            origin=record.text("origin"),
            executor=record.text("executor", ""),
            seconds=record.number("seconds") if "seconds" in record else 0.0,
            notes=record.mapping("notes", {}),
        )

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Return the compute capabilities that it was compiled for."""
        values = self.inputs.get("capabilities")
        return tuple(map(str, values)) if isinstance(values, list | tuple) else ()

    def input_text(self, name: str) -> str:
        """Return an input of its key, such as ``torch``; "unknown" if it is missing, or not a string."""
        value = self.inputs.get(name)
        return value if isinstance(value, str) else "unknown"


def _notes(record: Fields) -> dict[str, Any]:
    """Return a layer's notes under their current names. Raises ValueError for one of a wrong type."""
    notes = {_FORMER_NOTES.get(name, name): value for name, value in record.mapping("notes", {}).items()}
    fields = Fields(notes, "notes")
    for name in ("outputs", "environment_left_out", "labels"):
        fields.texts(name, {})
    if "drift" in notes:
        fields.strings("drift")
    return notes


class ImageRecord(TypedDict):
    """An image by name. ``keys``: the cache keys of its layers; ``size``: of the manifest; ``config``: its digest;
    ``is_custom``: built with --gpu-arch or --build-arg.
    """

    manifest: str
    size: int
    config: str
    keys: list[str]
    recipe: NotRequired[str]
    stack: NotRequired[str]
    tasks: NotRequired[dict[str, str]]
    is_custom: NotRequired[bool]


class CompileStats(TypedDict, total=False):
    """Measurements of compiling a package: bytes of memory of one job, files, seconds, parallel jobs."""

    job_memory: int
    units: int
    seconds: float
    jobs: int


class Records:
    """The records of a store, each with a checksum. One that cannot be read, or whose checksum differs, counts as none:
    what it stood for is made again."""

    def __init__(self, staging: StagingArea) -> None:
        self.root, self._staging = staging.root, staging

    def path(self, kind: Kind, name: str) -> InnerPath:
        """Raises StoreError when ``name`` is not a file's: names come from records that others wrote."""
        if not is_basename(f"{name}.json"):
            raise StoreError(f"{name!r:.80} does not name a record of {self.root}")
        return self.root / kind / f"{name}.json"

    def read(self, kind: Kind, name: str) -> dict[str, Any] | None:
        """Return a record, or None: also for one that is damaged, a link, or not a file's name."""
        data = _read(self.path(kind, name)) if is_basename(f"{name}.json") else None
        if data is None and kind in _FORMER:
            data = _read(self.root / _FORMER[kind] / f"{name}.json") if is_basename(f"{name}.json") else None
        return data

    def write(self, kind: Kind, name: str, record: Mapping[str, Any]) -> None:
        """Write a record atomically. Raises StoreError."""
        self._staging.write(self.path(kind, name), dump(with_checksum(record)))

    def drop(self, kind: Kind, name: str) -> None:
        """Remove a record. Idempotent. Raises StoreError."""
        with self._staging.access.translated_errors():
            self.path(kind, name).remove(missing_ok=True)

    def names(self, kind: Kind) -> list[str]:
        """Return the names of all records of a kind."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = (path.name for path in (self.root / kind).entries())
            return [name.removesuffix(".json") for name in names if name.endswith(".json") and not name.startswith(".")]
        return []

    def layer(self, cache_key: str) -> StoredLayer | None:
        """Return the record of a layer, whether its blob is there or not."""
        with contextlib.suppress(ValueError):
            layer = StoredLayer.parse(Fields.of(self.read("keys", cache_key)))
            return layer if layer.cache_key == cache_key else None  # a record with a different key is damaged
        return None

    def result(self, key: str) -> StoredResult | None:
        """Return the record of a stage's result, whether its blobs are there or not."""
        with contextlib.suppress(ValueError):
            result = StoredResult.parse(Fields.of(self.read("results", key)))
            return result if result.key == key else None
        return None

    def put_layer(self, layer: StoredLayer) -> None:
        """Write a layer's record."""
        self.write("keys", layer.cache_key, asdict(layer))
        self.note_last(layer.name, layer.cache_key)

    def put_result(self, result: StoredResult) -> None:
        """Write a result's record."""
        self.write("results", result.key, asdict(result))
        self.note_last(result.name, result.key)

    def note_last(self, name: str, cache_key: str) -> None:
        """Remember the key that a layer has now."""
        if (self.read("last", name) or {}).get("cache_key") != cache_key:
            self.write("last", name, {"cache_key": cache_key})

    def last_layer(self, name: str) -> StoredLayer | None:
        """Return the record of a layer's last build, None without one."""
        key = (self.read("last", name) or {}).get("cache_key")
        return self.layer(key) if isinstance(key, str) else None

    def last_inputs(self, name: str) -> Mapping[str, Any] | None:
        """Return the inputs of a layer's last build, None without one."""
        key = (self.read("last", name) or {}).get("cache_key")
        records = [self.read("keys", str(key)), self.read("results", str(key))] if key else []
        return next((record["inputs"] for record in records if record and isinstance(record.get("inputs"), dict)), None)

    def compile_stats(self, name: str) -> CompileStats:
        """Return the measurements of compiling a package; empty where there is no record, or one with other types."""
        with contextlib.suppress(ValueError):
            fields = Fields.of(self.read("compile_stats", name))
            for field_name in fields.data.keys() & {"job_memory", "units", "jobs"}:
                fields.size(field_name)
            if "seconds" in fields:
                fields.number("seconds")
            return cast(CompileStats, fields.data)
        return {}

    def image(self, name: str) -> ImageRecord | None:
        """Return the record of an image; None for one without a required field."""
        record = self.read("refs", name)
        with contextlib.suppress(ValueError):
            fields = Fields.of(record)
            fields.digest("manifest"), fields.digest("config"), fields.strings("keys"), fields.size("size")
            fields.text("recipe", ""), fields.text("stack", ""), fields.texts("tasks", {})
            return cast(ImageRecord, record)
        return None

    def images(self) -> dict[str, ImageRecord]:
        """Return the records of all images, by name."""
        records = {name: self.image(name) for name in self.names("refs")}
        return {name: image for name, image in records.items() if image}

    def write_index(self) -> None:
        """Write index.json from refs/.

        Reads them again afterwards: another process may have named an image meanwhile.
        """
        images, seen = self.images(), None
        while images != seen:
            manifests = [
                {
                    "mediaType": MEDIA_MANIFEST,
                    "digest": image["manifest"],
                    "size": image["size"],
                    "annotations": {"org.opencontainers.image.ref.name": name},
                }
                for name, image in images.items()
            ]
            index = {"schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": manifests}
            self._staging.write(self.root / "index.json", dump(index))
            images, seen = self.images(), images


def _read(path: InnerPath) -> dict[str, Any] | None:
    try:
        data = parse_json(path.read())
        return without_checksum(data) if isinstance(data, dict) else None
    except (OSError, ValueError):
        return None


def dump(data: Mapping[str, Any]) -> bytes:
    """Return the one form of a record as JSON."""
    return json.dumps(data, indent=1, sort_keys=True).encode() + b"\n"
