"""Collect the content of catalog.json from a shared folder: records, layers (each read once), links, runs."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from ekiben.core.errors import StoreError
from ekiben.core.inner_path import InnerPath
from ekiben.doctor.consult import check_image
from ekiben.doctor.findings import worst
from ekiben.doctor.image_requirements import ImageRequirements, requirements_of_layers
from ekiben.doctor.rules.device_code import FLOORS, TOOLKIT_DRIVERS
from ekiben.formats.compare import layer_differences
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.images.published import (
    RECORD_MISSING,
    SBOM_SUFFIX,
    VersionRecord,
    image_folders,
    read_records,
    tags,
    unrecorded_versions,
)
from ekiben.inspect.diff import changes, compare_layers
from ekiben.packages.installed import DPKG_STATUS, installed_packages
from ekiben.publish.catalog._types import (
    Catalog,
    CatalogImage,
    CatalogVersion,
    DriverVersions,
    GpuSupport,
    LayerSummary,
    RunCommand,
    SkippedFile,
    VersionChanges,
)
from ekiben.publish.catalog.runs import runs_of
from ekiben.publish.publish import CURRENT
from ekiben.run import schedulers
from ekiben.run.modulefile import MODULES, module_name
from ekiben.run.printed import docker_line
from ekiben.run.site import Gpu, Node, SiteFile, version_of
from ekiben.store import Store, StoredLayer
from ekiben.store.shared import IMAGES, SharedStore

FORMAT = 2
_SMALL = 4_000_000  # bytes of a layer whose files are compared, when a later version has another one
_SHOWN = 40  # files of one layer
_VERSION_FIELDS = ("version", "stack", "description", "file", "sha256", "size", "sif", "image", "published", "by")
_LAYER_FIELDS = ("name", "cache_key", "diff_id", "digest", "size", "tar_size")
GPUS = (
    ("Volta", "V100", "7.0"),
    ("Turing", "T4, RTX 20", "7.5"),
    ("Ampere", "A100, A30", "8.0"),
    ("Ampere", "A10, A40, RTX 30", "8.6"),
    ("Ada", "L4, L40S, RTX 40", "8.9"),
    ("Hopper", "H100, H200", "9.0"),
    ("Blackwell", "B200, GB200", "10.0"),
    ("Blackwell", "B300, GB300", "10.3"),
    ("Blackwell", "RTX 50, RTX PRO", "12.0"),
)

Log = Callable[[str], None]


def gather(shared: SharedStore, store: Store, log: Log) -> Catalog:
    """Collect the catalog of the folder.

    ``store`` has the shared folder upstream, and caches what is read from its layers. Raises StoreError.
    """
    skipped: list[SkippedFile] = []
    try:
        folders = image_folders(shared.folder)
    except OSError as error:
        raise StoreError(f"{shared.shared_dir / IMAGES} cannot be read: {error.strerror}") from error
    images = [_image(shared, folder, LayerInspector(store, log), skipped) for folder in folders]
    return {
        "format": FORMAT,
        "shared_dir": str(shared.shared_dir),
        "images": [image for image in images if image],
        "skipped": skipped,
    }


def _image(
    shared: SharedStore, folder: InnerPath, inspector: LayerInspector, skipped: list[SkippedFile]
) -> CatalogImage | None:
    records, unusable = read_records(folder)
    skipped += [{"file": f"{IMAGES}/{folder.name}/{name}", "reason": reason} for name, reason in unusable]
    with contextlib.suppress(OSError):
        missing = [item for item in unrecorded_versions(folder) if item.reason == RECORD_MISSING]
        skipped += [{"file": f"{IMAGES}/{folder.name}/{item.file}", "reason": item.reason} for item in missing]
    if not records:
        return None
    links = tags(folder)
    versions: list[CatalogVersion] = []
    for record in records:
        version = _version(record, folder, links, inspector, skipped)
        before = next((one for one in reversed(versions) if one["stack"] == version["stack"]), None)
        version["changes"] = inspector.changes(before, version) if before else None
        versions.append(version)
    stems = [version["stem"] for version in versions]
    current = links.get(CURRENT, "").removesuffix(".sif")
    at = stems.index(current) if current in stems else -1
    shown, recipe, layers = versions[at], records[at].recipe, records[at].added_layers
    return {
        "name": folder.name,
        "description": shown["description"],
        "recipe": recipe,
        "current": current if current in stems else None,
        "shown": shown["stem"],
        "commands": commands(shared.shared_dir, folder, shown, recipe, current in stems, layers),
        "versions": versions[::-1],
    }


def _version(
    record: VersionRecord,
    folder: InnerPath,
    links: Mapping[str, str],
    inspector: LayerInspector,
    skipped: list[SkippedFile],
) -> CatalogVersion:
    sbom = f"{record.stem}{SBOM_SUFFIX}"
    runs, broken = runs_of(folder, record.stem)
    skipped += [{"file": f"{IMAGES}/{folder.name}/{name}", "reason": reason} for name, reason in broken]
    version: dict[str, Any] = {
        "stem": record.stem,
        **{name: getattr(record, name) for name in _VERSION_FIELDS},
        "tasks": dict(record.tasks),
        "environment": dict(record.environment),
        "checks": [asdict(check) for check in record.checks],
        "tags": sorted(tag for tag, target in links.items() if target == record.file),
        "pinned": (folder / f"{record.stem}.pin").lexists(),
        "signature": asdict(record.signature) if record.signature else None,
        "sbom": sbom if (folder / sbom).is_regular() else None,
        "layers": [{name: getattr(layer, name) for name in _LAYER_FIELDS} for layer in record.layers],
        "drift": [f"{layer.name}: {line}" for layer in record.layers for line in _lines(layer.notes.get("drift"))],
        **inspector.of(record),
        "changes": None,
        "runs": runs,
    }
    return cast(CatalogVersion, version)


def _lines(value: Any) -> list[str]:
    return [str(line) for line in value] if isinstance(value, list) else []


# ------------------------------------------------------------------------------------------------ what is in the layers


class LayerInspector:
    """Reads layers of the shared folder, each once."""

    def __init__(self, store: Store, log: Log) -> None:
        self.store, self.log = store, log
        self._debian: dict[str, dict[str, str] | None] = {}

    def of(self, record: VersionRecord) -> LayerSummary:
        """Return the requirements of an image, and its packages; ``read_error`` is the reason when they are not
        known.
        """
        nothing: LayerSummary = {
            "read_error": None,
            "python": {},
            "debian": {},
            "glibc": None,
            "torch": None,
            "cuda": None,
            "device_code": [],
            "gpus": [],
            "driver": None,
        }
        try:
            from ekiben.core.environment import platform

            layers = [self._layer(layer) for layer in record.layers]
            requirements = requirements_of_layers(record.file, layers, self.store, platform().split("/")[1], self.log)
            debian = next(
                (packages for layer in reversed(layers) if (packages := self._packages(layer)) is not None), {}
            )
        except StoreError as error:
            return {**nothing, "read_error": str(error)}
        core = [path for path in requirements.judged if path.endswith("/libtorch_cuda.so")] or list(requirements.judged)
        return {
            "read_error": None,
            "python": dict(sorted(requirements.packages.items())),
            "debian": dict(sorted(debian.items())),
            "glibc": requirements.glibc,
            "torch": requirements.torch,
            "cuda": requirements.cuda,
            "device_code": requirements.judged[core[0]].names if core else [],
            "gpus": _gpus(requirements),
            "driver": _driver(requirements.cuda),
        }

    def changes(self, before: CatalogVersion, after: CatalogVersion) -> VersionChanges:
        """Return the additions of ``after`` to the version before it; of small layers, also the files."""
        layers = [
            [StoredLayer(**layer, executor="", seconds=0, inputs={}) for layer in one["layers"]]
            for one in (before, after)
        ]
        layer_changes = compare_layers(*layers)
        files = {}
        for change in layer_changes:
            pair = [next((layer for layer in one if layer.name == change["name"]), None) for one in layers]
            if not change["same"] and pair[0] and pair[1] and max(pair[0].size, pair[1].size) <= _SMALL:
                files[change["name"]] = self._files(pair[0], pair[1])
        return {
            "before": before["stem"],
            "size": [before["size"], after["size"]],
            "layers": [change for change in layer_changes if not change["same"]],
            "packages": {
                "python": changes(before["python"], after["python"]),
                "debian": changes(before["debian"], after["debian"]),
            },
            "environment": changes(before["environment"], after["environment"]),
            "files": {name: lines for name, lines in files.items() if lines},
        }

    def _layer(self, layer: StoredLayer) -> StoredLayer:
        stored = self.store.layer(layer.cache_key)
        if stored is None or stored.digest != layer.digest:
            raise StoreError(f"layer {layer.name} is not in the folder's store")
        return stored

    def _packages(self, layer: StoredLayer) -> dict[str, str] | None:
        if layer.digest not in self._debian:
            with ExitStack() as stack:
                reader = self._open(layer, stack)
                entry = reader.lookup(DPKG_STATUS)
                status = reader.read_file(DPKG_STATUS) if entry and entry.kind == "file" else None
            self._debian[layer.digest] = None if status is None else installed_packages(status.decode(errors="replace"))
        return self._debian[layer.digest]

    def _files(self, before: StoredLayer, after: StoredLayer) -> list[str]:
        try:
            with ExitStack() as stack:
                lines = list(layer_differences(self._open(before, stack), self._open(after, stack)))
        except StoreError as error:
            return [str(error)]
        return lines if len(lines) <= _SHOWN else [*lines[: _SHOWN - 1], f"… and {len(lines) - _SHOWN + 1} more"]

    def _open(self, layer: StoredLayer, stack: ExitStack) -> SquashfsReader:
        try:
            return stack.enter_context(self.store.reader(layer.digest))
        except OSError as error:
            raise StoreError(f"layer {layer.name} cannot be read: {error.strerror}") from error


def _gpus(requirements: ImageRequirements) -> list[GpuSupport]:
    """Return each kind of GPU with doctor's ``level`` (fine, but, fail) and message. Empty without device code."""
    rows = list[GpuSupport]()
    for family, models, capability in GPUS if requirements.judged else ():
        node = Node(gpus=(Gpu(model=models, capability=capability, memory_gib=1),), architecture=requirements.arch)
        findings = [
            one
            for one in check_image(SiteFile(name="", description="", node=node), requirements)
            if one.topic == "GPU code"
        ]
        rows.append(
            {
                "family": family,
                "models": models,
                "capability": capability,
                "level": worst(findings),
                "message": "; ".join(one.message for one in findings if one.level == worst(findings)),
            }
        )
    return rows


def _driver(cuda: str | None) -> DriverVersions | None:
    """Return the oldest NVIDIA driver for that CUDA version, and the one released with it."""
    if cuda is None:
        return None
    return {"minimum": FLOORS.get(version_of(cuda)[0]), "toolkit": TOOLKIT_DRIVERS.get(cuda)}


# -------------------------------------------------------------------------------------------------------- how to run it


def commands(
    shared_dir: Path,
    folder: InnerPath,
    version: CatalogVersion,
    recipe: str,
    is_current: bool,
    layers: Sequence[str] = (),
) -> list[RunCommand]:
    """Return the ways to run a version: commands with a title and a description. Paths are quoted for a shell."""
    task = shlex.quote(next(iter(version["tasks"]), "TASK"))
    file = shlex.quote(str(folder / (CURRENT if is_current else version["file"])))
    fixed = shlex.quote(str(folder / version["file"]))
    gpu = version["cuda"] is not None or version["read_error"] is not None
    run = "apptainer exec --nv"  # its only message without a GPU is a warning
    ways: list[RunCommand] = [
        {
            "title": "Apptainer, SingularityCE",
            "description": "Nothing else is needed.",
            "lines": [f"{run} {file} {task}", f"{run.replace('apptainer', 'singularity')} {file} {task}"],
        }
    ]
    if (folder / f"{version['stem']}.module").lexists():
        module = f"ekiben/{folder.name}" if is_current else module_name(folder.name, version["stem"])
        use = f"module use {shlex.quote(str(shared_dir / MODULES))}"
        ways.append(
            {
                "title": "Environment Modules, Lmod",
                "description": "The tasks are then on PATH.",
                "lines": [use, f"module load {shlex.quote(module)}", task],
            }
        )
    build = f"EKIBEN_SHARED={shlex.quote(str(shared_dir))} ekiben build {shlex.quote(recipe)}"
    if folder.name != recipe:
        build += f" --stack {shlex.quote(version['stack'])}"
    build += "".join(f" --layer {shlex.quote(layer)}" for layer in layers) + " --format docker"
    gpu_args = ("--gpus", "all") if gpu else ()
    ways.append(
        {
            "title": "Docker",
            "description": "With Ekiben, which reuses the layers in this folder and builds none.",
            "lines": [build, docker_line(f"ekiben/{shlex.quote(folder.name)}", task, gpu_args=gpu_args)],
        }
    )
    return [*ways, *_job_commands(f"{run} {fixed} {task}", f"{fixed} {task}", gpu), _check_commands(folder, version)]


def _job_commands(line: str, image_and_task: str, gpu: bool) -> Iterator[RunCommand]:
    """Yield the ways to run a task in a job of each scheduler: ``line`` in a script, or ``ekiben submit``."""
    for kind, scheduler in schedulers.by_preference().items():
        option = f"--scheduler-arg {shlex.quote(scheduler.GPU_OPTION)}" if scheduler.GPU_OPTION else "--gpus-per-node 1"
        options = f"--scheduler {kind} {option}" if gpu else f"--scheduler {kind}"
        description = (
            "One task on one node. The second line, with Ekiben: also on several, and requeued until it is done."
        )
        if gpu and scheduler.GPU_OPTION:
            description += " The name of the GPU option differs from site to site."
        lines = [scheduler.example(line, gpu), f"ekiben submit {options} --time 2:00:00 {image_and_task}"]
        yield {"title": scheduler.TITLE, "description": description, "lines": lines}


def _check_commands(folder: InnerPath, version: CatalogVersion) -> RunCommand:
    """Return the commands that check a version's file, and its signature if it has one."""
    file, fixed = shlex.quote(version["file"]), shlex.quote(str(folder / version["file"]))
    lines = [f"cd {shlex.quote(str(folder))} && sha256sum -c {file}.sha256"]
    description = "That the file is complete."
    if version["signature"]:
        lines += [f"apptainer verify {fixed}", f"ekiben verify {fixed} --require-signature"]
        description = "That the file is complete, and signed by a key that you trust: import the key first."
    return {"title": "Check it", "description": description, "lines": lines}
