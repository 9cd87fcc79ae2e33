"""The stages of a Dockerfile as groups, each of which becomes a layer with a definition file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ekiben.project.dockerfile.base_config import BaseConfig
from ekiben.project.dockerfile.shell import DEFAULT_SHELL
from ekiben.spec.container import ContainerConfig, Healthcheck


@dataclass(frozen=True, slots=True)
class Step:
    """Lines of %post. ``helpers`` are the functions that they call; ``exports`` are set before."""

    lines: tuple[str, ...]
    helpers: tuple[str, ...] = ()
    exports: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageArchive:
    """Files of another stage, packed there as ``archive``. ``stage``: its number."""

    stage: int
    archive: str
    sources: tuple[str, ...]


@dataclass(slots=True)
class Group:
    """One layer: ``files`` are lines of %files, which come first; then ``steps`` run.

    ``is_run``: a file of this machine can no longer come before what was done.
    """

    files: list[str] = field(default_factory=list)
    archives: list[StageArchive] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)
    is_run: bool = False
    uses_scratch: bool = False

    @property
    def is_empty(self) -> bool:
        """Return whether the layer would be empty."""
        return not (self.files or self.archives or self.steps or self.environment)


@dataclass(slots=True, kw_only=True)
class Settings:
    """What only the configuration of a Docker image has. ``user`` is USER as written."""

    user: str = ""
    shell: tuple[str, ...] = ()
    ports: set[str] = field(default_factory=set)
    volumes: set[str] = field(default_factory=set)
    stop_signal: str = ""
    healthcheck: Healthcheck | None = None
    onbuild: list[str] = field(default_factory=list)

    def child(self) -> Settings:
        """Return the settings of a stage on this one; the instructions of ONBUILD are carried out there."""
        return replace(self, ports=set(self.ports), volumes=set(self.volumes), onbuild=[])


@dataclass(slots=True, kw_only=True)
class Stage:
    """A stage with what its instructions have set so far.

    ``base`` is a reference, ``parent`` another stage's number; with neither it is FROM scratch. ``visible`` has
    ENV and ARG, of which the later one counts; ``lower`` is what the layers below the current group set.
    """

    number: int
    name: str
    where: str
    base: str = ""
    parent: int | None = None
    config: BaseConfig = field(default_factory=BaseConfig)
    groups: list[Group] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    visible: dict[str, str] = field(default_factory=dict)
    lower: dict[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = "/"
    shell: tuple[str, ...] = DEFAULT_SHELL
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    is_cmd_set: bool = False
    is_start_set: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    docker: Settings = field(default_factory=Settings)

    @property
    def group(self) -> Group:
        """Return the layer that instructions add to."""
        if not self.groups:
            self.groups.append(Group())
        return self.groups[-1]

    def next_group(self) -> Group:
        """Begin a layer."""
        self.lower = dict(self.environment)
        self.groups.append(Group())
        return self.groups[-1]

    def container_config(self) -> ContainerConfig:
        """Return what a container of the image starts with. What only an unknown base sets is left to it."""
        is_known, docker = self.config.is_known, self.docker
        is_workdir_known = is_known or bool(self.folders)
        has_program = self.is_start_set or (is_known and bool(self.entrypoint or self.cmd))
        return ContainerConfig(
            entrypoint=self.entrypoint if has_program else None,
            cmd=self.cmd if has_program else None,
            user=docker.user,
            workdir=self.workdir if is_workdir_known else "",
            ports=tuple(sorted(docker.ports)),
            volumes=tuple(sorted(docker.volumes)),
            stop_signal=docker.stop_signal,
            healthcheck=docker.healthcheck,
            shell=docker.shell,
            onbuild=tuple(docker.onbuild),
        )

    def exports(self) -> dict[str, str]:
        """Return the variables of a command besides those of the layers below: arguments, and ENV of this layer."""
        return {name: value for name, value in self.visible.items() if self.lower.get(name) != value}
