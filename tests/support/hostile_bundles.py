"""Bundles that nobody's `ekiben bundle` wrote: names and links that point out, members that are no files, sizes that
lie.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ekiben.core.environment import platform
from support.sample_recipe import RECIPE

LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE


@dataclass(frozen=True)
class Item:
    """A member of a tar."""

    name: str
    data: bytes = b"1"
    type: bytes = tarfile.REGTYPE
    link: str = ""
    pax: dict[str, str] = field(default_factory=dict)


def bundle_of(items: Sequence[Item], index: bytes | None = None) -> bytes:
    """Return a bundle of ``items`` and its index, by default one that fits them."""
    files: dict[str, Any] = {}
    for item in items:
        digest = hashlib.sha256(item.data).hexdigest()
        files[item.name] = {"link": item.link} if item.type == LINK else {"size": len(item.data), "sha256": digest}
    record = {
        "format": 3,
        "recipe": RECIPE["name"],
        "stack": "tiny",
        "platform": platform(),
        "locks": {},
        "layers": {},
        "files": files,
    }
    data = json.dumps(record).encode() if index is None else index
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for item in (Item("bundle.json", data), *items):
            info = tarfile.TarInfo(item.name)
            info.type, info.linkname, info.pax_headers = item.type, item.link, dict(item.pax)
            info.size = len(item.data) if item.type == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(item.data))
    return out.getvalue()


# What these hold is odd, and harms nobody.
HARMLESS = ("name with a newline", "name with control characters", "name that is not UTF-8", "infinite pax time")


def hostile_bundles(canary: Path) -> dict[str, Callable[[], bytes]]:
    """Return what makes each bundle; one that is unpacked as it says would write ``canary``."""
    folder, name = canary.parent, canary.name
    up = "/".join([".."] * 30)
    sparse = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.map": "0,1",
        "GNU.sparse.size": str(1 << 40),
    }
    items: dict[str, list[Item]] = {
        "absolute name": [Item(str(canary))],
        "name with ..": [Item(f"include/{up}{canary}")],
        "name with . and //": [Item(f"include/./x//{up}{canary}")],
        "behind a link": [Item("include/l", type=LINK, link=str(folder)), Item(f"include/l/{name}")],
        "behind a relative link": [Item("include/l", type=LINK, link=f"{up}{folder}"), Item(f"include/l/{name}")],
        "behind two links": [
            Item("include/d/a", type=LINK, link="b"),
            Item("include/d/b", type=LINK, link=f"{up}{folder}"),
            Item(f"include/d/a/{name}"),
        ],
        "links that combine": [
            Item("include/d/x/y"),
            Item("include/d/up", type=LINK, link="x/../.."),
            Item("include/d/up2", type=LINK, link="up/.."),
        ],
        "link to itself": [Item("include/l", type=LINK, link="l")],
        "circle of links": [Item("include/a", type=LINK, link="b"), Item("include/b", type=LINK, link="a")],
        "link instead of include": [Item("include", type=LINK, link=str(folder)), Item(f"include/{name}")],
        "link instead of wheels": [Item("wheels", type=LINK, link=str(folder)), Item(f"wheels/{name}")],
        "link instead of debs": [Item("debs", type=LINK, link=str(folder)), Item(f"debs/{name}")],
        "link instead of compiled": [Item("compiled", type=LINK, link=str(folder)), Item(f"compiled/{name}")],
        "link, then the file": [Item("include/l", type=LINK, link=str(canary)), Item("include/l")],
        "hard link": [Item("include/h", type=HARD, link="/etc/passwd")],
        "hard link with ..": [Item("include/h", type=HARD, link=f"{up}/etc/passwd")],
        "hard link to the index": [Item("include/h", type=HARD, link="bundle.json")],
        "character device": [Item("include/n", type=tarfile.CHRTYPE)],
        "block device": [Item("include/n", type=tarfile.BLKTYPE)],
        "pipe": [Item("include/n", type=tarfile.FIFOTYPE)],
        "folder": [Item("include/n", type=tarfile.DIRTYPE)],
        "same name twice": [Item("include/a"), Item("include/a", b"2")],
        "file below a file": [Item("include/a"), Item("include/a/b", b"2")],
        "second index": [Item("bundle.json", b"{}")],
        "long name": [Item("include/" + "x" * 300)],
        "deep name": [Item("include/" + "d/" * 2100 + "f")],
        "name with NUL": [Item("include/a\0b")],
        "name with a newline": [Item("include/a\nb")],
        "section with control characters": [Item("x\x1b[31m/a")],
        "name with control characters": [Item("include/a\x1b[31mb")],
        "name that is not UTF-8": [Item("include/\udcff")],
        "pax path": [Item("include/p", pax={"path": str(canary)})],
        "huge pax size": [Item("include/p", pax={"size": "9" * 20})],
        "negative pax size": [Item("include/p", pax={"size": "-5"})],
        "infinite pax time": [Item("include/p", pax={"mtime": "inf"})],
        "sparse file": [Item("include/p", pax=sparse)],
        "compiled record that is none": [Item("compiled/x.json", b'{"a":[[[]]]}')],
        "compiled record elsewhere": [Item("compiled/../x.json", b"{}")],
        "file in no section": [Item("etc/passwd")],
    }
    indexes: dict[str, Callable[[], bytes]] = {
        "deep index": lambda: b"[" * 10_000,
        "large index": lambda: b'{"a":"' + b"x" * (300 << 20) + b'"}',
        "empty index": lambda: b"",
        "index of NUL": lambda: bytes(100),
        "index that is not UTF-8": lambda: b"\xff",
        "infinite number": lambda: b'{"format":3,"recipe":1e999}',
        "infinite format": lambda: b'{"format":1e400}',
        "number of 5000 digits": lambda: b'{"format":' + b"9" * 5000 + b"}",
    }
    made: dict[str, Callable[[], bytes]] = {key: lambda key=key: bundle_of(items[key]) for key in items}  # type: ignore[misc]
    made |= {key: lambda key=key: bundle_of([], indexes[key]()) for key in indexes}  # type: ignore[misc]
    made["cut in the middle"] = lambda: bundle_of([Item("include/a", bytes(10_000))])[:4000]
    made["no tar"] = lambda: b"x" * 10_000
    return made
