"""Site profiles: a description of a cluster's compute nodes, used on a login node without a GPU.

A profile is a YAML file: one of sites/, one of the user's own in ~/.config/ekiben/sites/, or a path. What a profile
does not say is unknown (None), never assumed.
"""

from __future__ import annotations

import os
import re
import string
from dataclasses import dataclass, field
from pathlib import Path

from ekiben.core.checked import check_variables, shorten
from ekiben.core.command_name import command_name
from ekiben.core.decisions import log_decision
from ekiben.core.errors import UsageError, nearest
from ekiben.core.files import read_yaml
from ekiben.core.paths import PROJECT_ROOT, expand_home
from ekiben.core.settings import JobDefaults
from ekiben.run import schedulers

RUNTIMES = {
    "apptainer": "apptainer",
    "singularity-ce": "singularity",
    "singularity-pro": "singularity",
    "singularity": "singularity",  # before it became Apptainer and SingularityCE: up to 3.8
    "docker": "docker",
}
NETWORKS = ("infiniband", "efa", "roce", "ethernet")
_STORAGE = ("home", "group", "scratch", "local", "tmp")
_VERSION = re.compile(r"\d+(\.\d+)*")
_CAPABILITY = re.compile(r"\d{1,2}\.\d")


def version_of(text: str) -> tuple[int, ...]:
    """Return a version as numbers: ``"580.65.06"`` → (580, 65, 6); a suffix (``-1``, ``+ds1``, ``~rc1``) is left out.

    Raises ValueError when it is none.
    """
    match = _VERSION.match(text.strip().removeprefix("v"))
    if not match:
        raise ValueError(f"'{text}' is not a version")
    return tuple(int(number) for number in match[0].split("."))


def _checked_version(name: str, value: str | None) -> None:
    if value is not None and not _VERSION.match(value):
        raise ValueError(f"{name}: should be a version, as \"580.65.06\" (found: '{value}')")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: '{value}' is not known." + nearest(value, known))


def _positive(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name}: should be at least 1 (found: {number})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """GPUs of one kind in a node. ``memory_gib`` is of each."""

    model: str
    capability: str
    memory_gib: int
    count: int = 1

    def __post_init__(self) -> None:
        if not _CAPABILITY.fullmatch(self.capability):
            raise ValueError(f"capability: should be a compute capability, as \"9.0\" (found: '{self.capability}')")
        _positive(memory_gib=self.memory_gib, count=self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A compute node. ``cores`` as its scheduler counts them; ``driver`` is NVIDIA's; ``internet``: can it reach out;
    ``squashfs_zstd``: can its kernel mount squashfs compressed with zstd, as SIF files of others may be."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cores: int | None = None
    memory_gib: int | None = None
    architecture: str = "amd64"
    system: str | None = None
    kernel: str | None = None
    glibc: str | None = None
    squashfs_zstd: bool | None = None
    user_namespaces: bool | None = None
    internet: bool | None = None

    def __post_init__(self) -> None:
        _checked_version("driver", self.driver)
        _checked_version("kernel", self.kernel)
        _checked_version("glibc", self.glibc)
        _positive(cores=self.cores, memory_gib=self.memory_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A container runtime of the site. ``module`` is loaded first (`module load`); ``setuid``: installed so; ``gpus``:
    whether Docker has NVIDIA's container toolkit, or a CDI file."""

    kind: str
    version: str | None = None
    module: str | None = None
    setuid: bool | None = None
    gpus: bool | None = None

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, tuple(RUNTIMES))
        _checked_version("version", self.version)

    @property
    def command(self) -> str:
        """Return the runtime's program."""
        return RUNTIMES[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A file system. ``path`` may hold ``$VARIABLES`` of a job there; ``quota_gib`` is one user's, or one group's."""

    path: str
    type: str | None = None
    quota_gib: int | None = None
    size_gib: int | None = None

    def __post_init__(self) -> None:
        _positive(quota_gib=self.quota_gib, size_gib=self.size_gib)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Between nodes: ``ports`` of ``gbit`` Gbit/s each in a node."""

    kind: str
    ports: int | None = None
    gbit: int | None = None

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, NETWORKS)
        _positive(ports=self.ports, gbit=self.gbit)


_FILLED_IN = ("nodes", "gpus", "cores", "memory_gib")


def _check_template(word: str) -> None:
    """Raise ValueError for fields that are not filled in, and for formats: one of a width of gigabytes would take as
    much memory.
    """
    reason = ""
    try:
        for _, name, form, conversion in string.Formatter().parse(word):
            if name is not None and name not in _FILLED_IN:
                reason = f"no {shorten(name)}"
            elif form or conversion:
                reason = f"no format of '{name}'"
    except ValueError as error:
        reason = str(error)
    if reason:
        message = "only {nodes}, {gpus}, {cores} and {memory_gib} are filled in"
        raise ValueError(f"request: {shorten(word)}: {message} ({reason})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """What one node of a job can be: a resource type, a partition. GPUs, cores and memory are those the job gets.

    ``request``: the scheduler's words that ask for it; {nodes}, {gpus} (per node), {cores} and {memory_gib} are filled
    in.
    """

    request: tuple[str, ...]
    gpus: int = 0
    cores: int | None = None
    memory_gib: int | None = None
    max_nodes: int | None = None
    max_hours: int | None = None
    exclusive: bool = False

    def __post_init__(self) -> None:
        _positive(cores=self.cores, memory_gib=self.memory_gib, max_nodes=self.max_nodes, max_hours=self.max_hours)
        for word in self.request:
            _check_template(word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """``group_option`` takes the group or account that pays (``-g``, ``-P``, ``--account=``).

    ``group_in_script``: whether the option may stand in the job script; otherwise only on the command line.
    ``options``: further options of every job. ``defaults``: of `submit`, where neither its options nor config.yaml say
    it.
    """

    kind: str
    version: str | None = None
    group_option: str | None = None
    group_in_script: bool = True
    group_required: bool = False
    default_hours: int | None = None
    resources: dict[str, Resource] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    defaults: JobDefaults = field(default_factory=JobDefaults)

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, tuple(schedulers.names()))
        if self.group_required and not self.group_option:
            raise ValueError("group_required: needs group_option, the scheduler's option for it")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFile:
    """A profile. ``storage``: home, group, scratch, local (to the node), tmp. ``modules`` are loaded in every job;
    ``module_init`` is sourced before that."""

    name: str
    description: str
    node: Node
    runtimes: tuple[Runtime, ...] = ()
    storage: dict[str, Storage] = field(default_factory=dict)
    network: Network | None = None
    scheduler: Scheduler | None = None
    modules: tuple[str, ...] = ()
    module_init: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.storage:
            _one_of("storage", name, _STORAGE)
        check_variables(self.environment)


@dataclass(frozen=True, slots=True)
class Site:
    """A site profile and the file it was read from."""

    path: Path
    file: SiteFile

    @property
    def name(self) -> str:
        """Return the profile's name."""
        return self.file.name


def user_folder() -> Path:
    """Return the folder of a user's own profiles."""
    return expand_home(Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config"), "XDG_CONFIG_HOME") / "ekiben" / "sites"


def site_paths() -> dict[str, Path]:
    """Return every profile by name; a user's own replaces one of the same name."""
    return {
        path.stem: path for folder in (PROJECT_ROOT / "sites", user_folder()) for path in sorted(folder.glob("*.yaml"))
    }


def find_site(name: str) -> Site:
    """Return the site ``name`` of the user's own folder or of sites/, or the one at a path.

    Raises UsageError when there is none, DefinitionError when its profile is wrong.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = expand_home(Path(name), "--site")
        if not path.is_file():
            raise UsageError(
                f"{name}: no such site profile", hint=f"`{command_name()} doctor --record` writes one on a compute node"
            )
    else:
        known = site_paths()
        if name not in known:
            raise UsageError(
                f"no site '{name}'." + nearest(name, known),
                hint=f"a profile of your own is given as a path, or kept in {user_folder()}",
            )
        path = known[name]
    log_decision(f"site {name}", path, "your profile" if path.parent == user_folder() else "")
    return Site(path, read_yaml(path, SiteFile))
