"""Verify an image: every %test of its layers, in the finished image, on the real runtime; and every digest."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ekiben.builder import surroundings
from ekiben.builder.build import stored_image
from ekiben.builder.layer import LAST_LINES, prepare_job
from ekiben.builder.layer_tests import EarlierPass, ScriptGroup, SeparateTests, Surroundings, now, separate
from ekiben.core.checked import Fields
from ekiben.core.command_name import command_name
from ekiben.core.decisions import log_decision
from ekiben.core.emulation import emulation_problem
from ekiben.core.environment import build_environment
from ekiben.core.errors import CorruptBlob, EngineError, StoreError, UsageError, VerifyError
from ekiben.core.inner_path import AnyPath
from ekiben.core.mounts import bind_args
from ekiben.core.paths import RECIPE_HOME
from ekiben.core.process import describe_exit, stream
from ekiben.core.progress import Progress
from ekiben.executors import JobFailed, Script, by_preference, podman, runtimes
from ekiben.executors.apptainer import program
from ekiben.formats.sif import read_sif
from ekiben.packages.modules import explain_import
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.store import Image, Store, check_sif

TEST = "/.singularity.d/test"
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """``runtime`` passed the tests that ran in ``seconds``; ``known``: all of them in an earlier run, on the same
    bytes; ``reused``: which did not run now, and when they did."""

    runtime: str
    seconds: float
    known: bool
    reused: EarlierPass | None = None


def verify(
    image: Image,
    store: Store,
    progress: Progress,
    *,
    sifs: Sequence[AnyPath] = (),
    loaded: Sequence[str] = (),
    again: bool = False,
) -> list[Check]:
    """Run the tests in each of ``sifs`` and in the image that each of ``loaded`` (docker, podman) keeps; where no
    runtime is, on the stored layers.

    ``again`` repeats tests that passed before. None are run where programs of the image's architecture do not run.
    Raises VerifyError when one fails.
    """
    checks: list[Check | None] = []
    if problem := emulation_problem(image.arch):
        for sif in sifs:
            check_sif(image, sif, store, again=again)
        progress.log(f"{image.name} is for {image.arch} and not tested here: {problem[0]} ({problem[1]})")
        return []
    with progress.step(f"verify {image.name}"):
        checks += [verify_sif(image, sif, store, progress.output, again=again) for sif in sifs]
        for name in loaded:
            if name == "docker":
                checks.append(verify_docker(image, store, progress.output, again=again))
            else:
                checks.append(verify_loaded(name, image, store, progress.output, again=again))
        if not any(checks):
            checks.append(verify_stored(image, store, progress.output, again=again))
    return [check for check in checks if check]


def verify_sif(image: Image, sif: AnyPath, store: Store, log: Log, *, again: bool = False) -> Check | None:
    """Run the tests in the SIF under Apptainer or SingularityCE; None when there is neither.

    Raises VerifyError when one fails, and when the file is not the image's, StoreError when it cannot be read.
    """
    check_sif(image, sif, store, again=again)
    return run_sif_tests(image, sif, store, log, again=again)


def run_sif_tests(image: Image, sif: AnyPath, store: Store, log: Log, *, again: bool = False) -> Check | None:
    """Run the tests in a SIF whose layers need not be in the store; None where neither runtime is here.

    Raises VerifyError when one fails.
    """
    runtime = program()
    if runtime is None:
        log_decision(f"tests in {sif}", "not run", "neither apptainer nor singularity is on PATH")
        return None
    log_decision(f"tests in {sif}", runtime, "the SIF runtime on PATH")

    def run(lines: list[str], group: ScriptGroup | None) -> int:
        with _work_folder(store) as folder:
            isolated: list[str | Path] = ["--cleanenv", "--contain", "--no-home", "--workdir", folder]
            if group and group.hides_recipe:
                (folder / "recipe").mkdir()
                isolated += bind_args(folder / "recipe", RECIPE_HOME, read_only=True)
            command = ["/bin/sh", "-c", group.script] if group else []
            # Apptainer resolves the path of a descriptor, too.
            argv = [runtime, "--quiet", "exec" if group else "test", *isolated, str(sif), *command]
            return stream(argv, _both(lines, log), env=_without_settings())

    def what_decides() -> Mapping[str, object]:
        return {**surroundings.sif_runtime(runtime), "partitions": len(read_sif(sif).layers)}

    return _Tests(image, Path(runtime).name, store, run, what_decides).check(again=again)


def verify_docker(image: Image, store: Store, log: Log, *, again: bool = False) -> Check | None:
    """Run the tests in a container of the Docker image, without a network; None when no daemon answers.

    Raises VerifyError.
    """
    from ekiben.executors import docker as daemon

    if daemon.unavailable():
        return None

    def run(lines: list[str], group: ScriptGroup | None) -> int:
        return daemon.try_image(image.image_id, _command(group), _both(lines, log), hidden=_hidden(group))

    return _Tests(image, "docker", store, run, surroundings.docker_daemon).check(again=again)


def verify_loaded(kind: str, image: Image, store: Store, log: Log, *, again: bool = False) -> Check:
    """Run the tests in a container of the image that the executor ``kind`` keeps, without a network.

    Raises VerifyError.
    """
    runtime = runtimes()[kind]

    def run(lines: list[str], group: ScriptGroup | None) -> int:
        if group is None:  # runtimes of plug-ins may hide nothing
            return runtime.try_image(image.image_id, _command(group), _both(lines, log))
        return podman.try_image(image.image_id, _command(group), _both(lines, log), hidden=_hidden(group))

    return _Tests(image, kind, store, run, surroundings.podman if kind == "podman" else None).check(again=again)


def verify_stored(image: Image, store: Store, log: Log, *, again: bool = False) -> Check | None:
    """Run the tests on the store's layers with any executor: for a machine without a runtime."""
    available = next((item for item in by_preference() if item[1].unavailable() is None), None)
    if available is None:
        log_decision("tests on the stored layers", "not run", "no engine can be used here")
        return None
    name, executor = available
    log_decision("tests on the stored layers", f"engine {name}", "no runtime here has the finished image")

    def run(lines: list[str], group: ScriptGroup | None) -> int:
        with store.staging() as staging:
            settings = {**image.environment, **build_environment(image.epoch)}
            script = Script("verify", f". {TEST}\n", settings)
            job = prepare_job(script, image.layers, store, staging, log=_both(lines, log))
            try:
                executor.try_run(job)
            except JobFailed as error:
                return error.returncode
            return 0

    return _Tests(image, name, store, run).check(again=again)


def verify_as_sif(image: Image, store: Store, log: Log) -> Check | None:
    """Run the tests on the store's layers, stacked by the SIF runtime as those of a SIF: before there is one.

    Where neither runtime is here, as verify_stored(). Raises VerifyError when one fails, StoreError.
    """
    if (runtime := program()) is None or emulation_problem(image.arch):
        return verify_stored(image, store, log) if runtime is None else None
    users = image.sif_header(store).users

    def run(lines: list[str], group: ScriptGroup | None) -> int:
        with _work_folder(store) as folder:
            for name in ("work", "recipe"):
                (folder / name).mkdir()
            names = [f"layer{number}" for number in range(len(image.layers))]
            for name, layer in zip(names, image.layers, strict=True):  # an option would end a path at ',' and ':'
                (folder / name).symlink_to(store.layer_file(layer).absolute())
            if users:
                (folder / "users").write_bytes(users)
                names.insert(0, "users")
            hidden = bind_args(folder / "recipe", RECIPE_HOME, read_only=True) if _hidden(group) else []
            overlays = [word for name in names[1:] for word in ("--overlay", f"{name}:ro")]
            isolated: list[str | Path] = ["--cleanenv", "--contain", "--no-home", "--workdir", folder / "work"]
            argv = [runtime, "--quiet", "exec", *isolated, *hidden, *overlays, names[0], *_command(group)]
            enter: list[str | Path] = ["/bin/sh", "-c", 'cd -- "$0" && exec "$@"', folder]
            return stream([*enter, *argv], _both(lines, log), env=_without_settings())

    def what_decides() -> Mapping[str, object]:
        return {**surroundings.sif_runtime(runtime), "partitions": len(image.layers) + bool(users)}

    log_decision("tests on the stored layers", runtime, "the SIF is rewritten when they have passed")
    return _Tests(image, Path(runtime).name, store, run, what_decides).check(again=False)


@contextlib.contextmanager
def _work_folder(store: Store) -> Iterator[Path]:
    """Yield a folder in the store, whose next command cleans up after a kill; without write access, in TMPDIR."""
    with contextlib.ExitStack() as stack:
        folder: Path | None = None
        with contextlib.suppress(StoreError):
            store.open_for_writing()
            folder = stack.enter_context(store.staging()) / "mount"
            folder.mkdir()
        yield folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ekiben-verify-")))


def _both(lines: list[str], log: Log) -> Log:
    def line(text: str) -> None:
        lines.append(text)
        log(text)

    return line


def _without_settings() -> dict[str, str]:
    """Return the environment without the user's APPTAINER_* settings, which could change a test's result."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("APPTAINER", "SINGULARITY"))}


def _command(group: ScriptGroup | None) -> list[str]:
    return ["/bin/sh", "-c", group.script] if group else ["/bin/sh", TEST]


def _hidden(group: ScriptGroup | None) -> str | None:
    return RECIPE_HOME if group and group.hides_recipe else None


def check_name(image: Image, runtime: str) -> str:
    """Return the name of a runtime's test record in the store."""
    return f"{image.image_id[7:]}-{runtime}"


@dataclass(frozen=True, slots=True)
class _Tests:
    """The tests of an image under one runtime. ``run`` runs all, or a group, appends the lines of output to a list, and
    returns the exit code; ``surroundings`` says what decides about them beside the image: without, all run."""

    image: Image
    runtime: str
    store: Store
    run: Callable[[list[str], ScriptGroup | None], int]
    surroundings: Surroundings | None = None

    def check(self, *, again: bool) -> Check:
        """Run the tests that may end differently than before; all with ``again``. Raises VerifyError when one fails."""
        name = check_name(self.image, self.runtime)
        if not again and (known := _known(self.store, name, self.image)) is not None:
            reason = f"they passed before on the image {self.image.image_id[:19]}"
            log_decision(f"tests under {self.runtime}", "not run again", reason)
            return Check(self.runtime, known[0], True, known[1])
        began = time.monotonic()
        tests = None
        if self.surroundings and not again:
            tests = separate(self.image, self.store, self.runtime, self.surroundings)
        is_passed, reused = self._run_groups(tests) if tests else (False, None)
        if not is_passed:
            lines: list[str] = []
            if code := self._run(lines, None):
                tail = "\n".join(f"  {line}" for line in lines[-LAST_LINES:])
                failed = f"a %test under {self.runtime} {describe_exit(code)}"
                message = f"{self.image.name}: {failed}. Its last lines:\n{tail}"
                raise VerifyError(message, hint=_import_hint(lines, self.image))
            if tests and not tests.passed(self.store):
                tests.note_requirement(self.store)
        seconds = round(time.monotonic() - began, 1)
        record = {"runtime": self.runtime, "seconds": seconds, "image": self.image.image_id, "date": now()}
        if self.store.is_writable():
            with contextlib.suppress(StoreError):  # a full disk: they run again next time
                self.store.put_check(name, record)
        return Check(self.runtime, seconds, False, reused)

    def _run_groups(self, tests: SeparateTests) -> tuple[bool, EarlierPass | None]:
        """Run the layers' tests where they may end differently, and the recipe's; return whether they passed, and what
        was not run."""
        name = f"tests of {self.image.name}'s layers under {self.runtime}"
        if tests.is_recipe_required(self.store):
            log_decision(name, "run in the complete image", "they failed before without the recipe's files")
            return False, None
        reused = tests.passed(self.store)
        if reused is not None:
            log_decision(name, "not run again", f"{reused}: same layers, environment, runtime and machine")
        elif self._run([], tests.of_layers):
            log_decision(name, "run in the complete image", "without the recipe's files, one failed")
            return False, None
        else:
            tests.note_passed(self.store)
        if self._run([], tests.of_recipe):
            log_decision(
                f"tests of {self.image.name} under {self.runtime}", "all run", "the recipe's test failed alone"
            )
            return False, None
        return True, reused

    def _run(self, lines: list[str], group: ScriptGroup | None) -> int:
        try:
            return self.run(lines, group)
        except EngineError as error:
            message = f"{self.image.name} could not be tested under {self.runtime}: {error}"
            raise VerifyError(message) from error


def _import_hint(lines: Sequence[str], image: Image) -> str | None:
    """Return what to do where an import failed; None where none did."""
    explained = explain_import(lines)
    if explained is None:
        return None
    lacks, arguments = explained
    recipe = shlex.quote(shlex.split(image.cli_args)[0])
    quoted = " ".join(map(shlex.quote, arguments.split()))
    return f"{lacks}; `{command_name()} add {quoted} {recipe}` adds it" if arguments else lacks


def _known(store: Store, name: str, image: Image) -> tuple[float, EarlierPass] | None:
    """Return how long the tests took that passed, and when that was; None where none are noted."""
    with contextlib.suppress(ValueError):
        fields = Fields.of(store.check(name))
        return fields.number("seconds"), EarlierPass(
            (), fields.time("date") if "date" in fields else "", image.image_id
        )
    return None


def _check_layers(image: Image, store: Store, progress: Progress) -> None:
    """Read every blob, and compute again what the records say of its tar. Raises CorruptBlob, VerifyError."""
    from ekiben.formats.tar import tar_digest

    with progress.step("read every blob", total=image.size):
        for layer in image.layers:
            try:
                store.check_blob(layer.digest, again=True)
            except CorruptBlob as error:
                if store.is_writable():
                    store.drop_blob(error.digest)
                error.hint = f"`{command_name()} build {image.cli_args}` builds it again"
                raise
            with store.reader(layer.digest) as reader:
                diff_id, tar_size = tar_digest(reader)
            if (diff_id, tar_size) != (layer.diff_id, layer.tar_size):
                if store.is_writable():  # the blob is intact: its record is corrected
                    store.put_layer(replace(layer, diff_id=diff_id, tar_size=tar_size))
                raise VerifyError(
                    f"the record of layer {layer.name} was damaged: its diff_id was {layer.diff_id}, and its files have"
                    f" {diff_id}",
                    hint=f"the record was corrected; `{command_name()} build {image.cli_args}` makes the image from it",
                )
            progress.count(layer.size)


def verify_image(resolved: ResolvedRecipe, store: Store, sif: Path | None) -> tuple[Image, list[Check]]:
    """Read every blob, compute every diff_id, run every test again, in ``sif``, or in ./NAME.sif where that is.

    Raises VerifyError when a test fails, a record is wrong or the SIF is not the image's, CorruptBlob when a blob is
    damaged, UsageError when ``sif`` is not there.
    """
    if sif is not None and not sif.is_file():
        raise UsageError(f"--sif: {sif} is {'not a file' if sif.exists() else 'not there'}")
    image = stored_image(resolved, store)
    progress = Progress()
    _check_layers(image, store, progress)
    sif = sif or Path(f"{image.name}.sif")
    from ekiben.executors import docker as daemon

    in_daemon = daemon.unavailable() is None and daemon.image_id(image.tag) == image.image_id
    checks = verify(
        image, store, progress, sifs=[sif] if sif.is_file() else [], loaded=["docker"] if in_daemon else [], again=True
    )
    if not checks:
        raise VerifyError(
            "every digest is right, but nothing here can run the tests: no Apptainer, Docker or buildah"
            + (f" for {image.arch}" if emulation_problem(image.arch) else "")
        )
    return image, checks
