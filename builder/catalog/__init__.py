"""A published place (builder/publish.py) as pages to read: static HTML and JSON, for a web server or straight from the disk.

    OUT/
        index.html            every image
        images/<name>.html    one image: how to run it and where, what is inside, its runs, its versions and their changes
        catalog.json          all of that

catalog.json; what is not known is null or empty:

    format       1
    place        the folder
    images       by name: name, description; recipe; current (the stem `current` names), shown (the stem the page is about);
                 commands: title, about, lines; versions, newest first:
        stem, version, stack, description, file, sha256, size, sif, image, tasks, environment, checks, published, by
                     as in the version's record
        tags, pinned, signature
        sbom         the CycloneDX file beside it
        layers       name, cache_key, diff_id, digest, size, tar_size, bottom first
        drift        what could not be had as locked, a line each
        unread       why what follows is not known, where it is not
        python, debian     packages and their versions; glibc, torch, cuda: versions
        device_code  architectures that its torch (or else any of its libraries) has machine code or PTX for
        gpus         family, models, capability; level: fine, but or fail; said
        driver       least: the oldest that runs its CUDA; own: the one that CUDA came with
        changes      since the version before of the same stack: before, size (of both), layers, packages, environment, files
        runs         id and what builder/catalog/runs.py keeps of a run
    skipped      records that could not be read: file, why

The same place gives the same bytes. The folder is written beside itself and then takes its name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.catalog.gather import FORMAT, Tell, gather
from builder.catalog.runs import Taken, take_runs
from builder.errors import UsageError
from builder.shared import IMAGES, SharedStore, open_shared
from builder.store import Store, remove_tree


@dataclass(frozen=True, slots=True)
class Made:
    out: Path
    catalog: dict[str, Any]
    runs: Taken


def make_catalog(place: Path, store: Store, *, out: Path | None, runs: Sequence[Path], tell: Tell) -> Made:
    """``store`` sees the place's layers. Errors: StoreError, UsageError."""
    shared = open_shared(place)
    out = out or place / "catalog"
    _refuse_other(out)
    taken = take_runs(shared, runs) if runs else Taken()
    found = gather(shared, store, tell)
    from builder.catalog.pages import relative, render  # late: jinja2

    inside = out.resolve().is_relative_to(place.resolve())
    _write_folder(shared if inside else None, out, render(found, relative(place / IMAGES, out) if inside else None))
    return Made(out, found, taken)


def _refuse_other(out: Path) -> None:
    """Only an empty folder or an earlier catalogue is replaced."""
    if not out.exists() and not out.is_symlink():
        return
    try:
        if out.is_dir() and (
            not any(out.iterdir()) or json.loads((out / "catalog.json").read_bytes())["format"] <= FORMAT
        ):
            return
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{out} is there, and is no catalogue", hint="give another folder with -o")


def _write_folder(shared: SharedStore | None, out: Path, files: dict[str, bytes]) -> None:
    """All of it or nothing. Two renames: for a moment there is none, but never half of one, nor pages of two."""
    made, old = (out.with_name(f".{out.name}.{secrets.token_hex(4)}") for _ in range(2))
    try:
        for folder in (made, made / IMAGES):
            folder.mkdir()
            if shared:
                shared.settle(folder, 0)
        for name, data in files.items():
            (made / name).write_bytes(data)
            if shared:
                shared.settle(made / name, 0o444)
        if out.exists():
            out.rename(old)
        try:
            made.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}", hint="give another folder with -o") from error
    finally:
        for left in (made, old):
            if left.exists():
                remove_tree(left)
