"""%files copies as Apptainer does: each line of the table is built by Apptainer, too, and the trees are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, EkibenError
from ekiben.resolve.copies import copied_files
from ekiben.spec.definition import read_definition
from ekiben.spec.source_folders import SourceFolders
from support.files_section import base, definition, ours, sources

# Apptainer copies or hangs; no layer should hold these.
OURS_ALONE = {
    "a FIFO": ("pipe /opt", "neither a file nor a folder"),
    "a FIFO in a folder": ("fifo-in /opt", "neither a file nor a folder"),
    "a folder that is in itself": ("round /opt", "a link to a folder that it is in"),
    "a device": ("/dev/null /opt", "neither a file nor a folder"),
    "another name over a folder, as it is renamed": ("g1.txt /dir.txt", "dir.txt is a folder in the layers below"),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of sources and a root file system, as a sandbox and as a layer."""
    root = tmp_path_factory.mktemp("files")
    (root / "images").mkdir()
    (root / "base").mkdir()
    sources(root)
    base(root / "base")
    yield root


@pytest.mark.parametrize(("lines", "message"), OURS_ALONE.values(), ids=OURS_ALONE)
def test_devices_and_pipes_in_sources_are_refused(tree: Path, tmp_path: Path, lines: str, message: str) -> None:
    (tree / "base/dir.txt").mkdir(exist_ok=True)
    try:
        with pytest.raises(EkibenError, match=message):
            ours(tree, lines, tmp_path / "x")
    finally:
        (tree / "base/dir.txt").rmdir()


@pytest.mark.parametrize(
    ("line", "name"),
    [('"with space" /opt', "with space"), ("with\\ space /opt", "with space"), ('"it\'s" /opt', "it's")],
)
def test_names_are_quoted_as_in_a_shell(tree: Path, tmp_path: Path, line: str, name: str) -> None:
    assert f"opt/{name}" in ours(tree, line, tmp_path / "x")


def test_the_name_that_may_become_a_part_of_the_path_is_in_the_key(tree: Path) -> None:
    from ekiben.resolve.copies import file_inputs

    def inputs(lines: str) -> object:
        read = read_definition(definition(tree, lines), root=tree)
        return file_inputs(
            [file for copy in read.final.files for file in copied_files(read, copy, SourceFolders(tree))]
        )

    (tree / "copy-of-a").write_text("a\n")
    assert inputs("a /opt") != inputs("copy-of-a /opt")
    assert "names" not in inputs("a /opt/a")  # type: ignore[operator]  # as keys always were
    assert "names" not in inputs("g1.txt /opt/x.txt")  # type: ignore[operator]


def test_a_pattern_of_several_without_a_folder_goes_into_one(tree: Path, tmp_path: Path) -> None:
    """Apptainer copies one file over the other."""
    assert {"opt/new/g1.txt", "opt/new/g2.txt"} <= ours(tree, "g*.txt /opt/new", tmp_path / "x").keys()


def test_a_source_outside_is_an_error_that_names_its_line(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match=r"x\.def:5: %files nothing"):
        ours(tree, "nothing /opt", tmp_path / "x")
