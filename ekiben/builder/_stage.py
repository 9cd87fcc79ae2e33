"""Build stages: compile one, collect its outputs, check them.

compile   the stage's %post on its own layers, with as many jobs as are allowed; a kill for lack of memory halves them
collect   the files that later stages copy, each a blob; other changes of the stage are dropped
check     a wheel, without running it (ekiben.builder.wheels)

The result is kept when the layer that holds it has passed its %test (ekiben.builder.build). What was compiled when a
stage failed is in the cache, and the next attempt resumes from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ekiben.builder._concurrency import GIB, Compilation, allowance, jobs_for, minutes, oom_kills
from ekiben.builder.layer import LayerBuilder, Log
from ekiben.builder.wheels import validate_wheel
from ekiben.core.checked import Fields, parse_json, read_regular
from ekiben.core.command_name import command_name
from ekiben.core.errors import LayerError, StoreError
from ekiben.core.files import make_folders, open_regular, remove_tree
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.progress import Progress
from ekiben.executors import JobFailed
from ekiben.formats.layer import File, LayerEntry
from ekiben.resolve.graph import BuildStage, StageCopy
from ekiben.store import CompileStats, StageOutput, Store, StoredLayer, StoredResult


def compile_stage(
    stage: BuildStage, lower: Sequence[StoredLayer], files: Sequence[File], builder: LayerBuilder
) -> StoredResult:
    """Run the stage's %post and store its outputs as blobs. Return the result, whose record is not stored yet.

    Raises LayerError, StoreError; VerifyError when it is not a wheel for this stage.
    """
    store, progress = builder.store, builder.progress
    stats: CompileStats = store.compile_stats(stage.wheel) if stage.wheel else {}
    allowed = allowance()
    jobs = jobs_for(
        allowed,
        stats.get("job_memory") or stage.job_memory,
        units=stats.get("units"),
        capabilities=len(stage.inputs.get("capabilities", ())),
    )
    work = work_folder(stage.name, stage.cache_key, store)
    make_folders(work)
    resumes = any(work.iterdir())  # then this attempt compiles only the rest
    os.utime(work)  # it is in use: prune keeps it
    paths = {
        "EKIBEN_WORK": f"/{BUILD_MOUNT}/cache/work/{work.name}",
        "EKIBEN_MEASURED": f"/{BUILD_MOUNT}/measured.json",
    }
    timer = _CompileTimer(stage.cache_key, store, resumes=resumes)
    with builder.log(stage) as log:
        while True:
            progress.log(f"stage {stage.name}: {jobs.count} parallel compiler jobs: {jobs.reason}")
            compilation, kills = Compilation(stats.get("units")), oom_kills()
            log.read_state = _line_reader(compilation, timer, progress)
            try:
                with store.staging() as staging:
                    settings = {**jobs.environment, **paths}
                    with builder.run_post(stage, lower, staging, files, log.line, settings) as changed:
                        outputs, left_out = _collect_outputs(stage, changed, staging, store)
                    for line in left_out:
                        progress.log(f"stage {stage.name}: {line}")
                    measured = _read_measured(staging / "mount/measured.json")
                break
            except JobFailed as error:
                killed = error.returncode in (137, -9) or compilation.was_killed or oom_kills() > kills
                if not killed or jobs.count == 1:
                    raise LayerError(
                        _describe_failure(stage, log, error, compilation, killed, allowed.memory)
                    ) from error
                jobs, resumes = jobs.halved(), True
                progress.log(f"stage {stage.name}: a compiler was killed for lack of memory; on with half the jobs")
    seconds = timer.total()
    if stage.wheel:
        _keep_stats(stage.wheel, measured, 0 if resumes else compilation.done, seconds, jobs.count, store)
    compiled = {"units": compilation.done, "jobs": jobs.count, **measured}
    in_all = f", {minutes(seconds)} with what was compiled before" if timer.earlier else ""
    progress.log(f"stage {stage.name}: {compilation.done} units compiled in {minutes(timer.now())}{in_all}")
    return StoredResult(
        name=stage.name,
        key=stage.cache_key,
        wheel=stage.wheel,
        files=tuple(outputs),
        inputs=stage.inputs,
        origin="compiled",
        executor=builder.executor[0],
        seconds=seconds,
        notes={**_wheel_notes(stage, outputs, store), **compiled},
    )


def work_folder(name: str, key: str, store: Store) -> Path:
    """Return the folder where a stage compiles, and resumes after a failure."""
    return store.cache / "work" / f"{name}-{key[:12]}"


def remove_work(result: StoredResult, store: Store) -> None:
    """Remove the compilers' files of a stored result."""
    remove_tree(work_folder(result.name, result.key, store))
    store.drop_compile_stats(result.key)


def files_for(copies: Sequence[StageCopy], results: Mapping[str, StoredResult], store: Store) -> list[File]:
    """Return the files of the lines of ``%files from``, from the store's blobs.

    A folder's files keep their paths below it.

    Raises LayerError for a folder whose destination ends with a slash: Docker and Apptainer disagree about its name
    there.
    """
    files = []
    for item in copies:
        folder, name, into = item.source.rstrip("/"), item.source.rstrip("/").rpartition("/")[2], item.destination
        stage = item.stage.stage.name or item.stage.name
        for file in results[item.stage.cache_key].files:
            blob = store.blob_path(file.digest)
            if file.path == item.source:
                path = into + name if into.endswith("/") else into
                files.append(File(path, file.mode, blob, stage=stage))
            elif _is_in(file.path, item.source):
                if into.endswith("/"):
                    raise LayerError(f"%files from {stage}: {folder} is a folder; name its destination: {into}{name}")
                path = into + file.path[len(folder) :]
                files.append(File(path, file.mode, blob, line=item.line, target=into, name=name, stage=stage))
    return files


def import_result(stage: BuildStage, wheel: Path, record: StoredResult | None, store: Store) -> StoredResult:
    """Put a wheel compiled elsewhere into the store, to use for a stage instead of compiling it. Raises VerifyError."""
    assert stage.wheel is not None
    proof = validate_wheel(wheel, stage.wheel, stage.inputs)
    with store.staging() as staging:
        with open_regular(wheel) as source, (staging / "blob").open("wb") as copy:
            shutil.copyfileobj(source, copy)
        with (staging / "blob").open("rb") as stream:
            digest = "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
        size = (staging / "blob").stat().st_size
        store.put_file(staging / "blob", digest)
    folder = stage.outputs[0].rstrip("/")
    path = folder if folder.endswith(".whl") else f"{folder}/{wheel.name}"
    result = record or StoredResult(
        name=stage.name,
        key=stage.cache_key,
        wheel=stage.wheel,
        files=(),
        inputs=stage.inputs,
        origin="",
        executor="unknown",
        seconds=0.0,
        notes=proof,
    )
    return replace(result, name=stage.name, files=(StageOutput(path, 0o644, digest, size),), origin="imported")


class _CompileTimer:
    """The compile time of a stage: earlier attempts count up to the last unit that they finished.

    The record is in the store, not in the work folder: a stage's %post can replace that one by a link.
    """

    def __init__(self, key: str, store: Store, *, resumes: bool) -> None:
        self._key, self._store, self._began = key, store, time.monotonic()
        self.earlier = max(0.0, store.compile_stats(key).get("seconds", 0.0)) if resumes else 0.0

    def now(self) -> float:
        """Return the seconds of this attempt."""
        return round(time.monotonic() - self._began, 1)

    def total(self) -> float:
        """Return the seconds of all attempts."""
        return round(self.earlier + self.now(), 1)

    def keep(self) -> None:
        """Write the total for the next attempt, in case this one is killed."""
        with contextlib.suppress(StoreError):  # a full disk ends the compilation itself, with a better message
            self._store.put_compile_stats(self._key, {"seconds": self.total()})


def _line_reader(compilation: Compilation, timer: _CompileTimer, progress: Progress) -> Callable[[str], str | None]:
    def read_state(line: str) -> str | None:
        if state := compilation.line(line):
            timer.keep()
        if state and compilation.is_due():
            progress.mark(state)
        return state

    return read_state


def _collect_outputs(
    stage: BuildStage, changed: Iterable[LayerEntry], staging: Path, store: Store
) -> tuple[list[StageOutput], list[str]]:
    """Return the outputs, and a sentence for each part of them that is left out.

    Raises LayerError when an output was not made, or is not a file or a folder of files.
    """
    outputs: list[StageOutput] = []
    folders: list[str] = []
    for entry, chunks in changed:
        path = "/" + entry.path
        if entry.kind == "whiteout" or not any(_is_in(path, output) for output in stage.outputs):
            continue
        if entry.kind == "dir":
            folders.append(path)
            continue
        if entry.kind != "file":
            raise LayerError(f"%files from {stage.stage.name}: {path} is a {entry.kind}; only regular files are copied")
        digest, blob = hashlib.sha256(), staging / "blob"
        with blob.open("wb") as out:
            for chunk in chunks or ():
                digest.update(chunk)
                out.write(chunk)
        name = f"sha256:{digest.hexdigest()}"
        store.put_file(blob, name)
        outputs.append(StageOutput(path, 0o755 if entry.mode & 0o100 else 0o644, name, entry.size))
    for output in stage.outputs:
        if not any(_is_in(file.path, output) for file in outputs):
            raise LayerError(f"%files from {stage.stage.name}: the stage made nothing at {output}")
    hollow = {folder for folder in folders if not any(_is_in(file.path, folder) for file in outputs)}
    tops = sorted(folder for folder in hollow if folder.rpartition("/")[0] not in hollow)
    return outputs, [f"{folder} is an empty folder, and only files are copied" for folder in tops]


def _wheel_notes(stage: BuildStage, outputs: Sequence[StageOutput], store: Store) -> dict[str, Any]:
    """Return the notes on a wheel. Raises LayerError without a wheel, VerifyError; its blobs are dropped."""
    if stage.wheel is None:
        return {}
    wheels = [file for file in outputs if file.path.endswith(".whl")]
    try:
        if len(wheels) != 1 or len(outputs) != 1:
            raise LayerError(
                f"stage {stage.name} has {len(outputs)} outputs, and one wheel is expected: "
                + ", ".join(file.path for file in outputs)
            )
        with store.staging() as staging:
            wheel = staging / Path(wheels[0].path).name
            wheel.symlink_to(store.blob_path(wheels[0].digest).absolute())
            return validate_wheel(wheel, stage.wheel, stage.inputs)
    except BaseException:
        for file in outputs:
            store.drop_blob(file.digest)
        raise


def _keep_stats(name: str, measured: Mapping[str, int], units: int, seconds: float, jobs: int, store: Store) -> None:
    before = store.compile_stats(name)
    stats: CompileStats = {"seconds": seconds, "jobs": jobs}
    if job_memory := max(before.get("job_memory", 0), measured.get("job_memory", 0)):
        stats["job_memory"] = job_memory
    if most_units := max(before.get("units", 0), units):
        stats["units"] = most_units
    store.put_compile_stats(name, stats)


def _is_in(path: str, output: str) -> bool:
    return path == output or path.startswith(output.rstrip("/") + "/")


def _read_measured(path: Path) -> dict[str, int]:
    """Return the memory of the largest job, as the stage's script wrote it; nothing where it did not."""
    try:
        return {"job_memory": Fields.of(parse_json(read_regular(path))).size("job_memory")}
    except (OSError, ValueError):
        return {}


def _describe_failure(
    stage: BuildStage, log: Log, error: JobFailed, compilation: Compilation, killed: bool, memory: int
) -> str:
    kept = f"What was compiled ({compilation.done} units) is kept: the same command resumes from it."
    if compilation.is_disk_full:
        return (
            f"stage {stage.name}: no space left on the disk while it compiled. {kept} Make room ({command_name()}"
            f" prune), or put the store elsewhere (EKIBEN_STORE). Its last lines:\n{log.tail()}"
        )
    if killed:
        return (
            f"stage {stage.name}: the compiler was killed for lack of memory, alone as it was; allowed are "
            f"{memory / GIB:.1f} GiB. {kept} Its last lines:\n{log.tail()}"
        )
    return log.failure(stage, error) + (f"\n{kept}" if compilation.done else "")
