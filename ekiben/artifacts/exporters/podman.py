"""The image in podman's own storage, as `docker load` does for Docker's."""

from __future__ import annotations

from pathlib import Path

from ekiben.artifacts.exporters import Artifact, ExportOptions
from ekiben.artifacts.load import Engine, load_image
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

    def load(tag: str) -> None:
        podman.remove_abandoned()
        with progress.step(f"load {image.tag}"), store.staging() as scratch:
            podman.load(image.config, bind_layers(store, image.layers), tag, scratch, like=image.tag)

    store.open_for_writing()
    return load_image("podman", image, Engine(podman.image_id, load, podman.tag, podman.untag), options, progress)


def run_commands(artifact: Artifact, task: str) -> list[str]:
    """Return the command that runs it, with all GPUs where this machine has some."""
    return [podman_line(artifact.ref, task, gpu=has_gpu(), options=podman.machine_options())]
