"""Proves an image: every %test of its chain, in the finished image, on the real runtime; and every digest."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.assemble import Product
from builder.errors import EngineError, VerifyError
from builder.executors import EXECUTORS, JobFailed, load
from builder.executors.apptainer import program
from builder.hostenv import build_environment
from builder.pipeline import Image, prepare_job
from builder.process import stream
from builder.progress import Progress
from builder.store import Store

TEST = "/.singularity.d/test"
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """``runtime`` ran the tests in ``seconds``; ``known`` when that was on an earlier day, on the same bytes."""

    runtime: str
    seconds: float
    known: bool


def verify(
    image: Image, store: Store, products: Sequence[Product], progress: Progress, *, again: bool = False
) -> list[Check]:
    """Test what was made where it can run here; without a runtime, the stored layers. Errors: VerifyError."""
    checks: list[Check | None] = []
    with progress.step(f"verify {image.name}"):
        for product in products:
            if product.kind == "sif":
                checks.append(verify_sif(image, Path(product.place), store, progress.note, again=again))
            elif product.kind == "docker":
                checks.append(verify_docker(image, store, progress.note, again=again))
        if not any(checks):
            checks.append(verify_stored(image, store, progress.note, again=again))
    return [check for check in checks if check]


def verify_sif(image: Image, sif: Path, store: Store, log: Log, *, again: bool = False) -> Check | None:
    """The tests in the SIF under Apptainer or SingularityCE. None when there is neither. Errors: VerifyError."""
    found = program()
    if found is None:
        return None

    def run(lines: list[str]) -> int:
        with tempfile.TemporaryDirectory(prefix="ekiben-verify-") as folder:
            argv: list[str | Path] = [
                found,
                "--quiet",
                "test",
                "--cleanenv",
                "--contain",
                "--no-home",
                "--workdir",
                folder,
                sif,
            ]
            return stream(argv, _both(lines, log), env=_without_settings())

    return _checked(image, f"{Path(found).name}", store, run, again)


def verify_docker(image: Image, store: Store, log: Log, *, again: bool = False) -> Check | None:
    """The tests in a container of the Docker image, without a network. None when no daemon answers. Errors: VerifyError."""
    from builder import daemon

    if daemon.unavailable():
        return None

    def run(lines: list[str]) -> int:
        container = daemon.client().containers.run(
            image.image_id, ["/bin/sh", TEST], detach=True, network_mode="none", shm_size="1g"
        )
        try:
            for chunk in container.logs(stream=True, follow=True):
                for line in chunk.decode("utf-8", "replace").splitlines():
                    lines.append(line)
                    log(line)
            return int(container.wait()["StatusCode"])
        finally:
            container.remove(force=True)

    return _checked(image, "docker", store, run, again)


def verify_stored(image: Image, store: Store, log: Log, *, again: bool = False) -> Check | None:
    """The tests on the store's layers under whatever executor is here: for a machine without a runtime."""
    for name in EXECUTORS:
        executor = load(name)
        if executor.unavailable() is None:
            break
    else:
        return None

    def run(lines: list[str]) -> int:
        with store.staging() as staging:
            settings = {**image.chain.environment, **build_environment(image.chain.stack.file.epoch)}
            job = prepare_job("verify", f". {TEST}\n", settings, image.layers, store, staging,
                              log=_both(lines, log))  # fmt: skip
            try:
                executor.try_run(job)
            except JobFailed as error:
                return error.returncode
            return 0

    return _checked(image, name, store, run, again)


def _both(lines: list[str], log: Log) -> Log:
    def line(text: str) -> None:
        lines.append(text)
        log(text)

    return line


def _without_settings() -> dict[str, str]:
    """A user's own APPTAINER_* settings would make the test say something about them."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("APPTAINER", "SINGULARITY"))}


def check_name(image: Image, runtime: str) -> str:
    """What the store calls the record of it."""
    return f"{image.image_id[7:]}-{runtime}"


def _checked(image: Image, runtime: str, store: Store, run: Callable[[list[str]], int], again: bool) -> Check:
    name = check_name(image, runtime)
    if not again and (known := store.check(name)) is not None:
        return Check(runtime, known["seconds"], True)
    began, lines = time.monotonic(), list[str]()
    try:
        code = run(lines)
    except EngineError as error:
        raise VerifyError(f"{image.name} could not be tested under {runtime}: {error}") from error
    if code:
        tail = "\n".join(f"  {line}" for line in lines[-20:])
        raise VerifyError(
            f"{image.name}: a %test failed under {runtime} with exit code {code}. Its last lines:\n{tail}"
        )
    seconds = round(time.monotonic() - began, 1)
    if os.access(store.root, os.W_OK):
        store.put_check(name, {"runtime": runtime, "seconds": seconds, "image": image.image_id})
    return Check(runtime, seconds, False)
