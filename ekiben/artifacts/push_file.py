"""Push a SIF file as it is, also one of another program."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ekiben.artifacts.push import (
    MEDIA_SBOM,
    MEDIA_SIF,
    MEDIA_SIF_CONFIG,
    Pushed,
    PushRequest,
    _bytes_blob,
    _Sender,
)
from ekiben.core.errors import StoreError
from ekiben.core.files import digest_of, open_regular
from ekiben.core.progress import Progress
from ekiben.formats.oci import MEDIA_MANIFEST
from ekiben.formats.partition import Partition, read_partition
from ekiben.formats.sif import read_sif
from ekiben.registry.client import Blob
from ekiben.registry.reference import Reference
from ekiben.signing.registry import sign_pushed
from ekiben.signing.sif import signed_copy
from ekiben.store import Store

_TITLE = "org.opencontainers.image.title"


def push_file(sif: Path, store: Store, request: PushRequest, progress: Progress) -> Pushed:
    """Send a SIF file to a registry. The key signs the image in the registry and the file that is sent.


    Raises FetchError, StoreError, EngineError; UsageError or VerifyError where its SBOM cannot be made.
    """
    request.check()
    reference, key = request.reference, request.key
    read_sif(sif)
    document = _make_sbom(sif, store) if request.sbom else None  # before the upload: if it fails, nothing is sent
    sender = _Sender(store, reference, progress)
    try:
        with signed_copy(sif, store, key, progress) as source, open_regular(source) as stream:
            size = os.fstat(stream.fileno()).st_size
            with progress.step(f"digest of {sif}", total=size):
                digest = digest_of(stream)
            partition = Partition(Path(f"/proc/self/fd/{stream.fileno()}"), 0, size, digest)
            config = _bytes_blob(b"{}")
            sender.send([config, Blob(digest, size, lambda offset: read_partition(partition, offset))])
    except OSError as error:
        raise StoreError(f"{sif}: cannot be read: {error.strerror}") from error
    layer = {"mediaType": MEDIA_SIF, "digest": digest, "size": size, "annotations": {_TITLE: sif.name}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MEDIA_MANIFEST,
        "config": {"mediaType": MEDIA_SIF_CONFIG, "digest": config.digest, "size": config.size},
        "layers": [layer],
        "annotations": {_TITLE: sif.stem},
    }
    done = sender.put_manifest(manifest, reference.tag_or_digest)
    pushed = done.ref.rpartition("@")[2]
    if key:
        sign_pushed(sender.registry, pushed, key)
    if document:
        attached = sender.registry.attach(pushed, MEDIA_SBOM, document, {_TITLE: f"{sif.stem}.cdx.json"})
        done = replace(done, sbom=str(Reference(reference.host, reference.repository, attached)))
    return done


def _make_sbom(sif: Path, store: Store) -> bytes:
    from ekiben.inspect.sbom import sbom_of  # imported here: its library takes a third of a second

    return sbom_of(str(sif.absolute()), store, Progress(quiet=True)).encode()
