"""A Docker daemon, through its SDK: the layers below become an image, the script runs in a container of it, and only
what changed is read back."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import IO, TYPE_CHECKING, Any, cast

from builder import oci
from builder.capture import BUILD_MOUNT, is_noise
from builder.chain import DEFAULT_PATH, platform
from builder.errors import EngineError
from builder.executors import Changes, Job, JobFailed, is_gone, shared_packages
from builder.layer import sort_key
from builder.squashfs import SquashfsReader, merged_entries
from builder.store import Store, StoredLayer

if TYPE_CHECKING:
    from docker import DockerClient

LAYER_IMAGES = "ekiben/layer"
_MAKER = "org.ekiben.process"


@cache
def client() -> DockerClient:
    """Errors: EngineError with what to do when no daemon answers."""
    import docker
    from docker.errors import DockerException

    try:
        connected = docker.from_env(timeout=600)
        connected.ping()
    except DockerException as error:
        said = str(error)
        if "Permission" in said:
            raise EngineError(
                "the Docker daemon refuses this user; ask for membership of the group 'docker'"
            ) from error
        where = os.environ.get("DOCKER_HOST", "/var/run/docker.sock")
        raise EngineError(f"no Docker daemon answers at {where}") from error
    return connected


def unavailable() -> str | None:
    if (answer := _ask("/_ping")) and answer[0] == 200:
        return None
    try:
        client()
    except EngineError as error:
        return str(error)
    return None


def _socket() -> str | None:
    """The daemon's Unix socket, unless DOCKER_HOST names something else, which is the SDK's business."""
    scheme, _, place = (os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock").partition("://")
    return place if scheme == "unix" else None


def _ask(path: str, *, send: Iterable[bytes] | None = None) -> tuple[int, bytes] | None:
    """Status and body of a GET (of a POST of ``send``) at the daemon's Unix socket; None when nothing answers there.

    For what an invocation with little to do needs: importing the SDK takes longer than all of it.
    """
    if (place := _socket()) is None:
        return None
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10 if send is None else 3600)
            connection.connect(place)
            if send is None:
                connection.sendall(f"GET {path} HTTP/1.0\r\nHost: docker\r\n\r\n".encode())
            else:
                connection.sendall(f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n"
                                   "Content-Type: application/x-tar\r\nTransfer-Encoding: chunked\r\n\r\n".encode())  # fmt: skip
                for chunk in filter(None, send):
                    connection.sendall(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                connection.sendall(b"0\r\n\r\n")
            head, _, body = b"".join(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        return int(head.split()[1]), body
    except (OSError, ValueError, IndexError):
        return None


def _layers_of(name: str) -> list[str]:
    answer = _ask(f"/images/{name}/json")
    return json.loads(answer[1])["RootFS"].get("Layers") or [] if answer and answer[0] == 200 else []


def known_layers() -> set[str]:
    """diff_ids the daemon has as the bottom of some image, in that order, so that they need not be sent again."""
    chains = [image.attrs["RootFS"].get("Layers") or [] for image in client().images.list(all=True)]
    return {",".join(chain[:length]) for chain in chains for length in range(1, len(chain) + 1)}


def has_image(name: str, image_id: str) -> bool:
    if answer := _ask(f"/images/{name}/json"):
        return answer[0] == 200 and bool(json.loads(answer[1])["Id"] == image_id)
    from docker.errors import APIError

    try:
        return bool(client().api.inspect_image(name)["Id"] == image_id)
    except APIError:
        return False


def load_image(store: Store, config: bytes, layers: Sequence[StoredLayer], name: str) -> str:
    """Bring an image into the daemon under ``name``; layers it has are not sent. Returns the image id."""
    wanted = oci.digest_of(config)
    if has_image(name, wanted):
        return wanted
    if has_image(wanted, wanted):
        repository, _, tag = name.rpartition(":")
        client().api.tag(wanted, repository, tag)
        return wanted
    present = _present([layer.diff_id for layer in layers], name)
    for leave_out in ([present] if present else []) + [set[str]()]:
        said = _load(oci.archive(store, config, layers, name, leave_out=leave_out))
        if has_image(name, wanted):
            return wanted
    raise EngineError(f"the Docker daemon did not take {name} as {wanted}: {said[-500:]}")


def _present(diff_ids: list[str], name: str) -> set[str]:
    """Which of the layers the daemon has. The image that had ``name`` before, most often, has all but the last."""
    if _layers_of(name)[: len(diff_ids) - 1] == diff_ids[:-1]:
        return set(diff_ids[:-1])
    known = known_layers()
    return {diff_ids[index] for index in range(len(diff_ids)) if ",".join(diff_ids[: index + 1]) in known}


def _load(archive: Iterable[bytes]) -> str:
    """What the daemon says to an archive."""
    if _socket() is None:
        return " ".join(str(line) for line in client().api.load_image(archive) or ())
    answer = _ask("/images/load", send=archive)
    return answer[1].decode(errors="replace") if answer else "it closed the connection"


@contextlib.contextmanager
def execute(job: Job) -> Iterator[Changes]:
    with _container(job) as container:
        started = _now(job)
        with shared_packages(job):
            _run(job, container)
        changed, deleted = _changes(job, container, started)
        (job.mount / "paths").write_bytes(os.fsencode("".join(f"./{path}\0" for path in changed)))
        command = ["tar", "-C", "/", "--create", "--file=-", "--format=pax", "--no-recursion", "--numeric-owner",
                   "--null", f"--files-from=/{BUILD_MOUNT}/paths"]  # fmt: skip
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
        layers = [
            SquashfsReader(stack.enter_context(job.store.blob_path(layer.digest).open("rb"))) for layer in job.lower
        ]
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
