"""Build stages for packages that have no wheel: one for each source that a layer's lock file names."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ekiben.core.errors import NotLockedError
from ekiben.core.paths import BUILD_MOUNT, PROJECT_ROOT
from ekiben.formats.layer import File
from ekiben.resolve.copies import file_inputs
from ekiben.resolve.graph import BuildStage, ImageState, StageCopy
from ekiben.resolve.keys import KEY_FORMAT
from ekiben.spec.definition import LOCAL, Stage
from ekiben.spec.recipe import Recipe
from ekiben.spec.source_tree import read_tree
from ekiben.spec.sources import Source, read_sources, sources_file
from ekiben.spec.stack import Stack
from ekiben.spec.sums import lock_hint

WHEELS = f"/{BUILD_MOUNT}/wheels"  # where a layer's %post finds the wheels, which the layer does not keep
SOURCE = f"/{BUILD_MOUNT}/source"  # where a stage finds its source; build/ has its build requirements
_SCRIPT = "/opt/ekiben/build_source.py"


def locked_sources(files: Sequence[File], recipe: Recipe) -> list[Source]:
    """Return the sources that packages of these lock files are built from.

    Raises NotLockedError for a folder that has other files than those that were locked.
    """
    locks = [file.source for file in files if file.source and file.source.suffix == ".lock"]
    paths = [path for path in map(sources_file, locks) if path.exists()]
    sources = [source for path in paths for source in read_sources(recipe.sources.check_file(path))]
    for source in sources:
        if source.folder:
            _check_folder(source, recipe)
    return sources


def _check_folder(source: Source, recipe: Recipe) -> None:
    """Raise NotLockedError when a package's folder has other files than those that were locked."""
    folder = recipe.sources.check(recipe.folder / source.folder, f"the package {source.name}")
    if not folder.is_dir() or read_tree(folder).digest() != source.sha256:
        raise NotLockedError(
            f"{folder}: the package {source.name} {'was changed' if folder.is_dir() else 'is not there'}, and is"
            " not locked again",
            hint=lock_hint(recipe.folder),
        )


def source_copies(
    layer: str, sources: Iterable[Source], state: ImageState, stack: Stack, folder: Path
) -> tuple[StageCopy, ...]:
    """Return what a layer on ``state`` takes from the stages that build ``sources``, each on ``state``.

    ``folder`` is the recipe's.
    """
    stages = [
        replace(stage, source_folder=folder / source.folder) if source.folder else stage
        for source in sources
        for stage in [_stage(layer, source, state, stack)]
    ]
    return tuple(StageCopy(stage, stage.outputs[0], WHEELS) for stage in stages)


def _stage(layer: str, source: Source, state: ImageState, stack: Stack) -> BuildStage:
    output = f"/opt/wheels/{source.name}"
    inside = f"/{shlex.quote(source.subdirectory)}" if source.subdirectory else ""
    post = (
        "umask 022\n"
        f"python={stack.file.interpreter or '/opt/venv/bin/python'}\n"
        f"$python -c 'import shutil, sys; shutil.unpack_archive(*sys.argv[1:])' {SOURCE}/{shlex.quote(source.file)}"
        " /tmp/source\n"
        "set -- /tmp/source/*\n"
        f'$python {_SCRIPT} "$1"{inside} {SOURCE}/build {output}\n'
    )
    script = PROJECT_ROOT / "images/scripts/build_source.py"
    files = (File(_SCRIPT, 0o644, script),)
    inputs: dict[str, Any] = {
        "format": KEY_FORMAT,
        "kind": "stage",
        "post": post,
        **file_inputs(files),
        "source": source.inputs,
        "hands over": [output],
        "epoch": stack.file.epoch,
        "platform": stack.platform,
        "parent": state.parent,
        "environment": dict(state.environment),
    }
    return BuildStage(
        name=f"{layer}.{source.name}",
        stage=Stage(name=source.name, header={"bootstrap": LOCAL}, arguments={}, post=post),
        layers=tuple(state.layers),
        files=files,
        copies=(),
        environment=dict(state.environment),
        epoch=stack.file.epoch,
        outputs=(output,),
        wheel=None,
        inputs=inputs,
        job_memory=None,
        source=source,
    )
