"""Read the part of an image's configuration that affects the instructions after FROM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ekiben.core.checked import Fields, parse_json
from ekiben.core.errors import EkibenError
from ekiben.spec.container import Healthcheck

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseConfig:
    """``is_known`` is False where no registry answered; then nothing is assumed about the image."""

    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    workdir: str = ""
    shell: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    onbuild: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    stop_signal: str = ""
    healthcheck: Healthcheck | None = None
    is_known: bool = True


def parse_config(data: bytes) -> BaseConfig:
    """Parse an image's config. Raises ValueError for a wrong field."""
    fields = Fields.of(parse_json(data))
    config = fields.object("config") if fields.data.get("config") else Fields({})

    def texts(name: str) -> tuple[str, ...]:
        return tuple(config.strings(name)) if config.data.get(name) else ()

    environment = dict(line.split("=", 1) for line in texts("Env") if "=" in line)
    return BaseConfig(
        environment={"PATH": DEFAULT_PATH} | environment,
        user=config.text("User", ""),
        workdir=config.text("WorkingDir", ""),
        shell=texts("Shell"),
        entrypoint=texts("Entrypoint"),
        cmd=texts("Cmd"),
        onbuild=texts("OnBuild"),
        ports=tuple(config.mapping("ExposedPorts", {})),
        volumes=tuple(config.mapping("Volumes", {})),
        stop_signal=config.text("StopSignal", ""),
        healthcheck=Healthcheck.parse_oci(config.object("Healthcheck")) if config.data.get("Healthcheck") else None,
    )


def fetch_config(reference: str, platform: str) -> BaseConfig:
    """Ask the image's registry. Without an answer ``is_known`` is False."""
    from ekiben.registry.client import Registry
    from ekiben.registry.reference import Reference

    try:
        registry = Registry(Reference.parse(reference))
        manifest = registry.manifest(platform)
        return parse_config(registry.small_blob(manifest.config.digest, manifest.config.size))
    except (EkibenError, ValueError):
        return BaseConfig(is_known=False)
