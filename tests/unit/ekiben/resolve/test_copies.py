"""%files copies as Apptainer does: each line of the table is built by Apptainer, too, and the trees are the same."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, EkibenError
from ekiben.formats.changeset import Lower, file_entries, normalize
from ekiben.formats.layer import Entry, write_entries
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.resolve.copies import copied_files
from ekiben.spec.definition import read_definition

Tree = dict[str, str]


def sources(root: Path) -> None:
    """What is there to copy."""
    (root / "d/sub/deep").mkdir(parents=True)
    (root / "d/hollow").mkdir()
    (root / "void").mkdir()
    (root / "fifo-in").mkdir()
    (root / "bad").mkdir()
    (root / "round").mkdir()
    for name in (
        "a",
        "b",
        "tool.sh",
        "with space",
        "it's",
        "d/x",
        "d/sub/y",
        "d/sub/deep/z",
        "d/.hidden",
        "g1.txt",
        "g2.txt",
        "日本",
    ):
        (root / name).write_text(f"{name}\n", encoding="utf-8")
    (root / "tool.sh").chmod(0o755)
    (root / "link-a").symlink_to("a")
    (root / "link-d").symlink_to("d")
    (root / "d/to-sub").symlink_to("sub")
    (root / "d/to-a").symlink_to("../a")
    (root / "dangling").symlink_to("nowhere")
    (root / "bad/dangling").symlink_to("nowhere")
    (root / "round/self").symlink_to("../round")
    os.mkfifo(root / "pipe")
    os.mkfifo(root / "fifo-in/pipe")


def base(root: Path) -> None:
    """What the layers below have."""
    for folder in ("etc", "opt", "usr/bin", "empty", "opt/d"):
        (root / folder).mkdir(parents=True)
    (root / "opt/d/old").write_text("old\n")
    (root / "etc/conf").write_text("conf\n")
    (root / "bin").symlink_to("usr/bin")
    (root / "to-opt").symlink_to("/opt")
    (root / "to-conf").symlink_to("etc/conf")


SAME = {
    "a file under a new name": "a /opt/new",
    "a file into a folder that is there": "a /opt",
    "a file into an empty folder": "a /empty",
    "a file into a folder with a slash": "a /opt/",
    "a file into a new folder": "a /srv/new/",
    "a file in a new folder": "a /srv/new/a",
    "a file over a file": "a /etc/conf",
    "a file without a destination": "a",
    "a program": "tool.sh /usr/bin/tool",
    "a file below a link to a folder": "a /bin/a",
    "a file into a link to a folder": "a /bin",
    "a file into an absolute link to a folder": "a /to-opt",
    "a file through a link to a file": "a /to-conf",
    "a link to a file": "link-a /opt/x",
    "a link to a file into a folder": "link-a /opt",
    "a folder under a new name": "d /opt/new",
    "a folder into a folder that is there": "d /empty",
    "a folder into a folder that has one of its name": "d /opt",
    "a folder onto one of its own name": "d /opt/d",
    "a folder into a new folder": "d /srv/new/",
    "a folder without a destination": "d",
    "a link to a folder": "link-d /opt/new",
    "a link to a folder into a folder": "link-d /opt",
    "an empty folder": "void /opt/void",
    "an empty folder into a folder": "void /opt",
    "a pattern into a folder": "g*.txt /opt",
    "a pattern into a new folder": "g?.txt /srv/new/",
    "a pattern that matches one": "g1* /opt/one",
    "two lines, the first makes the folder": "a /srv/new/\n    b /srv/new",
    "two lines, the last wins": "a /opt/x\n    b /opt/x",
    "a name that is not ASCII": "日本 /opt",
    "a relative destination": "a opt/x",
}
# name → the line, and what we say. Apptainer refuses these as well.
REFUSED = {
    "nothing there": ("nothing /opt", "no such file under"),
    "a pattern without a match": ("z*.txt /opt", "matches"),
    "a dangling link": ("dangling /opt", "a link to nowhere, which is not there"),
    "a dangling link in a folder": ("bad /opt", "a link to nowhere, which is not there"),
    "a file below a file": ("a /etc/conf/a", "/etc/conf is no folder"),
    "a folder onto a file": ("void /etc/conf", "is no folder in the layers below"),
}
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


def definition(tree: Path, lines: str, parent: str = "base.sif") -> Path:
    path = tree / "images/x.def"
    path.write_text(f"Bootstrap: localimage\nFrom: {parent}\n\n%files\n    {lines}\n", encoding="utf-8")
    return path


def ours(tree: Path, lines: str, out: Path) -> Tree:
    """The layer below with ours on it."""
    read = read_definition(definition(tree, lines), root=tree)
    files = [file for copy in read.final.files for file in copied_files(read, copy)]
    with out.open("w+b") as squashfs:
        write_entries(normalize(tree / "base", Lower([]), epoch=2**31 - 1), SquashfsWriter(squashfs, epoch=1))
        lower = Lower([SquashfsReader(squashfs)])
        found = {entry.path: shown(entry, lower.read_file(entry.path) if entry.kind == "file" else b"")
                 for entry, _ in normalize(tree / "base", Lower([]), epoch=1)}  # fmt: skip
        for entry, chunks in file_entries(files, lower, epoch=1):
            found[entry.path] = shown(entry, b"".join(chunks or ()))
    return {path: what for path, what in found.items() if path}


def shown(entry: Entry, data: bytes) -> str:
    kept = entry.target if entry.kind == "symlink" else data.decode() if entry.kind == "file" else ""
    return f"{entry.kind} {'x' if entry.kind == 'file' and entry.mode & 0o100 else ''} {kept}".strip()


def theirs(tree: Path, lines: str, out: Path) -> Tree | None:
    """None when Apptainer refuses."""
    if not shutil.which("apptainer") or os.geteuid():
        pytest.skip("apptainer and root are needed")
    argv = [
        "apptainer",
        "--quiet",
        "build",
        "--force",
        "--sandbox",
        str(out),
        str(definition(tree, lines, f"{tree}/base")),
    ]
    if subprocess.run(argv, cwd=tree, capture_output=True, check=False, timeout=60).returncode:
        return None
    kept = ("etc/conf", "etc", "opt", "usr", "bin", "empty", "srv", "to-opt", "to-conf", "a", "d")
    found: Tree = {}
    for path in sorted(out.rglob("*")):
        inside = path.relative_to(out).as_posix()
        if inside not in kept and not inside.startswith(("opt/", "usr/bin", "empty/", "srv/", "bin/", "a/", "d/")):
            continue
        if path.is_symlink():
            found[inside] = f"symlink  {path.readlink()}"
        elif path.is_dir():
            found[inside] = "dir"
        else:
            found[inside] = (
                f"file {'x' if path.stat().st_mode & 0o100 else ''} {path.read_text(encoding='utf-8')}".strip()
            )
    return found


@pytest.mark.parametrize("lines", SAME.values(), ids=SAME)
def test_files_section_gives_apptainers_tree(tree: Path, tmp_path: Path, lines: str) -> None:
    expected = theirs(tree, lines, tmp_path / "sandbox")
    assert expected is not None
    assert {path: what.rstrip() for path, what in ours(tree, lines, tmp_path / "x").items()} == {
        path: what.rstrip() for path, what in expected.items()
    }


@pytest.mark.parametrize(("lines", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_what_apptainer_refuses(tree: Path, tmp_path: Path, lines: str, message: str) -> None:
    assert theirs(tree, lines, tmp_path / "sandbox") is None
    with pytest.raises(EkibenError, match=message):
        ours(tree, lines, tmp_path / "x")


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
        return file_inputs([file for copy in read.final.files for file in copied_files(read, copy)])

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
