"""Pull images that push() sent: a SIF as it is, a Docker image as the SIF of its layers."""

from __future__ import annotations

import contextlib
import os
import tarfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from ekiben.artifacts.exporters import Artifact
from ekiben.artifacts.partial import Partial, partial_file, remove_empty_folder
from ekiben.artifacts.push import MEDIA_LAYER_CONFIG, MEDIA_SIF, MEDIA_SIF_CONFIG
from ekiben.core.command_name import command_name
from ekiben.core.environment import host_arch, platform
from ekiben.core.errors import FetchError, StoreError
from ekiben.core.files import digest_of, free_bytes, open_regular
from ekiben.core.output import check_output_file
from ekiben.core.pgp_key import Key
from ekiben.core.progress import Progress
from ekiben.formats.layer import write_entries
from ekiben.formats.partition import Partition
from ekiben.formats.sif import read_sif, sif_header, write_sif
from ekiben.formats.squashfs.reader import SquashfsReader
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.tar import DigestWriter, tar_entries
from ekiben.formats.users import users_partition
from ekiben.registry.client import Registry
from ekiben.registry.layers import unpacked
from ekiben.registry.manifest import Descriptor, Manifest
from ekiben.registry.reference import Reference
from ekiben.signing.gpg import Keys, SignatureError, unsigned
from ekiben.signing.registry import check_pushed
from ekiben.signing.sif import check_sif
from ekiben.store import Store

_DEFFILE = ".singularity.d/Singularity"


def pull(
    reference: Reference, store: Store, out: Path | None, progress: Progress, *, keys: Keys | None = None
) -> tuple[Artifact, str, Key | None]:
    """Write the image as a SIF to ``out`` (by default ./<name>.sif).

    Returns it, the manifest's digest, and who signed it.

    Raises FetchError, StoreError; SignatureError when it has no good signature by one of ``keys``, where they are
    given.
    """
    registry = Registry(reference)
    if reference.tag and reference.digest and (now := registry.tag_digest(reference.tag)) != reference.digest:
        progress.log(f"the tag {reference.tag} has moved to {now or 'nothing'}; taking {reference.digest} as asked")
    _, digest = registry.fetch_manifest()
    signer = check_pushed(registry, digest, keys) if keys else None
    if keys:
        registry = Registry(replace(reference, digest=digest))  # its tag may have moved since
    manifest = registry.manifest(platform())
    kind = manifest.config.media_type
    out = check_output_file(out or Path(f"{reference.repository.rpartition('/')[2]}.sif"))
    if kind == MEDIA_LAYER_CONFIG:
        raise FetchError(
            f"{reference} is a layer, not an image",
            hint=f"with EKIBEN_REGISTRY={reference.host}/{reference.repository} a build uses it",
        )
    if not manifest.layers:
        raise FetchError(f"{reference} has no layer")
    if kind == MEDIA_SIF_CONFIG or manifest.layers[0].media_type == MEDIA_SIF:
        inside = keys if keys and signer is None else None  # no signature in the registry: the file may contain one
        artifact, file_signer = _pull_sif(registry, manifest.layers[0], out, store, progress, inside)
        return artifact, digest, signer or file_signer
    if keys and signer is None:
        raise unsigned(str(reference), f"{command_name()} push RECIPE {reference} --sign")
    return _pull_image(registry, manifest, store, out, progress), digest, signer


def _pull_sif(
    registry: Registry, layer: Descriptor, out: Path, store: Store, progress: Progress, keys: Keys | None
) -> tuple[Artifact, Key | None]:
    digest, size = layer.digest, layer.size
    with contextlib.suppress(OSError):
        if out.stat().st_size == size and digest_of(out) == digest:
            remove_empty_folder(out, store)
            return Artifact("sif", str(out), size, False), check_sif(out, keys)[0] if keys else None
    with partial_file(out, digest, store) as partial:
        if free_bytes(out.absolute().parent) < size - partial.had:
            raise StoreError(
                f"no space left for {out}: it needs {(size - partial.had) / 1e9:.1f} GB more",
                hint="choose another path with -o",
            )
        if partial.had:
            progress.log(f"resuming after {partial.had / 1e6:.0f} MB")
        with progress.step(f"pull {out}", total=size):
            registry.download(digest, size, partial.stream, progress.count)
        signer = _check_pulled(registry.reference, partial, keys)
        umask = os.umask(0)
        os.umask(umask)
        partial.finish(out.name, 0o777 & ~umask)
    return Artifact("sif", str(out), size, True), signer


def _check_pulled(reference: Reference, partial: Partial, keys: Keys | None) -> Key | None:
    """Return who signed the SIF. Raises StoreError, SignatureError."""
    partial.stream.flush()
    try:
        read_sif(partial.path)
        return check_sif(partial.path, keys)[0] if keys else None
    except (StoreError, SignatureError) as error:
        partial.discard()
        message = f"{reference}{str(error).removeprefix(str(partial.path))}"
        if isinstance(error, SignatureError):
            raise SignatureError(message, rank=0, hint=error.hint) from error
        raise StoreError(message, hint=error.hint) from error


def _pull_image(registry: Registry, manifest: Manifest, store: Store, out: Path, progress: Progress) -> Artifact:
    """Compress each layer's tar to the squashfs of the build: the SIF is the one that was built."""
    config = registry.config(manifest)
    diff_ids = config.diff_ids
    foreign = FetchError(
        f"{registry.reference} is a Docker image that was not made by Ekiben",
        hint=f"apptainer pull docker://{registry.reference}, or docker pull {registry.reference}",
    )
    try:
        epoch = int(datetime.fromisoformat(config.created).timestamp())
    except ValueError as error:
        raise foreign from error
    if len(diff_ids) != len(manifest.layers) or "org.ekiben.stack" not in config.labels:
        raise foreign
    store.open_for_writing()
    with store.staging() as staging:
        partitions = []
        for number, (layer, diff_id) in enumerate(zip(manifest.layers, diff_ids, strict=True), 1):
            with progress.step(f"layer {number} of {len(diff_ids)}", total=layer.size):
                tar, path = staging / "layer", staging / f"{number}.squashfs"
                registry.blob(layer.digest, tar, progress.count, layer.size)
                with unpacked(tar) as archive, path.open("w+b") as blob:
                    sink = DigestWriter()
                    try:
                        write_entries(tar_entries(archive), sink, SquashfsWriter(blob, epoch=epoch))
                    except (ValueError, tarfile.TarError) as error:
                        raise foreign from error
                    if sink.diff_id != diff_id:
                        raise FetchError(
                            f"{registry.reference}: layer {number} is {sink.diff_id}, its config says {diff_id}"
                        )
                    blob.seek(0)
                    digest = digest_of(blob)
                tar.unlink()
            partitions.append(Partition(path, 0, path.stat().st_size, digest, is_checked=True))
        with contextlib.ExitStack() as stack:
            readers = [SquashfsReader(stack.enter_context(open_regular(item.path))) for item in partitions]
            deffile = readers[-1].read_file(_DEFFILE).decode("utf-8", "surrogateescape")
            users = users_partition(readers, epoch)
        with progress.step(f"write {out}", total=sum(item.size for item in partitions)):
            header = sif_header(
                [item.digest for item in partitions], deffile, config.architecture or host_arch(), epoch, users
            )
            write_sif(out, partitions, header, on_bytes=progress.count)
    return Artifact("sif", str(out), out.stat().st_size, True)
