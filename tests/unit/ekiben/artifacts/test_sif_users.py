"""Users and groups of upper layers: a small primary partition has them, for the runtimes read those of the primary one
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.artifacts.push import sif_bytes
from ekiben.core.errors import VerifyError
from ekiben.formats.sif import USERS, read_sif
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.inspect.image_reader import open_image
from ekiben.inspect.sbom import sbom_of
from ekiben.publish.publish import PublishOptions, publish
from ekiben.store import Image, Store, check_sif
from ekiben.store.shared import SharedStore
from support.sample_recipe import SampleRecipe, image_of, quiet, seeded

PASSWD = "porter:x:1321:1321::/:/bin/sh\n"


@dataclass(frozen=True)
class Upper:
    """An image with a file of users in its upper layer."""

    image: Image
    store: Store


WithFile = Callable[[str, str], Upper]  # of a file of /etc and its text


@pytest.fixture
def with_file(files_only: SampleRecipe, tmp_path: Path) -> WithFile:
    def make(file: str, text: str) -> Upper:
        files_only.write(f"files/{file}", text)
        files_only.replace("images/roof.def", "files/data.txt /opt/data/", f"files/{file} /etc/{file}")
        store = seeded(files_only, tmp_path / "store", "ground")
        return Upper(image_of(files_only, store), store)

    return make


@pytest.fixture
def upper(with_file: WithFile) -> Upper:
    return with_file("passwd", PASSWD)


@pytest.fixture
def sif(upper: Upper, tmp_path: Path) -> Path:
    make_sif(upper.image, upper.store, tmp_path / "x.sif", squash=False)
    return tmp_path / "x.sif"


@pytest.mark.parametrize(
    ("file", "text", "files"),
    [
        ("passwd", PASSWD, {"etc/passwd": PASSWD}),
        ("group", "rdma:x:104:\n", {"etc/group": "rdma:x:104:\n"}),
        ("data.txt", "no accounts", None),
    ],
)
def test_the_primary_partition_has_the_merged_files(
    with_file: WithFile, tmp_path: Path, file: str, text: str, files: dict[str, str] | None
) -> None:
    upper, sif = with_file(file, text), tmp_path / "x.sif"
    make_sif(upper.image, upper.store, sif, squash=False)
    lowest, *upper_layers = read_sif(sif).layers
    assert len(upper_layers) + 1 == len(upper.image.layers) + (files is not None)
    if files is None:
        assert lowest.name == ""
        return
    assert lowest.name == USERS
    with sif.open("rb") as stream:
        reader = SquashfsReader(stream, lowest.offset)
        entries = {entry.path: entry for entry in reader.entries()}
        assert {path: reader.read_file(path).decode() for path in entries if entries[path].kind == "file"} == files
    assert {path: (entry.mode, entry.uid) for path, entry in entries.items() if entry.kind == "dir"} == {
        "": (0o755, 0),
        "etc": (0o755, 0),
    }


def test_a_squashed_sif_has_no_such_partition(upper: Upper, tmp_path: Path) -> None:
    make_sif(upper.image, upper.store, tmp_path / "x.sif", squash=True)
    assert [item.name for item in read_sif(tmp_path / "x.sif").layers] == [""]


def test_what_is_pushed_is_the_file(upper: Upper, sif: Path) -> None:
    assert b"".join(sif_bytes(upper.image, upper.store).read(0)) == sif.read_bytes()
    size = len(sif.read_bytes())
    for start in (1, read_sif(sif).layers[0].offset + 5, read_sif(sif).layers[1].offset - 3, size - 1):
        assert b"".join(sif_bytes(upper.image, upper.store).read(start)) == sif.read_bytes()[start:]


def test_it_is_the_images_and_a_changed_one_is_not(upper: Upper, sif: Path) -> None:
    check_sif(upper.image, sif, upper.store, again=True)
    data, start = sif.read_bytes(), read_sif(sif).layers[0].offset
    sif.write_bytes(data[:start] + data[start:].replace(b"porter", b"parter", 1))
    with pytest.raises(VerifyError, match="data object 2 is damaged"):
        check_sif(upper.image, sif, upper.store, again=True)


def test_readers_see_the_layers(upper: Upper, sif: Path, tmp_path: Path) -> None:
    with open_image(str(sif), upper.store) as image:
        assert [layer.name for layer in image.layers] == [layer.name for layer in upper.image.layers]
        assert image.read("etc/passwd") == PASSWD.encode()
    assert sbom_of(str(sif), Store(tmp_path / "empty"), quiet()) == sbom_of(upper.image.name, upper.store, quiet())


def test_a_partition_that_only_has_the_name_is_read(upper: Upper, sif: Path) -> None:
    data, start = sif.read_bytes(), read_sif(sif).layers[0].offset
    sif.write_bytes(data[:start] + data[start:].replace(b"porter", b"parter", 1))
    with open_image(str(sif), upper.store) as image:
        assert len(image.layers) == len(upper.image.layers) + 1


def test_published_layers_are_located_after_it(upper: Upper, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(0o755)
    done = publish(upper.image, upper.store, shared, PublishOptions(check=False), quiet())
    assert read_sif(done.sif).layers[0].name == USERS
    for layer in upper.image.layers:
        with SharedStore(shared).reader(layer.digest) as reader, upper.store.reader(layer.digest) as stored:
            assert list(reader.entries()) == list(stored.entries())
    assert not publish(upper.image, upper.store, shared, PublishOptions(check=False), quiet()).created
