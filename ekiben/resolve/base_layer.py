"""Layers beside those of %files and %post: an image's base, and those that evaluate the scripts of an environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ekiben.formats.base_config import BASE_ENVIRONMENT, SIF_CONFIG, SIF_ENVIRONMENT
from ekiben.formats.layer import File
from ekiben.resolve.copies import copy_inputs, file_inputs
from ekiben.resolve.graph import ImageState, Layer, StageCopy
from ekiben.resolve.keys import KEY_FORMAT
from ekiben.spec.definition import Definition, Stage, load_agent
from ekiben.spec.environment import EnvironmentScript
from ekiben.spec.stack import Stack


def add_base(definition: Definition, state: ImageState, locked: Mapping[str, Any], stack: Stack) -> ImageState:
    """Return the state with the base that a definition's header names. ``locked``: inputs about Debian's packages."""
    stage, epoch = definition.final, stack.file.epoch
    source = load_agent(stage.bootstrap).key_inputs(stage.header)
    inputs = {
        "format": KEY_FORMAT,
        "parent": state.parent,
        "kind": "bootstrap",
        "source": source,
        **locked,
        "epoch": epoch,
        "platform": stack.platform,
    }
    base = Layer(
        name=f"{definition.name}-root" if stage.post or stage.files else definition.name,
        kind="bootstrap",
        stage=stage,
        files=(),
        environment=state.environment,
        epoch=epoch,
        inputs=inputs,
        scripts=state.scripts,
    )
    state = state.add(base)
    if source.get("config") == SIF_CONFIG:  # only a shell in the finished base knows what its scripts set
        script = EnvironmentScript("", definition.path, 0, file=SIF_ENVIRONMENT)
        return add_script(f"{definition.name}-base", script, replace(state, environment={}), stack)
    if "config" in source:
        script = EnvironmentScript("", definition.path, 0, file=BASE_ENVIRONMENT)
        return replace(state, environment={}, scripts=(script,))
    return state


@dataclass(frozen=True, slots=True)
class FileStep:
    """Files that are a layer of their own, below a %post: its name, and the environment of its layer."""

    name: str
    files: tuple[File, ...]
    copies: tuple[StageCopy, ...]
    environment: Mapping[str, str]


def add_files(step: FileStep, stage: Stage, state: ImageState, stack: Stack) -> ImageState:
    """Return the state with the layer of files of a ``stage`` whose %post is a further layer."""
    inputs = {
        "format": KEY_FORMAT,
        "parent": state.parent,
        "kind": "files",
        "post": "",
        **file_inputs(step.files),
        **copy_inputs(step.copies),
        "environment": dict(step.environment),
        "epoch": stack.file.epoch,
        "platform": stack.platform,
    }
    layer = Layer(
        name=step.name,
        kind="files",
        stage=replace(stage, post="", test=""),
        files=step.files,
        environment=step.environment,
        epoch=stack.file.epoch,
        inputs=inputs,
        copies=step.copies,
        scripts=state.scripts,
    )
    return state.add(layer)


def add_script(name: str, script: EnvironmentScript, state: ImageState, stack: Stack) -> ImageState:
    """Return the state with the layer ``name``, which evaluates a script in the layers below it."""
    inputs = {
        "format": KEY_FORMAT,
        "parent": state.parent,
        "kind": "environment",
        "environment": dict(state.environment),
        "script": script.text,
        "epoch": stack.file.epoch,
        "platform": stack.platform,
    }
    layer = Layer(
        name=name,
        kind="environment",
        stage=None,
        files=(),
        environment=state.environment,
        epoch=stack.file.epoch,
        inputs=inputs,
        scripts=(*state.scripts, script),
    )
    return replace(state.add(layer), scripts=layer.scripts)
