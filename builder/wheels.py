"""Compiled wheels: what is proven of one before it is kept, and how one travels between stores.

A wheel's key names its source, torch, CUDA, Python, the C++ ABI, the compute capabilities and the flags it is compiled
with (builder.chain). Its record travels with it in a file beside it: <wheel>.json.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builder.arch import coverage_problem
from builder.chain import BuildStage, Chain
from builder.cubins import DeviceCode, read_device_code
from builder.elf import Library, read_library
from builder.errors import StoreError, UsageError, VerifyError, nearest
from builder.store import Handed, Store, StoredResult

RECORD_FORMAT = 1


def prove(wheel: Path, name: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What can be read off a wheel that is said to fit ``inputs`` (a wheel stage's). Errors: VerifyError.

    That it can be imported, and what it holds, is for the layer's own %test, in the runtime image.
    """
    extensions = read_wheel(wheel, name, inputs)
    code = {place: item.code.names for place, item in extensions.items() if item.code}
    problems = [
        f"{place}: {problem}"
        for place, item in extensions.items()
        for problem in _library_problems(item.library, inputs)
    ]
    problems += [f"{place}: {problem}" for place, names in code.items()
                 if (problem := coverage_problem(inputs["capabilities"], names)) is not None]  # fmt: skip
    if not code:
        problems.append("there is no device code in it: it was compiled for CPUs only")
    if problems:
        raise VerifyError(f"{wheel.name} is not what it should be, and is not kept:\n  " + "\n  ".join(problems))
    return {"extensions": {place: code.get(place, []) for place in sorted(extensions)}}


@dataclass(frozen=True, slots=True)
class Extension:
    library: Library
    code: DeviceCode | None


def read_wheel(wheel: Path, name: str, inputs: Mapping[str, Any]) -> dict[str, Extension]:
    """The wheel's extensions by path, after a look at its name and at every file's hash. Errors: VerifyError."""
    parts = wheel.name.removesuffix(".whl").split("-")
    if not wheel.name.endswith(".whl") or len(parts) not in (5, 6):
        raise VerifyError(f"{wheel.name} is no wheel's file name")
    if _plain(parts[0]) != _plain(name):
        raise VerifyError(f"{wheel.name} is a wheel of {parts[0]}; wanted is one of {name}")
    python, machine = "cp" + str(inputs["python"]).replace(".", ""), {"amd64": "x86_64", "arm64": "aarch64"}
    if parts[-3] != python or not parts[-1].endswith(machine.get(str(inputs["platform"]).partition("/")[2], "?")):
        raise VerifyError(f"{wheel.name} is for {parts[-3]} on {parts[-1]}; wanted is {python} on {inputs['platform']}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            _check_record(archive, wheel.name)
            found = {
                info.filename: _read_extension(archive.read(info))
                for info in archive.infolist()
                if info.filename.endswith(".so")
            }
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise VerifyError(f"{wheel.name} cannot be read: {error}") from error
    if not found:
        raise VerifyError(f"{wheel.name} holds no compiled extension: its build left them out without an error")
    return found


def _read_extension(data: bytes) -> Extension:
    return Extension(read_library(data), read_device_code(lambda offset, size: data[offset : offset + size]))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_record(archive: zipfile.ZipFile, name: str) -> None:
    """Every file as the wheel's own RECORD has it: https://packaging.python.org/specifications/recording-installed-packages/"""
    records = [item for item in archive.namelist() if item.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise VerifyError(f"{name} has no RECORD of its files")
    for path, digest, *_ in csv.reader(archive.read(records[0]).decode().splitlines()):
        if not digest:
            continue
        algorithm, _, value = digest.partition("=")
        try:
            found = base64.urlsafe_b64encode(hashlib.new(algorithm, archive.read(path)).digest()).rstrip(b"=").decode()
        except (KeyError, ValueError):
            found = ""
        if found != value:
            raise VerifyError(f"{name}: {path} is not what the wheel's RECORD says")


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
        # torch's own functions that take a std::string carry the ABI in their names, whichever it is.
        of_torch = [symbol for symbol in library.undefined if re.match(r"_ZNK?(?:2at|3c10|5torch)", symbol)]
        new = any("B5cxx11" in symbol or "__cxx11" in symbol for symbol in of_torch)
        old = any("RKSs" in symbol or symbol.endswith("Ss") for symbol in of_torch)
        if (old and inputs["cxx11_abi"]) or (new and not inputs["cxx11_abi"]):
            problems.append(
                f"uses the {'old' if old else 'new'} C++ ABI of libstdc++; torch {inputs['torch']} here has the other"
            )
    return problems


# -- between stores ------------------------------------------------------------------------------------------------------


def wheels_of(chain: Chain) -> dict[str, BuildStage]:
    """The wheels a chain takes from build stages, by package, with what each stands on."""
    found: dict[str, BuildStage] = {}
    for layer in chain.layers:
        for item in layer.taken:
            if item.stage.wheel:
                found[item.stage.wheel] = item.stage
    return found


def stage_for(chain: Chain, wheel: Path) -> BuildStage:
    """The stage of the chain that a wheel is for, by its file name. Errors: UsageError."""
    package, compiled = _plain(wheel.name.split("-")[0]), wheels_of(chain)
    found = [stage for name, stage in compiled.items() if _plain(name) == package]
    if not found:
        what = f"it compiles {', '.join(compiled)}" if compiled else "it compiles nothing"
        raise UsageError(f"{wheel.name}: no layer of {chain.recipe.name} compiles '{package}'; {what}")
    return found[0]


def find_wheel(store: Store, name: str) -> StoredResult:
    """A wheel by package or by the beginning of its key. Errors: UsageError."""
    kept = [item for item in store.results() if item.wheel]
    found = [item for item in kept if item.wheel == name or item.key.startswith(name)]
    if not found:
        raise UsageError(f"no wheel '{name}' in {store.root}." + nearest(name, {item.wheel or "" for item in kept}))
    if len(found) > 1:
        keys = ", ".join(
            f"{item.key[:12]} (torch {item.inputs['torch']}, {' '.join(item.inputs['capabilities'])})" for item in found
        )
        raise UsageError(f"there are several wheels '{name}'; name one by its key: {keys}")
    return found[0]


def export_wheel(store: Store, result: StoredResult, folder: Path) -> Path:
    """The wheel and its record as two files of ``folder``; the path of the wheel. Errors: StoreError."""
    (handed,) = [item for item in result.files if item.path.endswith(".whl")]
    store.check_blob(handed.digest, again=True)
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder; make it first")
    target = folder / Path(handed.path).name
    if target.exists() and digest_of(target) != handed.digest:
        raise StoreError(f"{target} is another wheel of that name: for other GPUs, or another stack",
                         hint="name another folder with -o, or remove it and its .json")  # fmt: skip
    for path, source in ((target, store.blob_path(handed.digest)), (target.with_name(target.name + ".json"), None)):
        temporary = path.with_name(f".{path.name}.new")
        try:
            if source is not None:
                shutil.copyfile(source, temporary)
            else:
                temporary.write_text(
                    json.dumps({"format": RECORD_FORMAT, **asdict(result)}, indent=1, sort_keys=True) + "\n"
                )
            temporary.chmod(0o644)
            temporary.rename(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StoreError(f"{path} cannot be written: {error.strerror}") from error
    return target


def read_record(wheel: Path, stage: BuildStage) -> StoredResult | None:
    """The record beside a wheel, when there is one and it speaks of this very wheel for this very stage.

    Errors: VerifyError where it speaks of another, with what differs.
    """
    place = wheel.with_name(wheel.name + ".json")
    if not place.exists():
        return None
    try:
        data = json.loads(place.read_text())
        if data.pop("format") != RECORD_FORMAT:
            raise ValueError("another format")
        record = StoredResult(**{**data, "files": tuple(Handed(**item) for item in data["files"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VerifyError(f"{place} is no record of a wheel: {error}") from error
    if record.key != stage.cache_key:
        raise VerifyError(f"{wheel.name} was compiled for something else than {stage.name} is here:\n  "
                          + "\n  ".join(differences(record.inputs, stage.inputs)),
                          hint="import it where these are the same, or compile it here: build.py image")  # fmt: skip
    digest = digest_of(wheel)
    if digest not in [item.digest for item in record.files]:
        raise VerifyError(f"{wheel} has the hash {digest[7:19]}…, its record says {record.files[0].digest[7:19]}…: it is "
                          "damaged, or another file of that name")  # fmt: skip
    return record


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    said = []
    for field in sorted(theirs.keys() | ours.keys()):
        a, b = theirs.get(field), ours.get(field)
        if a == b:
            continue
        short = (not isinstance(a, (list, dict)) and field != "post") or field == "capabilities"
        said.append(f"{field}: {_short(a)} there, {_short(b)} here" if short else f"{field} differs")
    return said


def _short(value: Any) -> str:
    return " ".join(value) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def digest_of(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def savings(chain: Chain, store: Store) -> str:
    """What --gpu-arch leaves out, in words and, where the same package was compiled before, in numbers."""
    from builder.stack import find_stack

    everything = find_stack(chain.stack.name, chain.recipe.image_folders).file.compute_capabilities
    compiled = wheels_of(chain)
    if not compiled:
        return f"--gpu-arch saves nothing: no layer of {chain.recipe.name} is compiled for GPUs"
    lines = []
    for name, stage in compiled.items():
        wanted = stage.inputs["capabilities"]
        others = [item for item in everything if item not in wanted]
        said = (
            f"{name}: for {', '.join(wanted)}; not for {', '.join(others)}"
            if others
            else f"{name}: for {', '.join(wanted)}"
        )
        share = f", about {len(others)} of {len(everything)} parts of its device code" if others else ""
        seen = [
            item for item in store.results() if item.wheel == name and len(item.inputs["capabilities"]) > len(wanted)
        ]
        known = (
            f" (one for {len(seen[-1].inputs['capabilities'])} took {seen[-1].seconds:.0f} s and has {seen[-1].size / 1e6:.0f} MB)"
            if seen
            else ""
        )
        lines.append(f"saves  {said}{share}{known}")
    return "\n".join(lines)
