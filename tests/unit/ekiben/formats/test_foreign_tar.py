"""Tars of images that others made: whole and plausible, or refused with a sentence."""

from __future__ import annotations

import contextlib
import io
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import StoreError
from ekiben.formats.changeset import Lower, unordered_entries
from ekiben.formats.foreign_tar import spool_tar, unpacked_limit
from ekiben.formats.layer import write_entries
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.squashfs.writer import SquashfsWriter


def tar_of(*infos: tuple[tarfile.TarInfo, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in infos:
            info.size = len(data) or info.size
            tar.addfile(info, io.BytesIO(data))
    return archive.getvalue()


def entry(name: str = "x", data: bytes = b"data", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


@contextlib.contextmanager
def layer_below(folder: Path, *infos: tuple[tarfile.TarInfo, bytes]) -> Iterator[Lower]:
    """Yield a layer of these entries, to stand on."""
    with (folder / "spool").open("w+b") as spool, (folder / "below").open("w+b") as out:
        spool_tar(io.BytesIO(tar_of(*infos)), spool, limit=1 << 30)
        write_entries(unordered_entries(io.BytesIO(), spool, Lower([]), epoch=1), SquashfsWriter(out, epoch=1))
    with (folder / "below").open("rb") as file:
        yield Lower([SquashfsReader(file)])


def spooled(data: bytes, folder: Path, limit: int = 1 << 30) -> dict[str, bytes]:
    """Return the files that become a layer's, without what runtimes mount over."""
    with (folder / "spool").open("w+b") as spool:
        spool_tar(io.BytesIO(data), spool, limit=limit)
        entries = unordered_entries(io.BytesIO(), spool, Lower([]), epoch=1, placeholders=True)
        return {item.path: b"".join(chunks) for item, chunks in entries if chunks}


def patched(offset: int, value: bytes) -> bytes:
    """Return a tar whose first header has ``value`` at ``offset``, and a right checksum."""
    data = bytearray(tar_of(entry()))
    data[offset : offset + len(value)] = value
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


BROKEN: list[tuple[Callable[[], bytes], str]] = [
    (lambda: b"", "empty file"),
    (lambda: b"no tar", "truncated header"),
    (lambda: tar_of(entry())[:600], "unexpected end of data|breaks off"),
    (lambda: tar_of(entry(), entry("y"))[:1500], "breaks off, or is damaged, at byte 1024"),
    (lambda: tar_of(entry())[:1024] + b"garbage" * 200, "breaks off, or is damaged, at byte 1024"),
    (lambda: patched(124, b"77777777777\0"), "unexpected end of data|breaks off"),
    (lambda: patched(124, b"\xff" * 12), "its size is impossible|invalid offset"),  # tarfile itself, in Python 3.11.2
    (lambda: patched(108, b"\x80" + b"\xff" * 7), "its owner is impossible"),
    (lambda: patched(136, b"\x80" + b"\xff" * 11), "its time is impossible"),
    (lambda: tar_of(entry(pax_headers={"mtime": "nan"})), "its time is impossible"),
    (lambda: tar_of(entry(pax_headers={"size": str(2**62)})), "impossible size|unexpected end"),
    (lambda: tar_of(entry(pax_headers={"GNU.sparse.map": "a,b", "GNU.sparse.size": "9"})), "invalid literal"),
    (lambda: tar_of(entry("../x")), "its name goes upwards"),
    (lambda: tar_of(entry("n" * 300)), "its name is too long"),
    (lambda: tar_of(entry("a/" * 1000 + "x")), "its name is too long"),
    (lambda: tar_of(entry(type=tarfile.SYMTYPE, linkname="y" * 70_000, data=b"")), "its link is too long"),
]


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_broken_tar_is_refused_with_a_reason(tmp_path: Path, number: int) -> None:
    make, reason = BROKEN[number]
    with pytest.raises(ValueError, match=reason):
        spooled(make(), tmp_path)


def test_a_tar_without_folders_becomes_a_layer(tmp_path: Path) -> None:
    assert spooled(tar_of(entry("a/b", b"data")), tmp_path) == {"a/b": b"data"}


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_sparse_files_are_written_out(tmp_path: Path, form: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/plain").write_bytes(b"plain")
    with (tmp_path / "in/holes").open("wb") as file:
        file.seek(3_000_000)
        file.write(b"end")
    argv = ["tar", "--sparse", f"--format={form}", "-cf", tmp_path / "x.tar", "-C", tmp_path / "in", "."]
    subprocess.run(argv, check=True)
    assert (tmp_path / "x.tar").stat().st_size < 100_000
    assert spooled((tmp_path / "x.tar").read_bytes(), tmp_path) == {
        "holes": bytes(3_000_000) + b"end",
        "plain": b"plain",
    }
    with pytest.raises(ValueError, match=r"unpacks to more than .*holes' has holes"):
        spooled((tmp_path / "x.tar").read_bytes(), tmp_path, limit=2_000_000)


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it unpacks to more than 10\.0 kB"):
        spooled(tar_of(entry(data=bytes(20_000))), tmp_path, limit=10_000)
    assert unpacked_limit(10) == 1 << 30
    assert unpacked_limit(1 << 30) == 100 << 30


def kinds_on(lower: Lower, folder: Path, *infos: tuple[tarfile.TarInfo, bytes]) -> dict[str, str]:
    with (folder / "spool").open("w+b") as spool:
        spool_tar(io.BytesIO(tar_of(*infos)), spool, limit=1 << 30)
        return {item.path: item.kind for item, _ in unordered_entries(io.BytesIO(), spool, lower, epoch=1) if item.path}


def test_a_link_below_is_followed_as_docker_does(tmp_path: Path) -> None:
    link = entry("d", b"", type=tarfile.SYMTYPE, linkname="real/sub")
    upper = [
        entry("d/x"),
        entry("d/z", b"", type=tarfile.LNKTYPE, linkname="d/x"),
        entry("d/.wh.old", b""),
        entry("file/y"),
    ]
    with layer_below(tmp_path, link, entry("real/sub/old"), entry("file")) as lower:
        assert kinds_on(lower, tmp_path, *upper) == {
            "file": "dir",
            "file/y": "file",
            "real": "dir",
            "real/sub": "dir",
            "real/sub/old": "whiteout",
            "real/sub/x": "file",
            "real/sub/z": "hardlink",
        }


def test_a_folder_replaces_a_link_below(tmp_path: Path) -> None:
    link = entry("d", b"", type=tarfile.SYMTYPE, linkname="real")
    with layer_below(tmp_path, link, entry("real/old")) as lower:
        upper = [entry("d", b"", type=tarfile.DIRTYPE), entry("d/x")]
        assert kinds_on(lower, tmp_path, *upper) == {"d": "dir", "d/x": "file"}


def test_a_file_that_is_too_large_for_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekiben.formats.squashfs.reader._MAX_READ", 4)
    with layer_below(tmp_path, entry("x", b"1234"), entry("y", b"12345")) as lower:
        assert lower.read_file("x") == b"1234"
        with pytest.raises(StoreError, match="'y' has 5 bytes, more than the 4 that are read"):
            lower.read_file("y")
