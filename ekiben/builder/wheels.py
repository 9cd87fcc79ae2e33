"""Compiled wheels: checks before one is stored, and export and import between stores.

A wheel's key names its source, torch, CUDA, Python, the C++ ABI, the compute capabilities and the flags it is compiled
with (ekiben.resolve.resolve). Its record is a file beside it: <wheel>.json.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from ekiben.core import files as core_files
from ekiben.core.atomic import write_files
from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.errors import StoreError, UsageError, VerifyError, nearest
from ekiben.core.files import open_regular
from ekiben.gpu.device_code import DeviceCode, read_device_code
from ekiben.gpu.elf import Library, read_library
from ekiben.resolve.capabilities import coverage_problem
from ekiben.resolve.graph import BuildStage, ResolvedRecipe
from ekiben.store import Store, StoredResult

RECORD_FORMAT = 1


def validate_wheel(wheel: Path, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Check what can be read off a wheel against ``inputs``, a wheel stage's; return its extensions.

    Raises VerifyError.

    That it can be imported, and what it holds, is for the layer's own %test, in the runtime image.
    """
    extensions = read_wheel(wheel, name, inputs)
    code = {path: item.code.names for path, item in extensions.items() if item.code}
    problems = [
        f"{path}: {problem}" for path, item in extensions.items() for problem in _library_problems(item.library, inputs)
    ]
    problems += [
        f"{path}: {problem}"
        for path, names in code.items()
        if (problem := coverage_problem(inputs["capabilities"], names)) is not None
    ]
    if not code:
        problems.append("there is no device code in it: it was compiled for CPUs only")
    if problems:
        raise VerifyError(f"{wheel.name} does not fit its stage, and is not kept:\n  " + "\n  ".join(problems))
    return {"extensions": {path: code.get(path, []) for path in sorted(extensions)}}


@dataclass(frozen=True, slots=True)
class Extension:
    """An extension module of a wheel, with the device code in it."""

    library: Library
    code: DeviceCode | None


def read_wheel(wheel: Path, name: str, inputs: Mapping[str, Any]) -> dict[str, Extension]:
    """Return the wheel's extensions by path, after a check of its name and of every file's hash. Raises VerifyError."""
    try:
        package, _, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise VerifyError(f"{wheel.name} is not a wheel's file name") from error
    if package != canonicalize_name(name):
        raise VerifyError(f"{wheel.name} is a wheel of {package}; expected: {name}")
    python, platform = "cp" + str(inputs["python"]).replace(".", ""), str(inputs["platform"])
    machine = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}.get(platform, "?")
    if not any(tag.interpreter == python and tag.platform.endswith(machine) for tag in tags):
        targets = " and ".join(sorted(f"{tag.interpreter} on {tag.platform}" for tag in tags))
        raise VerifyError(f"{wheel.name} is for {targets}; expected: {python} on {platform}")
    try:
        with open_regular(wheel) as file, zipfile.ZipFile(file) as archive:
            _check_record(archive, wheel.name)
            extensions = {
                info.filename: _read_extension(archive.read(info))
                for info in archive.infolist()
                if info.filename.endswith(".so")
            }
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise VerifyError(f"{wheel.name} cannot be read: {error}") from error
    if not extensions:
        raise VerifyError(f"{wheel.name} holds no compiled extension: its build left them out without an error")
    return extensions


def _read_extension(data: bytes) -> Extension:
    return Extension(read_library(data), read_device_code(lambda offset, size: data[offset : offset + size]))


def _check_record(archive: zipfile.ZipFile, name: str) -> None:
    """Check files against RECORD: packaging.python.org/specifications/recording-installed-packages/"""
    records = [item for item in archive.namelist() if item.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise VerifyError(f"{name} has no RECORD of its files")
    for path, digest, *_ in csv.reader(archive.read(records[0]).decode().splitlines()):
        if not digest:
            continue
        algorithm, _, value = digest.partition("=")
        try:
            computed = (
                base64.urlsafe_b64encode(hashlib.new(algorithm, archive.read(path)).digest()).rstrip(b"=").decode()
            )
        except (KeyError, ValueError):
            computed = ""
        if computed != value:
            raise VerifyError(f"{name}: {path} differs from the wheel's RECORD")


def _library_problems(library: Library, inputs: Mapping[str, Any]) -> list[str]:
    problems = []
    machine = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}.get(str(inputs["platform"]))
    if library.machine != machine:
        problems.append(f"is for {library.machine}, not {machine}")
    major = str(inputs["cuda"]).split(".")[0]
    for soname in library.needed:
        if (match := re.match(r"libcudart\.so\.(\d+)", soname)) and match[1] != major:
            problems.append(f"is linked against CUDA {match[1]} ({soname}); the stack has CUDA {inputs['cuda']}")
    if any(soname.startswith(("libtorch", "libc10")) for soname in library.needed):
        # The mangled names of torch's functions with a std::string argument show the ABI.
        of_torch = [symbol for symbol in library.undefined if re.match(r"_ZNK?(?:2at|3c10|5torch)", symbol)]
        new = any("B5cxx11" in symbol or "__cxx11" in symbol for symbol in of_torch)
        old = any("RKSs" in symbol or symbol.endswith("Ss") for symbol in of_torch)
        if (old and inputs["cxx11_abi"]) or (new and not inputs["cxx11_abi"]):
            problems.append(
                f"uses the {'old' if old else 'new'} C++ ABI of libstdc++; torch {inputs['torch']} here has the other"
            )
    return problems


# -- between stores
# ------------------------------------------------------------------------------------------------------


def wheels_of(resolved: ResolvedRecipe) -> dict[str, BuildStage]:
    """Return the build stages that compile a wheel, by package."""
    stages: dict[str, BuildStage] = {}
    for layer in resolved.layers:
        for item in layer.copies:
            if item.stage.wheel:
                stages[item.stage.wheel] = item.stage
    return stages


def stage_for(resolved: ResolvedRecipe, wheel: Path) -> BuildStage:
    """Return the build stage that a wheel is for, by its file name. Raises UsageError when the recipe has none."""
    package, compiled = canonicalize_name(wheel.name.split("-")[0]), wheels_of(resolved)
    stages = [stage for name, stage in compiled.items() if canonicalize_name(name) == package]
    if not stages:
        what = f"it compiles {', '.join(compiled)}" if compiled else "it compiles nothing"
        raise UsageError(f"{wheel.name}: no layer of {resolved.recipe.name} compiles '{package}'; {what}")
    return stages[0]


def find_wheel(store: Store, name: str) -> StoredResult:
    """Find a wheel by package or by the beginning of its key. Raises UsageError when there is none, or several."""
    kept = [item for item in store.results() if item.wheel]
    matches = [item for item in kept if item.wheel == name or item.key.startswith(name)]
    if not matches:
        raise UsageError(f"no wheel '{name}' in {store.root}." + nearest(name, {item.wheel or "" for item in kept}))
    if len(matches) > 1:
        keys = ", ".join(
            f"{item.key[:12]} (torch {item.input_text('torch')}, {' '.join(item.capabilities)})" for item in matches
        )
        raise UsageError(f"there are several wheels '{name}'; name one by its key: {keys}")
    return matches[0]


def export_wheel(store: Store, result: StoredResult, folder: Path) -> Path:
    """Write the wheel and its record into ``folder``; return the wheel's path. Raises StoreError."""
    (wheel,) = [item for item in result.files if item.path.endswith(".whl")]
    store.check_blob(wheel.digest, again=True)
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder; create it first")
    target = folder / Path(wheel.path).name
    if target.exists() and digest_of(target) != wheel.digest:
        raise StoreError(
            f"{target} exists and differs: it is for other GPUs, or for another stack",
            hint="name another folder with -o, or remove it and its .json",
        )
    record = json.dumps({"format": RECORD_FORMAT, **asdict(result)}, indent=1, sort_keys=True) + "\n"
    files: dict[Path, str | Iterable[bytes]] = {
        target: store.read_blob(wheel.digest),
        target.with_name(target.name + ".json"): record,
    }
    write_files(files, error=StoreError)
    return target


def read_record(wheel: Path, stage: BuildStage) -> StoredResult | None:
    """Read the record beside a wheel, if there is one.

    Raises VerifyError when it is of another wheel or stage, with what differs.
    """
    path = wheel.with_name(wheel.name + ".json")
    if not path.exists():
        return None
    try:
        fields = Fields.of(parse_json(read_regular(path, follow=True)))
        if fields.size("format") != RECORD_FORMAT:
            raise ValueError(f"is of format {fields.size('format')}")
        record = StoredResult.parse(fields)
        if not record.files:
            raise ValueError("names no file")
    except (OSError, ValueError) as error:
        raise VerifyError(f"{path} is not a record of a wheel: it {error}") from error
    if record.key != stage.cache_key:
        raise VerifyError(
            f"{wheel.name} was not compiled for {stage.name} as it is here:\n  "
            + "\n  ".join(differences(record.inputs, stage.inputs)),
            hint="import it where these agree, or build the image without it: the package is compiled here",
        )
    digest = digest_of(wheel)
    if digest not in [item.digest for item in record.files]:
        raise VerifyError(
            f"{wheel} has the hash {digest[7:19]}…, its record says {record.files[0].digest[7:19]}…: it is "
            "damaged, or another file of that name"
        )
    return record


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Describe in which inputs two compilations differ, a line for each."""
    lines = []
    for field in sorted(theirs.keys() | ours.keys()):
        a, b = theirs.get(field), ours.get(field)
        if a == b:
            continue
        if field == "post" and isinstance(a, str) and isinstance(b, str):
            lines.append(_script_difference(a, b))
            continue
        short = not isinstance(a, (list, dict)) or field == "capabilities"
        lines.append(f"{field}: {_short(a)} there, {_short(b)} here" if short else f"{field} differs")
    return lines


def _script_difference(theirs: str, ours: str) -> str:
    """Show the first line in which two scripts differ: most often an argument has another value in it."""
    pairs = zip_longest(theirs.splitlines(), ours.splitlines(), fillvalue="")
    theirs, ours = next(((a, b) for a, b in pairs if a != b), ("", ""))
    return f"post differs, first in this line:\n    there: {theirs.strip()[:200]}\n    here:  {ours.strip()[:200]}"


def _short(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def digest_of(path: Path) -> str:
    """Return a file's digest. Raises UsageError when it cannot be read."""
    try:
        return core_files.digest_of(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def format_savings(resolved: ResolvedRecipe, store: Store) -> str:
    """Return the architectures that --gpu-arch leaves out and the compile time saved, as far as it is known."""
    from ekiben.spec.stack import find_stack

    everything = find_stack(resolved.stack.name, resolved.recipe.image_folders).file.compute_capabilities
    compiled = wheels_of(resolved)
    if not compiled:
        return f"--gpu-arch saves nothing: no layer of {resolved.recipe.name} is compiled for GPUs"
    lines = []
    for name, stage in compiled.items():
        capabilities = stage.inputs["capabilities"]
        left_out = [item for item in everything if item not in capabilities]
        targets = (
            f"{name}: for {', '.join(capabilities)}; not for {', '.join(left_out)}"
            if left_out
            else f"{name}: for {', '.join(capabilities)}"
        )
        share = f", about {len(left_out)} of {len(everything)} parts of its device code" if left_out else ""
        seen = [item for item in store.results() if item.wheel == name and len(item.capabilities) > len(capabilities)]
        known = (
            f" (one for {len(seen[-1].capabilities)} took {seen[-1].seconds:.0f} s and has"
            f" {seen[-1].size / 1e6:.0f} MB)"
            if seen
            else ""
        )
        lines.append(f"saves  {targets}{share}{known}")
    return "\n".join(lines)
