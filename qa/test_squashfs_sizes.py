"""The squashfs writer and reader with many files, large ones, and hundreds of damages: minutes of a core, no root."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiben.formats.layer import Entry
from ekiben.formats.squashfs.reader import SquashfsReader
from support.squashfs_trees import noticed_damage, random_tree, read, tree, write, write_beyond_four_gibibytes

pytestmark = pytest.mark.covers("ekiben/formats")


def test_a_directory_of_70000_files_and_deep_paths(tmp_path: Path) -> None:
    deep = "/".join("d" * 20 for _ in range(190))
    folders = [Entry(deep[: 21 * (level + 1) - 1], "dir") for level in range(190)]
    many = [
        (
            Entry(f"many/file-with-a-longer-name-{number:06}", "file", mode=0o644, size=len(b"%d" % number)),
            b"%d" % number,
        )
        for number in range(70_000)
    ]
    files = tree(Entry("many", "dir"), *many, *folders, (Entry(deep + "/leaf", "file", mode=0o644, size=4), b"leaf"))
    written = write(tmp_path / "x", files)
    assert read(tmp_path / "x")[0] == written
    with (tmp_path / "x").open("rb") as stream:
        image = SquashfsReader(stream)
        assert image.read_file(deep + "/leaf") == b"leaf"
        assert image.read_file("many/file-with-a-longer-name-069999") == b"69999"


def test_files_beyond_four_gibibytes(tmp_path: Path) -> None:
    big, late, data = write_beyond_four_gibibytes(tmp_path / "x")
    with (tmp_path / "x").open("rb") as stream:
        image = SquashfsReader(stream)
        assert image.lookup("big") == big
        assert image.read_file(late) == data


def test_damage_is_a_store_error_and_never_hangs(tmp_path: Path) -> None:
    write(tmp_path / "good", random_tree(3), block_size=4096)
    assert noticed_damage(tmp_path / "bad", (tmp_path / "good").read_bytes(), seed="gzip") > 200
