"""What the Python of a base brings: LAYER.packages.json beside LAYER.def, written by `ekiben init` and `ekiben lock`.

A layer on the base keeps these versions: they are constraints, and none of them is installed again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.command_name import command_name
from ekiben.core.errors import DefinitionError

FORMAT = 1
SUFFIX = ".packages.json"
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_PYTHON = re.compile(r"3\.\d{1,3}(\.\d{1,3}\w{0,8})?")
_PATH = re.compile(r"(/[\w.+-]+)+")
_LIBC = re.compile(r"glibc \d{1,3}\.\d{1,3}|musl")
_ARCH = re.compile(r"(sm|compute)_\d{1,4}[af]?")


@dataclass(frozen=True, slots=True)
class BasePackage:
    """A Python package of a base. ``extras``: its requirements that an extra asks for, as its METADATA has them."""

    name: str
    version: str
    extras: tuple[str, ...] = ()

    @classmethod
    def parse(cls, fields: Fields) -> BasePackage:
        """Parse the fields. Raises ValueError for what is wrong."""
        extras = tuple(fields.strings("extras")) if "extras" in fields else ()
        try:
            package = cls(fields.matching("name", _NAME, "a package's name"), fields.text("version"), extras)
            if canonicalize_name(package.name) != package.name or str(Version(package.version)) != package.version:
                fields.refuse("version", "a version in its normal form")
            for line in extras:
                Requirement(line)
        except (InvalidVersion, InvalidRequirement) as error:
            raise ValueError(f"cannot be read: {error}") from error
        return package


@dataclass(frozen=True, slots=True)
class Constraint:
    """A line of a file of constraints of the base (PIP_CONSTRAINT)."""

    file: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BasePackages:
    """A base's Python: ``python`` is its path, ``version`` as 3.12.3 or 3.12, ``libc`` as "glibc 2.39" or "musl".

    ``digest`` is the base's. ``cuda`` and ``device_code`` are torch's, as far as its files say. ``unused``: what was
    found and cannot be kept to, a sentence each.
    """

    digest: str
    python: str
    version: str
    libc: str
    packages: tuple[BasePackage, ...]
    cuda: str = ""
    device_code: tuple[str, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    unused: tuple[str, ...] = ()

    @classmethod
    def parse(cls, fields: Fields) -> BasePackages:
        """Parse the fields. Raises ValueError for what is wrong."""
        constraints = tuple(Constraint(item.text("file"), item.text("line")) for item in fields.objects("constraints"))
        for item in constraints:
            try:
                Requirement(item.line)
            except InvalidRequirement as error:
                raise ValueError(f"has the constraint {item.line!r:.80}, which is none: {error}") from error
        device_code = fields.strings("device_code")
        if not all(_ARCH.fullmatch(item) for item in device_code):
            fields.refuse("device_code", "a list of architectures such as sm_90")
        return cls(
            digest=fields.digest("digest"),
            python=fields.matching("python", _PATH, "a path such as /usr/bin/python3"),
            version=fields.matching("version", _PYTHON, "a version of Python 3"),
            libc=fields.matching("libc", _LIBC, "glibc VERSION, or musl"),
            packages=tuple(BasePackage.parse(item) for item in fields.objects("packages")),
            cuda=fields.text("cuda", ""),
            device_code=tuple(device_code),
            constraints=constraints,
            unused=tuple(fields.strings("unused")),
        )

    @property
    def minor(self) -> str:
        """Return the version of Python that a stack names, as 3.12."""
        return ".".join(self.version.split(".")[:2])

    @property
    def torch(self) -> str:
        """Return torch's version, "" where there is none."""
        return next((item.version for item in self.packages if item.name == "torch"), "")

    @property
    def pins(self) -> str:
        """Return the packages as lines of a lock file without hashes."""
        return "".join(f"{item.name}=={item.version}\n" for item in self.packages)

    @property
    def limits(self) -> list[Constraint]:
        """Return the constraints of packages that the base does not have: those that it has stay as they are."""
        has = {item.name for item in self.packages}
        return [item for item in self.constraints if canonicalize_name(Requirement(item.line).name) not in has]


def packages_file(definition: Path) -> Path:
    """Return where the packages of a base are listed: NAME.def → NAME.packages.json."""
    return definition.with_name(definition.name.removesuffix(".def") + SUFFIX)


def read_base_packages(path: Path, text: str = "") -> dict[str, BasePackages]:
    """Read LAYER.packages.json, or the ``text`` that is about to be written there, by platform.

    Raises DefinitionError.
    """
    try:
        fields = Fields.of(parse_json(text or read_regular(path, follow=True)))
        if fields.size("format") != FORMAT:
            raise ValueError(f"is of format {fields.size('format')}")
        platforms = fields.object("platforms")
        return {platform: BasePackages.parse(platforms.object(platform)) for platform in platforms.data}
    except (OSError, ValueError) as error:
        raise DefinitionError(
            f"{path}: is not as `{command_name()} init` writes it: it {error}",
            hint=f"delete it, and write it anew: {command_name()} init NEW --from BASE",
        ) from error


def format_base_packages(platforms: Mapping[str, BasePackages]) -> str:
    """Return the content of LAYER.packages.json."""
    items = {platform: _to_json(packages) for platform, packages in sorted(platforms.items())}
    return json.dumps({"format": FORMAT, "platforms": items}, indent=1) + "\n"


def _to_json(packages: BasePackages) -> dict[str, Any]:
    record = asdict(packages)
    for item in record["packages"]:
        if not item["extras"]:
            del item["extras"]
    return record
