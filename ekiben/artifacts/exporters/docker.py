"""The image in the Docker daemon, where one answers; else an archive for `docker load`."""

from __future__ import annotations

from pathlib import Path

from ekiben.artifacts.exporters import Artifact, ExportOptions
from ekiben.artifacts.load import Engine, load_image
from ekiben.core.decisions import log_decision
from ekiben.core.progress import Progress
from ekiben.executors import docker as daemon
from ekiben.gpu import container_gpus
from ekiben.gpu.devices import has_gpu
from ekiben.run.printed import docker_line
from ekiben.store import Image, Store, bind_layers

PREFERENCE = 20
SUFFIX = None
FALLBACK = "oci"


def is_default() -> bool:
    """Return whether a Docker daemon answers."""
    reason = unavailable()
    if reason is not None:
        log_decision("format docker", "not made", reason)
    return reason is None


def unavailable() -> str | None:
    """Return why the daemon cannot be used, or None."""
    return daemon.unavailable()


def export(image: Image, store: Store, target: Path, options: ExportOptions, progress: Progress) -> Artifact:
    """Load the image into the daemon, where its id is the digest of its config. Layers the daemon has are not sent."""

    def load(tag: str) -> None:
        daemon.remove_abandoned()
        with progress.step(f"load {image.tag}"):
            daemon.load_image(image.config, bind_layers(store, image.layers), tag, like=image.tag)

    return load_image("docker", image, Engine(daemon.image_id, load, daemon.tag, daemon.untag), options, progress)


def run_commands(artifact: Artifact, task: str) -> list[str]:
    """Return the command that runs it, with all GPUs where this machine has some."""
    return [docker_line(artifact.ref, task, gpu_args=container_gpus.docker_args() if has_gpu() else ())]
