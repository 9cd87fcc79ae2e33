"""A resolved recipe: layers, the build stages they copy from, and the image's metadata."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ekiben.core.environment import DEFAULT_PATH
from ekiben.formats.base_config import SIF_ENVIRONMENT
from ekiben.formats.layer import File
from ekiben.resolve.keys import hash_inputs
from ekiben.spec.definition import Definition, Stage
from ekiben.spec.environment import EnvironmentScript
from ekiben.spec.recipe import Recipe
from ekiben.spec.source_folders import follow
from ekiben.spec.sources import Source
from ekiben.spec.stack import Stack

Parent = str | list[str] | None
PARENT = "parent"  # the input of a key


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One step of an image. ``kind``: the header's bootstrap, a %post, files alone, or the evaluation of a %environment
    that is a script.

    ``environment`` is what the step below leaves behind and what runs with, as far as it is known before a build: what
    ``scripts`` below it set, and in an evaluation its own, comes on top. ``inputs`` is the readable form of the key.
    ``copies`` is what it takes from build stages.
    """

    name: str
    kind: Literal["bootstrap", "post", "files", "environment"]
    stage: Stage | None
    files: tuple[File, ...]
    environment: Mapping[str, str]
    epoch: int
    inputs: Mapping[str, Any]
    copies: tuple[StageCopy, ...] = ()
    scripts: tuple[EnvironmentScript, ...] = ()
    cache_key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_key", hash_inputs(self.inputs))


@dataclass(frozen=True, slots=True)
class ImageState:
    """The layers of an image or of a build stage, bottom first, and the environment that they leave: values, and from
    the first %environment that is a script on scripts, bottom first."""

    layers: Sequence[Layer] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": DEFAULT_PATH})
    scripts: tuple[EnvironmentScript, ...] = ()

    @property
    def parent(self) -> Parent:
        """Return what the next layer's key has as its parent."""
        return parent_of(self.layers)

    def add(self, layer: Layer) -> ImageState:
        """Return the state with one layer more, and the same environment."""
        return replace(self, layers=(*self.layers, layer))


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStage:
    """A stage whose files a later one copies, and which never ships. ``name`` is <layer>.<stage>.

    ``layers`` are those below it, bottom first; ``outputs`` the paths that later stages copy. A stage with a ``wheel``
    compiles that package: its key names what decides about compiled code, and not the layers below. ``job_memory``, in
    bytes, is where the store has not seen one compiled yet. A stage with a ``source`` builds that, without a network;
    ``source_folder`` is where it lies, when it is a folder of the recipe.
    """

    name: str
    stage: Stage
    layers: tuple[Layer, ...]
    files: tuple[File, ...]
    copies: tuple[StageCopy, ...]
    environment: Mapping[str, str]
    epoch: int
    outputs: tuple[str, ...]
    wheel: str | None
    job_memory: int | None
    inputs: Mapping[str, Any]
    source: Source | None = None
    source_folder: Path | None = None
    scripts: tuple[EnvironmentScript, ...] = ()
    cache_key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_key", hash_inputs(self.inputs))


@dataclass(frozen=True, slots=True)
class StageCopy:
    """One line of ``%files from``: the file or folder ``source`` of a stage, as ``destination``."""

    stage: BuildStage
    source: str
    destination: str
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRecipe:
    """A recipe resolved: its layers bottom first, and what its image says of itself.

    ``environment`` is known before a build; ``scripts`` set more. ``gpu_arch`` and ``arguments`` are those that the
    command line gave, beside the stack's; ``deciding_arguments``: names of these, where they change keys.
    """

    recipe: Recipe
    stack: Stack
    definitions: tuple[Definition, ...]
    layers: tuple[Layer, ...]
    environment: Mapping[str, str]
    labels: Mapping[str, str]
    deffile: str
    tests: tuple[tuple[str, str], ...] = field(default=())
    gpu_arch: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    deciding_arguments: tuple[str, ...] = ()
    scripts: tuple[EnvironmentScript, ...] = ()

    @property
    def cli_args(self) -> str:
        """Return the recipe and the options that are resolved into this image, as a command line gives them."""
        options = [f"--gpu-arch {','.join(self.stack.file.compute_capabilities)}"] if self.gpu_arch else []
        options += [f"--build-arg {shlex.quote(f'{name}={value}')}" for name, value in self.arguments.items()]
        files = self.included_files
        used = tuple(path for path in self.recipe.included if any(file.is_relative_to(follow(path)) for file in files))
        recipe = replace(self.recipe, included=used)
        return " ".join([recipe.cli_args(self.stack.name, self.stack.arch), *options])

    @property
    def included_files(self) -> list[Path]:
        """Return the files that come from outside the recipe's folder, by --include: paths without links."""
        sources = self.recipe.sources
        named = [self.recipe.folder / "recipe.yaml", self.stack.folder / "stack.yaml"]
        named += [definition.path for definition in self.definitions]
        named += [Path(item.final.header["file"]) for item in self.definitions if "file" in item.final.header]
        paths = {follow(path) for path in named} | {file.real for file in files_of(self.layers) if file.real}
        return sorted(path for path in paths if sources.is_outside(path))

    @property
    def has_base_config(self) -> bool:
        """Return whether its base has an environment and a program of its own, which only the build learns."""
        return any(script.file for script in self.scripts)

    @property
    def has_sif_base(self) -> bool:
        """Return whether its base is a SIF with scripts of its own."""
        return any(script.file == SIF_ENVIRONMENT for script in self.scripts)

    @property
    def top(self) -> Layer:
        """Return the highest layer."""
        return self.layers[-1]


def parent_of(layers: Sequence[Layer]) -> Parent:
    """Return what the key of a layer on these layers has as its parent: the key of the highest one, which has its own
    parent's. Where keys of wheel layers have none: the keys from the highest layer that has one on, bottom first.
    """
    keys: list[str] = []
    for layer in reversed(layers):
        keys.insert(0, layer.cache_key)
        if PARENT in layer.inputs:
            break
    return keys if len(keys) > 1 else keys[0] if keys else None


def stages_of(copies: Iterable[StageCopy]) -> list[BuildStage]:
    """Return each build stage once."""
    return list({item.stage.cache_key: item.stage for item in copies}.values())


def all_layers(layers: Iterable[Layer]) -> Iterator[Layer]:
    """Yield the layers, and those below their build stages, some of them several times."""
    for layer in layers:
        yield layer
        for item in layer.copies:
            yield from all_layers(item.stage.layers)


def files_of(layers: Iterable[Layer | BuildStage]) -> Iterator[File]:
    """Return all files of these layers and of the build stages that they take from, some of it several times."""
    for step in layers:
        yield from step.files
        for stage in stages_of(step.copies):
            yield from files_of([*stage.layers, stage])
