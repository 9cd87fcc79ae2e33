"""The lowest layer of an image, which its base is; and layers that evaluate the scripts of an environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ekiben.formats.base_config import BASE_ENVIRONMENT, SIF_CONFIG, SIF_ENVIRONMENT
from ekiben.resolve.graph import ImageState, Layer
from ekiben.resolve.keys import KEY_FORMAT
from ekiben.spec.definition import Definition, load_agent
from ekiben.spec.environment import EnvironmentScript
from ekiben.spec.stack import Stack


def add_base(definition: Definition, state: ImageState, locked: Mapping[str, Any], stack: Stack) -> ImageState:
    """Return the state with the base that a definition's header names. ``locked``: inputs about Debian's packages."""
    stage, epoch = definition.final, stack.file.epoch
    source = load_agent(stage.bootstrap).key_inputs(stage.header)
    inputs = {
        "format": KEY_FORMAT,
        "parent": state.top_key,
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


def add_script(name: str, script: EnvironmentScript, state: ImageState, stack: Stack) -> ImageState:
    """Return the state with the layer ``name``, which evaluates a script in the layers below it."""
    inputs = {
        "format": KEY_FORMAT,
        "parent": state.top_key,
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
