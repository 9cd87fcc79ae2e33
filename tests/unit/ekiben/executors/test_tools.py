"""A base without GNU tar and find, as Alpine's, is refused with what to do."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ekiben.core.errors import EngineError, LayerError
from ekiben.executors import check_tools
from ekiben.formats.changeset import Lower, normalize
from ekiben.formats.layer import Entry, LayerEntry, write_entries
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.upper import Changes


def layer(path: Path, *entries: Entry) -> Any:
    """A layer with these entries and the folders of programs."""
    members: list[LayerEntry] = [
        (entry, None)
        for entry in sorted(
            [Entry("", "dir"), Entry("usr", "dir"), Entry("usr/bin", "dir"), *entries], key=lambda entry: entry.order
        )
    ]
    with path.open("w+b") as out:
        write_entries(members, SquashfsWriter(out, epoch=1))

    @contextlib.contextmanager
    def reader() -> Iterator[SquashfsReader]:
        with path.open("rb") as file:
            yield SquashfsReader(file)

    return SimpleNamespace(reader=reader)


LINKED = Entry("bin", "symlink", 0o777, target="usr/bin")
BUSYBOX = (
    Entry("bin", "dir"),
    Entry("bin/busybox", "file"),
    *(
        Entry(f"{folder}/{tool}", "symlink", 0o777, target="/bin/busybox")
        for folder, tool in (("bin", "tar"), ("usr/bin", "find"))
    ),
)
GNU = (Entry("usr/bin/tar", "file"), Entry("usr/bin/find", "file"))


def test_debians_tools_are_accepted(tmp_path: Path) -> None:
    check_tools([layer(tmp_path / "x", LINKED, *GNU)], "docker")


def test_tools_of_a_layer_above_count(tmp_path: Path) -> None:
    check_tools([layer(tmp_path / "x", *BUSYBOX), layer(tmp_path / "y", *GNU)], "docker")


@pytest.mark.parametrize(("entries", "message"), [(BUSYBOX, "tar is busybox's"), ((LINKED, GNU[0]), "find is missing")])
def test_other_tools_are_refused_with_a_hint(tmp_path: Path, entries: tuple[Entry, ...], message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        check_tools([layer(tmp_path / "x", *entries)], "docker")
    assert "--engine buildah or podman" in str(caught.value.hint)


def test_invalid_tar_is_an_error_without_traceback() -> None:
    for junk in (b"", b"tar: unrecognized option\n" * 40):
        with pytest.raises(LayerError, match="cannot be read"):
            list(normalize(Changes(io.BytesIO(junk)), Lower([]), epoch=1))
