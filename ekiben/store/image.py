"""A finished image: its layers in the store, and its attributes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from ekiben.core.checked import is_digest
from ekiben.core.errors import StoreError
from ekiben.formats.sif import SifHeader, sif_header
from ekiben.store._records import StoredLayer
from ekiben.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A finished image in the store.

    ``image_id`` is the digest of ``config``, by which a Docker daemon knows the image. ``tasks`` maps a task to its
    help. ``cli_args``: the recipe and the options that it is built from, as a command line gives them. ``epoch``:
    seconds since 1970, the time stamp of the image. ``result_keys`` are those of the build stages whose files it holds.
    ``recipe_test`` is the file name of the recipe's own test, "" where it has none; None where the tests of layers may
    look at the recipe's files.
    """

    name: str
    image_id: str
    config: bytes
    layers: tuple[StoredLayer, ...]
    recipe: str
    stack: str
    description: str
    tasks: Mapping[str, str]
    environment: Mapping[str, str]
    labels: Mapping[str, str]
    deffile: str
    epoch: int
    arch: str
    cli_args: str
    result_keys: tuple[str, ...] = ()
    recipe_test: str | None = None

    @property
    def tag(self) -> str:
        """Return the image's name in Docker and podman."""
        return f"ekiben/{self.name}:latest"

    @property
    def size(self) -> int:
        """Return the bytes of its layers as they are stored."""
        return sum(layer.size for layer in self.layers)

    def squashed_header(self) -> SifHeader:
        """Return the header of the SIF that has all layers as one partition."""
        digests = ["flat", *(layer.digest for layer in self.layers)]
        return sif_header(digests, self.deffile, self.arch, self.epoch)

    def sif_header(self, store: Store) -> SifHeader:
        """Return the header of the SIF that is made of its layers.

        Raises StoreError when they cannot be read in ``store``.
        """
        from ekiben.formats.users import users_partition

        try:
            with contextlib.ExitStack() as stack:
                readers = [stack.enter_context(store.reader(layer.digest)) for layer in self.layers]
                users = users_partition(readers, self.epoch)
        except (StoreError, OSError):
            for layer in self.layers:
                store.check_blob(layer.digest, again=True)  # the error names the damaged layer
            raise
        return sif_header([layer.digest for layer in self.layers], self.deffile, self.arch, self.epoch, users)


def known_sif(store: Store, id: str, signature: bytes = b"") -> str | None:
    """Return the SHA-256 of the SIF of this id with this signature, as 64 hex digits, where it was ever computed."""
    known = (store.check(_sif_check(id, signature)) or {}).get("sha256")
    return str(known) if is_digest(f"sha256:{known}") else None


def keep_sif(store: Store, id: str, file_digest: hashlib._Hash, signature: bytes = b"") -> str:
    """Remember the SHA-256 of a SIF for known_sif(), and return it."""
    if store.is_writable():
        store.put_check(_sif_check(id, signature), {"sha256": file_digest.hexdigest()})
    return file_digest.hexdigest()


def _sif_check(id: str, signature: bytes) -> str:
    return f"sif-{id}" + (f"-{hashlib.sha256(signature).hexdigest()[:16]}" if signature else "")
