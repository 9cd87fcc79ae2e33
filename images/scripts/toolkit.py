"""Make one CUDA folder, as nvcc expects it, of the wheels that hold its parts: toolkit.py FOLDER

Wheels have lib/ where nvcc looks for lib64/, and only the versioned names of libraries, where a linker wants the plain
one; and no stub of the driver's library, which is on no machine without a GPU. The folder is a link to the one that the
wheels share.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))


def make_folder(home: Path, cuda: Path) -> None:
    link(home, cuda)
    link(cuda / "lib64", Path("lib"))
    (cuda / "lib" / "stubs").mkdir(exist_ok=True)
    for library in sorted((cuda / "lib").glob("lib*.so.*")):
        link(library.with_name(library.name.split(".so.")[0] + ".so"), Path(library.name))
    stub = [
        "-shared",
        "-x",
        "c",
        "/dev/null",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(cuda / "lib" / "stubs" / "libcuda.so"),
    ]
    subprocess.run(["cc", *stub], check=True)


def link(path: Path, target: Path) -> None:
    if not path.exists():
        path.symlink_to(target)


def main(arguments: list[str]) -> int:
    found = sorted(SITE.glob("nvidia/*/bin/nvcc"))
    if len(arguments) != 1 or len(found) != 1:
        print(f"usage: toolkit.py FOLDER   (with one nvcc in {SITE}/nvidia/*/bin; found {len(found)})", file=sys.stderr)
        return 2
    make_folder(Path(arguments[0]), found[0].parent.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
