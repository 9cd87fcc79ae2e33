"""Copies of run records next to their image: users' run.json are in their own folders, which get removed.

A run.json (training/run_summary.py of the tasks; generation/record.py writes OUTPUT.run.json) says with `image` what it
ran in: /opt/ekiben/image.json, which names the layers but the last, and the checksum of the recipe's own files, which
are that one. The version that has the same gets the record, in images/<name>/<stem>.runs/<first 12 digits of its
sha256>.json. Of several that have (the same image under two versions, or a record from before there was a checksum) it
is the newest that was there when the run began.

Beside it, in .curve, are at most 60 steps of each loss of its metrics.jsonl, where that was there.

Only what is named here is kept: model and its size, method, device, numbers and switches among the settings, the data's
checksum and size, when it began, steps, speed, time, memory, losses, seed, packages' versions. Of a model's path only
the last part is. Of an answering run there are its answers and seconds, too, of an evaluation its scores. Left out are
all other settings that are words, and so the paths of data and output; host, nodes, job, cluster.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.errors import StoreError, UsageError
from ekiben.core.inner_path import AnyPath, InnerPath
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.images.published import image_folders, read_records
from ekiben.publish.catalog import curves
from ekiben.publish.catalog._types import CatalogRun, ReducedRun
from ekiben.store.shared import SharedStore

FORMAT = 1
_RECIPE = "opt/ekiben/recipe/"
_MOST = 1_000_000  # bytes of a run.json
_NUMBERS = (
    "steps",
    "time_to_train_s",
    "tokens_per_s",
    "mfu",
    "peak_memory_bytes",
    "final_loss",
    "final_eval_loss",
    "final_eval_perplexity",
    "seed",
)
_METRIC = re.compile(r"[\w.,:+ -]{1,80}")  # a task of an evaluation, or a metric
_MAX_SCORES = 200  # tasks, and metrics of each
_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]{0,60}")
_HUB = re.compile(
    r"[\w-][\w.-]*/[\w-][\w.-]*"
)  # cyberagent/open-calm-3b; a relative folder looks the same, and is harmless
_STARTED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@dataclass(slots=True)
class ImportedRuns:
    """Counts of the run.json found, by result.

    ``unmatched`` used none of the images here, ``jobs`` are those of submitted jobs, ``without_image`` files name no
    image; ``broken`` are (file or folder, reason).
    """

    new: list[str] = field(default_factory=list)
    known: int = 0
    unfinished: int = 0
    unmatched: int = 0
    jobs: int = 0
    without_image: list[str] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)

    def skipped(self) -> list[tuple[str, str]]:
        """Return (file, reason) of all that were left out and should perhaps not have been."""
        return [*self.broken, *((file, "names no image, so it belongs to no version") for file in self.without_image)]


def import_runs(shared: SharedStore, folders: Sequence[Path]) -> ImportedRuns:
    """Copy the run records that belong to a published version. Raises UsageError, StoreError."""
    for folder in folders:
        if not folder.exists():
            raise UsageError(f"--runs {folder}: no such folder or file")
    imported = ImportedRuns()
    versions = list(_versions(shared, imported.broken))
    shared.open_for_writing()
    for path in (path for folder in folders for path in _find(folder, imported.broken)):
        try:
            run = _read(path)
            if not isinstance(run.get("image"), dict):
                if "scheduler" in run and isinstance(run.get("steps"), list) and (run["steps"] or "image" not in run):
                    imported.jobs += 1
                else:
                    imported.without_image.append(str(path))
                continue
            folder_of = _version_of(run, versions)
            if folder_of is None:
                imported.unmatched += 1
            elif run.get("status") != "finished":
                imported.unfinished += 1
            elif _put(shared, folder_of, reduced(run), path):
                imported.new.append(str(path))
            else:
                imported.known += 1
        except ValueError as error:
            imported.broken.append((str(path), str(error)))
    return imported


def _find(folder: Path, unreadable: list[tuple[str, str]]) -> Iterator[Path]:
    """Yield the records below ``folder``, or that file alone; add folders that cannot be read to ``unreadable``."""
    if not folder.is_dir():
        yield folder

    def note(error: OSError) -> None:
        unreadable.append((str(error.filename), f"cannot be read: {error.strerror}"))

    for parent, folders, files in os.walk(folder, onerror=note):
        folders.sort()
        yield from (Path(parent, name) for name in sorted(files) if name == "run.json" or name.endswith(".run.json"))


def _read(path: AnyPath) -> dict[str, Any]:
    """Return a record's fields. Your own results may be links. Raises ValueError when it is none."""
    try:
        text = (
            path.read(max_size=_MOST)
            if isinstance(path, InnerPath)
            else read_regular(path, max_size=_MOST, follow=True)
        )
        data = parse_json(text, nan=True)  # of a loss that diverged
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if not isinstance(data, dict):
        raise ValueError("is not a record of a run")
    return data


@dataclass(frozen=True, slots=True)
class _Version:
    folder: InnerPath  # of its runs
    published: str
    metadata: dict[str, Any]


def _versions(shared: SharedStore, unreadable: list[tuple[str, str]]) -> Iterator[_Version]:
    """Yield the published versions; add those whose last layer cannot be read, so that no run is theirs, to
    ``unreadable``.
    """
    for folder in image_folders(shared.folder):
        for record in read_records(folder)[0]:
            try:
                with shared.reader(record.layers[-1].digest) as reader:
                    metadata = image_metadata(reader)
            except (OSError, ValueError, StoreError) as error:
                reason = f"its runs are not recognised: {' '.join(str(error).split())}"
                unreadable.append((str(folder / record.file), reason))
                continue
            yield _Version(folder / f"{record.stem}.runs", record.published, metadata)


def image_metadata(layer: SquashfsReader) -> dict[str, Any]:
    """Return `image` of a run.json for the image whose last layer this is.

    Raises StoreError, ValueError.
    """
    files = {
        entry.path: b"".join(chunks or ())
        for entry, chunks in layer.contents()
        if entry.path.startswith(_RECIPE) and entry.kind == "file" and "__pycache__" not in entry.path
    }
    digest = hashlib.sha256()
    for path, data in sorted(files.items()):
        digest.update(f"{path.removeprefix(_RECIPE)}\0{len(data)}\0".encode() + data)
    return {**Fields.of(parse_json(layer.read_file("opt/ekiben/image.json"))).data, "recipe_sha256": digest.hexdigest()}


def _version_of(run: Mapping[str, Any], versions: Sequence[_Version]) -> InnerPath | None:
    image = run["image"]
    same = [
        one
        for one in versions
        if {name: one.metadata[name] for name in one.metadata if name in image or name != "recipe_sha256"} == image
    ]
    same.sort(key=lambda one: one.published)
    before = [one for one in same if one.published[:19] <= str(run.get("started"))[:19]]
    return (before or same[:1])[-1].folder if same else None


def _put(shared: SharedStore, folder: InnerPath, kept: ReducedRun, source: Path) -> bool:
    """Write a run's record, and its curve; return False when the record exists. source: the run.json."""
    data = json.dumps(kept, indent=1, sort_keys=True).encode() + b"\n"
    path = folder / f"{hashlib.sha256(data).hexdigest()[:12]}.json"
    is_new, curve_file = not path.lexists(), path.with_name(path.name.removesuffix(".json") + curves.SUFFIX)
    curve = curves.read_metrics(source.parent / curves.METRICS) if source.name == "run.json" else None
    with shared.translated_errors():
        if is_new:
            shared.policy.make_folder(folder)
            shared.write_file(path, data)
        if curve and not curve_file.lexists():
            shared.write_file(curve_file, curves.format_curve(curve))
    return is_new


def reduced(run: Mapping[str, Any]) -> ReducedRun:
    """Reduce a run.json to the fields that are kept. Raises ValueError when it does not say when the run began."""
    model, device, data, settings = (_mapping(run.get(name)) for name in ("model", "device", "data", "settings"))
    started = run.get("started")
    if not isinstance(started, str) or not _STARTED.fullmatch(started):
        raise ValueError("does not say when the run began")
    name = model.get("name", settings.get("model"))
    if name is None and "size" in settings:
        name = f"GPT {_text(settings['size'])}"
    checksum = str(data.get("sha256", ""))
    kept: dict[str, Any] = {
        "format": FORMAT,
        "started": started,
        "model": {
            "name": _model_name(name),
            "parameters": _number(model.get("parameters")),
            "trainable": _number(model.get("trainable")),
        },
        "method": _text(settings.get("method")),
        "device": {
            "name": _text(device.get("name")),
            "count": _number(device.get("count")),
            "parallel": _text(device.get("parallel")),
            "dtype": _text(device.get("dtype")),
            "attention": _text(device.get("attention")),
        },
        "data": {
            "sha256": checksum if re.fullmatch("[0-9a-f]{64}", checksum) else None,
            "rows": _number(data.get("rows")),
            "tokens": _number(data.get("tokens")),
        },
        "settings": dict(_numbers(settings)),
        **{field: _number(run.get(field)) for field in _NUMBERS},
        # Only for generate: a record of training is named by its checksum, which must not change.
        **{name: _number(run[name]) for name in ("answers", "seconds") if "answers" in run and name in run},
        **({"scores": dict(_scores(run["scores"]))} if isinstance(run.get("scores"), dict) else {}),
        "versions": {
            key: _text(value)
            for key, value in sorted(_mapping(run.get("versions")).items())
            if _PACKAGE.fullmatch(key) and _text(value)
        },
    }
    return cast(ReducedRun, kept)


def _scores(tasks: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float | int]]]:
    """Yield the numbers of an evaluation by task."""
    for task, metrics in sorted(tasks.items(), key=lambda item: str(item[0]))[:_MAX_SCORES]:
        numbers = {
            name: number
            for name, value in sorted(_mapping(metrics).items())[:_MAX_SCORES]
            if _METRIC.fullmatch(name) and (number := _number(value)) is not None
        }
        if numbers and _METRIC.fullmatch(task):
            yield task, numbers


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | int | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else None


def _text(value: Any) -> str | None:
    """Return one line of limited length without a path."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > 100 or value.startswith(("/", "~", ".")):
        return None
    return value


def _model_name(value: Any) -> str | None:
    name = str(value).rstrip("/") if isinstance(value, str) else ""
    return _text(name if _HUB.fullmatch(name) else name.rpartition("/")[2]) or None


def _numbers(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, bool | int | float]]:
    for name, value in sorted(settings.items()):
        if not re.fullmatch(r"[a-z][\w.]{0,60}", name):
            continue
        if isinstance(value, dict) and not above:
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, bool) or _number(value) is not None:
            yield above + name, value


# ------------------------------------------------------------------------------------------------------------- reading


def runs_of(folder: InnerPath, stem: str) -> tuple[list[CatalogRun], list[tuple[str, str]]]:
    """Return the records kept with a version, newest first, and (file, reason) of those that cannot be read."""
    records, broken = list[CatalogRun](), list[tuple[str, str]]()
    runs = folder / f"{stem}.runs"
    for path in runs.entries() if runs.is_folder() else ():
        if not path.name.endswith(".json") or path.name.startswith("."):
            continue
        try:
            run = _read(path)
            if run.get("format") != FORMAT:
                raise ValueError(f"is not a record of format {FORMAT}")
            id = path.name.removesuffix(".json")
            kept = reduced(_as_run(run))
        except (ValueError, OSError) as error:
            broken.append((f"{stem}.runs/{path.name}", str(error)))
            continue
        curve = None
        try:
            curve = curves.parse_curve(runs / f"{id}{curves.SUFFIX}")
        except ValueError as error:
            broken.append((f"{stem}.runs/{id}{curves.SUFFIX}", str(error)))
        records.append({"id": id, "curve": curve, **kept})
    records.sort(key=lambda run: (run["started"], run["id"]), reverse=True)
    return records, broken


def _as_run(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the record again: others may write to the folder."""
    return {**kept, "settings": {**_mapping(kept.get("settings")), "method": kept.get("method")}}
