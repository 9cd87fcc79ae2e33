"""SIFs on their way to a GPU machine: what arrives is the same file, and nothing else is written."""

from __future__ import annotations

import hashlib
import io
import random
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

import pytest

from ekiben.formats.layer import Entry, LayerEntry, write_entries
from ekiben.formats.partition import Partition
from ekiben.formats.sif import sif_header, write_sif
from ekiben.formats.squashfs.writer import SquashfsWriter

pytestmark = pytest.mark.covers("qa/gpu/carry_image.py", "ekiben/formats")

SCRIPT = Path(__file__).parent / "gpu" / "carry_image.py"
INSIDE = "opt/venv/lib/python3.10/site-packages"
NUMBERS = random.Random(0)
LIBRARY = b"\x7fELF" + NUMBERS.randbytes(300_000)
COMMON = NUMBERS.randbytes(3_000)
EPOCH = 1_700_000_000


def carry(*argv: object, code: int = 0) -> str:
    done = subprocess.run([sys.executable, SCRIPT, *map(str, argv)], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def site_packages(folder: Path) -> Path:
    """What the GPU machine has, of this Python's version."""
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    (folder / "tool").mkdir(parents=True)
    (folder / "tool" / f"_c.{tag}-x86_64-linux-gnu.so").write_bytes(LIBRARY)
    (folder / "tool" / "data.bin").write_bytes(COMMON)
    return folder


def layer(path: Path, *entries: Entry, data: dict[str, bytes]) -> Partition:
    def with_data() -> list[LayerEntry]:
        return [(entry, [data[entry.path]] if entry.kind == "file" and entry.size else None) for entry in entries]

    with path.open("w+b") as out:
        write_entries(with_data(), SquashfsWriter(out, epoch=EPOCH))
    return Partition(path, 0, path.stat().st_size, "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest())


def image(folder: Path) -> Path:
    """Two layers with a file that the GPU machine has, a library that it has in another build, and one that it
    lacks.
    """
    data = {
        f"{INSIDE}/tool/_c.cpython-310-x86_64-linux-gnu.so": LIBRARY[:200_000] + b"another build" + LIBRARY[200_000:],
        f"{INSIDE}/tool/data.bin": COMMON,
        f"{INSIDE}/tool/weights.bin": NUMBERS.randbytes(1_500_000),
        f"{INSIDE}/tool/again.bin": COMMON,
        f"{INSIDE}/tool/small.py": b"x = 1\n",
        "empty": b"",
    }
    names = ["", *(path.as_posix() for path in reversed(PurePosixPath(INSIDE, "tool").parents[:-1])), f"{INSIDE}/tool"]
    folders = [Entry(name, "dir", mtime=EPOCH) for name in names]
    files = [
        Entry(name, "file", 0o644, 1000, 1000, EPOCH, len(content), xattrs=(("user.note", b"\0\xff"),))
        for name, content in data.items()
    ]
    other = [Entry("a\udcff", "symlink", mtime=EPOCH, target="/opt"), Entry("run", "fifo", mtime=EPOCH)]
    link = Entry("z", "hardlink", 0o644, 1000, 1000, EPOCH, 0, f"{INSIDE}/tool/data.bin")
    lower = layer(folder / "0", *sorted([*folders, *files, *other, link], key=lambda entry: entry.order), data=data)
    upper = layer(folder / "1", folders[0], Entry("a\udcff", "whiteout", mtime=EPOCH), data=data)
    digests = [lower.digest, upper.digest]
    header = sif_header(digests, "Bootstrap: scratch\n# \u00e9 \udcff\n", "amd64", EPOCH, users=b"users" * 99)
    write_sif(folder / "image.sif", [lower, upper], header)
    return folder / "image.sif"


def test_a_sif_arrives_as_the_same_file(tmp_path: Path) -> None:
    existing, have = site_packages(tmp_path / "gpu-machine"), site_packages(tmp_path / "here")
    sif = image(tmp_path)
    carry("survey", existing, tmp_path / "survey.gz")
    options = ("--survey", tmp_path / "survey.gz", "--have", have, "--part", "1", "--cache", tmp_path / "cache")
    printed = carry("pack", *options, "--to", tmp_path / "cargo", sif)
    assert f"image.sif: 2 layers, sha256:{hashlib.sha256(sif.read_bytes()).hexdigest()}" in printed
    archive = sorted((tmp_path / "cargo").iterdir())
    assert [path.name for path in archive] == ["part-000", "part-001"]
    assert archive[0].stat().st_size == 1 << 20
    # Neither the common file nor the library travelled: the 1.5 MB that the machine lacks did.
    assert sum(path.stat().st_size for path in archive) < 1_500_000 + 50_000
    assert carry("unpack", tmp_path / "cargo", "--to", tmp_path / "out").endswith(", the same\n")
    assert (tmp_path / "out" / "image.sif").read_bytes() == sif.read_bytes()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["image.sif"]
    compressed = sorted((tmp_path / "cache").iterdir())
    carry("pack", *options, "--to", tmp_path / "again", sif)
    assert sorted((tmp_path / "cache").iterdir()) == compressed


@pytest.mark.parametrize("damage", ["a file is missing", "a path", "a link", "no archive"])
def test_what_is_no_archive_of_ours_is_refused(damage: str, tmp_path: Path) -> None:
    cargo = tmp_path / "cargo"
    cargo.mkdir()
    with tarfile.open(cargo / "part-000", "w") as tar:
        item = tarfile.TarInfo("../outside" if damage == "a path" else "index.json.zst")
        if damage == "a link":
            item.type, item.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(item, io.BytesIO())
    if damage == "a file is missing":
        (cargo / "part-000").rename(cargo / "part-001")
    if damage == "no archive":
        (cargo / "part-000").write_bytes(b"x" * 2000)
    assert carry("unpack", cargo, "--to", tmp_path / "out", code=1).startswith("error: ")
    assert list((tmp_path / "out").iterdir()) == []
    assert not (tmp_path / "outside").exists()
