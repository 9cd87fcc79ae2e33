"""plan() and build(): the story on one page.

resolve   recipe → chain of layers with cache keys          (builder.chain)
plan      which of them the store has, and why not           pure, printable
build     obtain each layer, bottom first; name the image
assemble  SIF and Docker image out of the store              (builder.assemble)
verify    every %test in the finished image                  (builder.verify)

What makes layers is imported by the functions that make them: most invocations find everything stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder import oci
from builder.chain import Chain, File, Layer, platform
from builder.errors import DefinitionError, DriftError, LayerError
from builder.progress import Progress
from builder.store import Store, StoredLayer

if TYPE_CHECKING:
    from builder.executors import Executor, Job
    from builder.hostenv import Supply
    from builder.layer import Member


@dataclass(frozen=True, slots=True)
class Action:
    """What is to be done for one layer, and why. ``stored`` is the layer when there is nothing to do."""

    layer: Layer
    stored: StoredLayer | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A finished image in the store. ``image_id`` is the digest of its config: a Docker daemon's image id."""

    name: str
    image_id: str
    config: bytes
    chain: Chain
    layers: tuple[StoredLayer, ...]

    @property
    def tag(self) -> str:
        return f"ekiben/{self.name}:latest"

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    engine: str = "auto"
    mirror: str | None = None
    locked: bool = False
    compression_threads: int | None = None


def image_name(chain: Chain) -> str:
    own = chain.stack.name == chain.recipe.file.stack
    return chain.recipe.name if own else f"{chain.recipe.name}-{chain.stack.name}"


def plan(chain: Chain, store: Store) -> list[Action]:
    """Nothing is written and nothing is run. Every skip and every run carries its reason."""
    actions: list[Action] = []
    for layer in chain.layers:
        stored = store.layer(layer.cache_key)
        rebuilt = any(action.stored is None for action in actions)
        actions.append(Action(layer, stored, "stored" if stored else _why(layer, store, parent_is_rebuilt=rebuilt)))
    return actions


def _why(layer: Layer, store: Store, *, parent_is_rebuilt: bool) -> str:
    last = store.last_inputs(layer.name)
    if last is None:
        return "parent is rebuilt" if parent_is_rebuilt else "never built in this store"
    said = [
        _changed(field, last.get(field), value) for field, value in layer.inputs.items() if last.get(field) != value
    ]
    if not said:
        return "its data is gone from the store"
    return ", ".join(said)


def _changed(field: str, before: Any, now: Any) -> str:
    if field == "parent":
        return "parent changed"
    if field == "post":
        return "%post changed"
    if field == "files":
        old, new = ({item[0]: item[1:] for item in files or []} for files in (before, now))
        names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        return "file changed: " + ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if field == "packages":
        old, new = before or {}, now or {}
        names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        return (
            "Debian packages changed: "
            + ", ".join(names[:3])
            + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        )
    if field == "environment":
        old, new = before or {}, now or {}
        return "environment changed: " + ", ".join(
            sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
        )
    return f"{field} changed"


def build(chain: Chain, store: Store, options: Options, progress: Progress) -> Image:
    """Obtain every layer, bottom first, and name the image. Errors: LayerError, EngineError, StoreError, FetchError."""
    stored = [action.stored for action in plan(chain, store) if action.stored]
    if options.locked:
        refuse_drift([line for layer in stored for line in layer.notes.get("drift", ())])
    if len(stored) < len(chain.layers):
        store.open_for_writing()
        with store.building((layer.cache_key for layer in chain.layers), beside=True):
            return _named(chain, store, _Build(chain, store, options, progress).obtain_all())
    return _named(chain, store, stored)


def _named(chain: Chain, store: Store, layers: Sequence[StoredLayer]) -> Image:
    config = oci.image_config(
        layers, environment=chain.environment, labels=chain.labels, epoch=chain.stack.file.epoch, platform=platform()
    )
    name, image_id = image_name(chain), oci.digest_of(config)
    about = {"config": image_id, "recipe": chain.recipe.name, "stack": chain.stack.name,
             "tasks": {task: file.help for task, file in chain.recipe.file.tasks.items()},
             "keys": [layer.cache_key for layer in layers]}  # fmt: skip
    ref = store.image(name)
    if ref is None or any(ref.get(field) != value for field, value in about.items()):
        store.open_for_writing()
        store.put_blob(config)
        for layer in layers:
            store.note_last(layer.name, layer.cache_key)
        store.put_image(name, oci.store_manifest(config, layers), about)
    return Image(name=name, image_id=image_id, config=config, chain=chain, layers=tuple(layers))


class _Build:
    """One run of build(): the executor is chosen when the first %post needs it, and then kept."""

    def __init__(self, chain: Chain, store: Store, options: Options, progress: Progress) -> None:
        self.chain, self.store, self.options, self.progress = chain, store, options, progress
        self._executor: tuple[str, Executor] | None = None
        self._supply: Supply | None = None

    @property
    def supply(self) -> Supply:
        if self._supply is None:
            from builder.hostenv import site_supply

            self._supply = site_supply(self.chain.stack, self.options.mirror)
        return self._supply

    @property
    def executor(self) -> tuple[str, Executor]:
        if self._executor is None:
            from builder.executors import choose

            name, executor, why = choose(self.options.engine)
            self.progress.tell(f"engine {name}: {why}")
            self._executor = name, executor
        return self._executor

    def obtain_all(self) -> list[StoredLayer]:
        self.refuse_unlocked()
        done: list[StoredLayer] = []
        for layer, action in zip(self.chain.layers, plan(self.chain, self.store), strict=True):
            done.append(self.obtain(layer, done, action.reason))
        return done

    def refuse_unlocked(self) -> None:
        """Before anything is built. Errors: DefinitionError when a lock file says that it could not lock something."""
        stack = self.chain.stack
        locks = {file.source for layer in self.chain.layers for file in layer.files
                 if file.source and file.source.suffix == ".lock" and not self.store.layer(layer.cache_key)}  # fmt: skip
        if missing := [f"{lock}: {line} is not locked" for lock in sorted(locks) for line in stack.unlocked(lock)]:
            raise DefinitionError("\n".join(missing), hint="where an index that has it can be reached: "
                                  f"UV_EXTRA_INDEX_URL=<index> build.py lock {stack.name} --keep")  # fmt: skip

    def obtain(self, layer: Layer, lower: Sequence[StoredLayer], reason: str) -> StoredLayer:
        def say_waiting() -> None:
            self.progress.tell(f"layer {layer.name}: another process is building it; waiting")

        if stored := self.store.layer(layer.cache_key):
            return stored
        with self.store.lock(layer.cache_key, say_waiting):
            if stored := self.store.layer(layer.cache_key):  # that other process did it
                return stored
            with self.progress.step(f"layer {layer.name} ({reason})"):
                return self.make(layer, lower)

    def make(self, layer: Layer, lower: Sequence[StoredLayer]) -> StoredLayer:
        from builder.layer import DigestSink, pour
        from builder.squashfs import SquashfsWriter

        began = time.monotonic()
        with self.store.staging() as staging:
            blob, digest = staging / "layer.squashfs", DigestSink()
            notes: dict[str, Any] = {}
            with self.members(layer, lower, staging, notes) as members, blob.open("w+b") as out:
                pour(members, digest, SquashfsWriter(out, epoch=layer.epoch))
            known = {line for item in lower for line in item.notes.get("drift", ())}
            if drift := [line for line in self.drift(blob) if line not in known]:
                notes["drift"] = drift
            with blob.open("rb") as stream:
                blob_digest = "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
            size = blob.stat().st_size
            self.store.put_file(blob, blob_digest)
        made = StoredLayer(
            name=layer.name, cache_key=layer.cache_key, diff_id=digest.diff_id, tar_size=digest.size,
            digest=blob_digest, size=size, executor=notes.pop("executor", "none"),
            seconds=round(time.monotonic() - began, 2), inputs=layer.inputs, notes=notes,
        )  # fmt: skip
        self.store.put_layer(made)
        return made

    @contextlib.contextmanager
    def members(
        self, layer: Layer, lower: Sequence[StoredLayer], staging: Path, notes: dict[str, Any]
    ) -> Iterator[Iterator[Member]]:
        """What the layer holds, by its kind."""
        from builder.capture import Lower, canonical, file_members
        from builder.executors import JobFailed
        from builder.hostenv import build_environment, write_host_files
        from builder.squashfs import SquashfsReader

        with contextlib.ExitStack() as stack:
            if layer.kind == "bootstrap":
                from builder.bases import base_members  # late: most invocations make no base

                log = stack.enter_context(self.log(layer))
                yield base_members(layer, staging, notes, supply=self.supply, log=log.line)
                return
            below = Lower([SquashfsReader(stack.enter_context(self.store.blob_path(item.digest).open("rb")))
                           for item in reversed(lower)])  # fmt: skip
            if layer.kind == "files":
                yield file_members(layer.files, below, epoch=layer.epoch)
                return
            log = stack.enter_context(self.log(layer))
            notes["executor"], executor = self.executor
            for item in lower:
                self.store.check_blob(item.digest)
            assert layer.stage is not None
            (staging / "mount").mkdir()
            lent = write_host_files(staging / "mount", self.supply)
            job = prepare_job(
                layer.name, layer.stage.post, {**layer.environment, **build_environment(layer.epoch), **lent},
                lower, self.store, staging, files=layer.files, log=log.line,
            )  # fmt: skip
            try:
                changes = stack.enter_context(executor.execute(job))
            except JobFailed as error:
                raise LayerError(log.failure(layer, error.returncode)) from error
            yield canonical(changes.archive, below, epoch=layer.epoch, deleted=changes.deleted, opaque=changes.opaque)

    @contextlib.contextmanager
    def log(self, layer: Layer) -> Iterator[_Log]:
        path = (
            self.store.root / "logs" / f"{self.chain.recipe.name}-{layer.name}-{layer.cache_key[:8]}-{os.getpid()}.log"
        )
        with path.open("w", encoding="utf-8", errors="replace") as stream:
            yield _Log(path, stream, self.progress)

    def drift(self, blob: Path) -> list[str]:
        """Debian packages whose version is not the locked one. Errors: DriftError under --locked."""
        from builder.squashfs import SquashfsReader

        locked = self.chain.stack.apt_lock().packages
        with blob.open("rb") as stream:
            reader = SquashfsReader(stream)
            entry = reader.lookup(_DPKG_STATUS) if locked else None
            status = reader.read_file(_DPKG_STATUS).decode() if entry and entry.kind == "file" else ""
        found = [f"{name} {locked[name]} → {version}" for name, version in installed_packages(status).items()
                 if name in locked and locked[name] != version]  # fmt: skip
        if self.options.locked:
            refuse_drift(found)
        for line in found:
            self.progress.tell(f"drift: {line}")
        return found


def refuse_drift(found: Sequence[str]) -> None:
    """Errors: DriftError when there is any."""
    if found:
        raise DriftError("other versions than the locked ones, which the mirror does not have:\n  " + "\n  ".join(found),
                         hint="`build.py lock` locks today's; without --locked the drift is recorded in the image")  # fmt: skip


_DPKG_STATUS = "var/lib/dpkg/status"


def installed_packages(status: str) -> dict[str, str]:
    """Package → version out of dpkg's status file."""
    records = (dict(line.split(": ", 1) for line in record.splitlines() if ": " in line and line[0] != " ")
               for record in status.split("\n\n"))  # fmt: skip
    return {record["Package"]: record["Version"] for record in records if "Package" in record and "Version" in record}


def prepare_job(
    name: str, script: str, environment: Mapping[str, str], lower: Sequence[StoredLayer], store: Store, staging: Path, *,
    files: Sequence[File] = (), log: Callable[[str], None],
) -> Job:  # fmt: skip
    """The folders a job needs, with its run.sh; the caller adds what the host lends."""
    from builder.executors import Job, write_run_script

    mount, scratch = staging / "mount", staging / "scratch"
    mount.mkdir(exist_ok=True)
    scratch.mkdir()
    cache = store.root.parent / ("cache" if os.geteuid() else "cache-root")  # a daemon's root and a user don't mix
    for folder in ("uv", "apt/partial"):
        (cache / folder).mkdir(parents=True, exist_ok=True)
    if files:
        (mount / "files.tar").write_bytes(_files_tar(files))
    write_run_script(mount, environment, script)
    return Job(name=name, store=store, lower=lower, mount=mount, cache=cache, scratch=scratch, log=log)


def _files_tar(files: Sequence[File]) -> bytes:
    """What %files brings, for the executor to unpack before %post. Lock files and scripts: small."""
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for file in files:
            info = tarfile.TarInfo(file.destination.lstrip("/"))
            info.size, info.mode = file.size, file.mode
            with file.source.open("rb") if file.source else io.BytesIO(file.content) as content:
                tar.addfile(info, content)
    return buffer.getvalue()


class _Log:
    """A layer's log: every line is kept in a file, the last ones in memory for the error message."""

    def __init__(self, path: Path, stream: io.TextIOWrapper, progress: Progress) -> None:
        self.path, self._stream, self._progress = path, stream, progress
        self._last: list[str] = []

    def line(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
        self._last = [*self._last[-19:], line]
        self._progress.note(line)

    def failure(self, layer: Layer, returncode: int) -> str:
        where = f"%post of {layer.name}" + (f" ({layer.stage and layer.name}.def)" if layer.stage else "")
        killed = " (killed: out of memory?)" if returncode in (137, -9) else ""
        tail = "\n".join(f"  {line}" for line in self._last)
        return (
            f"{where} failed with exit code {returncode}{killed}. Its last lines:\n{tail}\nthe whole log: {self.path}"
        )
