"""Entries in one order, the tar they become, and the sinks they go to."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from collections.abc import Iterator

import pytest

from ekiben.formats.layer import CHUNK, Entry, LayerEntry, read_chunks, sort_key, write_entries
from ekiben.formats.tar import DigestWriter, TarWriter, tar_header, tar_stream

ROOT = Entry("", "dir")


def members(*items: Entry | tuple[Entry, bytes]) -> Iterator[LayerEntry]:
    for item in items:
        entry, data = item if isinstance(item, tuple) else (item, b"")
        yield entry, [data] if data else None


def untarred(data: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getmembers()


SAMPLE = (
    ROOT,
    (Entry("a", "file", 0o644, 1000, 2000, 7, 3), b"abc"),
    Entry("a-link", "hardlink", 0o644, 1000, 2000, 7, target="a"),
    Entry("d", "dir", 0o1777),
    Entry("d/gone", "whiteout"),
    Entry("d/s", "symlink", 0o777, target="../a"),
    Entry("f", "fifo"),
    (Entry("z" * 200, "file", size=1), b"z"),
)


def test_the_order_is_depth_first_and_by_bytes() -> None:
    paths = ["", "A", "a", "a/b", "a/b/c", "a/z", "a-b", "a.b", "b", "é", "\udcff"]
    shuffled = random.Random(1).sample(paths, len(paths))
    assert sorted(shuffled, key=sort_key) == paths


def test_tar_is_read_by_tarfile() -> None:
    found = untarred(b"".join(tar_stream(members(*SAMPLE))))
    headers = [
        (info.name, info.type, info.mode, info.uid, info.gid, info.mtime, info.size, info.linkname) for info in found
    ]
    assert headers == [
        (".", tarfile.DIRTYPE, 0o755, 0, 0, 0, 0, ""),
        ("a", tarfile.REGTYPE, 0o644, 1000, 2000, 7, 3, ""),
        ("a-link", tarfile.LNKTYPE, 0o644, 1000, 2000, 7, 0, "a"),
        ("d", tarfile.DIRTYPE, 0o1777, 0, 0, 0, 0, ""),
        ("d/.wh.gone", tarfile.REGTYPE, 0o755, 0, 0, 0, 0, ""),
        ("d/s", tarfile.SYMTYPE, 0o777, 0, 0, 0, 0, "../a"),
        ("f", tarfile.FIFOTYPE, 0o755, 0, 0, 0, 0, ""),
        ("z" * 200, tarfile.REGTYPE, 0o755, 0, 0, 0, 1, ""),
    ]
    assert all(not info.uname and not info.gname for info in found)


@pytest.mark.parametrize("path", ["é", "\udcff\udc80", "x" * 300, "a/" * 60 + "b", "new\nline"])
def test_any_file_name_round_trips(path: str) -> None:
    (info,) = untarred(tar_header(Entry(path, "dir")) + bytes(1024))
    assert info.name == path


def test_large_numbers_round_trip() -> None:
    (info,) = untarred(tar_header(Entry("a", "dir", uid=3_000_000, gid=2**31, mtime=2**32 - 1)) + bytes(1024))
    assert (info.uid, info.gid, info.mtime) == (3_000_000, 2**31, 2**32 - 1)


def test_stream_writer_and_digest_give_the_same_tar() -> None:
    digest, out = DigestWriter(), io.BytesIO()
    write_entries(members(*SAMPLE), digest, TarWriter(out.write))
    streamed = b"".join(tar_stream(members(*SAMPLE)))
    assert out.getvalue() == streamed
    assert digest.diff_id == "sha256:" + hashlib.sha256(streamed).hexdigest()
    assert digest.size == len(streamed)
    assert len(streamed) % tarfile.BLOCKSIZE == 0


def test_tar_stream_buffers_little() -> None:
    big = (Entry("big", "file", size=5 * CHUNK), (bytes(CHUNK) for _ in range(5)))
    sizes = [len(chunk) for chunk in tar_stream([(ROOT, None), big])]
    assert sum(sizes) > 5 * CHUNK
    assert max(sizes) <= 2 * CHUNK


def test_entries_out_of_order_or_of_wrong_size_are_refused() -> None:
    for wrong in (
        [Entry("b", "dir"), Entry("a", "dir")],
        [Entry("a", "dir"), Entry("a", "dir")],
        [Entry("a-b", "dir"), Entry("a/b", "dir")],
    ):
        with pytest.raises(ValueError, match="out of order"):
            write_entries(members(ROOT, *wrong), DigestWriter())
    for data in (b"ab", b"abcd"):
        with pytest.raises(ValueError, match="'a' changed while it was read"):
            write_entries(members(ROOT, (Entry("a", "file", size=3), data)), DigestWriter())


def test_read_chunks_ends_with_its_source() -> None:
    data = bytes(range(256)) * 5000
    assert b"".join(read_chunks(io.BytesIO(data).read, len(data))) == data
    assert b"".join(read_chunks(io.BytesIO(data).read, 10)) == data[:10]
    assert b"".join(read_chunks(io.BytesIO(b"abc").read, 10)) == b"abc"
