"""Layers whose %post installs a lock file of wheels, and does nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

INSTALLER = "/opt/ekiben/install.py"
SHRINKER = "/opt/ekiben/shrink.py"
_INSTALL = re.compile(rf"/opt/venv/bin/python {re.escape(INSTALLER)} (/opt/ekiben/locks/[A-Za-z0-9._-]+\.lock)")
_COMPLETED = re.compile(r"/opt/venv/bin/python /opt/ekiben/install(?:_wheel)?\.py \S+")


def installed_lock(post: str) -> str | None:
    """Return the path in the image of the lock file that a %post installs; None where it does anything else."""
    lines = _commands(post)
    match = _INSTALL.fullmatch(lines[0]) if len(lines) == 1 else None
    return match[1] if match else None


def is_wheel_layer(inputs: Mapping[str, Any]) -> bool:
    """Return whether a layer with these inputs installs a lock file, takes nothing else, and has the usual shell."""
    post = inputs.get("post")
    is_plain = not {"from", "shell", "writes"} & inputs.keys()
    return inputs.get("kind") == "post" and is_plain and isinstance(post, str) and installed_lock(post) is not None


def ends_with_install(inputs: Mapping[str, Any]) -> bool:
    """Return whether a layer's %post ends with an installation, which leaves all of the environment compiled."""
    post = inputs.get("post")
    return isinstance(post, str) and bool(lines := _commands(post)) and _COMPLETED.fullmatch(lines[-1]) is not None


def _commands(post: str) -> list[str]:
    lines = [line.strip() for line in post.splitlines()]
    return [line for line in lines if line and not line.startswith("#") and line != "umask 022"]
