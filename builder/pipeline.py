"""plan() and build(): the story on one page.

resolve   recipe → chain of layers with cache keys          (builder.chain)
plan      which of them the store has, and why not           pure, printable
build     obtain each layer, bottom first; name the image
          (for one with build stages: what they hand over,
          compiled first, kept when the layer passes its test) (builder.stages)
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builder import oci
from builder.chain import BuildStage, Chain, File, Layer, Taken, platform, stages_of
from builder.definition import expand
from builder.errors import DefinitionError, DriftError, LayerError, VerifyError
from builder.progress import Progress
from builder.store import Store, StoredLayer, StoredResult

if TYPE_CHECKING:
    from builder.capture import Lower
    from builder.executors import Executor, Job
    from builder.hostenv import Supply
    from builder.layer import Member
    from builder.pull import LayerCache
    from builder.stages import Stages


@dataclass(frozen=True, slots=True)
class Action:
    """What is to be done for one layer, and why. ``stored`` is the layer when there is nothing to do; ``needs`` is what
    the build stages it takes from come to, in order; ``in_registry``: it would be fetched (see ask_registry)."""

    layer: Layer
    stored: StoredLayer | None
    reason: str
    needs: tuple[Need, ...] = ()
    in_registry: bool = False


@dataclass(frozen=True, slots=True)
class Need:
    """A build stage, or a layer that only build stages stand on."""

    step: Layer | BuildStage
    is_stored: bool
    reason: str
    in_registry: bool = False


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
    supply: Supply | None = None  # where packages come from, instead of the site's mirrors and indexes
    compression_threads: int | None = None
    registry: str | None = None  # asked for a layer before it is built


def image_name(chain: Chain) -> str:
    return chain.recipe.image_name(chain.stack.name)


def plan(chain: Chain, store: Store) -> list[Action]:
    """An action for each layer, bottom first. Nothing is written and nothing is run. Every skip and every run carries its
    reason."""
    return _plan_layers(chain.layers, store)


def ask_registry(actions: Sequence[Action], cache: LayerCache) -> list[Action]:
    """What build() would fetch is not built, and nothing is for it."""
    why = f"from {cache.registry.reference}"

    def asked(need: Need) -> Need:
        if not isinstance(need.step, Layer) or need.is_stored or not cache.has(need.step.cache_key):
            return need
        return replace(need, reason=why, in_registry=True)

    def planned(action: Action) -> Action:
        if action.stored is None and cache.has(action.layer.cache_key):
            return replace(action, reason=why, needs=(), in_registry=True)
        return replace(action, needs=tuple(map(asked, action.needs)))

    return list(map(planned, actions))


def _plan_layers(layers: Sequence[Layer], store: Store) -> list[Action]:
    actions: list[Action] = []
    for layer in layers:
        stored = store.layer(layer.cache_key)
        rebuilt = any(action.stored is None for action in actions)
        reason = "stored" if stored else _why(layer, store, parent_is_rebuilt=rebuilt)
        actions.append(Action(layer, stored, reason, () if stored else tuple(_plan_stages(layer.taken, layers, store))))
    return actions


def _plan_stages(taken: Sequence[Taken], shipped: Sequence[Layer], store: Store) -> Iterator[Need]:
    own = {layer.cache_key for layer in shipped}
    for stage in stages_of(taken):
        if stored := store.result(stage.cache_key):
            yield Need(stage, True, f"stored, {stored.origin}")
            continue
        yield from _plan_stages(stage.taken, shipped, store)
        yield from (Need(action.layer, False, action.reason) for action in _plan_layers(stage.layers, store)
                    if not action.stored and action.layer.cache_key not in own)  # fmt: skip
        yield Need(stage, False, _why(stage, store, parent_is_rebuilt=False))


def _why(layer: Layer | BuildStage, store: Store, *, parent_is_rebuilt: bool) -> str:
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
    if field == "from":
        return "what a build stage hands over changed"
    if field == "capabilities":
        return f"compute capabilities changed: {' '.join(before or ())} → {' '.join(now)}"
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
    actions = plan(chain, store)
    stored = [action.stored for action in actions if action.stored]
    if options.locked:
        refuse_drift([line for layer in stored for line in layer.notes.get("drift", ())])
    if len(stored) < len(chain.layers):
        store.open_for_writing()
        is_large = any(action.stored is None and action.layer.kind != "files" for action in actions)
        with store.building((layer.cache_key for layer in _all_layers(chain.layers)), beside=is_large):
            return _named(chain, store, _Build(chain, store, options, progress).obtain_all())
    return _named(chain, store, stored)


def _all_layers(layers: Sequence[Layer]) -> Iterator[Layer]:
    """With those that build stages stand on."""
    for layer in layers:
        yield layer
        for item in layer.taken:
            yield from _all_layers(item.stage.layers)


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


def obtain_layers(
    chain: Chain, store: Store, options: Options, progress: Progress, layers: Sequence[Layer]
) -> list[StoredLayer]:
    """Layers that a build stage of ``chain`` stands on, made where the store has them not. Errors: as build()'s."""
    store.open_for_writing()
    with store.building(layer.cache_key for layer in layers):
        return _Build(chain, store, options, progress).obtain_layers(layers)


def adopt_wheel(
    chain: Chain, store: Store, options: Options, progress: Progress, wheel: Path, sha256: str | None = None
) -> StoredResult:
    """Take a wheel compiled elsewhere: prove it, make the layer it is for, run that layer's %test, keep both.

    Errors: UsageError when the chain compiles no such package; VerifyError when the wheel is not for it.
    """
    from builder import wheels

    digest = wheels.digest_of(wheel)
    if sha256 and digest != f"sha256:{sha256.lower().removeprefix('sha256:')}":
        raise VerifyError(f"{wheel} has the hash {digest[7:]}, not the one asked for; it is not taken")
    stage = wheels.stage_for(chain, wheel)
    record = wheels.read_record(wheel, stage)
    if (there := store.result(stage.cache_key)) is not None:
        if digest in [file.digest for file in there.files]:
            return there
        raise VerifyError(f"there is a wheel for {stage.name} already ({there.origin}), with other bytes; two of one key "
                          "would make two images of one key", hint="build.py prune --wheels removes one that no image needs")  # fmt: skip
    store.open_for_writing()
    with store.building(layer.cache_key for layer in _all_layers(chain.layers)):
        build = _Build(chain, store, options, progress)
        taken = build.stages.adopt(stage, wheel, record)
        at = next(number for number, layer in enumerate(chain.layers, 1) if stage in stages_of(layer.taken))
        made = build.obtain_layers(chain.layers[:at])[-1]
        if (
            store.result(stage.cache_key) is None
        ):  # the layer was there: it is proof enough, if it holds this very wheel
            if digest[7:] not in made.notes.get("handed over", {}).values():
                raise VerifyError(f"{made.name} is in the store, made with another wheel than {wheel}; it is not taken")
            store.put_result(taken)
    return taken


class _Build:
    """One run of build(): the executor is chosen when the first %post needs it, and then kept."""

    def __init__(self, chain: Chain, store: Store, options: Options, progress: Progress) -> None:
        self.chain, self.store, self.options, self.progress = chain, store, options, progress
        self._executor: tuple[str, Executor] | None = None
        self._supply: Supply | None = None
        self._stages: Stages | None = None
        self._cache: LayerCache | None = None
        self._last_script: str | None = None  # the key of the last layer whose %post is to be run

    @property
    def stages(self) -> Stages:
        if self._stages is None:
            from builder.stages import Stages

            self._stages = Stages(self)
        return self._stages

    @property
    def supply(self) -> Supply:
        if self._supply is None:
            from builder.hostenv import site_supply

            self._supply = self.options.supply or site_supply(self.chain.stack, self.options.mirror)
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
        scripts = [layer.cache_key for layer in self.chain.layers
                   if layer.kind == "post" and not self.store.layer(layer.cache_key)]  # fmt: skip
        self._last_script = scripts[-1] if scripts else None
        return self.obtain_layers(self.chain.layers)

    def obtain_layers(self, layers: Sequence[Layer]) -> list[StoredLayer]:
        done: list[StoredLayer] = []
        for layer, action in zip(layers, _plan_layers(layers, self.store), strict=True):
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
            if stored := self.store.layer(layer.cache_key) or self.fetch(
                layer
            ):  # that other process did it, or another machine
                return stored
            if not layer.taken:
                with self.progress.step(f"layer {layer.name} ({reason})"):
                    made = self.make(layer, lower)
            else:
                made = self.make_with_stages(layer, lower, reason)
            self.store.put_layer(made)
            return made

    def fetch(self, layer: Layer) -> StoredLayer | None:
        if self.options.registry is None:
            return None
        if self._cache is None:
            from builder.pull import LayerCache

            self._cache = LayerCache(self.options.registry, self.progress)
        return self._cache.fetch(layer.cache_key, self.store)

    def make_with_stages(self, layer: Layer, lower: Sequence[StoredLayer], reason: str) -> StoredLayer:
        """What is compiled for the layer is kept when the layer that holds it has passed its %test."""
        with self.stages.results(layer.taken) as results:
            with self.progress.step(f"layer {layer.name} ({reason})"):
                made = self.make(layer, lower, self.stages.handed_files(layer.taken, results))
                if self.stages.are_new(results):
                    self.run_test(layer, [*lower, made])
            self.stages.keep(results)
        return made

    def make(self, layer: Layer, lower: Sequence[StoredLayer], handed: Sequence[File] = ()) -> StoredLayer:
        """The layer, its blob in the store and its record not yet."""
        from builder.layer import DigestSink, pour
        from builder.squashfs import SquashfsWriter

        began = time.monotonic()
        with self.store.staging() as staging:
            blob, digest = staging / "layer.squashfs", DigestSink()
            notes: dict[str, Any] = {}
            with (
                self.members(layer, lower, staging, notes, handed) as members,
                blob.open("w+b") as out,
            ):
                pour(members, digest, SquashfsWriter(out, epoch=layer.epoch))
            known = {line for item in lower for line in item.notes.get("drift", ())}
            if drift := [line for line in self.drift(layer, blob) if line not in known]:
                notes["drift"] = drift
            if handed:
                notes["handed over"] = {file.destination: file.sha256() for file in handed}
            with blob.open("rb") as stream:
                blob_digest = "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
            size = blob.stat().st_size
            self.store.put_file(blob, blob_digest)
        return StoredLayer(
            name=layer.name, cache_key=layer.cache_key, diff_id=digest.diff_id, tar_size=digest.size,
            digest=blob_digest, size=size, executor=notes.pop("executor", "none"),
            seconds=round(time.monotonic() - began, 2), inputs=layer.inputs, notes=notes,
        )  # fmt: skip

    @contextlib.contextmanager
    def members(
        self, layer: Layer, lower: Sequence[StoredLayer], staging: Path, notes: dict[str, Any], handed: Sequence[File]
    ) -> Iterator[Iterator[Member]]:
        """What the layer holds, by its kind."""
        from builder.capture import file_members

        with contextlib.ExitStack() as stack:
            if layer.kind == "bootstrap":
                from builder.bases import base_members  # late: most invocations make no base

                log = stack.enter_context(self.log(layer))
                yield base_members(layer, staging, notes, supply=self.supply, log=log.line)
                return
            files = (*layer.files, *handed)
            if layer.kind == "files":
                yield file_members(files, stack.enter_context(self.below(lower)), epoch=layer.epoch)
                return
            from builder.executors import JobFailed

            log = stack.enter_context(self.log(layer))
            try:
                yield stack.enter_context(self.run_post(layer, lower, staging, files, log.line, notes))
            except JobFailed as error:
                raise LayerError(log.failure(layer, error.returncode)) from error

    @contextlib.contextmanager
    def run_post(
        self, step: Layer | BuildStage, lower: Sequence[StoredLayer], staging: Path, files: Sequence[File],
        log: Callable[[str], None], notes: dict[str, Any], settings: Mapping[str, str] | None = None,
    ) -> Iterator[Iterator[Member]]:  # fmt: skip
        """Run a step's %post on the layers below; inside the context what it changed can be read, once. ``settings`` are
        variables that are no input. Errors: JobFailed."""
        from builder.capture import canonical
        from builder.hostenv import build_environment, write_host_files
        from builder.sources import lend_repositories

        notes["executor"], executor = self.executor
        for item in lower:
            self.store.check_blob(item.digest)
        assert step.stage is not None
        (staging / "mount").mkdir()
        lent = write_host_files(staging / "mount", self.supply)
        if "GIT_CONFIG_COUNT" not in self.supply.environment:  # else a bundle says where git goes
            lent = {**lent, **lend_repositories(step.stage.arguments, staging / "mount")}
        job = prepare_job(
            step.name, step.stage.post, {**step.environment, **build_environment(step.epoch), **lent, **(settings or {})},
            lower, self.store, staging, files=files, log=log,
        )  # fmt: skip
        with self.below(lower) as below, executor.execute(job) as changes:
            if step.cache_key == self._last_script:
                self.store.remove_left()
            yield canonical(changes.upper, below, epoch=step.epoch, deleted=changes.deleted, opaque=changes.opaque)

    @contextlib.contextmanager
    def below(self, lower: Sequence[StoredLayer]) -> Iterator[Lower]:
        from builder.capture import Lower

        with contextlib.ExitStack() as stack:
            yield Lower([stack.enter_context(self.store.reader(item.digest)) for item in reversed(lower)])

    def run_test(self, layer: Layer, layers: Sequence[StoredLayer]) -> None:
        """A layer's own %test on ``layers``, of which it is the last. Errors: VerifyError."""
        from builder.executors import JobFailed
        from builder.hostenv import build_environment

        assert layer.stage is not None
        lines: list[str] = []
        with self.store.staging() as staging:
            settings = {**expand(layer.stage.environment, layer.environment), **build_environment(layer.epoch)}
            job = prepare_job(
                f"{layer.name}-test", layer.stage.test, settings, layers, self.store, staging, log=lines.append
            )
            try:
                self.executor[1].try_run(job)
            except JobFailed as error:
                tail = "\n".join(f"  {line}" for line in lines[-20:])
                raise VerifyError(
                    f"%test of {layer.name} failed with exit code {error.returncode}. Its last lines:\n{tail}"
                ) from error

    @contextlib.contextmanager
    def log(self, step: Layer | BuildStage) -> Iterator[Log]:
        path = self.store.root / "logs" / f"{self.chain.recipe.name}-{step.name}-{step.cache_key[:8]}-{os.getpid()}.log"
        with path.open("w", encoding="utf-8", errors="replace") as stream:
            yield Log(path, stream, self.progress)

    def drift(self, layer: Layer, blob: Path) -> list[str]:
        """Debian packages whose version is not the locked one. Errors: DriftError under --locked."""
        if layer.kind == "files":  # they install nothing
            return []
        from builder.contents import DPKG_STATUS, installed_packages
        from builder.squashfs import SquashfsReader

        locked = self.chain.stack.apt_lock().packages
        with blob.open("rb") as stream:
            reader = SquashfsReader(stream)
            entry = reader.lookup(DPKG_STATUS) if locked else None
            status = reader.read_file(DPKG_STATUS).decode() if entry and entry.kind == "file" else ""
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


def prepare_job(
    name: str, script: str, environment: Mapping[str, str], lower: Sequence[StoredLayer], store: Store, staging: Path, *,
    files: Sequence[File] = (), log: Callable[[str], None],
) -> Job:  # fmt: skip
    """The folders a job needs, with its run.sh; the caller adds what the host lends."""
    from builder.executors import Job, write_run_script

    mount, scratch = staging / "mount", staging / "scratch"
    mount.mkdir(exist_ok=True)
    scratch.mkdir()
    cache = store.cache
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


class Log:
    """A step's log: every line is kept in a file, the last ones in memory for the error message. ``read_state`` may make
    something better to show of a line than the line."""

    def __init__(self, path: Path, stream: io.TextIOWrapper, progress: Progress) -> None:
        self.path, self._stream, self._progress = path, stream, progress
        self._last: list[str] = []
        self.read_state: Callable[[str], str | None] = lambda line: line

    def line(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
        self._last = [*self._last[-19:], line]
        if (state := self.read_state(line)) is not None:
            self._progress.note(state)

    def tail(self) -> str:
        return "\n".join(f"  {line}" for line in self._last) + f"\nthe whole log: {self.path}"

    def failure(self, step: Layer | BuildStage, returncode: int) -> str:
        where = f"%post of {step.name}" + (f" ({step.stage and step.name.split('.')[0]}.def)" if step.stage else "")
        killed = " (killed: out of memory?)" if returncode in (137, -9) else ""
        return f"{where} failed with exit code {returncode}{killed}. Its last lines:\n{self.tail()}"
