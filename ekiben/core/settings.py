"""Settings of a user and of a site: ~/.config/ekiben/config.yaml and /etc/ekiben/config.yaml, merged key by key.

    shared: /groups/lab/ekiben                     # where colleagues publish: layers found there are not built again
    registry: registry.example.org/lab/layers      # layers by key, asked after that; see ekiben/registry/client.py
    recipes: [~/recipes, /groups/lab/recipes]      # folders of recipes, found by name beside those of Ekiben itself
    jobs: {account: lab, time: "2:00:00"}          # defaults of `submit`: see
    JobDefaults
    require_signature: [FINGERPRINT]               # keys, one of which has to have signed an image before it is run

An option on the command line comes first, then the environment (EKIBEN_STORE, EKIBEN_SHARED, EKIBEN_REGISTRY, and
EKIBEN_RECIPES with a colon between folders; empty: none), then the user's file, then the site's. A folder that is not
absolute is taken from where config.yaml lies. The command line reads them once and hands the values down.

``require_signature`` has neither option nor variable. Where both files have it, an image needs the signature of a key
that both name: a user can tighten the site's policy, not loosen it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ekiben.core.errors import DefinitionError
from ekiben.core.files import IF_NULL, read_yaml
from ekiben.core.paths import expand_home
from ekiben.core.pgp_key import SignaturePolicy, full_fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDefaults:
    """Options of `submit` that a user or a site sets once; None: not set. ``env``: NAME or NAME=VALUE.

    ``check``: what a job compares of its image: "state" (size, times, inode, header), or "digest" (every byte).
    """

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    time: str | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    memory: str | None = None
    exclusive: bool | None = None
    env: tuple[str, ...] = ()
    bind: tuple[str, ...] = ()
    scheduler_args: tuple[str, ...] = ()
    check: str | None = None

    def __post_init__(self) -> None:
        if self.check not in (None, "state", "digest"):
            raise ValueError(f"check: should be state or digest (found: '{self.check}')")

    def describe(self) -> str:
        """Return the settings for messages; lists by name only, because a variable may hold a secret."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return ", ".join(
            name if isinstance(value, tuple) else f"{name}={value}"
            for name, value in values.items()
            if value not in (None, ())
        )


_EMPTY_POLICY = "is empty; name the fingerprints of keys, or leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The content of config.yaml. ``require_signature``: fingerprints of keys; None: unsigned images are run, too."""

    shared: str | None = None
    registry: str | None = None
    recipes: tuple[str, ...] = ()
    sync: bool | None = None
    in_place: bool | None = None
    jobs: JobDefaults = field(default_factory=JobDefaults)
    require_signature: tuple[str, ...] | None = field(default=None, metadata={IF_NULL: _EMPTY_POLICY})

    def __post_init__(self) -> None:
        if self.require_signature == ():
            raise ValueError(f"require_signature: {_EMPTY_POLICY}")
        try:
            for text in self.require_signature or ():
                full_fingerprint(text)
        except ValueError as error:
            raise ValueError(f"require_signature: {error} (gpg --fingerprint shows it)") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``store`` and ``shared`` are absolute; ``registry`` is a reference of a repository of layers; ``recipes``
    are absolute folders whose recipes are known by name; ``sync``: locks are brought up to date; ``rewrite``:
    `build` rewrites the last layer in the SIF that is there;
    ``jobs`` are the user's defaults and the site's;
    ``require_signature`` is the policy that satisfies both files, None where neither has one.

    ``sources``: setting → where its value comes from, for messages; ``job_sources`` says it of each of ``jobs``.
    """

    store: Path
    shared: Path | None = None
    registry: str | None = None
    recipes: tuple[Path, ...] = ()
    sync: bool = False
    rewrite: bool = False
    jobs: tuple[JobDefaults, ...] = ()
    require_signature: SignaturePolicy | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    job_sources: tuple[str, ...] = ()


_OF_SITE = Path("/etc/ekiben/config.yaml")


def config_files(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return where config.yaml may be, the user's before the site's."""
    config_home = environment.get("XDG_CONFIG_HOME") or "~/.config"
    return (expand_home(Path(config_home), "folder of config.yaml") / "ekiben" / "config.yaml", _OF_SITE)


def store_root(environment: Mapping[str, str], option: Path | None = None) -> Path:
    """Return the absolute path of the user's own store. ``option`` is that of the command line."""
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    path = option or Path(environment.get("EKIBEN_STORE") or f"{cache}/ekiben/store")
    return expand_home(path, f"store ({store_source(environment, option)})").absolute()


def store_source(environment: Mapping[str, str], option: Path | None = None) -> str:
    """Return where store_root() takes the path from, for messages."""
    if option:
        return "--store"
    names = (name for name in ("EKIBEN_STORE", "XDG_CACHE_HOME") if environment.get(name))
    return next(names, "default")


def read_settings(environment: Mapping[str, str], *, store: Path | None = None, shared: Path | None = None) -> Settings:
    """Read the user's config.yaml and the site's. ``store`` and ``shared`` are options of the command line.

    Raises:
        DefinitionError: config.yaml is not what it should be.
    """
    configs = [(path, read_yaml(path, Config)) for path in config_files(environment) if _exists(path)]
    sources = {"store": store_source(environment, store)}
    values: dict[str, str | None] = {}
    for key in ("shared", "registry"):
        value, sources[key] = _of_file(configs, key)
        values[key], sources[key] = _of_environment(environment, f"EKIBEN_{key.upper()}", value, sources[key])
    if shared:
        values["shared"], sources["shared"] = str(shared), "--shared"
    base, folders, sources["recipes"] = next(
        ((path.parent, config.recipes, _file_source(path)) for path, config in configs if config.recipes),
        (Path.cwd(), (), _UNSET),
    )
    if (named := environment.get("EKIBEN_RECIPES")) is not None:
        base, folders, sources["recipes"] = Path.cwd(), tuple(filter(None, named.split(":"))), "EKIBEN_RECIPES"
    shared_dir = values["shared"]
    synced = [(config.sync, _file_source(path)) for path, config in configs if config.sync is not None]
    sync, sources["sync"] = next(iter(synced), (False, _UNSET))
    rewritten = [(config.in_place, _file_source(path)) for path, config in configs if config.in_place is not None]
    rewrite, sources["in_place"] = next(iter(rewritten), (False, _UNSET))
    return Settings(
        store=store_root(environment, store),
        shared=expand_home(Path(shared_dir), f"shared folder ({sources['shared']})").absolute() if shared_dir else None,
        registry=values["registry"] or None,
        sync=sync,
        rewrite=rewrite,
        jobs=tuple(config.jobs for _, config in configs),
        require_signature=SignaturePolicy.of_all(
            SignaturePolicy(frozenset(map(full_fingerprint, config.require_signature)), (str(path),))
            for path, config in configs
            if config.require_signature is not None
        ),
        recipes=tuple(
            (base / expand_home(Path(folder), f"folders of recipes ({sources['recipes']})")).absolute()
            for folder in folders
        ),
        sources=sources,
        job_sources=tuple(_file_source(path) for path, _ in configs),
    )


def _exists(path: Path) -> bool:
    """Return whether the file exists. A folder or an unreadable file does not disable the policy: reading it fails."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DefinitionError(f"{path}: cannot be read: {error.strerror}") from error
    return True


_UNSET = "not set"


def _file_source(path: Path) -> str:
    return f"the {'site' if path == _OF_SITE else 'user'}'s {path}"


def _of_file(configs: Iterable[tuple[Path, Config]], key: str) -> tuple[str | None, str]:
    """Return the first value of ``key`` in ``configs``, and its source."""
    values = ((value, _file_source(path)) for path, config in configs if (value := getattr(config, key)) is not None)
    return next(values, (None, _UNSET))


def _of_environment(
    environment: Mapping[str, str], name: str, value: str | None, source: str
) -> tuple[str | None, str]:
    """Return the variable and its name, or without one ``value`` and ``source``."""
    if name not in environment:
        return value, source
    return environment[name], name if environment[name] else f"{name} is empty"
