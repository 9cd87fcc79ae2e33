"""A Docker daemon, through its SDK: the layers below become an image, the script runs in a container of it, and only
what changed is read back."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import IO, Any, cast

from builder import oci
from builder.capture import is_noise
from builder.chain import BUILD_MOUNT, DEFAULT_PATH, platform
from builder.daemon import client, load_image, unavailable
from builder.errors import EngineError
from builder.executors import TAR, Changes, Job, JobFailed, is_gone, shared_packages
from builder.layer import sort_key
from builder.squashfs import merged_entries

__all__ = ["execute", "forget_images", "try_run", "unavailable"]
LAYER_IMAGES = "ekiben/layer"
_MAKER = "org.ekiben.process"


@contextlib.contextmanager
def execute(job: Job) -> Iterator[Changes]:
    with _container(job) as container:
        started = _now(job)
        with shared_packages(job):
            _run(job, container)
        changed, deleted = _changes(job, container, started)
        (job.mount / "paths").write_bytes(os.fsencode("".join(f"./{path}\0" for path in changed)))
        command = [*TAR, "-C", "/", "--no-recursion", "--null", f"--files-from=/{BUILD_MOUNT}/paths"]
        yield Changes(_output(container, command), deleted=deleted)


def _now(job: Job) -> float:
    """The kernel's clock as files see it."""
    (job.mount / "started").touch()
    return (job.mount / "started").stat().st_ctime_ns / 1e9


def _changes(job: Job, container: Any, started: float) -> tuple[list[str], list[str]]:
    """What was written and what is gone since ``started``.

    Not asked of the daemon: where it compares sizes and times it overlooks a file with both unchanged, and its JSON
    has no names that are not UTF-8. A file's ctime cannot be set by hand.
    """
    there: dict[str, bool] = {}  # path → whether it is a directory
    changed: set[str] = set()
    with _output(container, ["find", "/", "-xdev", "-printf", r"%C@ %y %P\0"]) as listing:
        for line in listing.read().split(b"\0")[:-1]:
            when, kind, path = os.fsdecode(line).split(" ", 2)
            there[path] = kind == "d"
            if float(when) >= started and path and not is_noise(path):
                parts = path.split("/")
                changed |= {"/".join(parts[:length]) for length in range(1, len(parts) + 1)}
    with contextlib.ExitStack() as stack:
        layers = [stack.enter_context(job.store.reader(layer.digest)) for layer in job.lower]
        deleted = [entry.path for entry in merged_entries(layers)
                   if entry.path not in there and there.get(entry.path.rpartition("/")[0])]  # fmt: skip
    return sorted(changed, key=sort_key), deleted


def forget_images() -> int:
    names = [tag for image in client().images.list(LAYER_IMAGES) for tag in image.tags if tag.startswith(LAYER_IMAGES)]
    for name in names:
        client().images.remove(name)
    return len(names)


def try_run(job: Job) -> None:
    with _container(job) as container, shared_packages(job):
        _run(job, container)


@contextlib.contextmanager
def _container(job: Job) -> Iterator[Any]:
    config = oci.image_config(job.lower, environment={"PATH": DEFAULT_PATH}, labels={}, epoch=0, platform=platform())
    image = load_image(job.store, config, job.lower, f"{LAYER_IMAGES}:{oci.digest_of(config)[7:19]}")
    _remove_left_behind()
    container = client().containers.create(
        image, ["/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"],
        volumes=[f"{job.mount}:/{BUILD_MOUNT}", f"{job.cache}:/{BUILD_MOUNT}/cache"], labels={"org.ekiben.build": job.name, _MAKER: f"{socket.gethostname()}:{os.getpid()}"},
        init=False,
    )  # fmt: skip
    try:
        container.start()
        yield container
    finally:
        container.remove(force=True)


def _remove_left_behind() -> None:
    """Containers of builds that were killed on this host."""
    for left in client().containers.list(all=True, filters={"label": _MAKER}, ignore_removed=True):
        host, _, process = left.labels[_MAKER].rpartition(":")
        if host == socket.gethostname() and is_gone(process):
            left.remove(force=True)


def _run(job: Job, container: Any) -> None:
    api = client().api
    # One stream: the daemon carries stdout and stderr apart, and then their lines arrive in any order.
    script = f"exec /bin/sh /{BUILD_MOUNT}/run.sh 2>&1"
    execution = api.exec_create(container.id, ["/bin/sh", "-c", script])["Id"]
    rest = ""
    for chunk in api.exec_start(execution, stream=True):
        *lines, rest = (rest + chunk.decode("utf-8", "replace")).split("\n")
        for line in lines:
            job.log(line)
    if rest:
        job.log(rest)
    if code := api.exec_inspect(execution)["ExitCode"]:
        raise JobFailed(code)


def _output(container: Any, command: Sequence[str]) -> IO[bytes]:
    """A program's stdout as a file; its failure shows as an error when the stream ends."""
    api = client().api
    execution = api.exec_create(container.id, list(command))["Id"]

    def chunks() -> Iterator[bytes]:
        errors = b""
        for out, error in api.exec_start(execution, stream=True, demux=True):
            errors += error or b""
            if out:
                yield out
        if code := api.exec_inspect(execution)["ExitCode"]:
            raise EngineError(
                f"reading the changes failed with exit code {code}: {errors.decode('utf-8', 'replace')[-500:]}"
            )

    return cast(IO[bytes], oci.ChunkReader(chunks()))
