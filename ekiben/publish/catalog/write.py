"""Write the catalog of a shared folder as one folder: all of it or nothing."""

from __future__ import annotations

import contextlib
import errno
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.errors import UsageError
from ekiben.core.files import remove_tree
from ekiben.publish.catalog._types import Catalog
from ekiben.publish.catalog.gather import FORMAT, Log, gather
from ekiben.publish.catalog.runs import ImportedRuns, import_runs
from ekiben.store import Store
from ekiben.store.shared import IMAGES, SharedStore, open_shared

_ATTEMPTS = 20
_MAX_CATALOG = 1 << 30  # bytes


@dataclass(frozen=True, slots=True)
class WrittenCatalog:
    """The catalog that was written to ``out``; ``runs``: what was imported."""

    out: Path
    catalog: Catalog
    runs: ImportedRuns


def make_catalog(shared_dir: Path, store: Store, *, out: Path | None, runs: Sequence[Path], log: Log) -> WrittenCatalog:
    """Write the pages about a shared folder, after importing ``runs``.

    ``store`` has the shared folder upstream. Raises StoreError, UsageError.
    """
    shared = open_shared(shared_dir)
    out = out or shared_dir / "catalog"
    _refuse_other(out)
    imported = import_runs(shared, runs) if runs else ImportedRuns()
    catalog = gather(shared, store, log)
    from ekiben.publish.catalog.pages import relative, render  # late: jinja2

    inside = out.resolve().is_relative_to(shared_dir.resolve())
    _write_folder(
        shared if inside else None, out, render(catalog, relative(shared_dir / IMAGES, out) if inside else None)
    )
    return WrittenCatalog(out, catalog, imported)


def _refuse_other(out: Path) -> None:
    """Raise UsageError unless ``out`` is missing, empty, or an earlier catalog."""
    for _ in range(3):
        if _is_replaceable(out):
            return
        time.sleep(0.05)  # another may be replacing it just now
    raise UsageError(f"{out} exists, and is not a catalog", hint="give another folder with -o")


def _is_replaceable(out: Path) -> bool:
    if not out.exists() and not out.is_symlink():
        return True
    try:
        return (
            not any(out.iterdir())
            or Fields.of(parse_json(read_regular(out / "catalog.json", max_size=_MAX_CATALOG))).size("format") <= FORMAT
        )
    except (OSError, ValueError):
        return False


def _write_folder(shared: SharedStore | None, out: Path, files: dict[str, bytes]) -> None:
    """All of it or nothing."""
    temporary = _hidden(out)
    try:
        for folder in (temporary, temporary / IMAGES):
            folder.mkdir()
            if shared:
                shared.policy.apply_to(folder, 0)
        for name, data in files.items():
            (temporary / name).write_bytes(data)
            if shared:
                shared.policy.apply_to(temporary / name, 0o444)
        _take_name(temporary, out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}", hint="give another folder with -o") from error
    finally:
        if temporary.exists():
            remove_tree(temporary)


def _hidden(out: Path) -> Path:
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}")


def _take_name(temporary: Path, out: Path) -> None:
    """Two renames: for a moment there is none, but never half of one, nor pages of two. Several may do it at once: the last
    one's stays."""
    for attempt in range(_ATTEMPTS):
        old = _hidden(out)
        try:
            with contextlib.suppress(FileNotFoundError):
                out.rename(old)
            temporary.rename(out)
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
