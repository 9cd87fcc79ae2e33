"""Write the catalog of a shared folder atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ekiben.core.checked import Fields, parse_json
from ekiben.core.errors import UsageError
from ekiben.core.inner_path import InnerPath
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
    inner = _inner(shared, out)
    _refuse_other(inner or _below_parent(out))
    imported = import_runs(shared, runs) if runs else ImportedRuns()
    catalog = gather(shared, store, log)
    from ekiben.publish.catalog.pages import relative, render  # imported here: jinja2

    files = render(catalog, relative(shared_dir / IMAGES, out) if inner else None)
    _write_folder(shared if inner else None, inner or _below_parent(out), files)
    return WrittenCatalog(out, catalog, imported)


def _inner(shared: SharedStore, out: Path) -> InnerPath | None:
    """Return ``out`` below the shared folder; None where it lies elsewhere.

    A link in the shared folder is not followed.
    """
    for outer, inner in (
        (os.path.abspath(shared.shared_dir), os.path.abspath(out)),
        (os.path.realpath(shared.shared_dir), os.path.realpath(out)),
    ):
        if (path := PurePosixPath(inner)).is_relative_to(outer):
            return shared.folder / path.relative_to(outer)
    return None


def _below_parent(out: Path) -> InnerPath:
    real = Path(os.path.abspath(out))
    return InnerPath.below(real.parent) / real.name


def _refuse_other(out: InnerPath) -> None:
    """Raise UsageError unless ``out`` is missing, empty, or an earlier catalog."""
    for _ in range(3):
        if _is_replaceable(out):
            return
        time.sleep(0.05)  # another process may be replacing it
    raise UsageError(f"{out} exists, and is not a catalog", hint="give another folder with -o")


def _is_replaceable(out: InnerPath) -> bool:
    try:
        if not out.lexists():
            return True
        if not out.entries():
            return True
        return Fields.of(parse_json((out / "catalog.json").read(max_size=_MAX_CATALOG))).size("format") <= FORMAT
    except (OSError, ValueError):
        return False


def _write_folder(shared: SharedStore | None, out: InnerPath, files: dict[str, bytes]) -> None:
    """Write the folder atomically."""
    temporary = _hidden(out)
    try:
        for folder in (temporary, temporary / IMAGES):
            folder.new_folder((lambda handle: shared.apply_permissions(handle, 0)) if shared else None)
        for name, data in files.items():
            with (temporary / name).create(0o600 if shared else 0o666) as stream:
                stream.write(data)
                if shared:
                    shared.apply_permissions(stream.fileno(), 0o444)
        _take_name(temporary, out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}", hint="give another folder with -o") from error
    finally:
        temporary.remove_tree()


def _hidden(out: InnerPath) -> InnerPath:
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}")


def _take_name(temporary: InnerPath, out: InnerPath) -> None:
    """Rename twice: for a moment no folder has the name, but never half of one. The last writer wins."""
    for attempt in range(_ATTEMPTS):
        old = _hidden(out)
        try:
            with contextlib.suppress(FileNotFoundError):
                out.move(old)
            temporary.move(out)
            return
        except OSError as error:
            beaten = error.errno in (errno.ENOTEMPTY, errno.EEXIST)  # another process took the name in between
            if not beaten and old.lexists():
                old.move(out)
            if not beaten or attempt == _ATTEMPTS - 1:
                raise
        finally:
            old.remove_tree()
