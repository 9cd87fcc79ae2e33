"""The same image again: built again in an empty store, and compared with the one that is there, byte by byte."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ekiben.artifacts.exporters.sif import make_sif
from ekiben.builder.build import BuildContext, build, stored_image
from ekiben.core.errors import StoreError, VerifyError
from ekiben.core.files import digest_of
from ekiben.formats.compare import layer_differences
from ekiben.store import Image, Store, StoredLayer

_NAMED = 20  # differing files named for each layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """A layer of both builds. ``differing``: a line for each entry that differs."""

    name: str
    before: StoredLayer
    after: StoredLayer
    differing: Sequence[str]

    @property
    def same(self) -> bool:
        """Return whether the rebuilt layer has the same bytes."""
        return (self.before.diff_id, self.before.digest) == (self.after.diff_id, self.after.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``image_ids`` and ``sif_digests``: before and after."""

    layers: tuple[Rebuilt, ...]
    image_ids: tuple[str, str]
    sif_digests: tuple[str, str]

    @property
    def same(self) -> bool:
        """Return whether all layers, image ids and SIF digests are equal."""
        return all(layer.same for layer in self.layers) and len({*self.image_ids}) == len({*self.sif_digests}) == 1


def rebuild(context: BuildContext, *, user_root: Path) -> Comparison:
    """Build a recipe in an empty store, and compare. ``user_root``: the user's own store, beside which the
    rebuilt one lies where nothing can be written beside the store.

    Raises VerifyError when it is not built yet, StoreError when there is no folder to rebuild in, and what build()
    raises.
    """
    store, progress = context.store, context.progress
    before = stored_image(context.resolved, store)
    # Beside the store, to share its cache of downloads; only this store is removed afterwards.
    # A store of another user cannot be written: then the cache beside the user's store is used.
    beside = store.root.parent if os.access(store.root.parent, os.W_OK) else user_root.parent
    try:
        beside.mkdir(parents=True, exist_ok=True)
        fresh = Store(Path(tempfile.mkdtemp(prefix="rebuild-", dir=beside)))
    except OSError as error:
        raise StoreError(
            f"cannot create a folder to rebuild in: {beside}: {error.strerror}",
            hint="EKIBEN_STORE names a store of your own; the rebuilt one is created next to it",
        ) from error
    try:
        after = build(replace(context, store=fresh))
        with progress.step(f"compare {len(before.layers)} layers"):
            layers = tuple(
                _compare(one, other, store, fresh) for one, other in zip(before.layers, after.layers, strict=True)
            )
        with progress.step("compare the SIF files"):
            sifs = _sif_digest(before, store, fresh), _sif_digest(after, fresh, fresh)
        return Comparison(layers=layers, image_ids=(before.image_id, after.image_id), sif_digests=sifs)
    finally:
        shutil.rmtree(fresh.root, ignore_errors=True)


def _compare(before: StoredLayer, after: StoredLayer, store: Store, fresh: Store) -> Rebuilt:
    store.check_blob(before.digest)
    differing: list[str] = []
    if before.diff_id != after.diff_id:
        with store.reader(before.digest) as one, fresh.reader(after.digest) as other:
            differing = list(layer_differences(one, other))
    return Rebuilt(name=before.name, before=before, after=after, differing=differing)


def _sif_digest(image: Image, store: Store, fresh: Store) -> str:
    with fresh.staging() as staging:
        sif = make_sif(image, store, staging / "image.sif", squash=False)
        return digest_of(Path(sif.ref))


def refuse_differences(name: str, comparison: Comparison) -> None:
    """Raise VerifyError, naming the layers and files that differ, unless the images are equal."""
    if comparison.same:
        return
    lines = []
    for layer in comparison.layers:
        if not layer.same:
            lines.append(
                f"  layer {layer.name}: {layer.before.diff_id[:19]} → {layer.after.diff_id[:19]}"
                + (f", {len(layer.differing)} entries differ" if layer.differing else ", packed differently")
            )
            lines += [f"    {line}" for line in layer.differing[:_NAMED]]
            lines += [f"    … and {len(layer.differing) - _NAMED} more"] if len(layer.differing) > _NAMED else []
            lines += [f"    drift: {line}" for line in layer.after.drift]
    count = sum(not layer.same for layer in comparison.layers)
    raise VerifyError(f"{name}: {count} of {len(comparison.layers)} layers differ:\n" + "\n".join(lines))
