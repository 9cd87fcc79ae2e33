"""Layers in a registry, by their cache keys."""

from __future__ import annotations

from ekiben.core.checked import Fields, parse_json
from ekiben.core.errors import FetchError
from ekiben.core.progress import Progress
from ekiben.registry.client import Registry
from ekiben.registry.reference import Reference
from ekiben.store._records import StoredLayer
from ekiben.store.store import Store


class LayerCache:
    """Layers by key in a repository. After an error it is not used any more, and the layers are built."""

    def __init__(self, repository: str, progress: Progress) -> None:
        self.registry, self.progress = Registry(Reference.parse(repository)), progress
        self._failed = False

    def fetch(self, cache_key: str, into: Store) -> StoredLayer | None:
        """Fetch the layer into ``into`` and return it; None when the registry does not have it."""
        if not self.has(cache_key):
            return None
        try:
            return self._fetch(cache_key, into)
        except FetchError as error:
            self._give_up(error)
            return None

    def has(self, cache_key: str) -> bool:
        """Return whether the registry has the layer."""
        try:
            return not self._failed and self.registry.tag_digest(cache_key) is not None
        except FetchError as error:
            self._give_up(error)
            return False

    def _give_up(self, error: FetchError) -> None:
        self._failed = True
        self.progress.log(f"{error}; continuing without that registry")

    def _fetch(self, cache_key: str, into: Store) -> StoredLayer:
        data, _ = self.registry.fetch_manifest(cache_key)
        try:
            manifest = Fields.of(parse_json(data))
            config = self.registry.small_blob(manifest.object("config").digest("digest"))
            layer = StoredLayer.parse(Fields.of(parse_json(config)))
            blob, *_ = manifest.objects("layers")
            fits = (layer.cache_key, layer.digest, layer.size) == (cache_key, blob.digest("digest"), blob.size("size"))
        except ValueError as error:
            raise FetchError(f"{self.registry.reference}:{cache_key} is not a layer of Ekiben's") from error
        if not fits:
            raise FetchError(f"{self.registry.reference}:{cache_key} differs from its tag: it is {layer.cache_key}")
        if not into.has_blob(layer.digest, layer.size):
            with (
                into.staging() as staging,
                self.progress.step(f"layer {layer.name} from {self.registry.reference}", total=layer.size),
            ):
                self.registry.blob(layer.digest, staging / "blob", self.progress.count, layer.size)
                into.put_file(staging / "blob", layer.digest)
        into.put_layer(layer)
        return layer
