"""Build stages for packages that have no wheel: one for each source that a layer's lock file names."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from ekiben.core.paths import BUILD_MOUNT, PROJECT_ROOT
from ekiben.formats.layer import File
from ekiben.resolve.copies import file_inputs
from ekiben.resolve.graph import BuildStage, ImageState, StageCopy
from ekiben.resolve.keys import KEY_FORMAT
from ekiben.spec.definition import LOCAL, Stage
from ekiben.spec.sources import Source
from ekiben.spec.stack import Stack

WHEELS = f"/{BUILD_MOUNT}/wheels"  # where a layer's %post finds the wheels: it installs them, and does not keep them
SOURCE = f"/{BUILD_MOUNT}/source"  # where a stage finds its source, and in build/ what its build needs
_SCRIPT = "/opt/ekiben/build_source.py"


def source_copies(layer: str, sources: Iterable[Source], state: ImageState, stack: Stack) -> tuple[StageCopy, ...]:
    """Return what a layer on ``state`` takes from the stages that build ``sources``, each on ``state``."""
    stages = [_stage(layer, source, state, stack) for source in sources]
    return tuple(StageCopy(stage, stage.outputs[0], WHEELS) for stage in stages)


def _stage(layer: str, source: Source, state: ImageState, stack: Stack) -> BuildStage:
    output = f"/opt/wheels/{source.name}"
    post = (
        "umask 022\n"
        "python=/opt/venv/bin/python\n"
        f"$python -c 'import shutil, sys; shutil.unpack_archive(*sys.argv[1:])' {SOURCE}/{shlex.quote(source.file)}"
        " /tmp/source\n"
        "set -- /tmp/source/*\n"
        f'$python {_SCRIPT} "$1" {SOURCE}/build {output}\n'
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
        "parent": state.top_key,
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
