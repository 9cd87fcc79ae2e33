"""Layers whose %post installs a lock file of wheels, and does nothing else.

Such a layer is a function of its lock file, of the program that installs it, of the interpreter that compiles it, of
binutils, which strip its libraries, and of what is in the environment below. Its key has these in place of its parent,
so that a security update of Debian's packages does not build it again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ekiben.core.paths import PROJECT_ROOT
from ekiben.resolve.graph import PARENT, ImageState, Layer
from ekiben.resolve.keys import hash_inputs

INSTALLER = "/opt/ekiben/install.py"
SHRINKER = "/opt/ekiben/shrink.py"
_INSTALL = re.compile(rf"/opt/venv/bin/python {re.escape(INSTALLER)} (/opt/ekiben/locks/[A-Za-z0-9._-]+\.lock)")
# Debian's packages that decide about the content: the interpreter, and what strips libraries.
_TOOLS = re.compile(r"(?:lib)?python3[.0-9]*(?:-minimal|-stdlib)?|(?:lib)?binutils.*")
_COMPLETED = re.compile(r"/opt/venv/bin/python /opt/ekiben/install(?:_wheel)?\.py \S+")


def installed_lock(post: str) -> str | None:
    """Return the path in the image of the lock file that a %post installs; None where it does anything else."""
    lines = _commands(post)
    match = _INSTALL.fullmatch(lines[0]) if len(lines) == 1 else None
    return match[1] if match else None


def wheel_inputs(inputs: Mapping[str, Any], below: ImageState) -> dict[str, Any] | None:
    """Return the inputs of the key of a wheel layer without its parent.

    None where the layer is none or copies files elsewhere, or where files of the layers below may come from elsewhere:
    only Ekiben's definitions on Debian are known to add to the environment what their own inputs say.
    """
    base, *layers = below.layers or (None,)
    if base is None or not is_wheel_layer(inputs) or not _is_debian(base) or below.scripts:
        return None
    if not all(PARENT not in layer.inputs or _is_shipped(layer) for layer in layers):
        return None
    if not all(str(file[0]).startswith("/opt/ekiben/") for file in inputs.get("files", [])):
        return None
    locked = [*(layer.inputs.get("packages", {}) for layer in below.layers), inputs.get("packages", {})]
    packages = {name: version for section in locked for name, version in section.items()}
    rest = {name: value for name, value in inputs.items() if name not in (PARENT, "packages")}
    return {
        **rest,
        "kind": "wheels",
        "suite": base.inputs["source"].get("osversion", ""),
        "tools": {name: version for name, version in packages.items() if _TOOLS.fullmatch(name)},
        "below": [[layer.name, _definition_key(layer)] for layer in layers],
    }


def _is_debian(layer: Layer) -> bool:
    return layer.kind == "bootstrap" and layer.stage is not None and layer.stage.bootstrap == "debootstrap"


def _is_shipped(layer: Layer) -> bool:
    path = layer.stage.path if layer.stage else None
    return path is not None and path.resolve().is_relative_to((PROJECT_ROOT / "images").resolve())


def _definition_key(layer: Layer) -> str:
    """Return the key of a layer without Debian's packages and what is below it; that of a wheel layer as it is."""
    if PARENT not in layer.inputs:
        return layer.cache_key
    return hash_inputs({name: value for name, value in layer.inputs.items() if name not in (PARENT, "packages")})


def is_wheel_layer(inputs: Mapping[str, Any]) -> bool:
    """Return whether a layer with these inputs installs a lock file, takes nothing else, and has the usual shell."""
    post = inputs.get("post")
    is_plain = not {"from", "shell", "writes"} & inputs.keys()
    return (
        inputs.get("kind") in ("post", "wheels")
        and is_plain
        and isinstance(post, str)
        and installed_lock(post) is not None
    )


def ends_with_install(inputs: Mapping[str, Any]) -> bool:
    """Return whether a layer's %post ends with an installation, which leaves all of the environment compiled."""
    post = inputs.get("post")
    return isinstance(post, str) and bool(lines := _commands(post)) and _COMPLETED.fullmatch(lines[-1]) is not None


def _commands(post: str) -> list[str]:
    lines = [line.strip() for line in post.splitlines()]
    return [line for line in lines if line and not line.startswith("#") and line != "umask 022"]
