"""Fill a store with layers of a few bytes."""

from __future__ import annotations

from ekiben.core.files import digest_of
from ekiben.store import Store, StoredLayer


def put(store: Store, name: str, data: bytes = b"layer", key: str = "k1") -> StoredLayer:
    with store.staging() as staging:
        (staging / "blob").write_bytes(data)
        store.put_file(staging / "blob", digest_of(data))
    layer = StoredLayer(
        name=name,
        cache_key=key,
        diff_id="sha256:d",
        tar_size=9,
        digest=digest_of(data),
        size=len(data),
        executor="none",
        seconds=0.1,
        inputs={"post": "x"},
        notes={"a": [1]},
    )
    store.put_layer(layer)
    return layer


def blobs(store: Store) -> set[str]:
    return {"sha256:" + path.name for path in (store.root / "blobs/sha256").iterdir()}
