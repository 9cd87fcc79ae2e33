"""Python packages that are built from their sources: LAYER.sources.json beside LAYER.lock, written by `ekiben lock`.

The lock pins the wheel's hash, as that of any other package; this file says which source it is built from, with which
build requirements, and what its metadata says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ekiben.core.checked import NAME, Fields, parse_json, read_regular
from ekiben.core.errors import DefinitionError

FORMAT = 1
SUFFIX = ".sources.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIN = re.compile(r"[A-Za-z0-9][\w.-]*==[^\s;\\]+( --hash=sha256:[0-9a-f]{64})+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source distribution of an index, a git commit, or a ``folder``, which is a path from the recipe's.

    Of a commit, ``repository`` and the ``reference`` (a branch, a tag) are those that meant it when it was locked,
    ``subdirectory`` is where the package lies in it, and ``submodules`` whether it has some. ``build``: the pins of
    what its build needs, a line each, with hashes.

    ``wheel`` is the file name of what is built from it, ``wheel_sha256`` its hash, ``requires`` and ``python`` the
    dependencies and the versions of Python that its metadata names; all are empty until it is built.
    """

    name: str
    version: str
    file: str
    sha256: str
    build: tuple[str, ...]
    wheel: str = ""
    wheel_sha256: str = ""
    requires: tuple[str, ...] = ()
    python: str = ""
    repository: str = ""
    commit: str = ""
    reference: str = ""
    subdirectory: str = ""
    submodules: bool = False
    folder: str = ""

    @classmethod
    def parse(cls, fields: Fields) -> Source:
        """Parse the fields. Raises ValueError for what is wrong."""
        # imported here: most recipes have no sources
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
        from packaging.version import InvalidVersion, Version

        name, version, wheel = fields.name("name"), fields.text("version"), fields.basename("wheel")
        if not NAME.fullmatch(name) or canonicalize_name(name) != name:
            fields.refuse("name", "a package's name in its canonical form")
        build, requires = fields.strings("build"), fields.strings("requires")
        if wrong := next((line for line in build if not _PIN.fullmatch(line)), None):
            raise ValueError(f"names {wrong!r:.80}, which is not a pin with hashes")
        try:
            if parse_wheel_filename(wheel)[:2] != (name, Version(version)):
                fields.refuse("wheel", f"a wheel of {name} {version}")
            for line in requires:
                Requirement(line)
        except (InvalidWheelFilename, InvalidVersion, InvalidRequirement) as error:
            raise ValueError(f"cannot be read: {error}") from error
        is_git = "commit" in fields
        return cls(
            name=name,
            version=version,
            file=fields.basename("file"),
            sha256="" if is_git else fields.hex_digest("sha256"),
            repository=fields.text("repository") if is_git else "",
            commit=fields.matching("commit", _COMMIT, "a git commit's full name") if is_git else "",
            reference=fields.text("reference") if is_git else "",
            subdirectory=_subdirectory(fields) if is_git else "",
            submodules=is_git and fields.data.get("submodules") is True,
            folder=fields.text("folder", ""),
            build=tuple(build),
            wheel=wheel,
            wheel_sha256=fields.hex_digest("wheel_sha256"),
            requires=tuple(requires),
            python=fields.text("python", ""),
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """Return the inputs of the wheel's bytes, for a key."""
        if self.commit:  # which identifies its content, on every mirror
            return {
                "name": self.name,
                "commit": self.commit,
                **({"subdirectory": self.subdirectory} if self.subdirectory else {}),
                **({"submodules": True} if self.submodules else {}),
                "build": list(self.build),
            }
        if self.folder:  # whose archive names its content, wherever the folder is
            return {"name": self.name, "sha256": self.sha256, "build": list(self.build)}
        return {"name": self.name, "version": self.version, "sha256": self.sha256, "build": list(self.build)}

    def to_json(self) -> dict[str, Any]:
        """Return the object that the file holds."""
        values = {
            **self.inputs,
            **({"repository": self.repository, "reference": self.reference} if self.commit else {}),
            **({"folder": self.folder} if self.folder else {}),
            "version": self.version,
            "file": self.file,
            "wheel": self.wheel,
            "wheel_sha256": self.wheel_sha256,
            "requires": list(self.requires),
            "python": self.python,
        }
        return dict(sorted(values.items()))


def _subdirectory(fields: Fields) -> str:
    path = fields.text("subdirectory", "")
    if path and not is_subdirectory(path):
        fields.refuse("subdirectory", "a path below the repository's top folder")
    return path


def is_subdirectory(path: str) -> bool:
    """Return whether a path leads below the folder that it begins in."""
    return not path.startswith("/") and not {"", ".", ".."} & {*path.split("/")} and path.isprintable()


def sources_file(lock: Path) -> Path:
    """Return where the sources of a lock file's packages are named: NAME.lock → NAME.sources.json."""
    return lock.with_name(lock.name.removesuffix(".lock") + SUFFIX)


def read_sources(path: Path) -> list[Source]:
    """Read LAYER.sources.json; nothing where there is none. Raises DefinitionError."""
    if not path.exists():
        return []
    try:
        fields = Fields.of(parse_json(read_regular(path, follow=True)))
        if fields.size("format") != FORMAT:
            raise ValueError(f"is of format {fields.size('format')}")
        return [Source.parse(item) for item in fields.objects("sources")]
    except (OSError, ValueError) as error:
        raise DefinitionError(f"{path}: is not as `ekiben lock` writes it: it {error}") from error


def format_sources(sources: Iterable[Source]) -> str:
    """Return the content of LAYER.sources.json, "" without sources."""
    items = [source.to_json() for source in sorted(sources, key=lambda item: item.name)]
    return json.dumps({"format": FORMAT, "sources": items}, indent=1) + "\n" if items else ""
