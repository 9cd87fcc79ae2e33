"""Metadata of an Ekiben image: its recipe, its layers, its config. Read from a SIF or from the store."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ekiben.core.checked import NAME, Fields, parse_json
from ekiben.core.command_name import command_name
from ekiben.core.errors import StoreError, UsageError
from ekiben.core.inner_path import AnyPath
from ekiben.core.paths import RECIPE_HOME
from ekiben.core.progress import Progress
from ekiben.formats import oci
from ekiben.formats.base_config import BASE, BaseConfig
from ekiben.formats.evaluated import EVALUATED, Evaluated
from ekiben.formats.layer import write_entries
from ekiben.formats.sif import read_sif, sif_header
from ekiben.formats.tar import DigestWriter
from ekiben.formats.users import users_partition
from ekiben.inspect.image_reader import ImageReader, LayerReader, open_sif
from ekiben.inspect.metadata import IMAGE_METADATA, CompiledWheel, ImageMetadata
from ekiben.resolve.start import start_of
from ekiben.spec.recipe import ShippedRecipe
from ekiben.store import Image, Store, StoredLayer

_RECIPE = "opt/ekiben/recipe/recipe.yaml"
_OF_RECIPE = {"EKIBEN_RECIPE": RECIPE_HOME}  # variables of every Ekiben image, besides those of its scripts


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The image's metadata; ``layers`` and ``compiled`` as ekiben.resolve.resolve wrote them into it;
    ``evaluated``: what scripts of the environment set; ``start``: how a container of it starts; ``base``: its agent,
    reference and digest."""

    recipe: str
    stack: str
    layers: list[tuple[str, str]]
    compiled: list[CompiledWheel]
    labels: dict[str, str]
    environment: dict[str, str]
    deffile: str
    epoch: int
    distribution: dict[str, str]
    evaluated: Evaluated | None = None
    start: oci.Start = field(default_factory=oci.Start)
    base: Mapping[str, str] = field(default_factory=dict)


def image_info(image: ImageReader) -> ImageInfo:
    """Return the metadata of an open image. Raises UsageError for one of another builder."""

    def text(path: str) -> str:
        return (image.read_through_links(path) or b"").decode("utf-8", "surrogateescape")

    try:
        metadata = ImageMetadata.parse(image.read_through_links(IMAGE_METADATA) or b"")
        labels = Fields.of({"labels": parse_json(text(".singularity.d/labels.json"))}).texts("labels")
        evaluated = Evaluated.parse(image.read_through_links(EVALUATED) or b"") if metadata.is_evaluated else None
        exports = "" if evaluated else text(".singularity.d/env/90-environment.sh").removeprefix("#!/bin/sh\n")
        base = image.read_through_links(BASE) if metadata.is_evaluated else None
        release = shlex.split(text("etc/os-release"), comments=True)
        return ImageInfo(
            recipe=metadata.recipe,
            stack=metadata.stack,
            layers=metadata.layers,
            compiled=metadata.compiled,
            labels=labels,
            environment={**_OF_RECIPE, **evaluated.values} if evaluated else _assignments(shlex.split(exports)),
            deffile=text(".singularity.d/Singularity"),
            epoch=image.tree["opt/ekiben"][0].mtime,
            distribution=_assignments(release),
            evaluated=evaluated,
            start=_start(image, BaseConfig.parse(base) if base else None, evaluated, text(".singularity.d/runscript")),
            base=metadata.base,
        )
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"{image.name} was not built by Ekiben: it has no /opt/ekiben/image.json",
            hint=f"scan any other image with a tool such as syft; build a recipe's with {command_name()} build RECIPE",
        ) from error


def _start(image: ImageReader, base: BaseConfig | None, evaluated: Evaluated | None, runscript: str) -> oci.Start:
    data = image.read_through_links(_RECIPE)
    recipe = ShippedRecipe.parse(data) if data else None
    return start_of(
        recipe.docker if recipe else None,
        base,
        runscript,
        has_tasks=bool(recipe and recipe.tasks),
        at_start=bool(evaluated and evaluated.at_start),
    )


def _assignments(arguments: Iterable[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in arguments if "=" in word)


def layers_of(
    image: ImageReader, info: ImageInfo, store: Store, progress: Progress, known: Iterable[StoredLayer]
) -> list[StoredLayer]:
    """Return the layers as far as they are known, "" where not: in one flat partition they cannot, and no layer holds
    its own key.
    """
    named = [*info.layers, (info.recipe, "")]
    if len(image.layers) != len(named):
        return [_layer(name, key) for name, key in named]
    seen = {layer.digest: layer for layer in known}
    layers = []
    for layer, (name, key) in zip(image.layers, named, strict=True):
        record = layer.stored or seen.get(layer.digest) or (store.layer(key) if key else None)
        if record is None or record.digest != layer.digest:
            record = _layer(name, key, layer, *_tar_digest(layer, progress))
        layers.append(replace(record, name=name, cache_key=key))
    return layers


def _layer(name: str, key: str, layer: LayerReader | None = None, diff_id: str = "", tar_size: int = 0) -> StoredLayer:
    return StoredLayer(
        name=name,
        cache_key=key,
        diff_id=diff_id,
        tar_size=tar_size,
        digest=layer.digest if layer else "",
        size=layer.size if layer else 0,
        executor="",
        seconds=0.0,
        inputs={},
    )


def _tar_digest(layer: LayerReader, progress: Progress) -> tuple[str, int]:
    """Return the digest and the size of a layer's tar."""
    sink = DigestWriter()
    with progress.step(f"diff_id of layer {layer.name}, {layer.size / 1e6:.0f} MB, which no record here knows"):
        write_entries(layer.reader.contents(), sink)
    return sink.diff_id, sink.size


def config_of(info: ImageInfo, layers: Sequence[StoredLayer], arch: str) -> bytes:
    """Return the image's config, whose digest is its id in a Docker daemon."""
    evaluated = info.evaluated
    return oci.image_config(
        layers,
        environment={**_OF_RECIPE, **evaluated.fixed} if evaluated else info.environment,
        labels=info.labels,
        epoch=info.epoch,
        platform=f"linux/{arch}",
        start=info.start,
    )


@dataclass(frozen=True, slots=True)
class SifImage:
    """A SIF as an image. ``id`` is the SIF's UUID; ``image`` is as whoever built it knew it, but for the cache key of
    its last layer: it is not in the image, and replaced by the layer's digest.
    """

    id: str
    image: Image


def image_of_sif(path: AnyPath, store: Store, progress: Progress, name: str = "") -> SifImage:
    """Read which image a SIF is. ``name``: of the image (default: as `build` names it).

    Layers of which ``store`` has a record are not unpacked.
    Raises StoreError when the file cannot be read, UsageError for one of another builder, or in one partition.
    """
    with open_sif(path) as reader:
        info, recipe = image_info(reader), _shipped(reader)
        layers = layers_of(reader, info, store, progress, ())
        if not layers[0].diff_id:
            raise UsageError(
                f"{path} has all layers in one partition, and a published image has each in its own",
                hint=f"build it without --squash: {command_name()} build {info.recipe}",
            )
        _check_id(path, reader, info)
        config = config_of(info, layers, reader.arch)
        name = name or _image_name(info, recipe, reader.arch)
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{path} names its image {name!r:.80}, and a name is lower-case letters, digits, '.', '_', '-'",
                hint="build the image again",
            )
        image = Image(
            name=name,
            image_id=oci.digest_of(config),
            config=config,
            layers=(*layers[:-1], replace(layers[-1], cache_key=layers[-1].digest.removeprefix("sha256:"))),
            recipe=info.recipe,
            stack=info.stack,
            description=recipe.description,
            tasks={task: file.help for task, file in recipe.tasks.items()},
            environment=info.environment,
            labels=info.labels,
            deffile=info.deffile,
            epoch=info.epoch,
            arch=reader.arch,
            cli_args=info.recipe,
        )
        return SifImage(read_sif(path).id, image)


def _check_id(path: AnyPath, image: ImageReader, info: ImageInfo) -> None:
    """Raise StoreError for a SIF whose id does not match its content."""
    users = users_partition([layer.reader for layer in image.layers], info.epoch)
    header = sif_header([layer.digest for layer in image.layers], info.deffile, image.arch, info.epoch, users)
    if header.id != read_sif(path).id:
        raise StoreError(
            f"{path} is damaged, was changed after it was built, or is of an earlier version: "
            "its id is not that of its content",
            hint=f"build it again: {command_name()} build {info.recipe}",
        )


def _shipped(image: ImageReader) -> ShippedRecipe:
    try:
        return ShippedRecipe.parse(image.read_through_links(_RECIPE) or b"")
    except ValueError as error:
        raise UsageError(f"{image.name}: its /{_RECIPE} {error}", hint="build the image again") from error


def _image_name(info: ImageInfo, recipe: ShippedRecipe, arch: str) -> str:
    """Return the name that the image has in a store: of its recipe and layers, another stack, another architecture."""
    title = info.labels.get("org.opencontainers.image.title", "")
    name = title if NAME.fullmatch(title) else info.recipe
    name = name if recipe.stack in ("", info.stack) else f"{name}-{info.stack}"
    return name if arch == "amd64" else f"{name}-{arch}"
