"""One tar in OCI layout, for machines without a Docker daemon here."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

from ekiben.artifacts.exporters import Artifact, ExportOptions
from ekiben.core.errors import StoreError
from ekiben.core.files import reason_of
from ekiben.core.progress import Progress
from ekiben.formats import oci
from ekiben.store import Image, Store, bind_layers

PREFERENCE = 30
SUFFIX = ".tar"
FALLBACK = None


def is_default() -> bool:
    """Return False: an archive is written on request only."""
    return False


def unavailable() -> None:
    """Return None: files can be written everywhere."""


def export(image: Image, store: Store, target: Path, options: ExportOptions, progress: Progress) -> Artifact:
    """Write the image's archive at ``target``."""
    with progress.step(f"write {target}", total=image.size):
        return make_archive(image, store, target, on_bytes=progress.count)


def run_commands(artifact: Artifact, task: str) -> list[str]:
    """Return the command that loads it."""
    return [f"docker load -i {shlex.quote(artifact.ref)}"]


def make_archive(image: Image, store: Store, out: Path, *, on_bytes: Callable[[int], None]) -> Artifact:
    """Write one tar that `docker load`, podman, skopeo and `apptainer build … oci-archive:` read. Raises StoreError."""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {reason_of(error, out)}") from error
    try:
        with open(handle, "wb") as stream:
            for chunk in oci.archive(image.config, bind_layers(store, image.layers), image.tag, on_bytes=on_bytes):
                stream.write(chunk)
        os.chmod(temporary, 0o644)
        os.rename(temporary, out)
    except OSError as error:
        raise StoreError(
            f"{out} cannot be written: {reason_of(error, out)}; it needs "
            f"{sum(layer.tar_size for layer in image.layers) / 1e9:.1f} GB"
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return Artifact("oci", str(out), out.stat().st_size, True)
