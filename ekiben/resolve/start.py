"""What a container of a finished image starts with: of the recipe's `docker:`, of its base, and Ekiben's own."""

from __future__ import annotations

from ekiben.formats import oci
from ekiben.formats.base_config import BASE_RUNSCRIPT, BaseConfig
from ekiben.formats.evaluated import START
from ekiben.spec.container import ContainerConfig


def start_of(
    docker: ContainerConfig | None, base: BaseConfig | None, runscript: str, *, has_tasks: bool, at_start: bool
) -> oci.Start:
    """Return how a container starts.

    A base's program runs where ``runscript``, the image's, is that of the base; its folder counts without tasks, which
    write to the folder that is mounted. ``at_start``: scripts of the environment are evaluated at each start.
    """
    docker, base = docker or ContainerConfig(), base or BaseConfig()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] | None = None
    if BASE_RUNSCRIPT in runscript and not has_tasks and (base.entrypoint or base.cmd):
        entrypoint, command = base.entrypoint, base.cmd
    if docker.entrypoint is not None:
        entrypoint, command = docker.entrypoint, ()
    command = command if docker.cmd is None else docker.cmd
    return oci.Start(
        entrypoint=[*([START] if at_start else []), *entrypoint],
        user=docker.user or base.user,
        working_dir=docker.workdir or (base.workdir if not has_tasks else "") or oci.WORKING_DIR,
        command=command,
        further=docker.further_fields(),
    )
