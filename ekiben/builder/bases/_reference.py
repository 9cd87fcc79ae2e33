"""Validate the image reference of a header."""

from __future__ import annotations

from ekiben.core.errors import UsageError


def reference_problems(reference: str) -> list[str]:
    """Return why ``reference`` names no image, if it does not."""
    from ekiben.registry.reference import Reference

    try:
        Reference.parse(reference)
    except UsageError as error:
        return [f"From: {error}"]
    return []
