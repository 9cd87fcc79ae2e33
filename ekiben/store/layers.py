"""Layers with the store that holds them: what executors and image writers read (see formats.oci.LayerSource)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ekiben.store._records import StoredLayer
from ekiben.store.store import Store

if TYPE_CHECKING:
    from ekiben.formats.partition import Partition
    from ekiben.formats.squashfs.reader import SquashfsReader


@dataclass(frozen=True, slots=True)
class LayerHandle:
    """A stored layer bound to the store that finds its bytes."""

    store: Store
    record: StoredLayer

    @property
    def name(self) -> str:
        """Return the layer's name."""
        return self.record.name

    @property
    def cache_key(self) -> str:
        """Return the key that its inputs hash to."""
        return self.record.cache_key

    @property
    def diff_id(self) -> str:
        """Return the digest of its tar."""
        return self.record.diff_id

    @property
    def tar_size(self) -> int:
        """Return the bytes of its tar."""
        return self.record.tar_size

    @property
    def digest(self) -> str:
        """Return the digest of its blob."""
        return self.record.digest

    @property
    def size(self) -> int:
        """Return the bytes of its blob."""
        return self.record.size

    def partition(self) -> Partition:
        """Return where its bytes are: a file, or a part of one."""
        return self.store.partition(self.record)

    def file(self) -> Path:
        """Return a file that is this layer alone, copied into the store where it is a part of another file.

        Raises StoreError.
        """
        return self.store.layer_file(self.record)

    def reader(self) -> AbstractContextManager[SquashfsReader]:
        """Open its files. Raises StoreError, OSError."""
        return self.store.reader(self.digest)


class LayerProvider(Protocol):
    """A source of layers by cache key: a store, or a registry."""

    def has(self, cache_key: str) -> bool:
        """Return whether the store has the layer."""

    def fetch(self, cache_key: str, into: Store) -> StoredLayer | None:
        """Return the layer, readable through ``into``; None when it is missing. Raises StoreError."""


def fetch_layer(providers: Sequence[LayerProvider], cache_key: str, into: Store) -> StoredLayer | None:
    """Return the layer from the first of ``providers`` that has it."""
    return next((layer for provider in providers if (layer := provider.fetch(cache_key, into))), None)


def bind_layers(store: Store, records: Iterable[StoredLayer]) -> list[LayerHandle]:
    """Bind each record to ``store``."""
    return [LayerHandle(store, record) for record in records]
