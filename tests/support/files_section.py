"""Sources and a base for a %files section, and the tree that we make of them."""

from __future__ import annotations

import os
from pathlib import Path

from ekiben.formats.changeset import Lower, file_entries, normalize
from ekiben.formats.layer import Entry, write_entries
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.upper import Changes
from ekiben.resolve.copies import copied_files
from ekiben.spec.definition import read_definition
from ekiben.spec.source_folders import SourceFolders

Tree = dict[str, str]


def sources(root: Path) -> None:
    """What is there to copy."""
    (root / "d/sub/deep").mkdir(parents=True)
    (root / "d/hollow").mkdir()
    (root / "void").mkdir()
    (root / "fifo-in").mkdir()
    (root / "bad").mkdir()
    (root / "round").mkdir()
    inside = ("d/x", "d/sub/y", "d/sub/deep/z", "d/.hidden")
    for name in ("a", "b", "tool.sh", "with space", "it's", *inside, "g1.txt", "g2.txt", "日本"):
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


def definition(tree: Path, lines: str, parent: str = "base.sif") -> Path:
    path = tree / "images/x.def"
    path.write_text(f"Bootstrap: localimage\nFrom: {parent}\n\n%files\n    {lines}\n", encoding="utf-8")
    return path


def ours(tree: Path, lines: str, out: Path) -> Tree:
    """The layer below with ours on it."""
    read = read_definition(definition(tree, lines), root=tree)
    files = [file for copy in read.final.files for file in copied_files(read, copy, SourceFolders(read.root))]
    with out.open("w+b") as squashfs:
        write_entries(normalize(Changes(tree / "base"), Lower([]), epoch=2**31 - 1), SquashfsWriter(squashfs, epoch=1))
        lower = Lower([SquashfsReader(squashfs)])
        found = {
            entry.path: shown(entry, lower.read_file(entry.path) if entry.kind == "file" else b"")
            for entry, _ in normalize(Changes(tree / "base"), Lower([]), epoch=1)
        }
        for entry, chunks in file_entries(files, lower, epoch=1):
            found[entry.path] = shown(entry, b"".join(chunks or ()))
    return {path: what for path, what in found.items() if path}


def shown(entry: Entry, data: bytes) -> str:
    kept = entry.target if entry.kind == "symlink" else data.decode() if entry.kind == "file" else ""
    return f"{entry.kind} {'x' if entry.kind == 'file' and entry.mode & 0o100 else ''} {kept}".strip()
