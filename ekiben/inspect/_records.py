"""Read records of images in a store, and of published images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.environment import host_arch
from ekiben.core.errors import StoreError, UsageError, nearest
from ekiben.formats.oci import LAYER_LABEL
from ekiben.store import Store, StoredLayer


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer of a stored image, as its manifest and its record name it."""

    name: str
    cache_key: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """The store's record of one image. ``environment`` as lines NAME=value."""

    recipe: str
    stack: str
    manifest: str
    config: str
    created: str
    architecture: str
    environment: tuple[str, ...]
    labels: Mapping[str, str]
    tasks: Mapping[str, str]
    layers: tuple[LayerRecord, ...]

    def cli_args(self, name: str) -> str:
        """Return the recipe and the options that build the image, which is called ``name``: layers, stack,
        architecture.

        --gpu-arch and --build-arg are not recorded of an image.
        """
        layers = self.labels.get(LAYER_LABEL, "").split()
        options = [f"--layer {layer}" for layer in layers]
        if f"-{self.stack}" in name.removeprefix(
            "-".join([self.recipe, *layers])
        ):  # without it, the stack is the recipe's
            options.append(f"--stack {self.stack}")
        if self.architecture != host_arch():
            options.append(f"--arch {self.architecture}")
        return " ".join([self.recipe, *options])


def stored_image(name: str, store: Store, hint: str) -> StoredImage:
    """Return an image of the store by its name. Raises UsageError with ``hint`` when there is none, StoreError when its
    record is damaged."""
    ref = store.image(name)
    if ref is None:
        raise UsageError(f"no image '{name}' in {store.root}." + nearest(name, store.images()), hint=hint)
    try:
        record = Fields.of(ref)
        manifest = Fields.of(parse_json(store.get_blob(record.digest("manifest"))))
        config = Fields.of(parse_json(store.get_blob(record.digest("config"))))
        inner, keys, layers = config.object("config"), record.strings("keys"), manifest.objects("layers")
        if len(keys) != len(layers):
            raise ValueError(f"names {len(keys)} layers of {len(layers)}")
        return StoredImage(
            recipe=record.text("recipe"),
            stack=record.text("stack"),
            manifest=record.digest("manifest"),
            config=record.digest("config"),
            created=config.text("created"),
            architecture=config.text("architecture"),
            environment=tuple(inner.strings("Env")),
            labels=inner.texts("Labels", {}),
            tasks=record.texts("tasks"),
            layers=tuple(
                LayerRecord(
                    layer.object("annotations").text("org.ekiben.layer"),
                    key,
                    layer.digest("digest"),
                    layer.size("size"),
                )
                for key, layer in zip(keys, layers, strict=True)
            ),
        )
    except ValueError as error:
        raise StoreError(
            f"the record of image '{name}' in {store.root} is damaged: it {error}",
            hint="build the image again, which writes its record",
        ) from error


def published_layers(path: Path) -> tuple[Path, list[StoredLayer]]:
    """Return the SIF beside a record of a published image, and its layers. Raises UsageError."""
    try:
        record = Fields.of(parse_json(read_regular(path, follow=True)))
        return path.absolute().parent / record.basename("file"), [
            StoredLayer.parse(item) for item in record.objects("layers")
        ]
    except (OSError, ValueError) as error:
        reason = (
            str(error.strerror)
            if isinstance(error, OSError)
            else f"it is not a record of a published image: it {error}"
        )
        raise UsageError(
            f"{path} cannot be read: {reason}", hint="name the .json beside a published .sif, or the .sif"
        ) from error
