"""Images whose layers hold a few known files."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ekiben.formats.layer import Entry, LayerEntry, sort_key, write_entries
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.inspect.image_reader import ImageReader, LayerReader

SITE = "opt/venv/lib/python3.11/site-packages"
Files = Mapping[str, bytes | None]  # None: removed from the layers below


def write(path: Path, files: Files, mode: int = 0o644, links: Mapping[str, str] | None = None) -> Path:
    folders = {parent for file in (*files, *(links or {})) for parent in _folders(file)}
    members: list[LayerEntry] = [(Entry(folder, "dir", mtime=1), None) for folder in folders]
    members += [(Entry(name, "symlink", 0o777, mtime=1, target=target), None) for name, target in (links or {}).items()]
    for name, data in files.items():
        if data is None:
            members.append((Entry(name, "whiteout", 0, mtime=1), None))
        else:
            members.append((Entry(name, "file", mode, mtime=1, size=len(data)), [data] if data else None))
    with path.open("w+b") as out:
        write_entries(sorted(members, key=lambda member: sort_key(member[0].path)), SquashfsWriter(out, epoch=1))
    return path


def _folders(file: str) -> Iterator[str]:
    parts = file.split("/")[:-1]
    return ("/".join(parts[:count]) for count in range(len(parts) + 1))


def image(
    tmp_path: Path,
    stack: contextlib.ExitStack,
    name: str,
    *layers: Files,
    links: Mapping[str, str] | None = None,
    **environment: str,
) -> ImageReader:
    parts = []
    for number, files in enumerate(layers):
        path = write(tmp_path / f"{name}-{number}", files, links=links)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        parts.append(
            LayerReader(
                f"layer{number}", digest, path.stat().st_size, SquashfsReader(stack.enter_context(path.open("rb")))
            )
        )
    return ImageReader(name, tuple(parts), environment)


STATUS = "var/lib/dpkg/status"


def record(name: str, version: str, *lines: str, status: str = "install ok installed") -> str:
    return "\n".join(
        [f"Package: {name}", f"Status: {status}", "Architecture: amd64", f"Version: {version}", *lines, "\n"]
    )


def status(*records: str) -> Files:
    return {STATUS: "".join(records).encode()}


def dist_info(name: str, version: str, *lines: str) -> Files:
    return {
        f"{SITE}/{name}-{version}.dist-info/METADATA": (
            "\n".join([f"Name: {name}", f"Version: {version}", *lines]).encode()
        )
    }
