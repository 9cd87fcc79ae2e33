"""Whether a command line names a Dockerfile."""

from __future__ import annotations

from pathlib import Path


def find_dockerfile(path: Path) -> Path | None:
    """Return the Dockerfile that a path means: itself, or the one in the folder; None for neither."""
    if path.is_dir():
        return path / "Dockerfile" if (path / "Dockerfile").is_file() else None
    is_named = path.name.lower().startswith("dockerfile") or path.name.lower().endswith(
        (".dockerfile", "containerfile")
    )
    return path if path.is_file() and is_named else None


def dockerfile_of(recipe: str) -> Path | None:
    """Return the Dockerfile that a command line names instead of a recipe; None for a recipe."""
    path = Path(recipe)
    if path.is_dir() and (("/" not in recipe and recipe not in (".", "..")) or (path / "recipe.yaml").is_file()):
        return None
    return find_dockerfile(path)
