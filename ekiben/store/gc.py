"""Remove files from a store that no image needs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ekiben.core.checked import Fields, parse_json
from ekiben.core.errors import StoreError, UsageError, nearest
from ekiben.core.files import remove_tree
from ekiben.store._records import ImageRecord, Kind
from ekiben.store.store import Store

_LOG_DAYS = 30
_CACHE_DAYS = 30  # for which compiled files stay that no build uses


def prune(
    store: Store, *, untag: Iterable[str] = (), wheels: bool = False, dry_run: bool = False
) -> list[tuple[str, int]]:
    """Remove every blob that no image reaches, after removing the images in ``untag``; compiled wheels only with
    ``wheels``.

    Returns digest and bytes of what is removed: none while there are damaged_records(). Raises StoreError when the
    folder is not a store, since nothing is ever removed from a folder without Ekiben's tag; UsageError for a name
    that no image has.
    """
    if not _is_store(store):
        raise StoreError(
            f"{store.root} is not an Ekiben store (no CACHEDIR.TAG of ours); nothing was removed",
            hint="name the store's folder with --store or EKIBEN_STORE",
        )
    untag, area = tuple(untag), store.staging_area
    images = store.records.names("refs")  # damaged ones, too
    for name in untag:
        if name not in images:
            raise UsageError(f"no image '{name}' in {store.root}; nothing was removed." + nearest(name, images))
    with area.access.translated_errors():
        if not dry_run:
            area.sweep()
        for name in untag if not dry_run else ():
            store.records.drop("refs", name)
        since = area.oldest_running(time.time())
        gone = [] if damaged_records(store, untag) else _unneeded(store, untag, wheels, since)
        if not dry_run:
            for digest, _ in gone:
                store.drop_blob(digest)
            if not damaged_records(store, untag):
                _drop_dangling(store)
            store.records.write_index()
            _drop_compiled(store)
            if wheels:
                _drop_unfinished(store, since)
    return gone


def _is_store(store: Store) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return b"Ekiben" in (store.staging_area.root / "CACHEDIR.TAG").read()
    return False


def damaged_records(store: Store, untag: Collection[str] = ()) -> list[Path]:
    """Return the records of images, but for ``untag``, of results and of layers being built that are there and cannot
    be read.

    Each may name any blob, so prune() removes none while there is one.
    """
    records = store.records
    damaged: list[tuple[Kind, str]] = [
        *(("refs", name) for name in records.names("refs") if name not in untag and records.image(name) is None),
        *(("results", key) for key in records.names("results") if records.result(key) is None),
    ]
    layers = set(records.names("keys")) & store.staging_area.announced_keys()
    damaged += [("keys", key) for key in sorted(layers) if records.layer(key) is None]
    return [path.path for kind, name in damaged if (path := records.path(kind, name)).lexists()]


def _unneeded(store: Store, untag: Collection[str], wheels: bool, since: float) -> list[tuple[str, int]]:
    """Return digest and bytes of the unreferenced blobs older than ``since``."""
    images = {name: image for name, image in store.images().items() if name not in untag}
    keep = reachable(store, images) | _stage_outputs(store, images, all=not wheels) | _being_built(store)
    return [
        (digest, stat.st_size) for digest, stat in store.blobs.all() if digest not in keep and stat.st_mtime < since
    ]


def reachable(store: Store, images: Mapping[str, ImageRecord] | None = None) -> set[str]:
    """Return the digests of every blob that ``images`` need; by default all images of the store."""
    keep: set[str] = set()
    for image in (store.images() if images is None else images).values():
        keep |= {image["manifest"], image["config"]}  # also by its keys: a damaged manifest loses no layer
        keep |= {layer.digest for key in image["keys"] if (layer := store.layer(key))}
        with contextlib.suppress(StoreError, ValueError):
            manifest = Fields.of(parse_json(store.get_blob(image["manifest"])))
            keep |= {manifest.object("config").digest("digest")}
            keep |= {layer.digest("digest") for layer in manifest.objects("layers")}
    return keep


def _stage_outputs(store: Store, images: Mapping[str, ImageRecord], *, all: bool) -> set[str]:
    """Return the blobs of build stages to keep: compiled wheels are kept unless ``all`` is set.

    Then stays what an image of the store was built with, and what was imported, for it may not be available again.
    """
    layers = [layer for image in images.values() for key in image["keys"] if (layer := store.layer(key))]
    used = {key for layer in layers for key in layer.stage_keys}
    kept = [result for result in store.results() if all or result.key in used or result.origin == "imported"]
    return {file.digest for result in kept for file in result.files}


def _being_built(store: Store) -> set[str]:
    """Return the digests of the layers that running builds need, and that no image names yet."""
    return {layer.digest for key in store.staging_area.announced_keys() if (layer := store.records.layer(key))}


def _drop_unfinished(store: Store, since: float) -> None:
    """Remove unfinished compilations of failed stages; not of a running one."""
    for folder in (store.cache / "work").glob("*"):
        if folder.stat().st_mtime < since:
            remove_tree(folder)


def _drop_compiled(store: Store) -> None:
    """Remove compiled files of Python packages that no build has used for a month."""
    for entry in store.wheels.glob("*/compiled/*/*"):
        with contextlib.suppress(OSError):  # another process removed it, or it is root's
            if entry.stat().st_mtime < time.time() - _CACHE_DAYS * 86400:
                entry.unlink()


def _drop_dangling(store: Store) -> None:
    for key in store.records.names("keys"):
        layer = store.records.layer(key)
        if layer is None or store.find(layer.digest) is None:
            store.records.drop("keys", key)
    for key in store.records.names("results"):
        if store.result(key) is None:
            store.records.drop("results", key)
    for log in (store.staging_area.root / "logs").entries():
        if log.name.endswith(".log") and log.status().st_mtime < time.time() - _LOG_DAYS * 86400:
            log.remove(missing_ok=True)
