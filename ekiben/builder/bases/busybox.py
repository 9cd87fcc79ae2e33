"""A base of one program: ``Bootstrap: busybox``, ``MirrorURL: https://…/busybox-x86_64``; bases.lock has its SHA-256.

The files are those of Apptainer: the program, its names in /bin, and /etc of root. The program is not run for that: it
holds the list of its names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ekiben.builder.bases.scratch import folder_entries
from ekiben.core.errors import FetchError
from ekiben.core.files import format_size
from ekiben.formats.layer import Entry, sort_key

if TYPE_CHECKING:
    from ekiben.formats.layer import LayerEntry
    from ekiben.packages.host_config import PackageSources
    from ekiben.resolve.graph import Layer

_MAX_SIZE = 64 << 20  # bytes; the program has one or two million
_MACHINES = {"amd64": (3, 62), "arm64": (40, 183)}  # of ELF files that run there
_FIRST_NAMES = b"\0[\0[[\0"
_NAME = re.compile(rb"[a-z0-9\[][a-z0-9_.+\[-]{0,31}")
_FILES = {
    "etc/group": b" root:x:0:",
    "etc/hosts": b"127.0.0.1   localhost localhost.localdomain localhost4 localhost4.localdomain4",
    "etc/passwd": b"root:!:0:0:root:/root:/bin/sh",
}


def header_problems(header: Mapping[str, str]) -> list[str]:
    """Return the problems of MirrorURL:, which names the program."""
    url = header.get("mirrorurl", "")
    parts = urlsplit(url) if url.isprintable() and " " not in url else urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc or "@" in url or parts.fragment:
        return [f"Bootstrap: busybox needs 'MirrorURL: https://…/busybox-x86_64', its address (found: {url!r:.99})"]
    return []


def image_reference(header: Mapping[str, str]) -> str:
    """Return the program's address, by which bases.lock knows it."""
    return header["mirrorurl"]


def locked_digests(reference: str, platforms: Iterable[str]) -> dict[str, str]:
    """Return the program's digest now for those of ``platforms`` that it is for. Raises FetchError."""
    program = _fetch(reference)
    suitable = [platform for platform in platforms if _machine(program) in _MACHINES[platform.partition("/")[2]]]
    return dict.fromkeys(suitable, f"sha256:{hashlib.sha256(program).hexdigest()}")


def key_inputs(header: Mapping[str, str]) -> dict[str, str]:
    """Return the program's digest, whatever its address is."""
    return {"bootstrap": header["bootstrap"], "digest": header["from"].rpartition("@")[2]}


def entries(
    layer: Layer, staging: Path, notes: dict[str, Any], sources: PackageSources, log: Callable[[str], None]
) -> Iterator[LayerEntry]:
    """Yield the program under all its names, and the folders of a root file system. Raises FetchError."""
    assert layer.stage is not None
    notes["executor"] = "download"
    url, _, digest = layer.stage.header["from"].rpartition("@")
    log(url)
    program = _fetch(url)
    if f"sha256:{hashlib.sha256(program).hexdigest()}" != digest:
        raise FetchError(
            f"{url}: it has other bytes than bases.lock says, {digest}", hint="lock again for those of today"
        )
    names = applets(program)
    if not names:
        raise FetchError(f"{url} is not a busybox: it has no list of programs")
    first, *rest = sorted({*names, "busybox"}, key=lambda name: sort_key(f"bin/{name}"))
    bytes_of = {**_FILES, f"bin/{first}": program}
    items = [*folder_entries(layer.epoch), Entry("bin", "dir", 0o755, mtime=layer.epoch)]
    items = [item for item in items if item.path not in bytes_of]
    for path, data in bytes_of.items():
        mode = 0o755 if data is program else 0o644
        items.append(Entry(path, "file", mode, mtime=layer.epoch, size=len(data)))
    items += [Entry(f"bin/{name}", "hardlink", 0o755, mtime=layer.epoch, target=f"bin/{first}") for name in rest]
    for item in sorted(items, key=lambda item: sort_key(item.path)):
        yield item, iter([bytes_of[item.path]]) if item.path in bytes_of else None


def applets(program: bytes) -> list[str]:
    """Return the names under which a busybox does something, of the list in it; none of another program."""
    at = program.find(_FIRST_NAMES)
    names: list[str] = []
    while at >= 0:
        end = program.find(b"\0", at + 1)
        name = program[at + 1 : max(end, 0)]
        if not _NAME.fullmatch(name):
            break
        names.append(name.decode())
        at = end
    return names


def _fetch(url: str) -> bytes:
    from ekiben.packages.sources import chunks_of

    data = bytearray()
    for chunk in chunks_of(url):
        data += chunk
        if len(data) > _MAX_SIZE:
            raise FetchError(f"{url}: is larger than {format_size(_MAX_SIZE)}, as no busybox is")
    return bytes(data)


def _machine(program: bytes) -> int:
    """Return the number of a machine in an ELF file's header, 0 of another file."""
    return int.from_bytes(program[18:20], "little") if program[:4] == b"\x7fELF" else 0
