"""A base's own configuration: written into its layer, and read from it by the layers above."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.errors import LayerError
from ekiben.formats.base_config import BASE, BASE_HELP, BaseConfig
from ekiben.formats.layer import File
from ekiben.store import Store, StoredLayer

if TYPE_CHECKING:
    from ekiben.formats.squashfs.reader import SquashfsReader

LABELS = "/.singularity.d/labels.json"
HELP = "/.singularity.d/runscript.help"
LABELS_FILE = "labels"  # in the folder that a job has of the host
_MAX_LABELS = 1 << 20  # bytes
RESERVED_LABELS = ("org.ekiben.", "org.opencontainers.image.title", "org.opencontainers.image.description")


def config_layer(
    config: Mapping[str, tuple[int, bytes]], below: Sequence[SquashfsReader], out: BinaryIO, epoch: int
) -> SquashfsReader:
    """Write the files of a base's configuration to ``out`` as a squashfs, to be merged with ``below``; return it."""
    from ekiben.formats.changeset import Lower, file_entries  # imported here: most invocations build nothing
    from ekiben.formats.layer import write_entries
    from ekiben.formats.squashfs.reader import SquashfsReader
    from ekiben.formats.squashfs.writer import SquashfsWriter

    files = [File(name, mode, content=content) for name, (mode, content) in config.items()]
    write_entries(file_entries(files, Lower(below[::-1]), epoch=epoch), SquashfsWriter(out, epoch=epoch))
    return SquashfsReader(out)


def base_config_of(layers: Sequence[StoredLayer], store: Store) -> BaseConfig | None:
    """Return the configuration that the lowest of ``layers`` brought; None where it has none of its own.

    Raises LayerError for a layer that does not hold it, StoreError, OSError.
    """
    if not (layers and has_config(layers[0].inputs)):
        return None
    with store.reader(layers[0].digest) as reader:
        entry = reader.lookup(BASE)
        try:
            return BaseConfig.parse(reader.read_file(BASE) if entry and entry.kind == "file" else b"")
        except ValueError as error:
            raise LayerError(f"layer {layers[0].name}: its /{BASE} {error}") from error


def has_config(inputs: Mapping[str, object]) -> bool:
    """Return whether a layer of this key has a base's own configuration."""
    source = inputs.get("source")
    return isinstance(source, dict) and "config" in source


def with_inherited(files: Sequence[File], layers: Sequence[StoredLayer], store: Store) -> list[File]:
    """Return the files of a layer: its labels with those that the layers below brought, its help with the base's."""
    inherit = {LABELS: _with_labels, HELP: _with_help}
    return [inherit[file.destination](file, layers, store) if file.destination in inherit else file for file in files]


def _with_help(file: File, layers: Sequence[StoredLayer], store: Store) -> File:
    if not (layers and has_config(layers[0].inputs)):
        return file
    with store.reader(layers[0].digest) as reader:
        entry = reader.lookup(BASE_HELP.lstrip("/"))
        text = reader.read_file(entry.path) if entry and entry.kind == "file" else b""
    return replace(file, content=file.content + b"\nBase:\n" + text) if text else file


def _with_labels(file: File, layers: Sequence[StoredLayer], store: Store) -> File:
    labels = merged_labels(Fields.of({"labels": parse_json(file.content)}).texts("labels"), layers, store)
    return replace(file, content=json.dumps(labels, indent=1, sort_keys=True).encode() + b"\n")


def merged_labels(labels: Mapping[str, str], layers: Sequence[StoredLayer], store: Store) -> dict[str, str]:
    """Return an image's labels: those of its base, ``labels``, and what the %post of its layers wrote, which has no
    effect on Ekiben's own."""
    config = base_config_of(layers, store)
    written = {name: value for layer in layers for name, value in layer.notes.get("labels", {}).items()}
    known = {name: value for name, value in written.items() if not name.startswith(RESERVED_LABELS)}
    of_base = config.labels if config else {}
    of_base = {name: value for name, value in of_base.items() if not name.startswith(RESERVED_LABELS)}
    return {**of_base, **labels, **known}


def read_labels(folder: Path) -> dict[str, str]:
    """Return the labels that a %post wrote: lines of a name and a value. Raises LayerError."""
    try:
        text = read_regular(folder / LABELS_FILE, max_size=_MAX_LABELS).decode(errors="replace")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LayerError(f"$APPTAINER_LABELS, which %post wrote, cannot be read: it {error}") from error
    pairs = [line.split(None, 1) for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return {pair[0]: pair[1].strip() if pair[1:] else "" for pair in pairs}
