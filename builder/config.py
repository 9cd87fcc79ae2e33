"""What a user, or a site for all its users, sets once: ~/.config/ekiben/config.yaml, else /etc/ekiben/config.yaml.

    shared: /groups/lab/ekiben                     # where colleagues publish: layers found there are not built again
    registry: registry.example.org/lab/layers      # layers by key, asked after that; see builder/registry.py

An option on the command line comes first, then the environment (EKIBEN_SHARED, EKIBEN_REGISTRY; empty: none), then the file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from builder.files import read_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    shared: str | None = None
    registry: str | None = None


def config_files() -> tuple[Path, ...]:
    own = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return (Path(own).expanduser() / "ekiben" / "config.yaml", Path("/etc/ekiben/config.yaml"))


def read_config() -> Config:
    """The first file that is there, with what the environment says instead. Errors: DefinitionError."""
    path = next((path for path in config_files() if path.is_file()), None)
    written = read_yaml(path, Config) if path else Config()
    return Config(
        shared=os.environ.get("EKIBEN_SHARED", written.shared) or None,
        registry=os.environ.get("EKIBEN_REGISTRY", written.registry) or None,
    )
