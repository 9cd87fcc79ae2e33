"""What runs a layer's %post. An executor is a module that fits one Protocol; the dict below names them all."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Protocol, cast

from builder.chain import BUILD_MOUNT
from builder.errors import EngineError, UsageError, nearest
from builder.store import Store, StoredLayer

# In records of 256 KiB: with tar's own 10, reading a layer of gigabytes takes twice as long.
TAR = ("tar", "--create", "--file=-", "--format=pax", "--numeric-owner", "--blocking-factor=512")
TAR_OF_UPPER = (*TAR, "--sort=name", "--one-file-system", "--xattrs", "--xattrs-include=*.overlay.opaque")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A script to run as root on a stack of layers, bottom first.

    ``mount`` is a host folder that appears at /run/ekiben (it holds run.sh), ``cache`` one that appears at
    /run/ekiben/cache; ``scratch`` is a folder for the executor's own use that goes away afterwards.
    """

    name: str
    store: Store
    lower: Sequence[StoredLayer]
    mount: Path
    cache: Path
    scratch: Path
    log: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a job changed: the overlay's upper directory, or a tar of it where we may not read it (see builder.capture)."""

    upper: Path | IO[bytes]
    deleted: Collection[str] = ()
    opaque: Collection[str] = ()


class JobFailed(Exception):
    def __init__(self, returncode: int) -> None:
        super().__init__(f"exit code {returncode}")
        self.returncode = returncode


class Executor(Protocol):
    """As per PEP 544, ``self`` is ignored when the protocol is applied to a module."""

    def unavailable(self) -> str | None:
        """Why this executor cannot be used here, or None."""

    def execute(self, job: Job) -> AbstractContextManager[Changes]:
        """Run the job; inside the context its changes can be read, once. Errors: JobFailed, EngineError."""

    def try_run(self, job: Job) -> None:
        """Run the job and forget its changes. Errors: JobFailed, EngineError."""

    def forget_images(self) -> int:
        """Remove the layers kept as images for the next build; how many images those were."""


# In order of preference: no daemon and no root first. Loaded when asked for: docker's SDK alone takes 0.15 s.
EXECUTORS = {name: f"builder.executors.{name}" for name in ("apptainer", "buildah", "docker")}


def check_name(engine: str) -> None:
    """Errors: UsageError."""
    if engine not in ("auto", *EXECUTORS):
        raise UsageError(f"--engine: no engine '{engine}'." + nearest(engine, ["auto", *EXECUTORS]))


def load(name: str) -> Executor:
    check_name(name)
    return cast(Executor, import_module(EXECUTORS[name]))


def choose(engine: str) -> tuple[str, Executor, str]:
    """The executor to use, and why. ``auto`` takes the first that can. Errors: EngineError with each one's reason."""
    if engine != "auto":
        executor = load(engine)
        if reason := executor.unavailable():
            raise EngineError(f"engine {engine} cannot be used here: {reason}")
        return engine, executor, "asked for"
    reasons: list[str] = []
    for name in EXECUTORS:
        executor = load(name)
        if (reason := executor.unavailable()) is None:
            return name, executor, "; ".join([*reasons, "usable here"])
        reasons.append(f"{name}: {reason}")
    raise EngineError("no engine can be used here:\n" + "\n".join(f"  {reason}" for reason in reasons),
                      hint="`sh builder/bootstrap.sh --engine` installs one, or prints what to ask the administrator for")  # fmt: skip


@contextlib.contextmanager
def shared_packages(job: Job) -> Iterator[None]:
    """apt locks its cache while it installs, and a second build would fail: each job has links to what was fetched before."""
    shared, own = job.cache / "apt", job.mount / "apt"
    (own / "partial").mkdir(parents=True, exist_ok=True)
    _link_packages(shared, own)
    try:
        yield
    finally:
        _link_packages(own, shared)


def _link_packages(source: Path, target: Path) -> None:
    for package in source.glob("*.deb"):
        with contextlib.suppress(OSError):  # it is there, or on another file system
            os.link(package, target / package.name)


def is_gone(process: str) -> bool:
    return not Path("/proc", process).exists()


def write_run_script(mount: Path, environment: Mapping[str, str], script: str) -> None:
    """run.sh: the same environment and the same first steps under every executor."""
    (mount / "post.sh").write_text(script)
    (mount / "cache").mkdir(exist_ok=True)
    words = " \\\n  ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items()))
    (mount / "run.sh").write_text(
        "umask 022\ncd /\n"
        # Only files are in it, so directories that exist keep their owners and modes.
        f"[ ! -e /{BUILD_MOUNT}/files.tar ] || tar --no-same-owner -xf /{BUILD_MOUNT}/files.tar || exit\n"
        f"exec env -i \\\n  {words} \\\n  /bin/sh -e /{BUILD_MOUNT}/post.sh </dev/null\n"
    )
