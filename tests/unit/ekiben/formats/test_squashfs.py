from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import StoreError
from ekiben.formats.layer import Entry, LayerEntry, sort_key, write_entries
from ekiben.formats.squashfs._stream import StoredInode
from ekiben.formats.squashfs.format import BLOCK_SIZE
from ekiben.formats.squashfs.reader import SquashfsReader, merged_layer
from ekiben.formats.squashfs.writer import SquashfsWriter
from fuzz.limits import limited
from support.squashfs_trees import (
    SIZES,
    Contents,
    Tree,
    random_tree,
    read,
    tree,
    write,
)


def file(path: str, data: bytes = b"", **fields: Any) -> tuple[Entry, bytes]:
    return Entry(path, "file", **{"mode": 0o644, **fields}, size=len(data)), data


@pytest.mark.parametrize("seed", range(40))
def test_written_entries_are_read_back(tmp_path: Path, seed: int) -> None:
    files = random_tree(seed)
    written = write(tmp_path / "x", files, chunk=[1 << 20, 1000, 4096][seed % 3], block_size=4096)
    diff_id, found = read(tmp_path / "x")
    assert found == files
    assert diff_id == written


def test_entries_and_lookup_agree_with_contents(tmp_path: Path) -> None:
    files = random_tree(7)
    write(tmp_path / "x", files, block_size=4096)
    with (tmp_path / "x").open("rb") as stream:
        image = SquashfsReader(stream)
        assert list(image.entries()) == [files[path][0] for path in sorted(files, key=sort_key)]
        for path, (entry, data) in files.items():
            found = image.lookup(path)
            if entry.kind == "hardlink":
                assert found is not None and found.kind == files[entry.target][0].kind
            else:
                assert found == entry
            if entry.kind == "file":
                assert image.read_file(path) == data
        assert image.lookup("no/such/path") is None
        assert image.children("") == [
            image.lookup(path) for path in sorted(files, key=sort_key) if path and "/" not in path
        ]
        assert image.children("no/such/path") == []
        with pytest.raises(StoreError, match="no file 'no/such/path'"):
            image.read_file("no/such/path")


def test_a_large_folder_is_listed_once_for_all_lookups_in_it(tmp_path: Path) -> None:
    files = tree(Entry("d", "dir"), *(Entry(f"d/{number:04}", "file") for number in range(2000)))
    write(tmp_path / "x", files)
    listed: list[int] = []

    class Counting(SquashfsReader):
        def _listing(self, inode: StoredInode) -> Iterator[tuple[bytes, int]]:
            listed.append(inode.number)
            return super()._listing(inode)

    with (tmp_path / "x").open("rb") as stream:
        image = Counting(stream)
        assert all(image.lookup(path) == entry for path, (entry, _) in files.items())
        assert image.lookup("d/2000") is None
    assert len(listed) == 2  # the root, and d


def test_read_at_reads_any_range_of_a_file(tmp_path: Path) -> None:
    choose = random.Random(3)
    files = {f"f{size}": choose.randbytes(size) for size in (*SIZES, 3 * 4096)}
    write(
        tmp_path / "image",
        tree(*(file(name, data) for name, data in files.items()), Entry("link", "symlink", target="f0")),
        block_size=4096,
    )
    with (tmp_path / "image").open("rb") as stream:
        image = SquashfsReader(stream)
        for name, data in files.items():
            opened = image.open_file(name)
            assert opened.size == len(data)
            assert opened.read_at(0, len(data) + 1) == data
            for _ in range(20):
                offset, size = choose.randrange(len(data) + 2), choose.randrange(9000)
                assert opened.read_at(offset, size) == data[offset : offset + size]
        for absent in ("none", "link", ""):
            with pytest.raises(StoreError, match="no file"):
                image.open_file(absent)


def test_a_squashfs_at_an_offset_is_read(tmp_path: Path) -> None:
    write(tmp_path / "x", tree(file("f", b"data")))
    (tmp_path / "y").write_bytes(bytes(8192) + (tmp_path / "x").read_bytes())
    with (tmp_path / "y").open("rb") as stream:
        assert SquashfsReader(stream, 8192).read_file("f") == b"data"


def test_bytes_do_not_depend_on_threads_or_chunks(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(3 << 20)
    files = tree(
        file("big", noise), file("copy", noise), *(file(f"s{i:04}", noise[i : i + i * 7]) for i in range(3000))
    )
    digests = set()
    for threads, chunk in [(1, 1 << 20), (2, 1 << 20), (8, 777_777), (16, 1 << 17)]:
        write(tmp_path / "x", files, threads=threads, chunk=chunk)
        digests.add(hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest())
    assert len(digests) == 1


def test_a_tree_without_extended_attributes_keeps_its_bytes(tmp_path: Path) -> None:
    """The digests of stored layers: who builds them again gets them again."""
    choose = random.Random(1)
    data = choose.randbytes(200_000) + bytes(100_000)
    files = tree(
        Entry("d", "dir", 0o2750, 7, 8, 9),
        *(file(f"d/{n:04}", b"x" * (n % 50), mode=0o755) for n in range(3000)),
        file("f", data, mode=0o4755, mtime=5),
        Entry("g", "hardlink", target="f"),
        Entry("h", "symlink", 0o777, target="f"),
        Entry("i", "whiteout", 0),
        Entry("j", "fifo", 0o600),
    )
    diff_id = write(tmp_path / "x", files, epoch=3, chunk=200_000)
    assert diff_id == "sha256:5c5e6ecd679f923ebfa770ac8899690b2f1e5a48582a79d6c33f646dfa5123b8"
    stored = hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    assert stored == "af1178cd27a1deb1965d235e04beed2d63635854ad7792f5d1adfde299cf7468"


def test_the_epoch_is_in_the_superblock(tmp_path: Path) -> None:
    write(tmp_path / "x", tree(), epoch=1_700_000_000)
    with (tmp_path / "x").open("rb") as stream:
        assert SquashfsReader(stream).epoch == 1_700_000_000


@pytest.mark.parametrize("size", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 20 * BLOCK_SIZE])
def test_equal_files_are_stored_once(tmp_path: Path, size: int) -> None:
    noise = random.Random(size).randbytes(size)
    write(tmp_path / "one", tree(file("a", noise), file("c", b"end")))
    files = tree(file("a", noise), file("b", noise), file("c", b"end"))
    written = write(tmp_path / "two", files)
    assert read(tmp_path / "two") == (written, files)
    assert (tmp_path / "two").stat().st_size - (tmp_path / "one").stat().st_size < 4096 + 1


def test_files_of_equal_size_are_not_confused(tmp_path: Path) -> None:
    one, other = (random.Random(seed).randbytes(5 * BLOCK_SIZE) for seed in (1, 2))
    files = tree(file("a", one), file("b", other), file("c", other))
    written = write(tmp_path / "x", files)
    assert read(tmp_path / "x") == (written, files)
    assert (tmp_path / "x").stat().st_size < 10.2 * BLOCK_SIZE


def test_zero_blocks_are_holes(tmp_path: Path) -> None:
    files = tree(file("zeros", bytes(20 * BLOCK_SIZE + 5)), file("tail", b"x" * BLOCK_SIZE + bytes(BLOCK_SIZE + 9)))
    written = write(tmp_path / "x", files)
    assert (tmp_path / "x").stat().st_size <= 8192
    assert read(tmp_path / "x") == (written, files)


def test_a_file_of_gigabytes_of_holes_is_not_read_at_once(tmp_path: Path) -> None:
    """It takes a few kB in the layer."""
    size = 3 << 30
    entries: list[LayerEntry] = [
        (Entry("", "dir"), None),
        (Entry("zeros", "file", 0o644, size=size), (bytes(1 << 24) for _ in range(size >> 24))),
    ]
    with (tmp_path / "x").open("w+b") as out:
        write_entries(entries, SquashfsWriter(out, epoch=1))
    assert (tmp_path / "x").stat().st_size < 1 << 20
    with (tmp_path / "x").open("rb") as out, limited(tmp_path):
        reader = SquashfsReader(out)
        with pytest.raises(StoreError, match=f"file 'zeros' has {size} bytes, more than the "):
            reader.read_file("zeros")


def test_incompressible_blocks_are_stored_uncompressed(tmp_path: Path) -> None:
    """Whether a block is compressed is decided by its middle; the bytes are the same either way."""
    noise, text = random.Random(1).randbytes(8192), b"a line of text\n" * 10_000
    half = (BLOCK_SIZE - len(noise)) // 2
    dense = text[:half] + noise + text[:half]
    sizes = {}
    for name, data in (
        ("dense", dense),
        ("text", text[:BLOCK_SIZE]),
        ("edge", noise + text[: BLOCK_SIZE - len(noise)]),
    ):
        files = tree(file("f", data))
        write(tmp_path / name, files)
        assert read(tmp_path / name)[1] == files
        sizes[name] = (tmp_path / name).stat().st_size
    assert sizes["dense"] > BLOCK_SIZE
    assert sizes["text"] < sizes["edge"] < 2 * len(noise)


# -- what cannot be written


@pytest.mark.parametrize(
    ("entries", "error", "says"),
    [
        ([Entry("x", "dir")], ValueError, "has no directory before it"),
        ([Entry("", "dir"), Entry("a/b", "dir")], ValueError, "has no directory before it"),
        ([Entry("", "dir"), Entry("", "dir")], ValueError, "once"),
        ([Entry("", "dir"), Entry("b", "dir"), Entry("a", "dir")], ValueError, "out of order"),
        ([Entry("", "dir"), Entry("a", "hardlink", target="b")], ValueError, "which is not before it"),
        ([Entry("", "dir"), Entry("a", "dir"), Entry("b", "hardlink", target="a")], ValueError, "to the directory"),
        ([Entry("", "dir"), Entry("a", "file", size=3), Entry("b", "dir")], ValueError, "3 bytes of 3 are missing"),
        ([Entry("", "dir"), Entry("n" * 256, "dir")], StoreError, "255 bytes"),
        ([Entry("", "dir"), Entry("old", "dir", mtime=-1)], StoreError, "modification time -1"),
    ],
)
def test_invalid_entries_are_refused(tmp_path: Path, entries: list[Entry], error: type[Exception], says: str) -> None:
    with (tmp_path / "x").open("w+b") as out, pytest.raises(error, match=says):
        writer = SquashfsWriter(out)
        for entry in entries:
            writer.add(entry)


def test_more_data_than_the_entry_size_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w+b") as out:
        writer = SquashfsWriter(out)
        writer.add(Entry("", "dir"))
        writer.add(Entry("f", "file", size=2))
        with pytest.raises(ValueError, match="more data than 'f'"):
            writer.write(b"abc")


def test_a_write_only_output_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as out, pytest.raises(ValueError, match=r"w\+b"):
        SquashfsWriter(out)


# -- damage


def test_other_files_are_refused_as_squashfs(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"hello" * 100)
    with path.open("rb") as stream, pytest.raises(StoreError, match=f"{path}: squashfs: this is not a squashfs"):
        SquashfsReader(stream)
    path.write_bytes(b"hsqs")
    with path.open("rb") as stream, pytest.raises(StoreError, match="ends early: 96 bytes wanted at 0, 4 there"):
        SquashfsReader(stream)


def test_an_unknown_compression_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x", tree())
    data = bytearray((tmp_path / "x").read_bytes())
    struct.pack_into("<H", data, 20, 4)
    (tmp_path / "x").write_bytes(data)
    with (
        (tmp_path / "x").open("rb") as stream,
        pytest.raises(StoreError, match="compressed with xz; only zstd and gzip"),
    ):
        SquashfsReader(stream)


def test_a_directory_inside_itself_does_not_loop(tmp_path: Path) -> None:
    """Inodes are stored plain here, so that the child's reference can be bent to the parent."""
    path = tmp_path / "x"
    write(path, tree(Entry("d", "dir", mode=0o700), Entry("d/inner", "dir", mode=0o711)))
    with path.open("rb") as stream:
        image = SquashfsReader(stream)
        outer = image._find("d")
        assert outer is not None
        bent = list(image._listing(outer))
        image._listing = lambda inode: iter(  # type: ignore[method-assign]
            [(b"d", reference_of(image, "d"))]
            if inode.number == outer.number
            else SquashfsReader._listing(image, inode)
        )
        assert bent[0][0] == b"inner"
        with pytest.raises(StoreError, match="listed twice"):
            list(image.entries())


def reference_of(image: SquashfsReader, name: str) -> int:
    root = image._inode(image._root)
    return next(reference for found, reference in SquashfsReader._listing(image, root) if found == name.encode())


# -- stacking


def stacked(layers: Iterable[Tree]) -> Tree:
    """Return what overlayfs shows, computed in the simplest way: layer by layer onto one dictionary."""
    result = tree()
    for layer in layers:
        for path in sorted(layer, key=sort_key):
            entry, data = layer[path]
            below = result.get(path)
            if below and not (below[0].kind == entry.kind == "dir"):
                result = {p: v for p, v in result.items() if p != path and not p.startswith(path + "/")}
            if entry.kind != "whiteout":
                result[path] = entry, data
    return result


def random_layer(seed: int) -> Tree:
    choose = random.Random(seed)
    files = tree(Entry("", "dir", mode=choose.choice([0o755, 0o700])))
    for folder in ["", "a", "b", "a/a", "a/b", "b/a"]:
        if folder and (folder not in files or files[folder][0].kind != "dir"):
            continue
        for name in "abcd":
            path = f"{folder}/{name}" if folder else name
            kind: Any = choose.choice(["dir", "dir", "file", "whiteout", "symlink", "", "", ""])
            if kind == "file":
                files[path] = file(path, choose.randbytes(choose.choice([0, 10, 5000])))
            elif kind:
                files[path] = Entry(path, kind, target="t" * (kind == "symlink")), b""
    return files


@pytest.mark.parametrize("seed", range(60))
def test_merged_layers_look_like_an_overlay(tmp_path: Path, seed: int) -> None:
    layers = [random_layer(seed * 10 + height) for height in range(1 + seed % 5)]
    for height, layer in enumerate(layers):
        write(tmp_path / str(height), layer, block_size=4096)
    streams = [(tmp_path / str(height)).open("rb") for height in range(len(layers))]
    found = Contents()
    write_entries(merged_layer([SquashfsReader(stream) for stream in streams]), found)
    for stream in streams:
        stream.close()
    assert found.tree == stacked(layers)


def test_a_hard_link_whose_first_name_is_hidden_becomes_the_file(tmp_path: Path) -> None:
    link: dict[str, Any] = {"mode": 0o644, "target": "a"}
    write(tmp_path / "0", tree(file("a", b"data"), Entry("b", "hardlink", **link), Entry("c", "hardlink", **link)))
    write(tmp_path / "1", tree(Entry("a", "whiteout")))
    with (tmp_path / "0").open("rb") as lower, (tmp_path / "1").open("rb") as upper:
        merged = merged_layer([SquashfsReader(lower), SquashfsReader(upper)])
        found = [(entry, b"".join(chunks or ())) for entry, chunks in merged]
    assert found[1:] == [file("b", b"data"), (Entry("c", "hardlink", 0o644, target="b"), b"")]


# -- other tools
