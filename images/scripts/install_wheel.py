"""Install compiled wheels of a folder, shrink and compile them as a lock file's packages are, and remove the folder:
install_wheel.py FOLDER

Their dependencies are the layer's lock file's matter, installed before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from install import SHRINK, SITE, compile_packages


def main(arguments: list[str]) -> int:
    wheels = sorted(Path(arguments[0]).glob("*.whl")) if len(arguments) == 1 else []
    if not wheels:
        print("usage: install_wheel.py FOLDER   (with wheels in it)", file=sys.stderr)
        return 2
    os.umask(0o022)
    # pip, for uv notes the time of a local file in what it installs.
    exactly = ["--no-deps", "--no-index", "--no-compile", "--no-cache-dir", "--progress-bar", "off"]
    try:
        subprocess.run([sys.executable, "-m", "pip", "install", *exactly, *map(str, wheels)], check=True)
        subprocess.run([sys.executable, str(SHRINK), str(SITE)], check=True)
        compile_packages()
    except subprocess.CalledProcessError as error:
        print(f"install_wheel.py: {wheels[0].name} is not installed: it ended with {error.returncode}", file=sys.stderr)
        return 1
    shutil.rmtree(arguments[0])
    with contextlib.suppress(OSError):  # another layer's wheels may be beside it
        Path(arguments[0]).parent.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
