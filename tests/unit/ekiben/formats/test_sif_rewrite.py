"""SIFs whose last layer is rewritten in their file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ekiben.core.errors import StoreError
from ekiben.formats import sif_rewrite
from ekiben.formats.partition import Partition
from ekiben.formats.sif import SifHeader, sif_header, write_sif
from ekiben.formats.sif_rewrite import RewriteRefused, check_rewrite, was_killed
from support.small_sifs import blob


def layer(folder: Path, name: str, size: int) -> Partition:
    data = hashlib.shake_256(name.encode()).digest(size)
    return blob(folder / name, data)


def header_of(layers: list[Partition], deffile: str = "Bootstrap: scratch\n", users: bytes = b"") -> SifHeader:
    return sif_header([item.digest for item in layers], deffile, "amd64", 1_700_000_000, users)


@pytest.fixture
def base(tmp_path: Path) -> list[Partition]:
    return [layer(tmp_path, "base", 50_000), layer(tmp_path, "python", 8192)]


def old_sif(folder: Path, layers: list[Partition]) -> Path:
    write_sif(folder / "x.sif", layers, header_of(layers))
    return folder / "x.sif"


@pytest.mark.parametrize("size", [1, 4096, 90_000])
@pytest.mark.parametrize("users", [b"", b"users" * 900])
@pytest.mark.parametrize("is_noted", [True, False])
def test_the_file_is_the_one_that_would_be_written_anew(
    tmp_path: Path, base: list[Partition], size: int, users: bytes, is_noted: bool
) -> None:
    old, new = [*base, layer(tmp_path, "old", 20_000)], [*base, layer(tmp_path, "new", size)]
    path, header = tmp_path / "x.sif", header_of(new, "Bootstrap: localimage\n", users)
    write_sif(path, old, header_of(old, users=users))
    write_sif(tmp_path / "anew.sif", new, header)
    inode = path.stat().st_ino
    check_rewrite(path, new, header, is_noted=is_noted).run()
    assert path.read_bytes() == (tmp_path / "anew.sif").read_bytes()
    assert path.stat().st_ino == inode
    assert not list(tmp_path.glob(".x.sif*"))


def link(path: Path) -> None:
    os.link(path, path.with_name("other.sif"))


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("other.sif"))
    path.symlink_to("other.sif")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[70_000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (link, "2 names"),
        (replace_by_link, "cannot be written"),
        (damage, "another layer"),
        (lambda path: path.chmod(0o444) if os.geteuid() else replace_by_link(path), "cannot be written"),
    ],
)
def test_a_file_that_must_not_change_is_left(
    tmp_path: Path, base: list[Partition], change: Callable[[Path], None], reason: str
) -> None:
    old, new = [*base, layer(tmp_path, "old", 20_000)], [*base, layer(tmp_path, "new", 30_000)]
    path = old_sif(tmp_path, old)
    change(path)
    before = path.read_bytes()
    with pytest.raises(RewriteRefused, match=reason):
        check_rewrite(path, new, header_of(new), is_noted=False)
    assert path.read_bytes() == before


def test_other_layers_below_are_refused(tmp_path: Path, base: list[Partition]) -> None:
    path, top = old_sif(tmp_path, [*base, layer(tmp_path, "old", 20_000)]), layer(tmp_path, "new", 20_000)
    for below, reason in (
        ([base[0], layer(tmp_path, "other", 8192)], "another layer"),  # also where the old file is known
        ([base[0], layer(tmp_path, "larger", 9000)], "more layers than the last differ"),
        ([layer(tmp_path, "larger base", 60_000), base[1]], "more layers than the last differ"),
        ([*base, layer(tmp_path, "one more", 30_000)], "more layers than the last differ"),
        ([], "one layer alone"),
    ):
        new = [*below, top]
        with pytest.raises(RewriteRefused, match=reason):
            check_rewrite(path, new, header_of(new), is_noted=True)


def test_another_file_system_is_refused(tmp_path: Path, base: list[Partition], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sif_rewrite, "LOCAL", frozenset({"nfs4"}))
    new = [*base, layer(tmp_path, "new", 20_000)]
    path = old_sif(tmp_path, [*base, layer(tmp_path, "old", 20_000)])
    with pytest.raises(RewriteRefused, match="its file system is"):
        check_rewrite(path, new, header_of(new), is_noted=True)


def test_a_file_that_is_open_is_left(tmp_path: Path, base: list[Partition]) -> None:
    """As that of a running image is."""
    new = [*base, layer(tmp_path, "new", 20_000)]
    path = old_sif(tmp_path, [*base, layer(tmp_path, "old", 20_000)])
    before, rewrite = path.read_bytes(), check_rewrite(path, new, header_of(new), is_noted=True)
    with path.open("rb"), pytest.raises(RewriteRefused, match="somebody has it open"):
        rewrite.run()
    assert path.read_bytes() == before
    rewrite.run()
    assert path.read_bytes() != before


def test_a_file_that_changed_after_the_check_is_left(tmp_path: Path, base: list[Partition]) -> None:
    new = [*base, layer(tmp_path, "new", 20_000)]
    path = old_sif(tmp_path, [*base, layer(tmp_path, "old", 20_000)])
    rewrite = check_rewrite(path, new, header_of(new), is_noted=True)
    damage(path)
    with pytest.raises(RewriteRefused, match="changed"):
        rewrite.run()


def test_a_damaged_layer_leaves_the_file(tmp_path: Path, base: list[Partition]) -> None:
    new = [*base, layer(tmp_path, "new", 20_000)]
    path = old_sif(tmp_path, [*base, layer(tmp_path, "old", 20_000)])
    rewrite = check_rewrite(path, new, header_of(new), is_noted=True)
    Path(str(new[-1].path)).write_bytes(b"short")
    with pytest.raises(StoreError, match="ends 19995 bytes early"):
        rewrite.run()
    assert path.exists()  # its layer is read before the file is touched
    assert not was_killed(path)


def test_what_a_killed_process_left_is_known_by_its_name(tmp_path: Path) -> None:
    left = tmp_path / ".x.sif.0123.rewrite.locked.part"
    left.write_bytes(b"")
    assert was_killed(tmp_path / "x.sif")
    (tmp_path / "x.sif").write_bytes(b"")
    assert not was_killed(tmp_path / "x.sif")
