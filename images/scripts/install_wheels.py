"""Install a lock file into a folder, as images/scripts/install.py does it into the environment: the same bytes.

Ekiben runs this program in a container on the layers below: install_wheels.py JOB, a JSON file. Wheels are hard links
into uv's cache, and compiled files come from a cache, which are both in one folder; no script of a recipe sees it.
It ends with NOT_EQUAL where install.py would change files of the layers below as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import py_compile
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

NOT_EQUAL = 75
_FORMAT = 1  # of the cache
_ABSENT = 0xFFFFFFFF  # the length of what could not be compiled
_COMPILE = """
import py_compile, sys
for line in sys.stdin.read().splitlines():
    path, final, compiled = line.split("\\0")
    try:
        py_compile.compile(path, compiled, final, doraise=True,
                           invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    except py_compile.PyCompileError as error:
        print(f"not compiled: {final}: {error.exc_type_name}", file=sys.stderr)
"""


def main(arguments: Sequence[str]) -> int:
    """Install what the job names. Returns the exit code."""
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        print("usage: install_wheels.py JOB   (Ekiben's, of a container that it starts)", file=sys.stderr)
        return 2
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    sys.path.insert(0, "/opt/ekiben")
    installer, shrink = importlib.import_module("install"), importlib.import_module("shrink")
    site = Path(sysconfig.get_path("purelib"))
    if shrink.find_unused(site) or shrink.find_strippable(site):
        return NOT_EQUAL
    os.umask(0o022)
    target = Path(job["prefix"]) / site.relative_to(sys.prefix)
    try:
        _install(Path(job["lock"]), Path(job["prefix"]))
        _shrink(target, job["torch"])
        _compile(installer, target, site, Path(job["compiled"]))
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} ended with {error.returncode}", file=sys.stderr)
        return 1
    return 0


def _install(lock: Path, prefix: Path) -> None:
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--python", sys.executable, "--no-progress"]
    exactly = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirements", str(lock)]
    links = ["--prefix", str(prefix), "--link-mode", "hardlink"]
    subprocess.run([*uv, *exactly, *links], env={"UV_SYSTEM_CERTS": "1", **os.environ}, check=True)
    (prefix / ".lock").unlink(missing_ok=True)


def _shrink(site: Path, torch: str) -> None:
    """Remove what a training run never reads. ``torch``: the text of torch/version.py in a layer below, or ""."""
    version = site / "torch/version.py"
    is_below = bool(torch) and not version.parent.exists()
    if is_below:
        version.parent.mkdir()
        version.write_text(torch, encoding="utf-8")
    subprocess.run([sys.executable, "/opt/ekiben/shrink.py", str(site)], check=True)
    if is_below:
        version.unlink()
        version.parent.rmdir()


def _compile(installer: ModuleType, target: Path, site: Path, cache: Path) -> None:
    """Compile the files of ``target`` in the batches of install.py, under the names that they have in ``site``."""
    packages = [installer._uncompiled(entry) for entry in sorted(target.iterdir())]
    size = installer.AT_ONCE
    batches = [files[start : start + size] for files in packages for start in range(0, len(files), size)]
    interpreter = _interpreter()

    def compile_batch(files: Sequence[Path]) -> None:
        names = [(file, str(site / file.relative_to(target)), _compiled(file)) for file in files]
        hashes = [[final, hashlib.sha256(file.read_bytes()).hexdigest()] for file, final, _ in names]
        key = hashlib.sha256(json.dumps([_FORMAT, interpreter, hashes]).encode()).hexdigest()
        entry = cache / key[:2] / key
        if (codes := _read(entry, len(files))) is not None:
            for (file, _, compiled), code in zip(names, codes, strict=True):
                _write(file, compiled, code)
            return
        text = "".join(f"{file}\0{final}\0{compiled}\n" for file, final, compiled in names)
        environment = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
        python = [sys.executable, "-S", "-W", "ignore", "-c", _COMPILE]
        subprocess.run(python, input=text, text=True, env=environment, check=True)
        _keep(entry, [compiled.read_bytes() if compiled.exists() else None for _, _, compiled in names])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_batch, sorted(batches, key=len, reverse=True)))


def _interpreter() -> list[str]:
    """Return what decides about compiled code beside the source: Debian's interpreter is one program."""
    files = [Path(sys.executable).resolve(), Path(py_compile.__file__)]
    return [sys.version, *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)]


def _compiled(source: Path) -> Path:
    return source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"


def _read(entry: Path, count: int) -> list[bytes | None] | None:
    """Return the compiled files of a batch; None where the cache does not have them."""
    try:
        data = entry.read_bytes()
    except FileNotFoundError:
        return None
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    with contextlib.suppress(OSError):
        os.utime(entry)  # prune removes what is not used
    codes = list(_split(data[32:]))
    return codes if len(codes) == count else None


def _split(data: bytes) -> Iterator[bytes | None]:
    position = 0
    while position < len(data):
        length = int.from_bytes(data[position : position + 4], "little")
        position += 4
        if length == _ABSENT:
            yield None
            continue
        yield data[position : position + length]
        position += length


def _keep(entry: Path, codes: Sequence[bytes | None]) -> None:
    data = b"".join((_ABSENT if code is None else len(code)).to_bytes(4, "little") + (code or b"") for code in codes)
    with contextlib.suppress(OSError):  # a full disk: it is compiled again next time
        entry.parent.mkdir(exist_ok=True)
        temporary = entry.with_name(f"{entry.name}.{os.getpid()}")
        temporary.write_bytes(hashlib.sha256(data).digest() + data)
        temporary.replace(entry)


def _write(source: Path, compiled: Path, code: bytes | None) -> None:
    """Write a compiled file as py_compile does: with the source's mode, without its executable bits."""
    if code is None:
        return
    compiled.parent.mkdir(exist_ok=True)
    mode = (source.stat().st_mode | 0o200) & 0o666
    with os.fdopen(os.open(compiled, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as out:
        out.write(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
