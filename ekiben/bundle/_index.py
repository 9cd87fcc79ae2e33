"""bundle.json, and the comparison of a recipe's locks with it."""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ekiben.core.checked import Fields, parse_json
from ekiben.core.files import digest_of
from ekiben.resolve.graph import ResolvedRecipe

FORMAT = 3
SECTIONS = ("debs", "wheels", "compiled", "sources", "include")
INDEX = "bundle.json"
MAX_INDEX = 256 << 20  # bytes


@dataclass(frozen=True, slots=True)
class BundleFile:
    """One member: a file with ``size`` and ``sha256``, or a link to ``link``."""

    size: int = 0
    sha256: str = ""
    link: str | None = None

    @classmethod
    def parse(cls, fields: Fields) -> BundleFile:
        """Parse the fields. Raises ValueError for what is wrong."""
        if "link" in fields:
            return cls(link=fields.text("link"))
        return cls(fields.size("size"), fields.hex_digest("sha256"))

    def to_json(self) -> dict[str, Any]:
        """Return the object that the index holds."""
        return {"link": self.link} if self.link is not None else {"size": self.size, "sha256": self.sha256}


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleIndex:
    """bundle.json: its members, the lock files (name → sha256) and the layers (name → cache key)."""

    recipe: str
    stack: str
    platform: str
    locks: Mapping[str, str]
    layers: Mapping[str, str]
    files: Mapping[str, BundleFile]

    @classmethod
    def parse(cls, data: bytes) -> BundleIndex | None:
        """Return None for another format. Raises ValueError."""
        fields = Fields.of(parse_json(data, max_size=MAX_INDEX))
        if fields.data.get("format") != FORMAT:
            return None
        files = fields.object("files")
        return cls(
            recipe=fields.text("recipe"),
            stack=fields.text("stack"),
            platform=fields.text("platform"),
            locks=fields.texts("locks"),
            layers=fields.texts("layers", {}),
            files={name: BundleFile.parse(files.object(name)) for name in files.data},
        )

    def to_json(self) -> bytes:
        """Return the index as it is in the bundle."""
        data = {
            "format": FORMAT,
            "recipe": self.recipe,
            "stack": self.stack,
            "platform": self.platform,
            "locks": dict(self.locks),
            "layers": dict(self.layers),
            "files": {name: file.to_json() for name, file in self.files.items()},
        }
        return json.dumps(data, indent=1).encode() + b"\n"


def lock_digests(resolved: ResolvedRecipe) -> dict[str, str]:
    """Return digests to compare a recipe with a bundle: of lock files, and of each layer's Debian packages."""
    digests = {
        file.destination: file.sha256()
        for layer in resolved.layers
        for file in layer.files
        if file.source and file.destination.endswith(".lock")
    }
    for layer in resolved.layers:
        if packages := layer.inputs.get("packages"):
            digests[f"apt.lock [{layer.name}]"] = hashlib.sha256(
                json.dumps(packages, sort_keys=True).encode()
            ).hexdigest()
    return digests


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 as 64 hex digits."""
    return digest_of(path).removeprefix("sha256:")


def link_stays_inside(name: str, target: str) -> bool:
    """Return whether the target of the link ``name`` lies inside its snapshot's folder."""
    home = snapshot_folder(name)
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), target)).startswith(f"{home}/")


def snapshot_folder(name: str) -> str:
    """Return ``include/name``: a link of that member must not point out of it."""
    return "/".join(name.split("/")[:2])
