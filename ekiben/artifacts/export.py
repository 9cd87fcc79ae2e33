"""Exports an image in the formats asked for: builds it, and repairs damaged blobs met on the way, once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ekiben.artifacts import exporters
from ekiben.artifacts.exporters import Artifact, Exporter, ExportOptions
from ekiben.builder.build import build
from ekiben.builder.plan import Action, BuildContext, plan
from ekiben.core.decisions import log_decision
from ekiben.core.errors import CorruptBlob, EngineError, StoreError
from ekiben.core.output import check_output_file
from ekiben.core.progress import Progress
from ekiben.store import Image, Store

_DEFAULT = ExportOptions()


def build_and_export(
    context: BuildContext,
    actions: Sequence[Action] | None = None,
    *,
    formats: Sequence[str] = (),
    output: Path | None = None,
    options: ExportOptions = _DEFAULT,
) -> tuple[Image, list[Artifact]]:
    """Build the image as ``actions`` say (by default plan()'s) and export it.

    Once, a damaged blob is dropped and built again, and so is a layer that was removed after it was
    planned.
    """
    store, progress = context.store, context.progress
    try:
        image = build(context, actions)
        return image, export(image, store, progress, formats=formats, output=output, options=options)
    except StoreError:
        now = plan(context.resolved, store)
        damaged = _damaged_blobs(now, store)
        planned = {action.layer.cache_key for action in actions or () if action.stored}
        if not damaged and all(action.stored or action.layer.cache_key not in planned for action in now):
            raise
    for error in damaged:
        progress.log(f"{error}; it will be rebuilt")
        store.drop_blob(error.digest)
    image = build(context)
    return image, export(image, store, progress, formats=formats, output=output, options=options)


def _damaged_blobs(actions: Sequence[Action], store: Store) -> list[CorruptBlob]:
    """Check every stored layer: the error that was raised may name a block only."""
    damaged = []
    for action in actions:
        try:
            if action.stored:
                store.check_blob(action.stored.digest, again=True)
        except CorruptBlob as error:
            damaged.append(error)
    return damaged


def export(
    image: Image,
    store: Store,
    progress: Progress,
    *,
    formats: Sequence[str] = (),
    output: Path | None = None,
    options: ExportOptions = _DEFAULT,
) -> list[Artifact]:
    """Export ``image`` in ``formats``; by default as a SIF, and to the Docker daemon when one answers.

    Raises EngineError when a format cannot be had here and has no fallback; StoreError; UsageError for a file that
    cannot be replaced.
    """
    artifacts = []
    for name, exporter in _choose(formats, progress).items():
        target = output or Path(f"{image.name}{exporter.SUFFIX or ''}")
        if exporter.SUFFIX is not None:
            target = check_output_file(target)
        artifacts.append(exporter.export(image, store, target, options, progress))
        assert artifacts[-1].kind == name
    return artifacts


def _choose(formats: Sequence[str], progress: Progress) -> dict[str, Exporter]:
    """Return the exporters to use by name. For one that cannot be used here, its fallback is."""
    if not formats:
        known = {name: exporters.load(name) for name in exporters.names()}
        defaults = {
            name: one for name, one in sorted(known.items(), key=lambda item: item[1].PREFERENCE) if one.is_default()
        }
        alternatives = ", ".join(name for name in known if name not in defaults)
        log_decision("formats", ", ".join(defaults), f"no --format; only made with it: {alternatives}")
        return defaults
    chosen = {}
    for name in formats:
        exporter = exporters.load(name)
        if reason := exporter.unavailable():
            if exporter.FALLBACK is None:
                raise EngineError(f"--format {name}: {reason}")
            progress.log(f"{reason}: the {name} image is written as an archive instead (--format {exporter.FALLBACK})")
            name, exporter = exporter.FALLBACK, exporters.load(exporter.FALLBACK)
        chosen[name] = exporter
    return chosen
