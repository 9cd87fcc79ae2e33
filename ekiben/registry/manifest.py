"""Parse answers of a registry: manifests, lists of referrers, image configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ekiben.core.checked import Fields, parse_json


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob or a manifest that another one names. ``size`` is required: it is the limit of a download."""

    digest: str
    size: int
    media_type: str
    artifact_type: str
    platform: str
    data: Mapping[str, Any]

    @classmethod
    def parse(cls, fields: Fields) -> Descriptor:
        """Parse the fields. Raises ValueError for a wrong one."""
        platform = fields.mapping("platform", {})
        return cls(
            fields.digest("digest"),
            fields.size("size"),
            fields.text("mediaType", ""),
            fields.text("artifactType", ""),
            f"{platform.get('os')}/{platform.get('architecture')}",
            fields.data,
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of an image or an artifact; ``media_type`` is "" where it does not say it."""

    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Parse the fields. Raises ValueError for a wrong one."""
        fields = Fields.of(parse_json(data))
        layers = tuple(Descriptor.parse(layer) for layer in fields.objects("layers"))
        return cls(fields.text("mediaType", ""), Descriptor.parse(fields.object("config")), layers)


def parse_index(data: bytes) -> list[Descriptor] | None:
    """Return the entries of an index; None when ``data`` is not an index. Raises ValueError."""
    fields = Fields.of(parse_json(data))
    return [Descriptor.parse(item) for item in fields.objects("manifests")] if "manifests" in fields else None


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The config of an image. ``created`` and ``architecture`` are "" where they are missing; ``config`` is
    unchecked: what a container of it starts with."""

    created: str
    diff_ids: tuple[str, ...]
    environment: dict[str, str]
    labels: dict[str, str]
    architecture: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes) -> ImageConfig:
        """Parse the fields. Raises ValueError for a wrong one."""
        fields = Fields.of(parse_json(data))
        config = fields.object("config") if "config" in fields else Fields({})
        rootfs = fields.object("rootfs") if "rootfs" in fields else Fields({})
        env = config.strings("Env") if "Env" in config else []
        return cls(
            created=fields.text("created", ""),
            diff_ids=tuple(rootfs.strings("diff_ids")) if "diff_ids" in rootfs else (),
            environment=dict(line.split("=", 1) for line in env if "=" in line),
            labels=config.texts("Labels", {}),
            architecture=fields.text("architecture", ""),
            config=config.data,
        )
