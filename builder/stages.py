"""Build stages: compile, take what is handed over, prove it, keep it.

compile   the stage's %post on its own layers, with as many jobs as are allowed; a kill for lack of memory halves them
take      the files that later stages name, each a blob; the rest of what the stage changed is forgotten
prove     what can be read off a wheel (builder.wheels), then the layer's %test in the runtime image (builder.pipeline)
keep      only then is it found again: a result that fails anything is dropped

What was compiled when a stage failed lies in the cache, and the next attempt goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from builder.chain import BUILD_MOUNT, BuildStage, File, Layer, Taken, stages_of
from builder.errors import LayerError
from builder.executors import JobFailed
from builder.layer import Member
from builder.parallel import GIB, Compilation, allowance, jobs_for, minutes, oom_kills
from builder.store import CorruptBlob, Handed, Store, StoredLayer, StoredResult, remove_tree
from builder.wheels import prove

if TYPE_CHECKING:
    from builder.pipeline import Log
    from builder.progress import Progress

Results = dict[str, StoredResult]  # by the stage's key


class Builder(Protocol):
    """What a stage needs of the build it is part of (builder.pipeline)."""

    store: Store
    progress: Progress

    def obtain_layers(self, layers: Sequence[Layer]) -> list[StoredLayer]: ...
    def log(self, step: Layer | BuildStage) -> AbstractContextManager[Log]: ...
    def run_post(
        self, step: Layer | BuildStage, lower: Sequence[StoredLayer], staging: Path, files: Sequence[File],
        log: Any, notes: dict[str, Any], settings: dict[str, str] | None = None,
    ) -> AbstractContextManager[Iterator[Member]]: ...  # fmt: skip


class Stages:
    """The build stages of one run of build(). ``given`` are wheels to use instead of compiling, by the stage's key."""

    def __init__(self, build: Builder) -> None:
        self.build, self.store, self.progress = build, build.store, build.progress
        self.given: Results = {}
        self._new: Results = {}

    @contextlib.contextmanager
    def results(self, taken: Sequence[Taken]) -> Iterator[Results]:
        """What the stages hand over, compiled where the store has it not. An error inside drops what is new."""
        with contextlib.ExitStack() as locks:
            found: Results = {}
            try:
                for stage in stages_of(taken):
                    found[stage.cache_key] = self._obtain(stage, locks)
                yield found
            except BaseException:
                for result in [self._new.pop(key) for key in found if key in self._new]:
                    self._drop(result)
                raise

    def handed_files(self, taken: Sequence[Taken], results: Results) -> list[File]:
        """What the lines of ``%files from`` bring, from the store's blobs. A folder's files keep their paths below it."""
        files = []
        for item in taken:
            for file in results[item.stage.cache_key].files:
                if file.path == item.source:
                    name = item.source.rpartition("/")[2]
                    place = item.destination + name if item.destination.endswith("/") else item.destination
                elif _is_in(file.path, item.source):
                    place = item.destination.rstrip("/") + file.path[len(item.source.rstrip("/")) :]
                else:
                    continue
                files.append(File(place, file.mode, self.store.blob_path(file.digest)))
        return files

    def are_new(self, results: Results) -> bool:
        return any(key in self._new for key in results)

    def keep(self, results: Results) -> None:
        for key, result in results.items():
            if self._new.pop(key, None):
                self.store.put_result(result)
                remove_tree(self._work(result.name, key))

    def _obtain(self, stage: BuildStage, locks: contextlib.ExitStack) -> StoredResult:
        if stored := self._stored(stage):
            return stored
        if given := self.given.get(stage.cache_key):
            self._new[stage.cache_key] = given
            return given
        say = f"stage {stage.name}: another process is compiling it; waiting"
        locks.enter_context(self.store.lock(stage.cache_key, lambda: self.progress.tell(say)))
        if stored := self._stored(stage):
            return stored
        with self.results(stage.taken) as taken:
            lower = self.build.obtain_layers(stage.layers)
            files = [*stage.files, *self.handed_files(stage.taken, taken)]
            with self.progress.step(f"stage {stage.name}" + (f" (compiles {stage.wheel})" if stage.wheel else "")):
                result = self._compile(stage, lower, files)
            self.keep(taken)
        if stage.wheel is None:
            self.store.put_result(result)
        else:
            self._new[stage.cache_key] = result
        return result

    def _stored(self, stage: BuildStage) -> StoredResult | None:
        stored = self.store.result(stage.cache_key)
        try:
            for file in stored.files if stored else ():
                self.store.check_blob(file.digest)
        except CorruptBlob as error:
            self.progress.tell(f"{error}; it is made again")
            self.store.drop_blob(error.digest)
            return None
        return stored

    def _drop(self, result: StoredResult) -> None:
        kept = {file.digest for other in self.store.results() for file in other.files}
        for file in result.files:
            if file.digest not in kept:
                self.store.drop_blob(file.digest)

    def _work(self, name: str, key: str) -> Path:
        return self.store.cache / "work" / f"{name}-{key[:12]}"

    def _compile(self, stage: BuildStage, lower: Sequence[StoredLayer], files: Sequence[File]) -> StoredResult:
        """One result, its blobs in the store and its record not yet. Errors: LayerError, StoreError, VerifyError."""
        learnt = self.store.learnt(stage.wheel) if stage.wheel else {}
        allowed = allowance()
        jobs = jobs_for(allowed, learnt.get("job_memory") or stage.job_memory, units=learnt.get("units"),
                        capabilities=len(stage.inputs.get("capabilities", ())))  # fmt: skip
        work = self._work(stage.name, stage.cache_key)
        work.mkdir(parents=True, exist_ok=True)
        goes_on = any(work.iterdir())  # then what is compiled now is not all there is to it
        os.utime(work)  # it is in use: prune leaves it alone
        inside = f"/{BUILD_MOUNT}/cache/work/{work.name}"
        began, notes = time.monotonic(), dict[str, Any]()
        with self.build.log(stage) as log:
            while True:
                self.progress.tell(f"stage {stage.name}: {jobs.count} jobs side by side: {jobs.why}")
                compilation, kills = Compilation(learnt.get("units")), oom_kills()
                log.read_state = self._follow(compilation)
                settings = {
                    **jobs.environment,
                    "EKIBEN_WORK": inside,
                    "EKIBEN_MEASURED": f"/{BUILD_MOUNT}/measured.json",
                }
                try:
                    with self.store.staging() as staging:
                        with self.build.run_post(stage, lower, staging, files, log.line, notes, settings) as changed:
                            handed = self._take(stage, changed, staging)
                        measured = _read_json(staging / "mount/measured.json")
                    break
                except JobFailed as error:
                    killed = error.returncode in (137, -9) or compilation.was_killed or oom_kills() > kills
                    if killed and jobs.count > 1:
                        jobs, goes_on = jobs.halved(), True
                        self.progress.tell(
                            f"stage {stage.name}: a compiler was killed for lack of memory; on with half the jobs"
                        )
                        continue
                    raise LayerError(_why_failed(stage, log, error, compilation, killed, allowed.memory)) from error
        seconds = round(time.monotonic() - began, 1)
        if stage.wheel:
            self._learn(stage.wheel, measured, 0 if goes_on else compilation.done, seconds, jobs.count)
        compiled = {"units": compilation.done, "jobs": jobs.count, **measured}
        self.progress.tell(f"stage {stage.name}: {compilation.done} units compiled in {minutes(seconds)}")
        return StoredResult(
            name=stage.name, key=stage.cache_key, wheel=stage.wheel, files=tuple(handed), inputs=stage.inputs,
            origin="compiled", executor=notes["executor"], seconds=seconds, notes={**self._proof(stage, handed), **compiled},
        )  # fmt: skip

    def _follow(self, compilation: Compilation) -> Any:
        def read_state(line: str) -> str | None:
            state = compilation.line(line)
            if state and compilation.is_due():
                self.progress.mark(state)
            return state or (line if not compilation.done else None)

        return read_state

    def _take(self, stage: BuildStage, changed: Iterable[Member], staging: Path) -> list[Handed]:
        """Errors: LayerError when a path that is handed over was not made, or is not a file or a folder of files."""
        handed: list[Handed] = []
        for entry, chunks in changed:
            path = "/" + entry.path
            if entry.kind in ("dir", "whiteout") or not any(_is_in(path, place) for place in stage.hands_over):
                continue
            if entry.kind != "file":
                raise LayerError(
                    f"%files from {stage.stage.name}: {path} is a {entry.kind}; only plain files are handed over"
                )
            digest, blob = hashlib.sha256(), staging / "blob"
            with blob.open("wb") as out:
                for chunk in chunks or ():
                    digest.update(chunk)
                    out.write(chunk)
            name = f"sha256:{digest.hexdigest()}"
            self.store.put_file(blob, name)
            handed.append(Handed(path, 0o755 if entry.mode & 0o100 else 0o644, name, entry.size))
        for place in stage.hands_over:
            if not any(_is_in(file.path, place) for file in handed):
                raise LayerError(f"%files from {stage.stage.name}: the stage made nothing at {place}")
        return handed

    def _proof(self, stage: BuildStage, handed: Sequence[Handed]) -> dict[str, Any]:
        """What is read off the wheel. Errors: LayerError without a wheel, VerifyError; the blobs are then dropped."""
        if stage.wheel is None:
            return {}
        wheels = [file for file in handed if file.path.endswith(".whl")]
        try:
            if len(wheels) != 1 or len(handed) != 1:
                raise LayerError(f"stage {stage.name} hands over {len(handed)} files where one wheel is wanted: "
                                 + ", ".join(file.path for file in handed))  # fmt: skip
            with self.store.staging() as staging:
                wheel = staging / Path(wheels[0].path).name
                wheel.symlink_to(self.store.blob_path(wheels[0].digest).absolute())
                return prove(wheel, stage.wheel, stage.inputs)
        except BaseException:
            for file in handed:
                self.store.drop_blob(file.digest)
            raise

    def _learn(self, name: str, measured: dict[str, Any], units: int, seconds: float, jobs: int) -> None:
        before = self.store.learnt(name)
        seen = {"job_memory": max(before.get("job_memory", 0), measured.get("job_memory", 0)) or None,
                "units": max(before.get("units") or 0, units) or None, "seconds": seconds, "jobs": jobs}  # fmt: skip
        self.store.put_learnt(name, {key: value for key, value in seen.items() if value})

    def adopt(self, stage: BuildStage, wheel: Path, record: StoredResult | None) -> StoredResult:
        """A wheel compiled elsewhere, to use for a stage instead of compiling it. Errors: VerifyError."""
        assert stage.wheel is not None
        proof = prove(wheel, stage.wheel, stage.inputs)
        with self.store.staging() as staging:
            shutil.copyfile(wheel, staging / "blob")
            with (staging / "blob").open("rb") as stream:
                digest = "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
            size = (staging / "blob").stat().st_size
            self.store.put_file(staging / "blob", digest)
        folder = stage.hands_over[0].rstrip("/")
        path = folder if folder.endswith(".whl") else f"{folder}/{wheel.name}"
        handed = Handed(path, 0o644, digest, size)
        about = record or StoredResult(
            name=stage.name, key=stage.cache_key, wheel=stage.wheel, files=(), inputs=stage.inputs, origin="",
            executor="unknown", seconds=0.0, notes=proof,
        )  # fmt: skip
        self.given[stage.cache_key] = replace(about, name=stage.name, files=(handed,), origin="imported")
        return self.given[stage.cache_key]


def _is_in(path: str, place: str) -> bool:
    return path == place or path.startswith(place.rstrip("/") + "/")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _why_failed(
    stage: BuildStage, log: Log, error: JobFailed, compilation: Compilation, killed: bool, memory: int
) -> str:
    kept = f"What was compiled ({compilation.done} units) is kept: the same command goes on from there."
    if compilation.is_disk_full:
        return (f"stage {stage.name}: no space left on the disk while it compiled. {kept} Make room (build.py prune), or "
                f"put the store elsewhere (EKIBEN_STORE). Its last lines:\n{log.tail()}")  # fmt: skip
    if killed:
        return (f"stage {stage.name}: the compiler was killed for lack of memory, alone as it was; allowed are "
                f"{memory / GIB:.1f} GiB. {kept} Its last lines:\n{log.tail()}")  # fmt: skip
    return log.failure(stage, error.returncode) + (f"\n{kept}" if compilation.done else "")
