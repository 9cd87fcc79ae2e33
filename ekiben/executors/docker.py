"""A Docker daemon, through its SDK: the layers below become an image, the script runs in a container of it, and only
what changed is read back."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

from ekiben.core.environment import DEFAULT_PATH, platform
from ekiben.core.errors import EngineError
from ekiben.core.folder import Folder
from ekiben.core.mounts import is_ambiguous
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.process import describe_exit
from ekiben.core.process_name import has_ended, is_of_this_boot, process_name
from ekiben.executors import (
    DEBUG_SCRIPT,
    FEED,
    OWNER,
    TAR,
    Changes,
    Job,
    JobFailed,
    ShellCommand,
    check_tools,
    is_left_untested,
    shared_packages,
)
from ekiben.executors._docker_daemon import client, image_id, load_image, tag, unavailable, untag
from ekiben.formats import oci
from ekiben.formats.changeset import is_excluded
from ekiben.formats.evaluated import with_start
from ekiben.formats.layer import decode_name, encode_name, sort_key
from ekiben.formats.squashfs.reader import merged_entries

__all__ = [
    "client",
    "execute",
    "image_id",
    "load_image",
    "remove_abandoned",
    "remove_cached_images",
    "tag",
    "try_image",
    "try_run",
    "unavailable",
    "untag",
]
PREFERENCE = 40
LAYER_IMAGES = "ekiben/layer"
_MOST_OUTPUT = 1 << 20  # bytes of messages


@contextlib.contextmanager
def execute(job: Job) -> Iterator[Changes]:
    """Run the job in Docker; inside the context its changes can be read, once. Raises JobFailed, EngineError."""
    check_tools(job.lower, "docker")
    with _container(job) as container:
        started = _now(job)
        with shared_packages(job):
            _run(job, container)
        changed, deleted = _changes(job, container, started)
        (job.mount / "paths").write_bytes(encode_name("".join(f"./{path}\0" for path in changed)))
        command = [*TAR, "-C", "/", "--no-recursion", "--null", f"--files-from=/{BUILD_MOUNT}/paths"]
        with _output(job, container, command) as archive:
            yield Changes(archive, deleted=deleted)


def _now(job: Job) -> float:
    """Return the kernel's time, as files have it."""
    (job.mount / "started").touch()
    return (job.mount / "started").stat().st_ctime_ns / 1e9


def _changes(job: Job, container: Any, started: float) -> tuple[list[str], list[str]]:
    """Return the files that were written and removed since ``started``.

    Not asked of the daemon: where it compares sizes and times it overlooks a file with both unchanged, and its JSON
    has no names that are not UTF-8. A file's ctime cannot be set by hand.
    """
    existing: dict[str, bool] = {}  # path → whether it is a directory
    changed: set[str] = set()
    with _output(job, container, ["find", "/", "-xdev", "-printf", r"%C@ %y %P\0"]) as listing:
        for line in listing.read().split(b"\0")[:-1]:
            when, kind, path = decode_name(line).split(" ", 2)
            existing[path] = kind == "d"
            if float(when) >= started and path and not is_excluded(path):
                parts = path.split("/")
                changed |= {"/".join(parts[:length]) for length in range(1, len(parts) + 1)}
    with contextlib.ExitStack() as stack:
        layers = [stack.enter_context(layer.reader()) for layer in job.lower]
        deleted = [
            entry.path
            for entry in merged_entries(layers)
            if entry.path not in existing and existing.get(entry.path.rpartition("/")[0])
        ]
    return sorted(changed, key=sort_key), deleted


def remove_cached_images() -> int:
    """Remove the layers that Docker keeps as images for the next build, and return how many these were.

    Raises EngineError, when the others are removed, for those that containers use.
    """
    from docker.errors import APIError

    names = [tag for image in client().images.list(LAYER_IMAGES) for tag in image.tags if tag.startswith(LAYER_IMAGES)]
    used: list[str] = []
    for name in names:
        try:
            client().images.remove(name)
        except APIError as error:
            if error.status_code != HTTPStatus.CONFLICT:
                raise
            used.append(name)
    if used:
        raise EngineError(
            f"docker: removed {len(names) - len(used)} layer images; containers use {', '.join(used)}",
            hint="`docker ps --all` names the containers; when they are gone, prune again",
        )
    return len(names)


def try_run(job: Job) -> None:
    """Run the job in Docker and discard its changes. Raises JobFailed, EngineError."""
    with _container(job) as container, shared_packages(job):
        _run(job, container)


@contextlib.contextmanager
def _container(job: Job) -> Iterator[Any]:
    config = oci.image_config(job.lower, environment={"PATH": DEFAULT_PATH}, labels={}, epoch=0, platform=platform())
    image = load_image(config, job.lower, f"{LAYER_IMAGES}:{oci.digest_of(config)[7:19]}")
    _remove_abandoned_containers()
    container = client().containers.create(
        image,
        ["/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"],
        **_binds({job.mount: f"/{BUILD_MOUNT}", job.cache: f"/{BUILD_MOUNT}/cache"}),
        labels={"org.ekiben.build": job.name, OWNER: process_name()},
        init=False,
        network_mode=None if job.has_network else "none",
    )
    try:
        container.start()
        yield container
    finally:
        container.remove(force=True)


def try_image(image_id: str, command: Sequence[str], log: Callable[[str], None], *, hidden: str | None = None) -> int:
    """Run a command in a container of the image, without a network, and return its exit code.

    ``hidden``: a folder that is empty there.
    """
    _remove_abandoned_containers()
    entrypoint = client().images.get(image_id).attrs["Config"].get("Entrypoint")
    program, *arguments = with_start(entrypoint, command)
    container = client().containers.create(
        image_id,
        arguments,
        entrypoint=[program],
        network_mode="none",
        shm_size="1g",
        labels={OWNER: process_name()},
        tmpfs={hidden: "ro"} if hidden else {},
    )
    try:
        container.start()
        for chunk in container.logs(stream=True, follow=True):
            for line in chunk.decode("utf-8", "replace").splitlines():
                log(line)
        return int(container.wait()["StatusCode"])
    finally:
        container.remove(force=True)


def _binds(folders: Mapping[Path, str]) -> dict[str, Any]:
    """Return the arguments of docker-py that bind folders of the host. Its `volumes` ends a path at ':'."""
    from docker.types import Mount

    if not any(is_ambiguous(folder) for folder in folders):
        return {"volumes": [f"{folder}:{inside}" for folder, inside in folders.items()]}
    return {"mounts": [Mount(inside, str(folder), type="bind") for folder, inside in folders.items()]}


def remove_abandoned(*, dry_run: bool = False) -> list[str]:
    """Remove the containers and untested images of this user's killed commands, and return their names."""
    if unavailable():
        return []
    containers = _remove_abandoned_containers(dry_run=dry_run)
    return [f"container {name}" for name in containers] + [
        f"image {name}" for name in _remove_untested(dry_run=dry_run)
    ]


def _remove_abandoned_containers(*, dry_run: bool = False) -> list[str]:
    names: list[str] = []
    for left in client().containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
        owner = left.labels.get(OWNER, "")
        # The daemon may run on another machine. A running container older than this machine's boot was not started from
        # here.
        if has_ended(owner) and (is_of_this_boot(owner) or left.status != "running"):
            names.append(str(left.name))
            if not dry_run:
                _remove_left(left)
    return names


def _remove_untested(*, dry_run: bool) -> list[str]:
    names = [name for image in client().api.images() for name in filter(is_left_untested, image["RepoTags"] or ())]
    for name in names if not dry_run else ():
        with contextlib.suppress(EngineError):  # another command is removing it
            untag(name)
    return names


def _remove_left(container: Any) -> None:
    from docker.errors import APIError

    with contextlib.suppress(APIError):  # another command is removing it
        container.remove(force=True)


def _run(job: Job, container: Any) -> None:
    api = client().api
    if client().info().get("KernelVersion") != os.uname().release:  # a pipe does not reach another kernel
        (job.mount / FEED).unlink(missing_ok=True)
    # One stream: the daemon sends stdout and stderr separately, in any order.
    script = f"exec /bin/sh /{BUILD_MOUNT}/run.sh 2>&1"
    execution = api.exec_create(container.id, ["/bin/sh", "-c", script])["Id"]
    rest = ""
    for chunk in api.exec_start(execution, stream=True):
        *lines, rest = (rest + chunk.decode("utf-8", "replace")).split("\n")
        for line in lines:
            job.log(line)
    if rest:
        job.log(rest)
    if code := _exit_code(execution):
        if job.on_failure is not None:
            argv = [
                "docker",
                "exec",
                "--interactive",
                "--tty",
                container.id,
                "/bin/sh",
                f"/{BUILD_MOUNT}/{DEBUG_SCRIPT}",
            ]
            job.on_failure(code, ShellCommand(argv))
        raise JobFailed(code)


def _exit_code(execution: str) -> int:
    """Wait for a program's exit code: its output may end before the program does."""
    while (state := client().api.exec_inspect(execution))["Running"] or state["ExitCode"] is None:
        time.sleep(0.05)
    return int(state["ExitCode"])


@contextlib.contextmanager
def _output(job: Job, container: Any, command: Sequence[str]) -> Iterator[IO[bytes]]:
    """Return a program's stdout as a file.

    Raises EngineError when the program fails or the file is not all that it wrote, OSError when the disk is full.

    It goes through the folder that the container shares with us: docker-py loses what arrives with the headers of a
    stream's socket. The file's size, written when the program has succeeded, says that it is whole.
    """
    inside, output_file = f"/{BUILD_MOUNT}/output", job.mount / "output"
    script = f'"$@" >{inside} 2>{inside}.errors && find {inside} -printf %s >{inside}.size'
    api = client().api
    execution = api.exec_create(container.id, ["/bin/sh", "-c", script, "sh", *command])["Id"]
    api.exec_start(execution)
    code = _exit_code(execution)
    errors = _begin_of(job.mount, "output.errors")
    if code:
        _check_space(job.mount)
        raise EngineError(f"reading the changes {describe_exit(code)}: {errors.decode('utf-8', 'replace')[-500:]}")
    expected_size, size = (
        _begin_of(job.mount, "output.size").strip(),
        output_file.stat().st_size if output_file.exists() else -1,
    )
    if expected_size != str(size).encode():
        raise EngineError(
            f"{command[0]} wrote {expected_size.decode('utf-8', 'replace') or 'an unknown number of'} bytes, and {size}"
            " of them arrived: the daemon does not share this machine's files, or the disk is full"
        )
    try:
        with Folder.open(job.mount) as mount, mount.open_file("output", io.DEFAULT_BUFFER_SIZE) as output:
            yield output
    finally:
        for path in (output_file, job.mount / "output.errors", job.mount / "output.size"):
            path.unlink(missing_ok=True)


def _check_space(folder: Path) -> None:
    """Raise the OSError of a full disk or quota: on one, the program's own message has no room either."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(bytes(1 << 20))
        probe.flush()


def _begin_of(mount: Path, name: str) -> bytes:
    """Return the first bytes of a container's file; nothing where it is none: a process may have put a link there."""
    with contextlib.suppress(OSError), Folder.open(mount) as folder, folder.open_file(name) as stream:
        return stream.read(_MOST_OUTPUT)
    return b""
