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

import contextlib
import errno
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.catalog.gather import FORMAT, Tell, gather
from builder.catalog.runs import Taken, take_runs
from builder.errors import UsageError
from builder.shared import IMAGES, SharedStore, open_shared
from builder.store import Store, remove_tree

_ATTEMPTS = 20


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
    for _ in range(3):
        if _is_replaceable(out):
            return
        time.sleep(0.05)  # another may be replacing it just now
    raise UsageError(f"{out} is there, and is no catalogue", hint="give another folder with -o")


def _is_replaceable(out: Path) -> bool:
    if not out.exists() and not out.is_symlink():
        return True
    try:
        return not any(out.iterdir()) or json.loads((out / "catalog.json").read_bytes())["format"] <= FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_folder(shared: SharedStore | None, out: Path, files: dict[str, bytes]) -> None:
    """All of it or nothing."""
    made = _hidden(out)
    try:
        for folder in (made, made / IMAGES):
            folder.mkdir()
            if shared:
                shared.settle(folder, 0)
        for name, data in files.items():
            (made / name).write_bytes(data)
            if shared:
                shared.settle(made / name, 0o444)
        _take_name(made, out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}", hint="give another folder with -o") from error
    finally:
        if made.exists():
            remove_tree(made)


def _hidden(out: Path) -> Path:
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}")


def _take_name(made: Path, out: Path) -> None:
    """Two renames: for a moment there is none, but never half of one, nor pages of two. Several may do it at once: the last
    one's stays."""
    for attempt in range(_ATTEMPTS):
        old = _hidden(out)
        try:
            with contextlib.suppress(FileNotFoundError):
                out.rename(old)
            made.rename(out)
            return
        except OSError as error:
            beaten = error.errno in (errno.ENOTEMPTY, errno.EEXIST)  # another took the name in between
            if not beaten and old.exists():
                old.rename(out)
            if not beaten or attempt == _ATTEMPTS - 1:
                raise
        finally:
            if old.exists():
                remove_tree(old)
