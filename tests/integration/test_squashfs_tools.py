"""Our squashfs files read by unsquashfs, and those of mksquashfs by us."""

from __future__ import annotations

import os
import random
import stat
import subprocess
from pathlib import Path

import pytest

from support.squashfs_trees import (
    noticed_damage,
    random_tree,
    read,
    requires_program,
    write,
    write_beyond_four_gibibytes,
)

pytestmark = pytest.mark.covers("ekiben/formats")


@pytest.mark.parametrize("seed", range(6))
def test_unsquashfs_reads_our_files(tmp_path: Path, seed: int) -> None:
    tool = requires_program("unsquashfs")
    if os.geteuid() != 0:
        pytest.skip("unsquashfs makes owners and devices only as root")
    files = random_tree(seed)
    write(tmp_path / "x", files, block_size=4096 << seed % 3)
    subprocess.run([tool, "-quiet", "-n", "-d", tmp_path / "out", tmp_path / "x"], check=True, capture_output=True)
    for path, (entry, data) in files.items():
        unpacked = tmp_path / "out" / path
        status = unpacked.lstat()
        assert (status.st_uid, status.st_gid, int(status.st_mtime)) == (entry.uid, entry.gid, entry.mtime), path
        assert entry.kind == "symlink" or unpacked.is_symlink() or status.st_mode & 0o7777 == entry.mode, path
        assert entry.kind != "file" or unpacked.read_bytes() == data, path
        assert entry.kind != "symlink" or unpacked.readlink() == Path(entry.target), path
        assert entry.kind != "whiteout" or (stat.S_ISCHR(status.st_mode) and status.st_rdev == 0), path
        if entry.kind in ("file", "dir"):
            assert {name: os.getxattr(unpacked, name) for name in os.listxattr(unpacked)} == dict(entry.xattrs), path
        assert entry.kind != "hardlink" or status.st_ino == (tmp_path / "out" / entry.target).lstat().st_ino, path


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_files_of_mksquashfs_are_read(tmp_path: Path, compression: str) -> None:
    tool = requires_program("mksquashfs")
    source = tmp_path / "source"
    (source / "many").mkdir(parents=True)
    for number in range(700):
        (source / f"many/{number}").write_bytes(b"%d" % number * number)
    (source / "big").write_bytes(random.Random(5).randbytes(1 << 20) + bytes(1 << 20) + b"tail")
    (source / "link").symlink_to("big")
    os.link(source / "big", source / "same")
    os.mkfifo(source / "pipe")
    os.setxattr(source / "big", "user.note", b"n" * 300)
    os.setxattr(source / "many", "user.note", b"n" * 300)
    options = ["-comp", compression, "-quiet", "-no-progress", "-always-use-fragments"]
    subprocess.run([tool, source, tmp_path / "x", *options], check=True, capture_output=True)
    found = read(tmp_path / "x")[1]
    expected = {str(path.relative_to(source)) for path in source.rglob("*")} | {""}
    assert set(found) == expected
    assert {path for path, (entry, _) in found.items() if entry.xattrs == (("user.note", b"n" * 300),)} == {
        "big",
        "many",
    }
    assert found["big"][1] == (source / "big").read_bytes()
    assert all(found[f"many/{number}"][1] == b"%d" % number * number for number in range(700))
    assert (found["link"][0].target, found["pipe"][0].kind) == ("big", "fifo")
    assert (found["same"][0].kind, found["same"][0].target) == ("hardlink", "big")


def test_unsquashfs_reads_a_file_beyond_four_gibibytes(tmp_path: Path) -> None:
    _, late, data = write_beyond_four_gibibytes(tmp_path / "x")
    argv = [requires_program("unsquashfs"), "-d", tmp_path / "out", "-n", tmp_path / "x", late]
    done = subprocess.run(argv, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / late).read_bytes() == data


def test_damage_in_a_file_of_mksquashfs_is_a_store_error_and_never_hangs(tmp_path: Path) -> None:
    """Damage in zstd, which we read and do not write; tests/unit has gzip."""
    write(tmp_path / "ours", random_tree(3), block_size=4096)
    files = tmp_path / "ours.files"
    extract = [requires_program("unsquashfs"), "-quiet", "-n", "-d", files, tmp_path / "ours"]
    subprocess.run(extract, check=True, capture_output=True)
    compress = [requires_program("mksquashfs"), files, tmp_path / "good", "-comp", "zstd", "-b", "4096", "-quiet"]
    subprocess.run(compress, check=True, capture_output=True)
    assert noticed_damage(tmp_path / "bad", (tmp_path / "good").read_bytes(), seed="zstd") > 200
