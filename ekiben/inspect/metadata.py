"""The content of /opt/ekiben/image.json: recipe, layers, and compiled packages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ekiben.core.checked import Fields, parse_json

IMAGE_METADATA = "opt/ekiben/image.json"  # in an image: ekiben/resolve/recipe_layer.py writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledWheel:
    """A wheel that a build stage made: of a repository's ``commit``, or of the source distribution ``name``
    ``version``, one of ``sha256``; of neither where all of them are "". ``data`` is the whole entry."""

    package: str
    repository: str
    commit: str
    name: str
    version: str
    sha256: tuple[str, ...]
    data: Mapping[str, Any]

    @classmethod
    def parse(cls, entry: Fields) -> CompiledWheel:
        """Parse the fields. Raises ValueError for a wrong one."""
        source = entry.object("source")
        from_index = bool(source.data) and "commit" not in source
        return cls(
            package=entry.text("package"),
            repository=source.text("repository", ""),
            commit=source.text("commit", ""),
            name=source.text("name") if from_index else "",
            version=source.text("version") if from_index else "",
            sha256=tuple(source.strings("sha256")) if from_index else (),
            data=entry.data,
        )


@dataclass(frozen=True, slots=True)
class ImageMetadata:
    """/opt/ekiben/image.json of an image: ``layers`` are (name, cache_key), without the last one;
    ``arguments``: names that --build-arg set; ``is_evaluated``: scripts set its environment; ``base``: the agent,
    reference and digest of the image that it stands on, where it stands on one.
    """

    recipe: str
    stack: str
    layers: list[tuple[str, str]]
    compiled: list[CompiledWheel]
    arguments: tuple[str, ...] = ()
    is_evaluated: bool = False
    base: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes) -> ImageMetadata:
        """Parse the fields. Raises ValueError for a wrong one."""
        fields = Fields.of(parse_json(data))
        compiled = fields.objects("compiled") if "compiled" in fields else []
        return cls(
            fields.text("recipe"),
            fields.text("stack"),
            [(layer.text("name"), layer.text("cache_key", "")) for layer in fields.objects("layers")],
            [CompiledWheel.parse(item) for item in compiled if item.data.keys() >= {"package", "source", "cache_key"}],
            tuple(fields.strings("arguments")) if "arguments" in fields else (),
            fields.text("environment", "") == "evaluated",
            fields.texts("base", {}),
        )
