"""Makes what people run out of the store's layers: a SIF file, an image in a Docker daemon, an OCI archive."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder import daemon, oci
from builder.chain import Chain, platform
from builder.errors import StoreError
from builder.pipeline import Image, Options, build, plan
from builder.progress import Progress
from builder.sif import Partition, read_sif, sif_id, write_sif
from builder.store import CorruptBlob, Store

Count = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Product:
    """One thing made. ``place``: a path or a tag; ``size`` in bytes; ``made`` is False when it was there already; ``sha256`` of
    a file, where it is known."""

    kind: str
    place: str
    size: int
    made: bool
    sha256: str | None = None


def deliver(
    chain: Chain, store: Store, options: Options, progress: Progress, *,
    formats: Sequence[str] = (), output: Path | None = None, flat: bool = False, hashed: bool = False,
) -> tuple[Image, list[Product]]:  # fmt: skip
    """Build the image and make its products. A damaged blob met on the way is dropped and made again, once."""
    try:
        image = build(chain, store, options, progress)
        return image, make(image, store, progress, formats=formats, output=output, flat=flat, hashed=hashed)
    except StoreError:
        if not (damaged := _damaged(chain, store)):
            raise
    for error in damaged:
        progress.tell(f"{error}; it is made again")
        store.drop_blob(error.digest)
    image = build(chain, store, options, progress)
    return image, make(image, store, progress, formats=formats, output=output, flat=flat, hashed=hashed)


def _damaged(chain: Chain, store: Store) -> list[CorruptBlob]:
    """Whoever met the damage may only know that a block does not decompress."""
    found = []
    for action in plan(chain, store):
        try:
            if action.stored:
                store.check_blob(action.stored.digest, again=True)
        except CorruptBlob as error:
            found.append(error)
    return found


def make(
    image: Image,
    store: Store,
    progress: Progress,
    *,
    formats: Sequence[str] = (),
    output: Path | None = None,
    flat: bool = False,
    hashed: bool = False,
) -> list[Product]:
    """By default a SIF, and the Docker image when a daemon answers. Asked for docker without one, an archive instead."""
    if not formats:
        formats = ("sif",) if daemon.unavailable() else ("sif", "docker")
    elif "docker" in formats and (reason := daemon.unavailable()):
        progress.tell(f"{reason}: the Docker image is written as an archive for `docker load -i`")
        formats = ["oci" if name == "docker" else name for name in formats]
    products = []
    for name in dict.fromkeys(formats):
        if name == "docker":
            with progress.step(f"load {image.tag}"):
                products.append(load_docker(image, store))
            continue
        out = output or Path(f"{image.name}.sif" if name == "sif" else f"{image.name}.tar")
        with progress.step(f"write {out}", total=image.size):
            if name == "sif":
                products.append(make_sif(image, store, out, flat=flat, hashed=hashed, on_bytes=progress.count))
            else:
                products.append(make_archive(image, store, out, on_bytes=progress.count))
    return products


def make_sif(
    image: Image, store: Store, out: Path, *, flat: bool, hashed: bool = False, on_bytes: Count = lambda count: None
) -> Product:
    """A SIF of the image's layers at ``out``, which is replaced only when the new one is whole. Errors: StoreError.

    ``hashed``: its SHA-256 is taken on the way and kept, for whoever publishes or pushes it. It is a matter of the layers, so
    what was kept once holds for every file of them; but not of a flat one, which is compressed anew.
    """
    blobs = [layer.digest for layer in image.layers]
    wanted = sif_id(["flat", *blobs] if flat else blobs, image.chain.deffile)
    with contextlib.suppress(OSError, StoreError):
        if read_sif(out).id == wanted:
            return Product("sif", str(out), out.stat().st_size, False, known_sif(store, wanted))
    if not out.parent.is_dir():
        raise StoreError(f"{out}: there is no folder {out.parent}")
    for layer in image.layers:
        store.check_blob(layer.digest)
    partitions = [store.partition(layer, is_checked=True) for layer in image.layers]
    with contextlib.ExitStack() as stack:
        if flat:
            store.open_for_writing()
            partitions = [_flattened(image, store, stack.enter_context(store.staging()) / "flat.squashfs")]
        known = known_sif(store, wanted)
        whole = hashlib.sha256() if hashed and not flat and not known else None
        write_sif(out, partitions, id=wanted, deffile=image.chain.deffile, arch=platform().split("/")[1],
                  epoch=image.chain.stack.file.epoch, on_bytes=on_bytes, whole=whole)  # fmt: skip
    if whole:
        known = keep_sif(store, wanted, whole)
    return Product("sif", str(out), out.stat().st_size, True, known)


def known_sif(store: Store, id: str, signature: bytes = b"") -> str | None:
    """The SHA-256, 64 hex digits, of the SIF of this id with this signature, where it was ever taken."""
    known = (store.check(_sif_check(id, signature)) or {}).get("sha256")
    return known if isinstance(known, str) else None


def keep_sif(store: Store, id: str, whole: hashlib._Hash, signature: bytes = b"") -> str:
    if os.access(store.root, os.W_OK):
        store.put_check(_sif_check(id, signature), {"sha256": whole.hexdigest()})
    return whole.hexdigest()


def _sif_check(id: str, signature: bytes) -> str:
    return f"sif-{id}" + (f"-{hashlib.sha256(signature).hexdigest()[:16]}" if signature else "")


def _flattened(image: Image, store: Store, path: Path) -> Partition:
    """All layers as one partition, for tools that read only the first."""
    from builder.layer import pour
    from builder.squashfs import SquashfsWriter, merged_members

    with contextlib.ExitStack() as stack:
        layers = [stack.enter_context(store.reader(layer.digest)) for layer in image.layers]
        out = stack.enter_context(path.open("w+b"))
        pour(merged_members(layers), SquashfsWriter(out, epoch=image.chain.stack.file.epoch))
        out.seek(0)
        digest = "sha256:" + hashlib.file_digest(out, "sha256").hexdigest()
    return Partition(path, 0, path.stat().st_size, digest, is_checked=True)


def load_docker(image: Image, store: Store) -> Product:
    """The image in the Docker daemon, its id the digest of its config. Layers the daemon has are not sent."""
    if daemon.has_image(image.tag, image.image_id):
        return Product("docker", image.tag, image.size, False)
    daemon.load_image(store, image.config, image.layers, image.tag)
    return Product("docker", image.tag, image.size, True)


def make_archive(image: Image, store: Store, out: Path, *, on_bytes: Count) -> Product:
    """One tar that `docker load`, podman, skopeo and `apptainer build … oci-archive:` read."""
    import tempfile

    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}") from error
    try:
        with open(handle, "wb") as stream:
            for chunk in oci.archive(store, image.config, image.layers, image.tag, on_bytes=on_bytes):
                stream.write(chunk)
        os.chmod(temporary, 0o644)
        os.rename(temporary, out)
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror}; it takes "
                         f"{sum(layer.tar_size for layer in image.layers) / 1e9:.1f} GB") from error  # fmt: skip
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return Product("oci", str(out), out.stat().st_size, True)
