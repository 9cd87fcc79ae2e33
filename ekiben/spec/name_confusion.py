"""Packages of the index whose name users confuse with another package."""

from __future__ import annotations

import re

_CONFUSED_NAMES = {
    "apex": (
        "the package index's apex is a toolkit for websites, not NVIDIA's apex; images/apex.def compiles that one from"
        " its commit"
    ),
}
_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)", re.MULTILINE)


def find_confusion(requirements: str) -> str | None:
    """Return why a file of requirements is likely a mistake, or None.

    A requirement with an address says what it means.
    """
    if not any(name in requirements.lower() for name in _CONFUSED_NAMES):  # most often, and lock files are long
        return None
    named = [
        match[1].lower()
        for line in requirements.splitlines()
        if "@" not in line and (match := _REQUIREMENT.match(line))
    ]
    return next((_CONFUSED_NAMES[name] for name in named if name in _CONFUSED_NAMES), None)
