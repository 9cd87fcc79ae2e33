"""Installs the lock file of a wheel layer without copies: hard links into uv's cache, compiled files from a cache.

The bytes are those that the layer's %post makes, by images/scripts/install.py; where the two could differ, the %post
runs. No script of a recipe may write to the caches: a container that has them runs install_wheels.py alone, on the
layers up to the highest one that is no wheel layer, and these are Ekiben's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiben.builder.shipped import is_shipped
from ekiben.core.decisions import log_decision
from ekiben.core.environment import build_environment
from ekiben.core.errors import EngineError
from ekiben.core.files import make_folders, remove_tree
from ekiben.core.paths import BUILD_MOUNT, PROJECT_ROOT
from ekiben.core.process_name import has_ended, process_name
from ekiben.executors import Executor, Job, JobFailed, Script, write_run_script
from ekiben.formats.changeset import Lower, normalize
from ekiben.formats.layer import File, LayerEntry
from ekiben.formats.upper import Changes
from ekiben.packages.host_config import PackageSources, write_host_files
from ekiben.resolve.graph import Layer, ResolvedRecipe
from ekiben.resolve.keys import hash_inputs
from ekiben.resolve.wheel_layers import (
    INSTALLER,
    SHRINKER,
    ends_with_install,
    installed_lock,
    is_wheel_layer,
)
from ekiben.spec.stack import Stack
from ekiben.store import Store, StoredLayer, bind_layers

_IMAGES = PROJECT_ROOT / "images"
_PROGRAM = _IMAGES / "scripts/install_wheels.py"
_SCRIPTS = {INSTALLER: "install.py", SHRINKER: "strip_packages.py"}
_CACHE = f"/{BUILD_MOUNT}/cache"
_REQUIREMENT = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)", re.MULTILINE)
_TEMPORARY = "stage-"


class _NotEqualError(Exception):
    """The %post could make other bytes, or did not succeed here: it runs."""


@dataclass(frozen=True, slots=True)
class WheelInstaller:
    """Installs lock files under one executor. ``sources`` are the site's settings of uv."""

    store: Store
    resolved: ResolvedRecipe
    executor: Executor
    sources: PackageSources
    log: Callable[[str], None]

    @contextlib.contextmanager
    def install(
        self, layer: Layer, lower: Sequence[StoredLayer], below: Lower
    ) -> Iterator[Iterator[LayerEntry] | None]:
        """Yield the entries of a wheel layer on ``lower``, which ``below`` shows; None where its %post has to run.

        Raises StoreError.
        """
        with contextlib.ExitStack() as stack:
            try:
                entries = self._install(layer, lower, below, stack)
            except (_NotEqualError, JobFailed, EngineError, OSError) as error:
                log_decision(f"layer {layer.name}", "its %post runs", f"no hard links: {error}")
                yield None
                return
            yield entries

    def _install(
        self, layer: Layer, lower: Sequence[StoredLayer], below: Lower, stack: contextlib.ExitStack
    ) -> Iterator[LayerEntry]:
        site = f"opt/venv/lib/python{self.resolved.stack.file.python}/site-packages"
        count = _used_layers(lower)
        _check_layers(lower, below, self.store)
        _check_packages(layer, below, site)
        for item in lower[:count]:
            self.store.check_blob(item.digest)
        if (caches := trusted_caches(lower[:count], self.resolved.stack, self.store)) is None:
            raise _NotEqualError("a layer below is not one of Ekiben's")
        folder = caches / f"{_TEMPORARY}{process_name()}-{secrets.token_hex(4)}"
        stack.callback(remove_tree, folder)
        upper = folder / "upper"
        make_folders(upper / "opt/venv")
        _write_files(layer, upper)
        with self.store.staging() as staging:
            self.executor.try_run(self._job(layer, lower[:count], staging, folder, _torch_version(below, site)))
        _check_shared(upper, below, site)
        log_decision(f"layer {layer.name}", "installed by hard links", f"caches in {caches}")
        return normalize(Changes(upper, installed=layer.epoch), below, epoch=layer.epoch)

    def _job(self, layer: Layer, lower: Sequence[StoredLayer], staging: Path, folder: Path, torch: str) -> Job:
        mount, scratch = staging / "mount", staging / "scratch"
        mount.mkdir()
        scratch.mkdir()
        settings = write_host_files(mount, self.sources)
        inside = f"{_CACHE}/{folder.name}/upper"
        job = {
            "lock": inside + str(_lock_of(layer)),
            "prefix": f"{inside}/opt/venv",
            "torch": torch,
            "compiled": f"{_CACHE}/compiled",
        }
        (mount / "job.json").write_text(json.dumps(job), encoding="utf-8")
        (mount / "install_wheels.py").write_bytes(_PROGRAM.read_bytes())
        command = f"exec /opt/venv/bin/python -I /{BUILD_MOUNT}/install_wheels.py /{BUILD_MOUNT}/job.json\n"
        environment = {**layer.environment, **build_environment(layer.epoch), **settings}
        write_run_script(mount, Script(layer.name, command, environment))
        return Job(
            name=layer.name,
            lower=bind_layers(self.store, lower),
            mount=mount,
            cache=folder.parent,
            scratch=scratch,
            staging=self.store.staging_root,
            log=self.log,
        )


def trusted_caches(layers: Sequence[Layer | StoredLayer], stack: Stack, store: Store) -> Path | None:
    """Return the folder of the caches that scripts of recipes never see, for a container that runs or shows ``layers``;
    None where they are not all Ekiben's. Remove what killed commands left there.
    """
    if not all(is_shipped(item, stack.arch) for item in layers):
        return None
    caches = store.wheels / stack.platform.replace("/", "-")
    for name in ("uv", "apt/partial", "compiled"):
        make_folders(caches / name)
    for left in caches.glob(f"{_TEMPORARY}*"):
        if has_ended(left.name.removeprefix(_TEMPORARY).rpartition("-")[0]):
            remove_tree(left)
    return caches


def is_installable(layer: Layer) -> bool:
    """Return whether a layer installs a lock file, and does nothing else."""
    return is_wheel_layer(layer.inputs) and not layer.copies and not layer.scripts and _lock_of(layer) is not None


def _lock_of(layer: Layer) -> str | None:
    """Return the path in the image of the layer's lock file, where that is one of its files."""
    lock = installed_lock(layer.stage.post) if layer.stage else None
    return lock if any(file.destination == lock for file in layer.files) else None


def _used_layers(lower: Sequence[StoredLayer]) -> int:
    """Return how many of the layers below a container needs: those up to the highest that is no wheel layer."""
    return max((number for number, item in enumerate(lower, 1) if not is_wheel_layer(item.inputs)), default=0)


def _check_layers(lower: Sequence[StoredLayer], below: Lower, store: Store) -> None:
    """Raise _NotEqualError unless install.py is Ekiben's, and all that is in the environment was left by it."""
    for path, name in _SCRIPTS.items():
        entry = below.lookup(path[1:])
        if entry is None or entry.kind != "file":
            raise _NotEqualError(f"{path} is not in the layers below")
        if below.read_file(path[1:]) != (_IMAGES / "scripts" / name).read_bytes():
            raise _NotEqualError(f"{path} is of another version")
    for item in reversed(lower):
        with store.reader(item.digest) as reader:
            if reader.lookup("opt/venv") is None:
                continue
        if ends_with_install(item.inputs) and hash_inputs(item.inputs) == item.cache_key:
            return
        raise _NotEqualError(f"layer {item.name} changes /opt/venv")
    raise _NotEqualError("/opt/venv is not in the layers below")


def _check_packages(layer: Layer, below: Lower, site: str) -> None:
    """Raise _NotEqualError where a package of the lock file is in the layers below."""
    text = next(_content(file) for file in layer.files if file.destination == _lock_of(layer)).decode()
    locked = {_normal(name) for name in _REQUIREMENT.findall(text)}
    names = [path.rpartition("/")[2] for path in below.children(site)]
    installed = {_normal(name.partition("-")[0]) for name in names if name.endswith((".dist-info", ".egg-info"))}
    if both := sorted(locked & installed):
        raise _NotEqualError(f"{both[0]} is in a layer below")


def _content(file: File) -> bytes:
    with file.open() as stream:
        return stream.read()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _torch_version(below: Lower, site: str) -> str:
    """Return torch/version.py of the layers below, which says which libraries of bitsandbytes are kept; or ""."""
    path = f"{site}/torch/version.py"
    entry = below.lookup(path)
    return below.read_file(path).decode() if entry and entry.kind == "file" else ""


def _write_files(layer: Layer, upper: Path) -> None:
    """Write the layer's %files, with the time that they have in a tar."""
    for file in layer.files:
        path = upper / file.destination.lstrip("/")
        make_folders(path.parent)
        path.write_bytes(_content(file))
        path.chmod(file.mode)
        os.utime(path, (0, 0))


def _check_shared(upper: Path, below: Lower, site: str) -> None:
    """Raise _NotEqualError where a file replaces one of the layers below, or joins a package that is not compiled."""
    for path in _shared(upper, "", below):
        if not (upper / path).is_dir() or (upper / path).is_symlink():
            raise _NotEqualError(f"/{path} is in a layer below")
        if path.rpartition("/")[0] == site and not path.endswith("__pycache__"):
            _check_compiled(path, below)


def _shared(upper: Path, folder: str, below: Lower) -> Iterator[str]:
    """Yield the paths of ``upper`` that are in the layers below."""
    for child in sorted((upper / folder).iterdir()):
        path = f"{folder}/{child.name}".lstrip("/")
        if (entry := below.lookup(path)) is None:
            continue
        yield path
        if child.is_dir() and not child.is_symlink() and entry.kind == "dir":
            yield from _shared(upper, path, below)


def _check_compiled(folder: str, below: Lower) -> None:
    children = below.children(folder)
    compiled = {path.rpartition("/")[2].partition(".")[0] for path in below.children(f"{folder}/__pycache__")}
    for path in children:
        entry, name = below.lookup(path), path.rpartition("/")[2]
        if entry is not None and entry.kind == "dir" and name != "__pycache__":
            _check_compiled(path, below)
        elif name.endswith(".py") and name.partition(".")[0] not in compiled:
            raise _NotEqualError(f"/{path} is not compiled")
