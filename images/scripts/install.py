"""Install a lock file into this interpreter's environment, shrink it, compile it: install.py LOCK

Deterministic: the same lock gives the same bytes, at any number of cores. Only what this lock adds is touched, so a
layer holds nothing of the layers below.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
SHRINK = Path(__file__).with_name("shrink.py")

UNCHECKED_HASH = (0b01).to_bytes(4, "little")  # flags of a .pyc file, PEP 552

# Which references marshal writes depends on all that the process compiled before. So a process gets the files of one
# package, in order and so many of them, and how many processes run side by side does not matter.
AT_ONCE = 400
COMPILE = """
import py_compile, sys
for path in sys.stdin.read().splitlines():
    try:
        py_compile.compile(path, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    except py_compile.PyCompileError as error:
        print(f"not compiled: {path}: {error.exc_type_name}", file=sys.stderr)
"""


def install(lock: Path) -> None:
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--python", sys.executable, "--no-progress"]
    exactly = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirements", str(lock)]
    cache = ["--link-mode", "copy"] if "UV_CACHE_DIR" in os.environ else ["--no-cache"]
    # The image's own list of authorities, over which a site can bind one that knows its proxy.
    subprocess.run([*uv, *exactly, *cache], env={"UV_SYSTEM_CERTS": "1", **os.environ}, check=True)
    (Path(sys.prefix) / ".lock").unlink(missing_ok=True)  # uv's; a layer above would hold it again, by touching it


def compile_packages() -> None:
    packages = [_uncompiled(entry) for entry in sorted(SITE.iterdir())]
    parts = [files[start : start + AT_ONCE] for files in packages for start in range(0, len(files), AT_ONCE)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_compile, sorted(parts, key=len, reverse=True)))


def _uncompiled(entry: Path) -> list[Path]:
    files = [entry] if entry.is_file() else sorted(entry.rglob("*.py"))
    return [file for file in files if file.suffix == ".py" and not _is_compiled(file)]


def _is_compiled(source: Path) -> bool:
    """By us: what an import wrote meanwhile (setuptools is imported by a .pth file) holds a time, not a hash."""
    compiled = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
    try:
        with compiled.open("rb") as file:
            return file.read(8)[4:] == UNCHECKED_HASH
    except FileNotFoundError:
        return False


def _compile(files: list[Path]) -> None:
    environment = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
    python = [sys.executable, "-S", "-W", "ignore", "-c", COMPILE]
    subprocess.run(python, input="\n".join(map(str, files)), text=True, env=environment, check=True)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not (lock := Path(arguments[0])).is_file():
        print("usage: install.py LOCK   (requirements with hashes)", file=sys.stderr)
        return 2
    os.umask(0o022)
    try:
        install(lock)
        subprocess.run([sys.executable, SHRINK, SITE], check=True)
        compile_packages()
    except subprocess.CalledProcessError as error:
        print(f"install.py: {lock} is not installed: {error.cmd[0]} ended with {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
