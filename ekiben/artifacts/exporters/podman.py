"""The image in podman's own storage, as `docker load` does for Docker's."""

from __future__ import annotations

from pathlib import Path

from ekiben.artifacts.exporters import Artifact, ExportOptions
from ekiben.core.progress import Progress
from ekiben.executors import podman
from ekiben.gpu.devices import has_gpu
from ekiben.run.printed import podman_line
from ekiben.store import Image, Store, bind_layers

PREFERENCE = 30
SUFFIX = None
FALLBACK = "oci"


def is_default() -> bool:
    """Return False: most machines with podman run SIF files or Docker."""
    return False


def unavailable() -> str | None:
    """Return why podman cannot be used, or None."""
    return podman.unavailable()


def export(image: Image, store: Store, target: Path, options: ExportOptions, progress: Progress) -> Artifact:
    """Load the image into podman's storage, where its id is the digest of its config."""
    if podman.image_id(image.tag) == image.image_id:
        return Artifact("podman", image.tag, image.size, False)
    with progress.step(f"load {image.tag}"):
        store.open_for_writing()
        with store.staging() as scratch:
            podman.load(image.config, bind_layers(store, image.layers), image.tag, scratch)
    return Artifact("podman", image.tag, image.size, True)


def run_commands(artifact: Artifact, task: str) -> list[str]:
    """Return the command that runs it, with all GPUs where this machine has some."""
    return [podman_line(artifact.ref, task, gpu=has_gpu(), options=podman.machine_options())]
