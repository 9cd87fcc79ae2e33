"""Entries in one order, the tar they become, and the sinks they go to."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from collections.abc import Iterator

import pytest

from builder.layer import CHUNK, DigestSink, Entry, Member, TarSink, pour, read_chunks, sort_key, tar_header, tar_stream

ROOT = Entry("", "dir")


def members(*items: Entry | tuple[Entry, bytes]) -> Iterator[Member]:
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


def test_the_tar_is_what_other_tools_read() -> None:
    found = untarred(b"".join(tar_stream(members(*SAMPLE))))
    said = [
        (info.name, info.type, info.mode, info.uid, info.gid, info.mtime, info.size, info.linkname) for info in found
    ]
    assert said == [
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
def test_any_name_survives(path: str) -> None:
    (info,) = untarred(tar_header(Entry(path, "dir")) + bytes(1024))
    assert info.name == path


def test_large_numbers_survive() -> None:
    (info,) = untarred(tar_header(Entry("a", "dir", uid=3_000_000, gid=2**31, mtime=2**32 - 1)) + bytes(1024))
    assert (info.uid, info.gid, info.mtime) == (3_000_000, 2**31, 2**32 - 1)


def test_every_way_to_the_tar_gives_the_same_bytes() -> None:
    digest, out = DigestSink(), io.BytesIO()
    pour(members(*SAMPLE), digest, TarSink(out.write))
    streamed = b"".join(tar_stream(members(*SAMPLE)))
    assert out.getvalue() == streamed
    assert digest.diff_id == "sha256:" + hashlib.sha256(streamed).hexdigest()
    assert digest.size == len(streamed)
    assert len(streamed) % tarfile.BLOCKSIZE == 0


def test_the_stream_holds_little_at_a_time() -> None:
    big = (Entry("big", "file", size=5 * CHUNK), (bytes(CHUNK) for _ in range(5)))
    sizes = [len(chunk) for chunk in tar_stream([(ROOT, None), big])]
    assert sum(sizes) > 5 * CHUNK
    assert max(sizes) <= 2 * CHUNK


def test_what_is_out_of_order_or_of_another_size_is_refused() -> None:
    for wrong in (
        [Entry("b", "dir"), Entry("a", "dir")],
        [Entry("a", "dir"), Entry("a", "dir")],
        [Entry("a-b", "dir"), Entry("a/b", "dir")],
    ):
        with pytest.raises(ValueError, match="out of order"):
            pour(members(ROOT, *wrong), DigestSink())
    for data in (b"ab", b"abcd"):
        with pytest.raises(ValueError, match="'a' changed while it was read"):
            pour(members(ROOT, (Entry("a", "file", size=3), data)), DigestSink())


def test_read_chunks_ends_with_its_source() -> None:
    data = bytes(range(256)) * 5000
    assert b"".join(read_chunks(io.BytesIO(data).read, len(data))) == data
    assert b"".join(read_chunks(io.BytesIO(data).read, 10)) == data[:10]
    assert b"".join(read_chunks(io.BytesIO(b"abc").read, 10)) == b"abc"
