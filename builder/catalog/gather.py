"""What a place holds, as the one object that catalog.json is and the pages show: records, layers read once, links, runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from builder.catalog.runs import runs_of
from builder.contents import DPKG_STATUS, installed_packages
from builder.diff import changes, compare_layers, layer_differences
from builder.doctor import FLOORS, TOOLKIT_DRIVERS, check_image, worst
from builder.errors import StoreError
from builder.facts import ImageFacts, facts_of_layers
from builder.modulefile import MODULES, module_name
from builder.publish import CURRENT, RECORD_FORMAT, tags
from builder.shared import IMAGES, SharedStore
from builder.site import Gpu, Node, SiteFile, version_of
from builder.squashfs import SquashfsReader
from builder.store import Store, StoredLayer

FORMAT = 1
_RECORD = re.compile(r".+-[0-9a-f]{12}\.json")  # and not <stem>.cdx.json, say
_SMALL = 4_000_000  # bytes of a layer whose files are compared, when a later version has another one
_SHOWN = 40  # files of one layer
_FIELDS: dict[str, type] = {
    "name": str, "recipe": str, "version": str, "stack": str, "description": str, "file": str, "sha256": str, "size": int, "sif": str, "image": str,
    "layers": list, "tasks": dict, "environment": dict, "checks": list, "published": str, "by": str,
}  # fmt: skip
_LAYER_FIELDS: dict[str, type] = {
    "name": str, "cache_key": str, "diff_id": str, "digest": str, "size": int, "tar_size": int, "notes": dict,
}  # fmt: skip
GPUS = (
    ("Volta", "V100", "7.0"), ("Turing", "T4, RTX 20", "7.5"), ("Ampere", "A100, A30", "8.0"), ("Ampere", "A10, A40, RTX 30", "8.6"),
    ("Ada", "L4, L40S, RTX 40", "8.9"), ("Hopper", "H100, H200", "9.0"), ("Blackwell", "B200, GB200", "10.0"),
    ("Blackwell", "B300, GB300", "10.3"), ("Blackwell", "RTX 50, RTX PRO", "12.0"),
)  # fmt: skip

Tell = Callable[[str], None]


def gather(shared: SharedStore, store: Store, tell: Tell) -> dict[str, Any]:
    """``store`` sees the place's layers, and is where the facts that are read from them are kept. Errors: StoreError."""
    skipped: list[dict[str, str]] = []
    try:
        folders = [
            path
            for path in sorted((shared.place / IMAGES).iterdir())
            if path.is_dir() and path.name[0] != "." and path.name.isprintable()
        ]
    except OSError as error:
        raise StoreError(f"{shared.place / IMAGES} cannot be read: {error.strerror}") from error
    images = [_image(shared, folder, Contents(store, tell), skipped) for folder in folders]
    return {
        "format": FORMAT,
        "place": str(shared.place),
        "images": [image for image in images if image],
        "skipped": skipped,
    }


def _image(
    shared: SharedStore, folder: Path, contents: Contents, skipped: list[dict[str, str]]
) -> dict[str, Any] | None:
    records = []
    for path in sorted(path for path in folder.glob("*.json") if _RECORD.fullmatch(path.name)):
        try:
            if not path.name.isprintable():
                raise ValueError("has a name that cannot be shown")
            records.append(read_record(path))
        except ValueError as error:
            skipped.append({"file": f"{IMAGES}/{folder.name}/{path.name}", "why": str(error)})
    if not records:
        return None
    records.sort(key=lambda record: (record["published"], record["file"]))
    links = tags(folder)
    versions: list[dict[str, Any]] = []
    for record in records:
        version = _version(record, folder, links, contents, skipped)
        before = next((one for one in reversed(versions) if one["stack"] == version["stack"]), None)
        version["changes"] = before and contents.changes(before, version)
        versions.append(version)
    stems = [version["stem"] for version in versions]
    current = links.get(CURRENT, "").removesuffix(".sif")
    at = stems.index(current) if current in stems else -1
    shown, recipe = versions[at], records[at]["recipe"]
    return {
        "name": folder.name, "description": shown["description"], "recipe": recipe,
        "current": current if current in stems else None, "shown": shown["stem"],
        "commands": commands(shared.place, folder, shown, recipe, current in stems),
        "versions": versions[::-1],
    }  # fmt: skip


def read_record(path: Path) -> dict[str, Any]:
    """A version's record, as builder/publish.py has it. Errors: ValueError, which says what is wrong with it."""
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    _check_fields(record, {"format": int, **_FIELDS}, "the record")
    if record["format"] != RECORD_FORMAT:
        raise ValueError(f"is of format {record['format']}; this Ekiben reads format {RECORD_FORMAT}")
    for layer in record["layers"]:
        _check_fields(layer, _LAYER_FIELDS, "a layer")
    for check in record["checks"]:
        _check_fields(check, {"runtime": str, "seconds": (int, float)}, "a check")
    for name in ("tasks", "environment"):
        if not all(isinstance(value, str) for value in record[name].values()):
            raise ValueError(f"'{name}' should map names to strings")
    if record["name"] != path.parent.name or record["file"] != f"{path.stem}.sif":
        raise ValueError(f"is of another file: {record['name']}/{record['file']}")
    try:
        size = path.with_name(record["file"]).stat().st_size
    except OSError as error:
        raise ValueError(f"its {record['file']} cannot be read: {error.strerror}") from error
    if size != record["size"]:
        raise ValueError(f"its {record['file']} has {size} bytes of {record['size']}")
    return dict(record)


def _check_fields(found: Any, fields: Mapping[str, Any], where: str) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{where} should be an object")
    for name, kind in fields.items():
        if name not in found:
            raise ValueError(f"{where} has no '{name}'")
        if not isinstance(found[name], kind) or isinstance(found[name], bool):
            raise ValueError(f"{where}: '{name}' is {found[name]!r:.40}")


def _version(
    record: Mapping[str, Any], folder: Path, links: Mapping[str, str], contents: Contents, skipped: list[dict[str, str]]
) -> dict[str, Any]:
    stem = record["file"].removesuffix(".sif")
    beside = f"{stem}.cdx.json"
    runs, broken = runs_of(folder, stem)
    skipped += [{"file": f"{IMAGES}/{folder.name}/{name}", "why": why} for name, why in broken]
    signature = record.get("signature")
    return {
        "stem": stem, **{name: record[name] for name in _FIELDS if name not in ("name", "recipe", "layers")},
        "tags": sorted(tag for tag, target in links.items() if target == record["file"]),
        "pinned": (folder / f"{stem}.pin").exists(),
        "signature": signature if isinstance(signature, dict) else None,
        "sbom": beside if (folder / beside).is_file() else None,
        "layers": [{name: layer[name] for name in _LAYER_FIELDS if name != "notes"} for layer in record["layers"]],
        "drift": [f"{layer['name']}: {line}" for layer in record["layers"] for line in _lines(layer["notes"].get("drift"))],
        **contents.of(record),
        "runs": runs,
    }  # fmt: skip


def _lines(value: Any) -> list[str]:
    return [str(line) for line in value] if isinstance(value, list) else []


# ------------------------------------------------------------------------------------------------- what is in the layers


class Contents:
    """Reads layers of the place, each once."""

    def __init__(self, store: Store, tell: Tell) -> None:
        self.store, self.tell = store, tell
        self._debian: dict[str, dict[str, str] | None] = {}

    def of(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """What decides where an image runs, and its packages; ``unread`` says why they are not known."""
        nothing: dict[str, Any] = {"unread": None, "python": {}, "debian": {}, "glibc": None, "torch": None, "cuda": None, "device_code": [],
                   "gpus": [], "driver": None}  # fmt: skip
        try:
            from builder.chain import platform

            layers = [self._layer(layer) for layer in record["layers"]]
            facts = facts_of_layers(record["file"], layers, self.store, platform().split("/")[1], self.tell)
            debian = next((found for layer in reversed(layers) if (found := self._packages(layer)) is not None), {})
        except StoreError as error:
            return {**nothing, "unread": str(error)}
        core = [path for path in facts.judged if path.endswith("/libtorch_cuda.so")] or list(facts.judged)
        return {
            "unread": None, "python": dict(sorted(facts.packages.items())), "debian": dict(sorted(debian.items())),
            "glibc": facts.glibc, "torch": facts.torch, "cuda": facts.cuda,
            "device_code": facts.judged[core[0]].names if core else [], "gpus": _gpus(facts), "driver": _driver(facts.cuda),
        }  # fmt: skip

    def changes(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
        """What ``after`` has that the version before it had not. Of small layers, the files, too."""
        layers = [[StoredLayer(**layer, executor="", seconds=0, inputs={}) for layer in one["layers"]] for one in (before, after)]  # fmt: skip
        rows = compare_layers(*layers)
        files = {}
        for row in rows:
            pair = [next((layer for layer in one if layer.name == row["name"]), None) for one in layers]
            if not row["same"] and pair[0] and pair[1] and max(pair[0].size, pair[1].size) <= _SMALL:
                files[row["name"]] = self._files(pair[0], pair[1])
        return {
            "before": before["stem"], "size": [before["size"], after["size"]],
            "layers": [row for row in rows if not row["same"]],
            "packages": {kind: changes(before[kind], after[kind]) for kind in ("python", "debian")},
            "environment": changes(before["environment"], after["environment"]),
            "files": {name: lines for name, lines in files.items() if lines},
        }  # fmt: skip

    def _layer(self, layer: Mapping[str, Any]) -> StoredLayer:
        found = self.store.layer(layer["cache_key"])
        if found is None or found.digest != layer["digest"]:
            raise StoreError(f"layer {layer['name']} is not in the place's store")
        return found

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


def _gpus(facts: ImageFacts) -> list[dict[str, str]]:
    """Each kind of GPU: ``level`` as doctor has it (fine, but, fail), and what it says. Empty without device code."""
    rows = []
    for family, models, capability in GPUS if facts.judged else ():
        node = Node(gpus=(Gpu(model=models, capability=capability, memory_gib=1),), architecture=facts.arch)
        found = [
            one for one in check_image(SiteFile(name="", description="", node=node), facts) if one.topic == "GPU code"
        ]
        rows.append({"family": family, "models": models, "capability": capability, "level": worst(found),
                     "said": "; ".join(one.said for one in found if one.level == worst(found))})  # fmt: skip
    return rows


def _driver(cuda: str | None) -> dict[str, str | None] | None:
    """The oldest driver of NVIDIA's that runs that CUDA version, and the one that CUDA version came with."""
    if cuda is None:
        return None
    return {"least": FLOORS.get(version_of(cuda)[0]), "own": TOOLKIT_DRIVERS.get(cuda)}


# --------------------------------------------------------------------------------------------------------- how to run it


def commands(
    place: Path, folder: Path, version: Mapping[str, Any], recipe: str, is_current: bool
) -> list[dict[str, Any]]:
    """Ways to run it, each with its lines and what it needs. Paths are for a shell."""
    task = shlex.quote(next(iter(version["tasks"]), "TASK"))
    file = shlex.quote(str(folder / (CURRENT if is_current else version["file"])))
    fixed = shlex.quote(str(folder / version["file"]))
    gpu = version["cuda"] is not None or version["unread"] is not None
    run = "singularity exec --nv"  # which only says so where there is no GPU
    stack = f" --stack {shlex.quote(version['stack'])}" if folder.name != recipe else ""
    ways = [{"title": "Singularity, Apptainer", "about": "Nothing else is needed.",
             "lines": [f"{run} {file} {task}", f"{run.replace('singularity', 'apptainer')} {file} {task}"]}]  # fmt: skip
    if (folder / f"{version['stem']}.module").exists():
        module = f"ekiben/{folder.name}" if is_current else module_name(folder.name, version["stem"])
        ways.append({"title": "Environment Modules, Lmod", "about": "The tasks are then on PATH.",
                     "lines": [f"module use {shlex.quote(str(place / MODULES))}", f"module load {shlex.quote(module)}", task]})  # fmt: skip
    shared = f"EKIBEN_SHARED={shlex.quote(str(place))} build.py image {shlex.quote(recipe)}{stack} --format docker"
    ways.append({"title": "Docker", "about": "From a checkout of Ekiben, which takes the layers from here and builds none of them.",
                 "lines": [shared, f"docker run --rm{' --gpus all' if gpu else ''} ekiben/{shlex.quote(folder.name)} {task}"]})  # fmt: skip
    line = f"{run} {fixed} {task}"
    in_folder = f'cd "$PBS_O_WORKDIR" && {line}'
    asks = {
        "slurm": ("Slurm", f"sbatch{' --gpus-per-node=1' * gpu} --time=2:00:00 --wrap {shlex.quote(line)}"),
        "sge": ("Grid Engine", f"qsub -cwd -V -b y -shell n{' -l gpu=1' * gpu} -l h_rt=2:00:00 {line}"),
        "pbs": ("PBS", f"echo {shlex.quote(in_folder)} | qsub -l select=1{':ngpus=1' * gpu} -l walltime=2:00:00"),
    }  # fmt: skip
    for kind, (title, submit) in asks.items():
        wanted = " --option '-l gpu=1'" if kind == "sge" else " --gpus-per-node 1"
        again = f"build.py submit {shlex.quote(recipe)} {task} --scheduler {kind} --sif {fixed}{wanted * gpu} --time 2:00:00"
        about = "One task on one node. The second line, with Ekiben: also on several, and into the queue again until it is done."
        if gpu and kind == "sge":
            about += " What a GPU is called differs from site to site."
        ways.append({"title": title, "about": about, "lines": [submit, again]})
    check = [f"cd {shlex.quote(str(folder))} && sha256sum -c {shlex.quote(version['file'])}.sha256"]
    if version["signature"]:
        check += [f"apptainer verify {fixed}", f"build.py verify {fixed} --require-signature"]
    about = "That the file is whole" + (", and signed by a key you know: import it first." if len(check) > 1 else ".")
    ways.append({"title": "Check it", "about": about, "lines": check})
    return ways
