"""Images in their OCI and Docker forms, made from the store's layers: https://github.com/opencontainers/image-spec

The store keeps a layer as squashfs; its tar form is regenerated here, always with the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ekiben.core.errors import CorruptBlob, StoreError
from ekiben.core.files import digest_of as digest_of  # its users know it as oci.digest_of

if TYPE_CHECKING:
    from ekiben.formats.partition import Partition
    from ekiben.formats.squashfs.reader import SquashfsReader


class LayerRecord(Protocol):
    """A layer in an image's config and manifest."""

    @property
    def name(self) -> str: ...
    @property
    def cache_key(self) -> str: ...
    @property
    def diff_id(self) -> str: ...
    @property
    def tar_size(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def size(self) -> int: ...


class LayerSource(LayerRecord, Protocol):
    """A layer whose bytes can be read."""

    def partition(self) -> Partition:
        """Return where its squashfs is: a file, or a part of one."""

    def file(self) -> Path:
        """Return a file that contains nothing but its squashfs. Raises StoreError."""

    def reader(self) -> AbstractContextManager[SquashfsReader]:
        """Open its files. Raises StoreError, OSError."""


MEDIA_LAYER = "application/vnd.ekiben.layer.v2.squashfs"
MEDIA_CONFIG = "application/vnd.oci.image.config.v1+json"
MEDIA_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
MEDIA_INDEX = "application/vnd.oci.image.index.v1+json"
MEDIA_TAR = "application/vnd.oci.image.layer.v1.tar"
WORKING_DIR = "/work"  # of a finished image: `docker run -v "$PWD:/work"` mounts the output folder here
RUNSCRIPT = ("/bin/sh", "/.singularity.d/runscript")  # what an image runs by itself
LAYER_LABEL = "org.ekiben.layer"  # of an image: the layers added to the recipe's, separated by blanks


@dataclass(frozen=True, slots=True)
class Start:
    """How a container of a finished image starts: the program that gets the command, its user, and the folder.

    ``command``: None is the runscript. ``further``: more fields of the config, such as ``ExposedPorts``.
    """

    entrypoint: Sequence[str] = ()
    user: str = ""
    working_dir: str = WORKING_DIR
    command: Sequence[str] | None = None
    further: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Return the fields of an image's config."""
        entrypoint = {"Entrypoint": [*self.entrypoint]} if self.entrypoint else {}
        command = RUNSCRIPT if self.command is None else self.command
        fields = {"WorkingDir": self.working_dir, **entrypoint, **({"User": self.user} if self.user else {})}
        return {**fields, **({"Cmd": [*command]} if command else {}), **self.further}


def image_config(
    layers: Sequence[LayerRecord],
    *,
    environment: Mapping[str, str],
    labels: Mapping[str, str],
    epoch: int,
    platform: str,
    start: Start | None = None,
) -> bytes:
    """Return the image's config; its SHA-256 is the image id in a Docker daemon.

    Only a finished image has a ``start``: Docker makes the folder, which would then be in a layer that is built so.
    """
    system, architecture = platform.split("/")
    created = datetime.fromtimestamp(epoch, UTC).isoformat().replace("+00:00", "Z")
    config = {
        "created": created,
        "architecture": architecture,
        "os": system,
        "config": {
            "Env": [f"{name}={value}" for name, value in sorted(environment.items())],
            "Labels": dict(sorted(labels.items())),
            **(start.fields() if start else {"Cmd": [*RUNSCRIPT]}),
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": created, "created_by": f"ekiben layer {layer.name}"} for layer in layers],
    }
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()


def store_manifest(config: bytes, layers: Sequence[LayerRecord]) -> dict[str, Any]:
    """Return the manifest as the store keeps it: over squashfs layers."""
    descriptors = [
        {
            "mediaType": MEDIA_LAYER,
            "digest": layer.digest,
            "size": layer.size,
            "annotations": {"org.ekiben.layer": layer.name, "org.ekiben.cache-key": layer.cache_key},
        }
        for layer in layers
    ]
    return _manifest(config, descriptors)


def _manifest(config: bytes, layers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": MEDIA_MANIFEST,
        "config": _descriptor(MEDIA_CONFIG, config),
        "layers": layers,
    }


def _descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def layer_tar(layer: LayerSource) -> Iterator[bytes]:
    """Yield the layer's tar and compare it with its diff_id on the way. Raises CorruptBlob, StoreError."""
    from ekiben.formats.tar import tar_stream

    path, sha = layer.partition().path, hashlib.sha256()
    try:
        with layer.reader() as reader:
            for chunk in tar_stream(reader.contents()):
                sha.update(chunk)
                yield chunk
    except StoreError as error:
        raise CorruptBlob(layer.digest, path) from error
    except OSError as error:
        raise StoreError(f"blob {layer.digest} cannot be read: {path}: {error.strerror}") from error
    if "sha256:" + sha.hexdigest() != layer.diff_id:
        raise CorruptBlob(layer.digest, path)


def _layout_files(
    config: bytes, layers: Sequence[LayerSource], name: str, leave_out: Collection[str]
) -> Iterator[tuple[str, int, Iterable[bytes]]]:
    """Path, size and data of everything in an OCI layout that `docker load` reads, too."""
    descriptors = [{"mediaType": MEDIA_TAR, "digest": layer.diff_id, "size": layer.tar_size} for layer in layers]
    manifest = json.dumps(_manifest(config, descriptors), sort_keys=True, separators=(",", ":")).encode()
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    index = {
        "schemaVersion": 2,
        "mediaType": MEDIA_INDEX,
        "manifests": [{**_descriptor(MEDIA_MANIFEST, manifest), "annotations": names}],
    }
    docker = [
        {"Config": _blob(digest_of(config)), "RepoTags": [name], "Layers": [_blob(layer.diff_id) for layer in layers]}
    ]
    small = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps(index).encode(),
        "manifest.json": json.dumps(docker).encode(),
        _blob(digest_of(config)): config,
        _blob(digest_of(manifest)): manifest,
    }
    for path, data in small.items():
        yield path, len(data), [data]
    for layer in layers:
        if layer.diff_id not in leave_out:
            yield _blob(layer.diff_id), layer.tar_size, layer_tar(layer)


def archive(
    config: bytes,
    layers: Sequence[LayerSource],
    name: str,
    *,
    leave_out: Collection[str] = (),
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Iterator[bytes]:
    """Yield a tar that is both an OCI archive and a `docker load` archive.

    ``leave_out``: diff_ids whose data the reader has already (a Docker daemon doesn't open what it knows).
    """
    import tarfile

    for folder in ("blobs", "blobs/sha256"):  # Apptainer unpacks no file into a folder that the archive does not hold
        info = tarfile.TarInfo(folder)
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        yield info.tobuf(tarfile.GNU_FORMAT)
    for path, size, chunks in _layout_files(config, layers, name, leave_out):
        info = tarfile.TarInfo(path)
        info.size = size
        yield info.tobuf(tarfile.GNU_FORMAT)  # GNU: a layer may pass 8 GiB
        for chunk in chunks:
            on_bytes(len(chunk))
            yield chunk
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def write_layout(
    folder: Path,
    config: bytes,
    layers: Sequence[LayerSource],
    name: str,
    *,
    leave_out: Collection[str] = (),
) -> None:
    """Write the same as a folder: an OCI image layout with uncompressed layers. Raises OSError, CorruptBlob."""
    for path, _, chunks in _layout_files(config, layers, name, leave_out):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("wb") as stream:
            for chunk in chunks:
                stream.write(chunk)


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")
