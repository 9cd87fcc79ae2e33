"""Verify an image: every %test of its layers, in the finished image, on the real runtime; and every digest."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ekiben.builder.build import stored_image
from ekiben.builder.layer import LAST_LINES, prepare_job
from ekiben.core.checked import Fields
from ekiben.core.command_name import command_name
from ekiben.core.decisions import log_decision
from ekiben.core.emulation import emulation_problem
from ekiben.core.environment import build_environment
from ekiben.core.errors import CorruptBlob, EngineError, StoreError, UsageError, VerifyError
from ekiben.core.inner_path import AnyPath
from ekiben.core.process import describe_exit, stream
from ekiben.core.progress import Progress
from ekiben.executors import JobFailed, Script, by_preference, runtimes
from ekiben.executors.apptainer import program
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.store import Image, Store, check_sif

TEST = "/.singularity.d/test"
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """``runtime`` passed the tests in ``seconds``; ``known``: in an earlier run, on the same bytes."""

    runtime: str
    seconds: float
    known: bool


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

    def run(lines: list[str]) -> int:
        with _work_folder(store) as folder:
            argv: list[str | Path] = [
                runtime,
                "--quiet",
                "test",
                "--cleanenv",
                "--contain",
                "--no-home",
                "--workdir",
                folder,
                str(sif),  # Apptainer resolves the path of a descriptor, too
            ]
            return stream(argv, _both(lines, log), env=_without_settings())

    return _checked(image, f"{Path(runtime).name}", store, run, again)


def verify_docker(image: Image, store: Store, log: Log, *, again: bool = False) -> Check | None:
    """Run the tests in a container of the Docker image, without a network; None when no daemon answers.

    Raises VerifyError.
    """
    from ekiben.executors import docker as daemon

    if daemon.unavailable():
        return None

    def run(lines: list[str]) -> int:
        return daemon.try_image(image.image_id, ["/bin/sh", TEST], _both(lines, log))

    return _checked(image, "docker", store, run, again)


def verify_loaded(kind: str, image: Image, store: Store, log: Log, *, again: bool = False) -> Check:
    """Run the tests in a container of the image that the executor ``kind`` keeps, without a network.

    Raises VerifyError.
    """
    runtime = runtimes()[kind]

    def run(lines: list[str]) -> int:
        return runtime.try_image(image.image_id, ["/bin/sh", TEST], _both(lines, log))

    return _checked(image, kind, store, run, again)


def verify_stored(image: Image, store: Store, log: Log, *, again: bool = False) -> Check | None:
    """Run the tests on the store's layers under whatever executor is here: for a machine without a runtime."""
    available = next((item for item in by_preference() if item[1].unavailable() is None), None)
    if available is None:
        log_decision("tests on the stored layers", "not run", "no engine can be used here")
        return None
    name, executor = available
    log_decision("tests on the stored layers", f"engine {name}", "no runtime here has the finished image")

    def run(lines: list[str]) -> int:
        with store.staging() as staging:
            settings = {**image.environment, **build_environment(image.epoch)}
            script = Script("verify", f". {TEST}\n", settings)
            job = prepare_job(script, image.layers, store, staging, log=_both(lines, log))
            try:
                executor.try_run(job)
            except JobFailed as error:
                return error.returncode
            return 0

    return _checked(image, name, store, run, again)


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


def check_name(image: Image, runtime: str) -> str:
    """Return the name of a runtime's test record in the store."""
    return f"{image.image_id[7:]}-{runtime}"


def _checked(image: Image, runtime: str, store: Store, run: Callable[[list[str]], int], again: bool) -> Check:
    name = check_name(image, runtime)
    if not again and (seconds := _known_seconds(store, name)) is not None:
        log_decision(
            f"tests under {runtime}", "not run again", f"they passed before on the image {image.image_id[:19]}"
        )
        return Check(runtime, seconds, True)
    began, lines = time.monotonic(), list[str]()
    try:
        code = run(lines)
    except EngineError as error:
        raise VerifyError(f"{image.name} could not be tested under {runtime}: {error}") from error
    if code:
        tail = "\n".join(f"  {line}" for line in lines[-LAST_LINES:])
        raise VerifyError(f"{image.name}: a %test under {runtime} {describe_exit(code)}. Its last lines:\n{tail}")
    seconds = round(time.monotonic() - began, 1)
    if store.is_writable():
        with contextlib.suppress(StoreError):  # a full disk: they run again next time
            store.put_check(name, {"runtime": runtime, "seconds": seconds, "image": image.image_id})
    return Check(runtime, seconds, False)


def _known_seconds(store: Store, name: str) -> float | None:
    """Return how long the tests took that passed, None where none are noted."""
    with contextlib.suppress(ValueError):
        return Fields.of(store.check(name)).number("seconds")
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
                if store.is_writable():  # the blob is intact: what its record says of it is put right
                    store.put_layer(replace(layer, diff_id=diff_id, tar_size=tar_size))
                raise VerifyError(
                    f"the record of layer {layer.name} was damaged: its diff_id was {layer.diff_id}, and its files have"
                    f" {diff_id}",
                    hint=f"the record is right now; `{command_name()} build {image.cli_args}` makes the image from it",
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
