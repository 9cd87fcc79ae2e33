"""Executors run a layer's %post. Each is a module of this folder that fits one Protocol.

To add an executor, add one file here and nothing elsewhere; its name is the file's name. It has `PREFERENCE`,
`unavailable`, `execute`, `try_run`, `remove_cached_images` and `remove_abandoned` (see `Executor`); with `load`,
`image_id`, `try_image` and `run_argv` as well (see `Runtime`) it also keeps images for `ekiben build --format NAME`
and runs tasks for `ekiben run --runtime NAME`. A distribution of your own can offer one, too: an entry point of the
group `ekiben.executors` that names the module. tests/unit/test_plugins.py holds each against its Protocol;
tests/integration/workspaces.py takes it into the tests with real engines. A module whose name begins with an underscore
is none.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from ekiben.core import plugins
from ekiben.core.decisions import is_logging, log_decision
from ekiben.core.errors import EngineError
from ekiben.core.paths import BUILD_MOUNT, ENGINE_SETUP
from ekiben.core.process import Argv
from ekiben.core.process_name import has_ended, process_name
from ekiben.formats.layer import decode_name
from ekiben.formats.oci import LayerSource
from ekiben.formats.upper import Changes

OWNER = "org.ekiben.owner"  # the label of a container: core.process_name() of its creator
_UNTESTED = "untested-"

# In records of 256 KiB: with tar's own 10, reading a layer of gigabytes takes twice as long.
# Of attributes layers keep capabilities and a user's own; access control lists are read to be named.
TAR = (
    "tar",
    "--create",
    "--file=-",
    "--format=pax",
    "--numeric-owner",
    "--blocking-factor=512",
    "--xattrs",
    "--xattrs-include=security.capability",
    "--xattrs-include=user.*",
    "--xattrs-include=system.posix_acl_*",
)
TAR_OF_UPPER = (*TAR, "--sort=name", "--one-file-system", "--xattrs-include=*.overlay.opaque")


# fuse-overlayfs marks an opaque folder by this file in it.
_MARKED = ("(", "-name", ".wh..opq", "-o", "-name", ".wh..wh..opq", ")")
_END = b"EKIBEN END"
# Names may contain any byte but NUL. A trailer after the last name marks a complete list.
FIND_MARKED = ("/bin/sh", "-c", f'find "$0" {shlex.join(_MARKED)} -print0 && printf "{_END.decode()}\\0"')


DEBUG_SCRIPT = "debug.sh"  # in a job's folder
SOURCED = '. "$0"'  # by the shell that has the variables
FEED = "feed"  # the pipe in a job's folder from which a shell reads a script line by line (ekiben.builder.failed_line)


@dataclass(frozen=True, slots=True)
class Script:
    """A script, its name in logs and in the names of containers, its variables, and the shell command that runs it,
    whose ``$0`` is its path: by default it is SOURCED.

    ``is_isolated``: it runs without a network, and with a cache of its own: for code that nobody here wrote.
    """

    name: str
    text: str
    environment: Mapping[str, str]
    command: str = SOURCED
    is_isolated: bool = False


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command that opens a shell on this terminal, its environment and the descriptors that it inherits."""

    argv: Argv
    environment: Mapping[str, str] | None = None
    pass_fds: Sequence[int] = ()


OnFailure = Callable[[int, ShellCommand], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A script to run as root on a stack of layers, bottom first.

    ``mount`` is a host folder that appears at /run/ekiben (it holds run.sh), ``cache`` one that appears at
    /run/ekiben/cache; ``scratch`` is a folder for the executor's own use that goes
    away afterwards; ``staging`` is where those of other builds are, too. Without ``has_network`` the script reaches
    nothing, not even this machine. ``on_failure`` is called with the exit code of a script that failed, and a command
    that opens DEBUG_SCRIPT on this terminal in what it left.
    """

    name: str
    lower: Sequence[LayerSource]
    mount: Path
    cache: Path
    scratch: Path
    staging: Path
    log: Callable[[str], None]
    has_network: bool = True
    on_failure: OnFailure | None = None


@dataclass(frozen=True, slots=True)
class FailedCommand:
    """A command of a script: its first line, counted from 1, and its text. ``is_last_failure``: commands that did not
    fail may have run after it.
    """

    line: int
    text: str
    is_last_failure: bool = False


class JobFailed(Exception):
    """A script ended with an exit code other than 0; ``command`` is what failed in it, where it is known."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"exit code {returncode}")
        self.returncode = returncode
        self.command: FailedCommand | None = None


class Executor(Protocol):
    """As per PEP 544, ``self`` is ignored when the protocol is applied to a module."""

    PREFERENCE: int  # `auto` chooses the usable one with the smallest: no daemon and no root first

    def unavailable(self) -> str | None:
        """Return why this executor cannot be used here, or None."""

    def execute(self, job: Job) -> AbstractContextManager[Changes]:
        """Run the job; inside the context its changes can be read, once. Raises JobFailed, EngineError."""

    def try_run(self, job: Job) -> None:
        """Run the job and discard its changes. Raises JobFailed, EngineError."""

    def remove_cached_images(self) -> int:
        """Remove the layers kept as images for the next build, and return their number."""

    def remove_abandoned(self, *, dry_run: bool = False) -> list[str]:
        """Remove what this user's killed commands left in the engine, and return "container NAME" or "image NAME" of
        each.

        With ``dry_run`` they stay.
        """


class Imprecise(Executor, Protocol):
    """An executor that may have to do without the kernel's overlay."""

    def overlay_defect(self, folder: Path) -> str | None:
        """Return why layers made with ``folder`` for files may differ from those of the kernel's overlay, or None."""


class Runtime(Executor, Protocol):
    """An executor that also stores users' images, and runs their tasks."""

    def load(self, config: bytes, layers: Sequence[LayerSource], name: str, scratch: Path, *, like: str = "") -> None:
        """Load the image of ``config`` and ``layers`` under ``name``; ``scratch`` is for temporary files, ``like`` the
        name of an image that is likely to have most of the layers.

        Raises EngineError, StoreError.
        """

    def tag(self, image_id: str, name: str) -> None:
        """Tag the image with this id as ``name``. Raises EngineError."""

    def untag(self, name: str) -> None:
        """Remove a name, and with its last one the image. Raises EngineError."""

    def image_id(self, name: str) -> str:
        """Return the id of the image ``name``, "" where there is none. Raises EngineError."""

    def try_image(
        self, image_id: str, command: Sequence[str], log: Callable[[str], None], *, hidden: str | None = None
    ) -> int:
        """Run a command in a new container of the image, without a network, and return its exit code.

        ``hidden``: a folder that is empty there; only Docker and podman are asked for it.
        """

    def run_argv(self, gpu: bool) -> list[str]:
        """Return the arguments that begin a task's command, as this user, with all GPUs or none.

        Docker's options follow.
        """


GROUP = "ekiben.executors"
_RUNTIME = ("load", "image_id", "try_image", "run_argv")


def untested_name(name: str, image_id: str) -> str:
    """Return the temporary tag of an image during its tests: NAME's repository, and the testing process."""
    version = f"{process_name()}-{image_id.removeprefix('sha256:')[:12]}"
    return f"{name.rpartition(':')[0]}:{_UNTESTED}{version}"


def is_left_untested(name: str) -> bool:
    """Return whether ``name`` is an untested_name() of a command of this user's that has ended."""
    version = name.rpartition(":")[2]
    return version.startswith(_UNTESTED) and has_ended(version.removeprefix(_UNTESTED).rpartition("-")[0])


def names() -> list[str]:
    """Name every executor, whether or not it can be used here. Nothing is imported: docker's SDK alone takes 0.15 s."""
    return plugins.names(__name__, GROUP)


def by_preference() -> list[tuple[str, Executor]]:
    """Return every executor in the order in which `auto` tries them."""
    return sorted(((name, load(name)) for name in names()), key=lambda named: (named[1].PREFERENCE, named[0]))


def check_name(engine: str) -> None:
    """Accept a name of an executor, or auto. Raises UsageError for another."""
    plugins.check(__name__, GROUP, engine, option="--engine", kind="engine", also=("auto",))


def load(name: str) -> Executor:
    """Import one executor. Raises UsageError when there is none of this name."""
    return cast(Executor, plugins.load(__name__, GROUP, name, option="--engine", kind="engine"))


def runtimes() -> dict[str, Runtime]:
    """Return the executors that keep images and run tasks, by name."""
    return {
        name: cast(Runtime, executor)
        for name, executor in by_preference()
        if all(hasattr(executor, attribute) for attribute in _RUNTIME)
    }


def choose(engine: str, without: Collection[str] = (), folder: Path | None = None) -> tuple[str, Executor, str]:
    """Return the executor to use, and why. ``auto`` chooses the first usable one that is not in ``without``.

    With ``folder``, where the job's files will be, one without a defect of its overlay comes first. Raises EngineError
    with each one's reason.
    """
    name, executor, reason = _choose(engine, without, folder)
    if is_logging():
        alternatives = [other for other in names() if other != name and f"{other}: " not in reason]
        skipped = f"; not tried: {', '.join(alternatives)}" if alternatives and engine == "auto" else ""
        log_decision("engine", name, reason + skipped)
    return name, executor, reason


def _choose(engine: str, without: Collection[str], folder: Path | None) -> tuple[str, Executor, str]:
    if engine != "auto":
        executor = load(engine)
        if reason := executor.unavailable():
            raise EngineError(f"engine {engine} cannot be used here: {reason}")
        return engine, executor, "; ".join(filter(None, ["asked for", _overlay_defect(executor, folder)]))
    reasons: list[str] = []
    second: tuple[str, Executor] | None = None
    for name, executor in by_preference():
        if name in without:
            continue
        if (reason := executor.unavailable()) is None:
            if (reason := _overlay_defect(executor, folder)) is None:
                return name, executor, "; ".join([*reasons, "usable here"])
            second = second or (name, executor)
        reasons.append(f"{name}: {reason}")
    if second is not None:
        return *second, "; ".join([*reasons, "no other can be used here"])
    raise EngineError(
        "no engine can be used here:\n" + "\n".join(f"  {reason}" for reason in reasons),
        hint=f"`{ENGINE_SETUP}` installs one, or prints what to ask the administrator for",
    )


def _overlay_defect(executor: Executor, folder: Path | None) -> str | None:
    if folder is None or not hasattr(executor, "overlay_defect"):
        return None
    return cast(Imprecise, executor).overlay_defect(folder)


@contextlib.contextmanager
def shared_packages(job: Job) -> Iterator[None]:
    """Link the packages of earlier jobs into the job's apt cache: apt locks its cache, so each job has one."""
    shared, job_packages = job.cache / "apt", job.mount / "apt"
    (job_packages / "partial").mkdir(parents=True, exist_ok=True)
    _link_packages(shared, job_packages)
    try:
        yield
    finally:
        _link_packages(job_packages, shared)


def _link_packages(source: Path, target: Path) -> None:
    for package in source.glob("*.deb"):
        with contextlib.suppress(OSError):  # it exists already, or is on another file system
            os.link(package, target / package.name)


def marked_folders(listing: bytes, upper: str) -> set[str]:
    """Return the opaque folders that FIND_MARKED listed for ``upper``.

    Raises EngineError when it is cut.
    """
    *names, end, rest = (b"", *listing.split(b"\0"))
    if (end, rest) != (_END, b""):
        raise EngineError(
            f"the list of what is opaque in {upper} breaks off after {len(listing)} bytes; build it again"
        )
    return {decode_name(name).rpartition("/")[0][len(upper) :].strip("/") for name in names if name}


def check_tools(layers: Sequence[LayerSource], engine: str) -> None:
    """Raise EngineError where these layers lack GNU tar or find, which read the changes from inside."""
    from ekiben.formats.changeset import Lower  # imported here: most invocations build nothing
    from ekiben.formats.placement import real_path

    with contextlib.ExitStack() as stack:
        lower = Lower([stack.enter_context(layer.reader()) for layer in reversed(layers)])
        for tool in ("tar", "find"):
            paths = [real_path(f"{folder}/{tool}", lower, follow_last=True) for folder in ("usr/bin", "bin")]
            tools = [path for path in paths if (entry := lower.lookup(path)) is not None and entry.kind != "dir"]
            small = tools and tools[0].rpartition("/")[2] in ("busybox", "toybox")
            if not tools or small:
                defect = f"is {tools[0].rpartition('/')[2]}'s" if small else "is missing"
                raise EngineError(
                    f"engine {engine} reads what a script changed with GNU tar and find of the image, where {tool}"
                    f" {defect}",
                    hint=(
                        "build with --engine buildah or podman, which use this machine's; or add tar and findutils "
                        "to the lowest layer"
                    ),
                )


def write_run_script(mount: Path, script: Script) -> None:
    """Write run.sh: the same environment and the same first steps under every executor.

    Variables are read from a file: on a command line everybody on the machine could read the passwords of proxies and
    indexes.
    """
    (mount / "post.sh").write_text(script.text, encoding="utf-8")
    (mount / "cache").mkdir(exist_ok=True)
    variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(script.environment.items()))
    private = os.open(mount / "environment", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(private, "w", encoding="utf-8") as stream:
        stream.write(variables)
    command = shlex.quote(f". /{BUILD_MOUNT}/environment; {script.command}")
    (mount / "run.sh").write_text(
        "umask 022\ncd /\n"
        # Only files are in it, so directories that exist keep their owners and modes.
        f"[ ! -e /{BUILD_MOUNT}/files.tar ] || tar --no-same-owner -xf /{BUILD_MOUNT}/files.tar || exit\n"
        f"exec env -i /bin/sh -e -c {command} /{BUILD_MOUNT}/post.sh </dev/null\n",
        encoding="utf-8",
    )


__all__ = [
    "DEBUG_SCRIPT",
    "FEED",
    "SOURCED",
    "Changes",
    "Executor",
    "FailedCommand",
    "Job",
    "JobFailed",
    "OnFailure",
    "Runtime",
    "Script",
    "ShellCommand",
    "apptainer",
    "by_preference",
    "check_name",
    "choose",
    "docker",
    "load",
    "names",
    "podman",
    "runtimes",
    "untested_name",
    "write_run_script",
]
