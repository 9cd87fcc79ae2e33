"""Make one CUDA folder of Debian's unpacked nvidia-cuda-toolkit and of NVIDIA's wheels: toolkit_debian.py TREE FOLDER

The compiler is Debian's; headers and libraries are links to the wheels', for those are what runs later.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

NVIDIA = Path(sysconfig.get_path("purelib")) / "nvidia"
PROGRAMS = ("bin2c", "cudafe++", "cuobjdump", "fatbinary", "nvlink", "ptxas")
# Debian's own names its folders by their absolute paths, and a g++ beside nvcc that is not installed here.
PROFILE = """\
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(_HERE_):
INCLUDES =+ "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
"""


def make_folder(tree: Path, cuda: Path) -> None:
    own = tree / "usr/lib/nvidia-cuda-toolkit"
    shutil.copytree(own / "libdevice", cuda / "nvvm/libdevice")
    shutil.copytree(own / "bin/crt", cuda / "bin/crt")
    for program in (own / "bin/nvcc", own / "bin/cicc", *(tree / "usr/bin" / name for name in PROGRAMS)):
        shutil.copy(program, cuda / "bin")
    (cuda / "bin/nvcc.profile").write_text(PROFILE)
    for part in sorted(NVIDIA.glob("*/include")):
        link_tree(part, cuda / "include")
    (cuda / "lib64/stubs").mkdir(parents=True)
    for library in sorted(NVIDIA.glob("*/lib/lib*.so.*")):
        link(cuda / "lib64" / library.name, library)
        link(cuda / "lib64" / (library.name.split(".so.")[0] + ".so"), library)
    # The driver's library is on no machine without a GPU; what is linked against this stub finds it where there is one.
    stub = ["-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", str(cuda / "lib64/stubs/libcuda.so")]
    subprocess.run(["cc", *stub], check=True)


def link_tree(source: Path, target: Path) -> None:
    """Folders are made, files are links: several wheels have a part of one folder."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            link_tree(path, target / path.name)
        else:
            link(target / path.name, path)


def link(path: Path, target: Path) -> None:
    if not path.exists():
        path.symlink_to(target)


def main(arguments: list[str]) -> int:
    if (
        len(arguments) != 2
        or not (tree := Path(arguments[0])).joinpath("usr/lib/nvidia-cuda-toolkit/bin/nvcc").exists()
    ):
        print(
            "usage: toolkit_debian.py TREE FOLDER   (TREE: the unpacked package nvidia-cuda-toolkit)", file=sys.stderr
        )
        return 2
    make_folder(tree, Path(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
