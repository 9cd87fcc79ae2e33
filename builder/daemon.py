"""A Docker daemon: whether it answers, which images it has, loading one. Imports the SDK only when there is work for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from builder import oci
from builder.dockersock import answers, ask, place
from builder.dockersock import image_id as id_of
from builder.errors import EngineError
from builder.store import Store, StoredLayer

if TYPE_CHECKING:
    from docker import DockerClient


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
    if answers():
        return None
    try:
        client()
    except EngineError as error:
        return str(error)
    return None


def _layers_of(name: str) -> list[str]:
    answer = ask(f"/images/{name}/json")
    return json.loads(answer[1])["RootFS"].get("Layers") or [] if answer and answer[0] == 200 else []


def known_layers() -> set[str]:
    """diff_ids the daemon has as the bottom of some image, in that order, so that they need not be sent again."""
    chains = [image.attrs["RootFS"].get("Layers") or [] for image in client().images.list(all=True)]
    return {",".join(chain[:length]) for chain in chains for length in range(1, len(chain) + 1)}


def has_image(name: str, image_id: str) -> bool:
    if place() is not None:
        return id_of(name) == image_id
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
    if place() is None:
        return " ".join(str(line) for line in client().api.load_image(archive) or ())
    answer = ask("/images/load", send=archive)
    return answer[1].decode(errors="replace") if answer else "it closed the connection"
