"""Takes what push() sent: a SIF as it is, a Docker image as the SIF of its layers, a layer by its key."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import tarfile
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from builder.assemble import Product
from builder.chain import platform
from builder.errors import FetchError, StoreError
from builder.files import free_bytes
from builder.gpg import Key, Keys, SignatureError
from builder.layer import DigestSink, pour, tar_members
from builder.progress import Progress
from builder.push import MEDIA_LAYER_CONFIG, MEDIA_SIF, MEDIA_SIF_CONFIG
from builder.registry import Reference, Registry, unpacked
from builder.sif import Partition, read_sif, sif_id, write_sif
from builder.sign import check_pushed, check_sif, unsigned
from builder.squashfs import SquashfsReader, SquashfsWriter
from builder.store import Store, StoredLayer

_DEFFILE = ".singularity.d/Singularity"


def pull(
    reference: Reference, store: Store, out: Path | None, progress: Progress, *, keys: Keys | None = None
) -> tuple[Product, str, Key | None]:
    """A SIF at ``out`` (by default ./<name>.sif), and the manifest's digest. With ``keys``, it has to be signed: by whom it is.

    Errors: FetchError, StoreError, SignatureError.
    """
    registry = Registry(reference)
    if reference.tag and reference.digest and (now := registry.tag_digest(reference.tag)) != reference.digest:
        progress.tell(f"the tag {reference.tag} has moved to {now or 'nothing'}; taking {reference.digest} as asked")
    _, digest = registry.fetch_manifest()
    signer = check_pushed(registry, digest, keys) if keys else None
    if keys:
        registry = Registry(replace(reference, digest=digest))  # whose tag may have moved since
    manifest = registry.manifest(platform())
    kind = manifest["config"].get("mediaType")
    out = out or Path(f"{reference.repository.rpartition('/')[2]}.sif")
    if not out.absolute().parent.is_dir():
        raise StoreError(f"{out}: there is no folder {out.absolute().parent}")
    if kind == MEDIA_LAYER_CONFIG:
        raise FetchError(f"{reference} is a layer, not an image", hint=f"EKIBEN_REGISTRY={reference.host}/{reference.repository} "
                         "lets a build take it")  # fmt: skip
    if kind == MEDIA_SIF_CONFIG or manifest["layers"][0].get("mediaType") == MEDIA_SIF:
        inside = keys if keys and signer is None else None  # nobody signed it in the registry: it may be signed itself
        product, found = _pull_sif(registry, manifest["layers"][0], out, progress, inside)
        return product, digest, signer or found
    if keys and signer is None:
        raise unsigned(str(reference), f"build.py push RECIPE {reference} --sign")
    return _pull_image(registry, manifest, store, out, progress), digest, signer


def _pull_sif(
    registry: Registry, layer: dict[str, Any], out: Path, progress: Progress, keys: Keys | None
) -> tuple[Product, Key | None]:
    digest, size = layer["digest"], int(layer.get("size") or 0)
    with contextlib.suppress(OSError):
        if out.stat().st_size == size:
            with out.open("rb") as stream:
                if "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest() == digest:
                    return Product("sif", str(out), size, False), check_sif(out, keys)[0] if keys else None
    with _partial(out, digest) as partial:
        had = partial.stat().st_size
        if free_bytes(out.absolute().parent) < size - had:
            raise StoreError(
                f"no room for {out}: it takes {(size - had) / 1e9:.1f} GB more", hint="choose another place with -o"
            )
        if had:
            progress.tell(f"{had / 1e6:.0f} MB are there from before")
        with progress.step(f"pull {out}", total=size):
            registry.blob(digest, partial, progress.count, size)
        read_sif(partial)
        try:
            signer = check_sif(partial, keys)[0] if keys else None
        except SignatureError as error:
            partial.unlink()
            raise SignatureError(
                f"{registry.reference}{str(error).removeprefix(str(partial))}", rank=0, hint=error.hint
            ) from error
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o777 & ~umask)
        partial.rename(out)
    return Product("sif", str(out), size, True), signer


@contextlib.contextmanager
def _partial(out: Path, digest: str) -> Iterator[Path]:
    """Where the file grows, kept when it breaks off. Of two at once on one place, the second has a name of its own."""
    path = out.with_name(f".{out.name}.{digest[7:19]}.part")
    try:
        with path.open("ab") as stream:
            if _is_ours(stream, path):
                yield path
                return
        path = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        path.touch()
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}", hint="choose another place with -o") from error


def _is_ours(stream: IO[bytes], path: Path) -> bool:
    """Whether nobody else writes there. Where there are no locks, the digest decides."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(stream.fileno()).st_ino == path.stat().st_ino  # it may have become the finished file meanwhile
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        return True


def _pull_image(registry: Registry, manifest: dict[str, Any], store: Store, out: Path, progress: Progress) -> Product:
    """Each layer's tar becomes the squashfs that it was made of, so the SIF is the one that was built."""
    config = registry.config(manifest)
    diff_ids = config.get("rootfs", {}).get("diff_ids", [])
    foreign = FetchError(f"{registry.reference} is a Docker image that was not made by Ekiben",
                         hint=f"apptainer pull docker://{registry.reference}, or docker pull {registry.reference}")  # fmt: skip
    try:
        epoch = int(datetime.fromisoformat(config["created"]).timestamp())
    except (KeyError, TypeError, ValueError) as error:
        raise foreign from error
    if len(diff_ids) != len(manifest["layers"]) or "org.ekiben.stack" not in (
        config.get("config", {}).get("Labels") or {}
    ):
        raise foreign
    store.open_for_writing()
    with store.staging() as staging:
        partitions = []
        for number, (layer, diff_id) in enumerate(zip(manifest["layers"], diff_ids, strict=True), 1):
            with progress.step(f"layer {number} of {len(diff_ids)}", total=int(layer.get("size") or 0)):
                tar, path = staging / "layer", staging / f"{number}.squashfs"
                registry.blob(layer["digest"], tar, progress.count, layer.get("size"))
                with unpacked(tar) as archive, path.open("w+b") as blob:
                    sink = DigestSink()
                    try:
                        pour(tar_members(archive), sink, SquashfsWriter(blob, epoch=epoch))
                    except (ValueError, tarfile.TarError) as error:
                        raise foreign from error
                    if sink.diff_id != diff_id:
                        raise FetchError(
                            f"{registry.reference}: layer {number} is {sink.diff_id}, its config says {diff_id}"
                        )
                    blob.seek(0)
                    digest = "sha256:" + hashlib.file_digest(blob, "sha256").hexdigest()
                tar.unlink()
            partitions.append(Partition(path, 0, path.stat().st_size, digest, is_checked=True))
        with partitions[-1].path.open("rb") as blob:
            deffile = SquashfsReader(blob).read_file(_DEFFILE).decode("utf-8", "surrogateescape")
        with progress.step(f"write {out}", total=sum(item.size for item in partitions)):
            write_sif(out, partitions, id=sif_id([item.digest for item in partitions], deffile), deffile=deffile,
                      arch=platform().split("/")[1], epoch=epoch, on_bytes=progress.count)  # fmt: skip
    return Product("sif", str(out), out.stat().st_size, True)


class LayerCache:
    """Layers by key in a repository: the store behind the others. What goes wrong is told, and the layer is built."""

    def __init__(self, place: str, progress: Progress) -> None:
        self.registry, self.progress = Registry(Reference.parse(place)), progress
        self._useless = False

    def fetch(self, cache_key: str, store: Store) -> StoredLayer | None:
        """The layer, now in ``store``; None when the registry has none."""
        if not self.has(cache_key):
            return None
        try:
            return self._fetch(cache_key, store)
        except FetchError as error:
            self._leave(error)
            return None

    def has(self, cache_key: str) -> bool:
        try:
            return not self._useless and self.registry.tag_digest(cache_key) is not None
        except FetchError as error:
            self._leave(error)
            return False

    def _leave(self, error: FetchError) -> None:
        self._useless = True
        self.progress.tell(f"{error}; going on without that registry")

    def _fetch(self, cache_key: str, store: Store) -> StoredLayer:
        data, _ = self.registry.fetch_manifest(cache_key)
        try:
            manifest = json.loads(data)
            described = json.loads(self.registry.small_blob(manifest["config"]["digest"]))
            layer = StoredLayer(**{field.name: described[field.name] for field in fields(StoredLayer)})
            blob = manifest["layers"][0]
            fits = (layer.cache_key, layer.digest, layer.size) == (cache_key, blob["digest"], blob["size"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise FetchError(f"{self.registry.reference}:{cache_key} is no layer of Ekiben's") from error
        if not fits:
            raise FetchError(
                f"{self.registry.reference}:{cache_key} is another layer than its tag says: {layer.cache_key}"
            )
        if not store.has_blob(layer.digest, layer.size):
            with (
                store.staging() as staging,
                self.progress.step(f"layer {layer.name} from {self.registry.reference}", total=layer.size),
            ):
                self.registry.blob(layer.digest, staging / "blob", self.progress.count, layer.size)
                store.put_file(staging / "blob", layer.digest)
        store.put_layer(layer)
        return layer
