"""A Docker daemon: whether it answers, which images it has, loading one.

Imports the SDK only when there is work for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ekiben.core.errors import EngineError
from ekiben.formats import oci

if TYPE_CHECKING:
    from docker import DockerClient

_PATIENCE = 30  # seconds for a first byte of the daemon, which its socket may have to start


@cache
def client() -> DockerClient:
    """Return a client of the daemon. Raises EngineError with a hint when none answers."""
    import docker
    from docker.errors import DockerException

    where = os.environ.get("DOCKER_HOST", "/var/run/docker.sock")
    try:
        _ask_once(where)
        connected = docker.from_env(timeout=600)
        connected.ping()
    except (DockerException, OSError, ValueError) as error:
        if "Permission" in str(error):
            raise EngineError(
                "the Docker daemon refuses this user; ask for membership of the group 'docker'"
            ) from error
        raise EngineError(f"no Docker daemon answers at {where}") from error
    return connected


def _ask_once(where: str) -> None:
    """Wait for a first byte of a daemon, and close.

    Without an answer, the SDK would leave its Unix socket open, or wait for ten minutes. The socket may belong to any
    program. A daemon with TLS answers this, too.
    """
    path, address = where.removeprefix("unix://"), urlsplit(where)
    if path.startswith("/"):
        probe = socket.socket(socket.AF_UNIX)
        probe.settimeout(_PATIENCE)
    elif address.scheme in ("tcp", "http", "https"):
        probe = socket.create_connection((address.hostname or "localhost", address.port or 2375), _PATIENCE)
    else:
        return
    with probe:
        if path.startswith("/"):
            probe.connect(path)
        probe.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
        probe.recv(1)


def unavailable() -> str | None:
    """Return why the daemon cannot be used, or None."""
    try:
        client()
    except EngineError as error:
        return str(error)
    return None


def _layers_of(name: str) -> list[str]:
    from docker.errors import APIError

    try:
        return client().api.inspect_image(name)["RootFS"].get("Layers") or []
    except APIError:
        return []


def known_layers() -> set[str]:
    """Return the diff_ids at the bottom of the daemon's images, in order, which need not be sent again."""
    layer_lists = [image.attrs["RootFS"].get("Layers") or [] for image in client().images.list(all=True)]
    return {",".join(diff_ids[:length]) for diff_ids in layer_lists for length in range(1, len(diff_ids) + 1)}


def image_id(name: str) -> str:
    """Return the id of the image ``name`` in the daemon, "" where there is none. Raises EngineError."""
    from docker.errors import APIError

    try:
        return str(client().api.inspect_image(name)["Id"])
    except APIError:
        return ""


def tag(image_id: str, name: str) -> None:
    """Tag the image with this id as ``name``. Raises EngineError."""
    from docker.errors import APIError

    repository, _, version = name.rpartition(":")
    try:
        client().api.tag(image_id, repository, version)
    except APIError as error:
        raise EngineError(f"{image_id} cannot be named {name}: {error.explanation or error}") from error


def untag(name: str) -> None:
    """Remove a name, and with its last one the image. Raises EngineError."""
    from docker.errors import APIError

    try:
        client().api.remove_image(name)
    except APIError as error:
        raise EngineError(f"{name} cannot be removed: {error.explanation or error}") from error


def load_image(config: bytes, layers: Sequence[oci.LayerSource], name: str, *, like: str = "") -> str:
    """Bring an image into the daemon under ``name``, and return its id; layers it has are not sent.

    ``like``: the name of an image that is likely to have most of them, by default ``name``.
    """
    expected = oci.digest_of(config)
    if image_id(name) == expected:
        return expected
    if image_id(expected) == expected:
        tag(expected, name)
        return expected
    present = _present([layer.diff_id for layer in layers], like or name)
    for leave_out in ([present] if present else []) + [set[str]()]:
        message = _load(oci.archive(config, layers, name, leave_out=leave_out))
        if image_id(name) == expected:
            return expected
    raise EngineError(f"the Docker daemon did not load {name} as {expected}: {message[-500:]}")


def _present(diff_ids: list[str], name: str) -> set[str]:
    """Return the layers that the daemon has. An earlier image of this name usually has all but the last."""
    if _layers_of(name)[: len(diff_ids) - 1] == diff_ids[:-1]:
        return set(diff_ids[:-1])
    known = known_layers()
    return {diff_ids[index] for index in range(len(diff_ids)) if ",".join(diff_ids[: index + 1]) in known}


def _load(archive: Iterable[bytes]) -> str:
    """Load an archive, and return the daemon's messages."""
    return " ".join(str(line) for line in client().api.load_image(archive) or ())
