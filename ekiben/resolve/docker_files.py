"""Files from which Docker's own tools start a recipe's image: compose.yaml, and devcontainer.json for editors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from ekiben.core.atomic import new_parents
from ekiben.core.errors import StoreError
from ekiben.core.files import atomic_write
from ekiben.formats.evaluated import START
from ekiben.resolve.graph import ResolvedRecipe

_HEADER = """\
# One service a task: docker compose run --rm SERVICE [ARGUMENTS]
# A task's files belong to the user below, who rendered this file.
"""
_ALL_GPUS = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}  # as Compose 1.28 and later read it


def write_compose(resolved: ResolvedRecipe, folder: Path) -> Path:
    """Write ``folder``/compose.yaml, with a service for each task, and return its path.

    Raises StoreError: it exists.
    """
    services: dict[str, Any] = {}
    for name, task in resolved.recipe.file.tasks.items():
        services[name] = {
            "image": _image(resolved),
            "pull_policy": "never",  # never pulled: another image of this name in a registry must not run here
            "entrypoint": [START, name] if resolved.scripts else [name],
            "user": _user(),
            "volumes": [".:/work"],
            "working_dir": "/work",
            "shm_size": "1gb",  # for DataLoader's workers, which Docker's default of 64 MB kills
        }
        if task.launch != "cpu":
            services[name]["deploy"] = {"resources": {"reservations": {"devices": [_ALL_GPUS]}}}
    text = yaml.safe_dump({"services": services}, sort_keys=False, allow_unicode=True, default_flow_style=None)
    return _write(folder / "compose.yaml", _HEADER + text)


def write_devcontainer(resolved: ResolvedRecipe, folder: Path) -> Path:
    """Write ``folder``/.devcontainer/devcontainer.json and return its path. Raises StoreError: it exists."""
    content = {
        "name": resolved.recipe.name,
        "image": _image(resolved),
        # The editor would pull an image that is missing.
        "initializeCommand": ["docker", "image", "inspect", "--format", "{{.Id}}", _image(resolved)],
        "hostRequirements": {"gpu": "optional"},  # the tool adds --gpus all where there is one
        "runArgs": ["--pull=never", "--user", _user(), "--shm-size", "1g"],
        "containerEnv": {"HOME": "/tmp"},  # in the container, where the user has no home
        "overrideCommand": True,
    }
    return _write(folder / ".devcontainer" / "devcontainer.json", json.dumps(content, indent=2) + "\n")


def _image(resolved: ResolvedRecipe) -> str:
    return f"ekiben/{resolved.recipe.image_name(resolved.stack.name, resolved.stack.arch)}:latest"


def _user() -> str:
    return f"{os.getuid()}:{os.getgid()}"


def _write(path: Path, text: str) -> Path:
    """Write a file that does not exist, and return its path."""
    if path.exists() or path.is_symlink():
        raise StoreError(f"{path} exists; remove it, or give another folder with -o")
    with new_parents(path, error=StoreError):
        atomic_write(path, text, error=StoreError)
    return path
