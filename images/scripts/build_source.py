"""Build one wheel of an unpacked source, the same bytes each time: build_source.py SOURCE REQUIREMENTS WHEELS

REQUIREMENTS is a folder with the packages that the build needs. Nothing is fetched. The wheel's members are sorted and
have the time of SOURCE_DATE_EPOCH, whatever the source's own builder wrote.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

EARLIEST = 315532800  # 1980, the first year of a ZIP file


def build_wheel(source: Path, requirements: Path, wheels: Path) -> Path:
    """The wheel that pip makes of ``source``, rewritten in ``wheels``."""
    exactly = ["--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir", "--use-pep517"]
    paths = [str(requirements), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": f"{requirements / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONHASHSEED": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", *exactly, "--wheel-dir", folder, str(source)]
        subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        wheels.mkdir(parents=True, exist_ok=True)
        return rewrite(wheel, wheels / wheel.name)


def rewrite(wheel: Path, target: Path) -> Path:
    """The same members in order, with one time and two modes, and a RECORD in the same order."""
    moment = time.gmtime(max(EARLIEST, int(os.environ.get("SOURCE_DATE_EPOCH", EARLIEST))))[:6]
    with zipfile.ZipFile(wheel) as old:
        modes = {info.filename: info.external_attr >> 16 for info in old.infolist() if not info.is_dir()}
        held = {name: old.read(name) for name in modes}
    (record,) = (name for name in held if name.endswith(".dist-info/RECORD"))
    names = sorted(held, key=lambda name: (".dist-info/" in name, name == record, name))
    held[record] = _record(held, names, record)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in names:
            info = zipfile.ZipInfo(name, moment)
            info.compress_type, info.create_system = zipfile.ZIP_DEFLATED, 3
            info.external_attr = (0o100755 if modes[name] & 0o100 else 0o100644) << 16
            new.writestr(info, held[name])
    return target


def _record(held: dict[str, bytes], names: list[str], record: str) -> bytes:
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for name in names:
        digest = base64.urlsafe_b64encode(hashlib.sha256(held[name]).digest()).rstrip(b"=").decode()
        lines.writerow((name, "", "") if name == record else (name, f"sha256={digest}", len(held[name])))
    return text.getvalue().encode()


def main(arguments: list[str]) -> int:
    if len(arguments) != 3 or not (source := Path(arguments[0])).is_dir():
        print("usage: build_source.py SOURCE REQUIREMENTS WHEELS   (an unpacked source; two folders)", file=sys.stderr)
        return 2
    os.umask(0o022)
    try:
        print(build_wheel(source, Path(arguments[1]), Path(arguments[2])).name)
    except subprocess.CalledProcessError as error:
        print(f"build_source.py: no wheel of {source}: pip ended with {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
