"""Find plug-ins of a package: a file in its folder, or an entry point of another
distribution.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from ekiben.core.errors import UsageError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def names(package: str, group: str) -> list[str]:
    """Name every module that the folder of ``package`` holds or the entry point group ``group`` offers, sorted.

    A module whose name begins with an underscore is a helper of others. Nothing is imported, ``package`` itself
    included.
    """
    return sorted({*_in_folder(package), *(entry.name for entry in _offered(group))})


def load(package: str, group: str, name: str, *, option: str, kind: str) -> ModuleType:
    """Import the module called ``name``; the package's own comes before an entry point of the same name.

    ``option`` and ``kind`` name in errors where the name came from and what it should be: ``--engine``, ``engine``.

    Raises:
        UsageError: no module has this name, or an entry point's module cannot be imported.
    """
    check(package, group, name, option=option, kind=kind)
    if name in _in_folder(package):
        return import_module(f"{package}.{name}")
    entry = next(entry for entry in _offered(group) if entry.name == name)
    return _load_entry(entry, group)


def check(package: str, group: str, name: str, *, option: str, kind: str, also: tuple[str, ...] = ()) -> None:
    """Accept ``name`` when a module or ``also`` has it.

    Raises:
        UsageError: neither has; the message names the nearest that is known.
    """
    if name in also or name in _in_folder(package):
        return
    known = [*also, *names(package, group)]
    if name not in known:
        raise UsageError(f"{option}: no {kind} '{name}'." + nearest(name, known))


def _in_folder(package: str) -> Iterator[str]:
    loaded = sys.modules.get(package)
    spec = None if loaded else find_spec(package)
    path = loaded.__path__ if loaded else spec.submodule_search_locations if spec else None
    return (module.name for module in pkgutil.iter_modules(path or ()) if not module.name.startswith("_"))


def _offered(group: str) -> Iterable[EntryPoint]:
    return _offered_on(tuple(sys.path), group)


@functools.cache
def _offered_on(path: tuple[str, ...], group: str) -> Iterable[EntryPoint]:
    """Return the entry points of ``group`` on ``path``. Cached: reading takes milliseconds, and jobs ask 130 times."""
    from importlib.metadata import (
        entry_points,
    )  # reads installed distributions: only for a name that is not in the folder

    return entry_points(group=group)


def _load_entry(entry: EntryPoint, group: str) -> ModuleType:
    try:
        module = entry.load()
    except (ImportError, AttributeError) as error:
        origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an installed distribution"
        raise UsageError(f"{entry.name}, which {origin} offers as {group}, cannot be imported: {error}") from error
    if not isinstance(module, ModuleType):
        raise UsageError(f"{entry.name}, offered as {group}, is {module!r}; it should be a module")
    return module
