"""Makes one layer: its base, its %post under an executor, or its files; as a blob in the store, with its record.

A layer and a build stage share host mounts, executor and working folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben.builder._written import show_written
from ekiben.builder.base_config import LABELS_FILE, read_labels, with_inherited
from ekiben.builder.bases import load_base
from ekiben.builder.environment import Evaluation, environment_files, environment_of
from ekiben.builder.failed_line import ScriptWatch, shell_of
from ekiben.builder.plan import BuildContext
from ekiben.builder.sif_base import base_scripts, known_environment
from ekiben.core.command_name import command_name
from ekiben.core.decisions import log_decision
from ekiben.core.environment import build_environment
from ekiben.core.errors import EngineError, LayerError, LockMismatchError, VerifyError
from ekiben.core.files import make_folders
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.printable import printable
from ekiben.core.process import describe_exit, interact, name_exit
from ekiben.core.progress import Progress
from ekiben.executors import (
    DEBUG_SCRIPT,
    SOURCED,
    Executor,
    Job,
    JobFailed,
    OnFailure,
    Script,
    ShellCommand,
    choose,
    write_run_script,
)
from ekiben.formats.base_config import SIF_ENVIRONMENT
from ekiben.formats.changeset import file_entries
from ekiben.formats.evaluated import Evaluated, written_path
from ekiben.formats.layer import File
from ekiben.formats.tar import DigestWriter
from ekiben.resolve.graph import BuildStage, Layer
from ekiben.resolve.keys import parent_name
from ekiben.spec.definition_scripts import interpreter_command
from ekiben.spec.environment import expand, is_known
from ekiben.store import Store, StoredLayer, bind_layers

if TYPE_CHECKING:
    from ekiben.formats.changeset import Lower
    from ekiben.formats.layer import LayerEntry
    from ekiben.packages.host_config import PackageSources

# Where %post adds to the image's environment and labels, under the names that Apptainer gives it.
WRITES = {
    **dict.fromkeys(("APPTAINER_ENVIRONMENT", "SINGULARITY_ENVIRONMENT"), "/.singularity.d/env/91-environment.sh"),
    **dict.fromkeys(("APPTAINER_LABELS", "SINGULARITY_LABELS"), f"/{BUILD_MOUNT}/{LABELS_FILE}"),
}
ENVIRONMENT_LINKS = ("/environment", "/.singularity.d/env/90-environment.sh")
LogLine = Callable[[str], None]
LAST_LINES = 40  # of a script that failed, in the error
_COMMAND_LINES = 6  # of the command that failed
# The same variables as the script's, and an interactive shell.
_DEBUG = f"""cd /
exec env -i TERM={{term}} /bin/sh -c '. /{BUILD_MOUNT}/environment
command -v bash >/dev/null && exec bash --norc -i
exec /bin/sh -i'
"""


class LayerBuilder:
    """Makes layers of one recipe. The executor is chosen when the first %post needs it, and then kept.

    ``last_script`` is the key of the last layer whose %post runs: temporary files of earlier ones are removed after
    it.
    """

    def __init__(self, context: BuildContext, last_script: str | None = None) -> None:
        self.store, self.progress, self.options = context.store, context.progress, context.options
        self.reused = context.reused
        self._resolved = context.resolved
        self._recipe, self._stack = context.resolved.recipe.name, context.resolved.stack
        self._last_script = last_script
        self._executor: tuple[str, Executor] | None = None
        self._sources: PackageSources | None = None

    @property
    def sources(self) -> PackageSources:
        """Return where packages come from."""
        if self._sources is None:
            from ekiben.packages.host_config import site_sources

            self._sources = self.options.sources or site_sources(self._stack, self.options.mirror)
        return self._sources

    @property
    def executor(self) -> tuple[str, Executor]:
        """Return the executor that runs the scripts."""
        if self._executor is None:
            with self.store.staging() as staging:
                name, executor, reason = choose(self.options.engine, folder=staging)
            self.progress.log(f"engine {name}: {reason}")
            self._executor = name, executor
        return self._executor

    def make(self, layer: Layer, lower: Sequence[StoredLayer], outputs: Sequence[File] = ()) -> StoredLayer:
        """Put the layer's blob into the store and return its record, which is not stored yet.

        ``outputs`` are files of build stages. Raises LayerError, EngineError, FetchError, StoreError;
        LockMismatchError when ``options.locked`` refuses what was installed.
        """
        from ekiben.formats.changeset import OverlayError

        try:
            return self._make(layer, lower, outputs)
        except OverlayError as error:
            usual = self.executor
            if (other := self._other_executor(usual[0])) is None:
                raise
            self.progress.log(f"{layer.name}: {error}; engine {other[0]} builds this layer again")
            self._executor = other
            try:
                return self._make(layer, lower, outputs)
            finally:
                self._executor = usual

    def _other_executor(self, usual: str) -> tuple[str, Executor] | None:
        """Return the next executor that can be used here; None where an engine was named."""
        if self.options.engine != "auto":
            return None
        try:
            with self.store.staging() as staging:
                return choose("auto", without={usual}, folder=staging)[:2]
        except EngineError:
            return None

    def _make(self, layer: Layer, lower: Sequence[StoredLayer], outputs: Sequence[File]) -> StoredLayer:
        from ekiben.formats.layer import write_entries
        from ekiben.formats.squashfs.writer import SquashfsWriter

        began = time.monotonic()
        with self.store.staging() as staging:
            blob, tar = staging / "layer.squashfs", DigestWriter()
            notes: dict[str, Any] = {}
            with (
                self._entries(layer, lower, staging, notes, outputs) as entries,
                blob.open("w+b") as out,
                self.store.reused_blocks(layer.name) as reuse,
            ):
                write_entries(entries, tar, SquashfsWriter(out, epoch=layer.epoch, reuse=reuse))
            known = {line for item in lower for line in item.drift}
            if drift := [line for line in self._drift(layer, blob) if line not in known]:
                notes["drift"] = drift
            if outputs:
                notes["outputs"] = {file.destination: file.sha256() for file in outputs}
            with blob.open("rb") as stream:
                digest = "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
            size = blob.stat().st_size
            self.store.put_file(blob, digest)
            self.store.keep_index(digest, reuse)
        return StoredLayer(
            name=layer.name,
            cache_key=layer.cache_key,
            diff_id=tar.diff_id,
            tar_size=tar.size,
            digest=digest,
            size=size,
            executor=notes.pop("executor", "none"),
            seconds=round(time.monotonic() - began, 2),
            inputs=layer.inputs,
            notes=notes,
        )

    @contextlib.contextmanager
    def _entries(
        self, layer: Layer, lower: Sequence[StoredLayer], staging: Path, notes: dict[str, Any], outputs: Sequence[File]
    ) -> Iterator[Iterator[LayerEntry]]:
        """Yield the layer's entries, by its kind."""
        with contextlib.ExitStack() as stack:
            if layer.kind == "bootstrap":
                assert layer.stage is not None
                log = stack.enter_context(self.log(layer))
                yield load_base(layer.stage.bootstrap).entries(layer, staging, notes, self.sources, log.line)
                return
            files: Sequence[File] = (*layer.files, *outputs)
            if layer.kind == "files":
                files = with_inherited(files, lower, self.store)
                yield file_entries(files, stack.enter_context(self._below(lower)), epoch=layer.epoch)
                return
            if layer.kind == "environment":
                evaluated = environment_files(self._evaluate(layer, lower, staging))
                notes["executor"] = self.executor[0]
                yield file_entries(evaluated, stack.enter_context(self._below(lower)), epoch=layer.epoch)
                return
            log = stack.enter_context(self.log(layer))
            try:
                notes["executor"] = self.executor[0]
                if not outputs and (entries := self._installed(layer, lower, log.line, stack)) is not None:
                    yield entries
                    return
                settings = WRITES if layer.inputs.get("writes") else None
                entries = stack.enter_context(self.run_post(layer, lower, staging, files, log.line, settings))
                if settings and (labels := read_labels(staging / "mount")):
                    notes["labels"] = labels
                yield entries
            except JobFailed as error:
                raise LayerError(log.failure(layer, error)) from error

    def _installed(
        self, layer: Layer, lower: Sequence[StoredLayer], log: LogLine, stack: contextlib.ExitStack
    ) -> Iterator[LayerEntry] | None:
        """Return the entries of a layer that installs a lock file alone; None where its %post has to run."""
        from ekiben.builder.wheel_layer import WheelInstaller, is_installable

        if not is_installable(layer) or self.options.sources or self.options.debug:
            return None
        if os.geteuid() and self.executor[0] == "docker":  # its daemon writes root's files, which nobody could remove
            return None
        installer = WheelInstaller(self.store, self._resolved, self.executor[1], self.sources, log)
        return stack.enter_context(installer.install(layer, lower, stack.enter_context(self._below(lower))))

    def _evaluate(self, layer: Layer, lower: Sequence[StoredLayer], staging: Path) -> Evaluated:
        """Return what the scripts of the environment set in the layers below. Raises LayerError, EngineError."""
        for item in lower:
            self.store.check_blob(item.digest)
        with self._below(lower) as below:
            texts = base_scripts(below) if layer.scripts[0].file == SIF_ENVIRONMENT else []
        if layer.scripts[-1].file and (values := known_environment(texts)) is not None:
            return Evaluated(values)  # without the image's shell, which need not be there
        lines: list[str] = []
        evaluation = Evaluation(layer, staging / "mount/environment.d", texts)
        script = Script(f"{layer.name}-environment", evaluation.write(), build_environment(layer.epoch))
        job = prepare_job(script, lower, self.store, staging, log=lines.append)
        try:
            self.executor[1].try_run(job)
        except JobFailed as error:
            raise evaluation.failure(error.returncode, lines) from error
        evaluated = evaluation.read()
        log_decision(f"environment of {layer.name}", "evaluated", ", ".join(evaluated.values) or "it sets nothing")
        if evaluated.varying:
            log_decision(f"environment of {layer.name}", ", ".join(evaluated.varying), "known where the image starts")
        return evaluated

    @property
    def uses_git(self) -> bool:
        """Return whether git sources are fetched; a bundle brings them along."""
        return "GIT_CONFIG_COUNT" not in self.sources.environment

    @contextlib.contextmanager
    def run_post(
        self,
        step: Layer | BuildStage,
        lower: Sequence[StoredLayer],
        staging: Path,
        files: Sequence[File],
        log: LogLine,
        settings: Mapping[str, str] | None = None,
    ) -> Iterator[Iterator[LayerEntry]]:
        """Run a step's %post on the layers below; inside the context, its changes can be read once.

        ``settings`` are variables that are no input. Raises JobFailed, EngineError.
        """
        from ekiben.formats.changeset import is_excluded, normalize, refuse_total_removal
        from ekiben.formats.left_out import LeftOut
        from ekiben.formats.placement import resolve_destinations
        from ekiben.packages.git import mount_repositories
        from ekiben.packages.host_config import mount_wheels, write_host_files
        from ekiben.packages.sources import mount_source

        _, executor = self.executor
        for item in lower:
            self.store.check_blob(item.digest)
        assert step.stage is not None
        source, folder = (step.source, step.source_folder) if isinstance(step, BuildStage) else (None, None)
        (mount := staging / "mount").mkdir()
        wheels = [file for file in files if file.destination.startswith(f"/{BUILD_MOUNT}/")]
        files = [file for file in files if file not in wheels]
        environment: Mapping[str, str] = {}
        if source:  # code from elsewhere: it gets neither the host's settings nor the network
            mount_source(source, self._stack, mount / "source", self.store.downloads, folder)
        else:
            environment = mount_wheels(wheels, mount, write_host_files(mount, self.sources))
        if self.uses_git:
            environment = {**environment, **mount_repositories(step.stage.arguments, mount)}
        left_out = LeftOut()
        with self._below(lower) as below:
            files, shell = resolve_destinations(files, below), shell_of(below)
            if isinstance(step, BuildStage):
                _refuse_shared_folders(step, below)
        for file in files:
            if is_excluded(path := file.destination.lstrip("/")):
                left_out.add(path)
        known = environment_of(step.environment, lower, self.store)
        variables = {**known, **build_environment(step.epoch), **environment, **(settings or {})}
        watch = ScriptWatch(mount, shell, step.stage.shell or SOURCED, has_bash_env="BASH_ENV" in variables)
        script = Script(
            step.name,
            step.stage.post,
            variables,
            command=watch.command,
            is_isolated=source is not None,
        )
        links: tuple[str, ...] = ()
        if step.inputs.get("writes"):
            links = (name := written_path(parent_name(step.inputs["parent"])), *ENVIRONMENT_LINKS)
            files = [File(name, 0o644, content=b"#!/bin/sh\n"), *files]
        job = prepare_job(script, lower, self.store, staging, files=files, log=log)
        if links:
            (staging / "mount/files.tar").write_bytes(_files_tar(files, links))
        if not isinstance(step, BuildStage) and (caches := self._trusted_caches(step, lower)):
            job = replace(job, cache=caches)
        if self.options.debug:
            job = replace(job, on_failure=self._shell_for(step, watch, mount, log))
        # A compilation shows its units.
        shown = contextlib.nullcontext() if isinstance(step, BuildStage) else show_written(job, self.progress)
        with self._below(lower) as below, watch, shown, executor.execute(job) as changes:
            if step.cache_key == self._last_script:
                self.store.remove_finished()
            entries = normalize(changes, below, epoch=step.epoch, left_out=left_out)
            yield refuse_total_removal(entries, below)
        for line in left_out.lines():
            log(line)
            self.progress.log(f"{step.name}: {line}")

    def _trusted_caches(self, layer: Layer, lower: Sequence[StoredLayer]) -> Path | None:
        """Return the caches of Ekiben's own layers, where ``layer`` is one; a bundle's packages are in the others."""
        from ekiben.builder.wheel_layer import trusted_caches

        return None if self.options.sources else trusted_caches([layer, *lower], self._stack, self.store)

    def _shell_for(self, step: Layer | BuildStage, watch: ScriptWatch, mount: Path, log: LogLine) -> OnFailure:
        """Return what opens a shell in the half-built layer of ``step``, and write what the shell begins with."""
        (mount / DEBUG_SCRIPT).write_text(_DEBUG.format(term=shlex.quote(os.environ.get("TERM", "dumb"))), "utf-8")

        def open_shell(code: int, command: ShellCommand) -> None:
            if isinstance(step, BuildStage) and code in (137, -9):  # it may be tried again with fewer compilers
                return
            error = JobFailed(code)
            error.command = watch.failed()
            for line in describe_failure(step, error).splitlines():
                self.progress.log(line)
            self.progress.log("a shell in the half-built layer; `exit` ends it, and the layer is removed")
            with self.progress.paused():
                ended = interact(command.argv, env=command.environment, pass_fds=command.pass_fds)
            log(f"the shell of --debug ended with {name_exit(ended)}")

        return open_shell

    @contextlib.contextmanager
    def _below(self, lower: Sequence[StoredLayer]) -> Iterator[Lower]:
        from ekiben.formats.changeset import Lower

        with contextlib.ExitStack() as stack:
            yield Lower([stack.enter_context(self.store.reader(item.digest)) for item in reversed(lower)])

    def run_test(self, layer: Layer, layers: Sequence[StoredLayer]) -> None:
        """Run the %test of a layer on ``layers``, of which it is the last. Raises VerifyError when it fails."""
        assert layer.stage is not None
        lines: list[str] = []
        with self.store.staging() as staging:
            script = self._test_of(layer, layers)
            job = prepare_job(script, layers, self.store, staging, log=lines.append)
            try:
                self.executor[1].try_run(job)
            except JobFailed as error:
                tail = "\n".join(f"  {line}" for line in lines[-LAST_LINES:])
                raise VerifyError(
                    f"%test of {layer.name} {describe_exit(error.returncode)}. Its last lines:\n{tail}"
                ) from error

    def _test_of(self, layer: Layer, layers: Sequence[StoredLayer]) -> Script:
        """Return the %test of a layer, run by its shebang; its %environment comes first where that is a script."""
        assert layer.stage is not None
        stage, known = layer.stage, environment_of(layer.environment, layers, self.store)
        command = interpreter_command(stage.test)
        if stage.environment and not layer.scripts and is_known(stage.environment, known):
            known = expand(stage.environment, known)
        elif stage.environment_text:
            command = f"set +e\n{stage.environment_text}\nset -e\n{command}"
        return Script(f"{layer.name}-test", stage.test, {**known, **build_environment(layer.epoch)}, command)

    @contextlib.contextmanager
    def log(self, step: Layer | BuildStage) -> Iterator[Log]:
        """Open a log file of its own for a step."""
        path = self.store.log_path(f"{self._recipe}-{step.name}-{step.cache_key[:8]}-{os.getpid()}")
        with path.open("w", encoding="utf-8", errors="replace") as stream:
            yield Log(path, stream, self.progress)

    def _drift(self, layer: Layer, blob: Path) -> list[str]:
        """Return the Debian packages whose version differs from the lock."""
        if layer.kind in ("files", "environment"):  # they install nothing
            return []
        from ekiben.formats.squashfs.reader import SquashfsReader
        from ekiben.packages.installed import DPKG_STATUS, installed_packages

        locked = self._stack.apt_lock().packages
        with blob.open("rb") as stream:
            reader = SquashfsReader(stream)
            entry = reader.lookup(DPKG_STATUS) if locked else None
            status = reader.read_file(DPKG_STATUS).decode() if entry and entry.kind == "file" else ""
        drift = [
            f"{name} {locked[name]} → {version}"
            for name, version in installed_packages(status).items()
            if name in locked and locked[name] != version
        ]
        if self.options.locked:
            refuse_drift(drift)
        for line in drift:
            self.progress.log(f"drift: {line}")
        return drift


def _refuse_shared_folders(stage: BuildStage, below: Lower) -> None:
    """Raise LayerError where an output folder of the stage has files of the layers below, which would stay
    behind.
    """
    for output in stage.outputs:
        entry = below.lookup(path := output.strip("/"))
        if entry is not None and entry.kind == "dir" and below.children(path):
            raise LayerError(
                f"%files from {stage.stage.name}: {output} is a folder of the layers below, and only files that the"
                " stage creates are copied; let it create a new folder, or name the files"
            )


def refuse_drift(drift: Sequence[str]) -> None:
    """Raise LockMismatchError when there is any."""
    if drift:
        raise LockMismatchError(
            "other versions than the locked ones, which the mirror does not have:\n  " + "\n  ".join(drift),
            hint=f"`{command_name()} lock` locks today's; without --locked the drift is recorded in the image",
        )


def prepare_job(
    script: Script,
    lower: Sequence[StoredLayer],
    store: Store,
    staging: Path,
    *,
    files: Sequence[File] = (),
    log: LogLine,
) -> Job:
    """Make the folders that a job needs, with its run.sh. The caller adds the host's files."""
    mount, scratch = staging / "mount", staging / "scratch"
    mount.mkdir(exist_ok=True)
    scratch.mkdir()
    cache = staging / "cache" if script.is_isolated else store.cache
    for folder in ("uv", "apt/partial"):
        make_folders(cache / folder)
    if files:
        (mount / "files.tar").write_bytes(_files_tar(files))
    write_run_script(mount, script)
    return Job(
        name=script.name,
        lower=bind_layers(store, lower),
        mount=mount,
        cache=cache,
        scratch=scratch,
        staging=store.staging_root,
        log=log,
        has_network=not script.is_isolated,
    )


def _files_tar(files: Sequence[File], links: Sequence[str] = ()) -> bytes:
    """Return the files of %files as a tar, which the executor unpacks before %post. ``links``: a path, and links that
    point there."""
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", encoding="utf-8", errors="surrogateescape") as tar:
        for file in files:
            info = tarfile.TarInfo(file.destination.lstrip("/"))
            info.type = tarfile.DIRTYPE if file.is_folder else tarfile.REGTYPE
            info.size, info.mode = file.size, file.mode
            with file.open() as content:
                tar.addfile(info, content)
        for link in links[1:]:
            info = tarfile.TarInfo(link.lstrip("/"))
            info.type, info.linkname = tarfile.SYMTYPE, links[0]
            tar.addfile(info)
    return buffer.getvalue()


class Log:
    """A step's log: every line is kept in a file, the last ones in memory for the error message. ``read_state``
    may shorten a line for the progress display."""

    def __init__(self, path: Path, stream: io.TextIOWrapper, progress: Progress) -> None:
        self.path, self._stream, self._progress = path, stream, progress
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self.read_state: Callable[[str], str | None] = lambda line: None

    def line(self, line: str) -> None:
        """Write one line of a script's output to the log."""
        self._stream.write(line + "\n")
        self._stream.flush()
        self._last.append(line)
        self._progress.output(line)
        if (state := self.read_state(line)) is not None:
            self._progress.note(state)

    def tail(self) -> str:
        """Return the last lines, and where the complete log is."""
        return "\n".join(f"  {line}" for line in self._last) + f"\nthe whole log: {self.path}"

    def failure(self, step: Layer | BuildStage, error: JobFailed) -> str:
        """Return the error of a step whose script failed, with its last lines."""
        return f"{describe_failure(step, error)}\nIts last lines:\n{self.tail()}"


def describe_failure(step: Layer | BuildStage, error: JobFailed) -> str:
    """Return where a step's %post failed and how, and the command."""
    stage, failed = step.stage, error.command
    file, number = f"{step.name.split('.')[0]}.def", 0
    if stage and stage.path and failed and failed.line <= len(stage.post_numbers):
        file, number = str(stage.path), stage.post_numbers[failed.line - 1]
    where = f" ({file}{f':{number}' if number else ''})" if stage else ""
    summary = f"%post of {step.name}{where} {describe_exit(error.returncode)}"
    if failed is None:
        return f"{summary}."
    lines = failed.text.splitlines()
    if len(lines) > _COMMAND_LINES:
        lines = [*lines[: _COMMAND_LINES - 1], f"… ({len(lines) - _COMMAND_LINES + 1} more lines)"]
    label = "The last command that failed:" if failed.is_last_failure else "The command:"
    return "\n".join([f"{summary}. {label}", *(f"  {printable(line)}" for line in lines)])
