"""Blocks of a former version: the same bytes in every mode, whatever the index says."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.formats.layer import Entry, LayerEntry, write_entries
from ekiben.formats.sif import sif_header, write_sif
from ekiben.formats.squashfs.reuse import BlockReuse
from ekiben.formats.squashfs.writer import SquashfsWriter
from support.small_sifs import blob

LINES = [hashlib.sha256(bytes([number])).hexdigest().encode() for number in range(64)]


def text(seed: int, size: int) -> bytes:
    dice = random.Random(seed)
    return b" ".join(dice.choices(LINES, k=size // 65 + 1))[:size]


def version(number: int) -> dict[str, bytes]:
    """Return files, of which each version changes one of each kind."""
    files = {f"large{item}": text(item, 150_000) for item in range(4)}
    files |= {f"small{item:03}": text(100 + item, 3000) for item in range(80)}
    files |= {"dense": random.Random(7).randbytes(200_000), "hole": bytes(130_000), "twin": files["large1"]}
    return files | {"large2": text(1000 + number, 150_000), "small040": text(2000 + number, 3000)}


def entries(files: dict[str, bytes]) -> Iterator[LayerEntry]:
    yield Entry("", "dir"), None
    for name, data in sorted(files.items()):
        yield Entry(name, "file", size=len(data)), [data]


def written(path: Path, files: dict[str, bytes], reuse: BlockReuse | None = None, threads: int = 2) -> bytes:
    with path.open("w+b") as out:
        write_entries(entries(files), SquashfsWriter(out, epoch=1, reuse=reuse, threads=threads))
    return path.read_bytes()


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A blob of version 1, and its index."""
    path, reuse = tmp_path_factory.mktemp("former") / "one", BlockReuse()
    written(path, version(1), reuse)
    return path, reuse.index()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_edited_layer_copies_the_blocks_that_are_as_before(
    tmp_path: Path, former: tuple[Path, bytes], threads: int
) -> None:
    path, index = former
    plain, empty = written(tmp_path / "plain", version(2)), BlockReuse()
    assert written(tmp_path / "noting", version(2), empty, threads) == plain
    with path.open("rb") as stream:
        reuse = BlockReuse(stream, index)
        assert written(tmp_path / "reusing", version(2), reuse, threads) == plain
    assert reuse.copied >= 12
    assert reuse.index() == empty.index()


def test_a_damaged_index_or_blob_changes_no_byte(tmp_path: Path, former: tuple[Path, bytes]) -> None:
    path, index = former
    plain, dice = written(tmp_path / "plain", version(2)), random.Random(1)
    for _ in range(60):
        wrong, data = bytearray(index), bytearray(path.read_bytes())
        for _ in range(dice.choice([0, 1, 40])):
            wrong[dice.randrange(len(wrong))] = dice.randrange(256)
        for _ in range(dice.choice([0, 1, 400])):
            data[dice.randrange(len(data))] = dice.randrange(256)
        del wrong[dice.choice([0, dice.randrange(len(wrong))]) or len(wrong) :]
        del data[dice.choice([0, dice.randrange(len(data))]) or len(data) :]
        (tmp_path / "wrong").write_bytes(data)
        with (tmp_path / "wrong").open("rb") as stream:
            assert written(tmp_path / "new", version(2), BlockReuse(stream, bytes(wrong))) == plain


def test_an_index_of_another_compressor_is_left(tmp_path: Path, former: tuple[Path, bytes]) -> None:
    path, index = former
    with path.open("rb") as stream:
        reuse = BlockReuse(stream, index.replace(b"level 1", b"level 2"))
        written(tmp_path / "new", version(2), reuse)
    assert reuse.copied == 0


def test_blocks_are_reused_at_the_usual_size_alone(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w+b") as out, pytest.raises(ValueError, match="usual block size"):
        SquashfsWriter(out, block_size=4096, reuse=BlockReuse())


# A change of these is another format of layers and of SIFs: stored layers, published files and caches of registries no
# longer have the digests that a build gives. Another version of libdeflate may be the cause.
SQUASHFS = "033408f214af7c6b27bcb65818b29a4bfe8d12734caf9ef464a7f1f0f4b7c136"
SIF = "63dba96270a9f85ddf3d0624ba58a8fb38209b4713defeb2c82ed9c82823a84e"


def test_golden_digests_of_a_squashfs_and_of_a_sif(tmp_path: Path) -> None:
    data = written(tmp_path / "layer", version(1))
    assert hashlib.sha256(data).hexdigest() == SQUASHFS
    layers = [blob(tmp_path / "a", data), blob(tmp_path / "b", b"hsqs" + bytes(5000))]
    header = sif_header([item.digest for item in layers], "Bootstrap: scratch\n", "amd64", 1_700_000_000)
    write_sif(tmp_path / "x.sif", layers, header)
    assert hashlib.sha256((tmp_path / "x.sif").read_bytes()).hexdigest() == SIF
