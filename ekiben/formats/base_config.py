"""The configuration of a foreign base image (environment, user, folder, program, labels), as files of its layer."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ekiben.core.checked import Fields, parse_json
from ekiben.core.environment import DEFAULT_PATH
from ekiben.formats.evaluated import Evaluated

BASE = "opt/ekiben/base.json"
BASE_ENVIRONMENT = "/.singularity.d/env/10-docker2singularity.sh"  # the name that Apptainer knows
BASE_RUNSCRIPT = "/opt/ekiben/base-runscript"
# Of a SIF alone: its environment is scripts, and it may have further scripts and a help.
SIF_CONFIG = "sif"  # of its key: what an older layer of it lacks
SIF_ENVIRONMENT = "/.singularity.d/env"
BASE_STARTSCRIPT = "/opt/ekiben/base-startscript"
BASE_HELP = "/opt/ekiben/base-help"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class BaseConfig:
    """The config of an image out of a registry, as far as images on it inherit it; "" and empty where it has none.

    ``environment`` has a PATH; names that no shell can export are not in it.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: {"PATH": DEFAULT_PATH})
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse_oci(cls, fields: Fields) -> BaseConfig:
        """Read the ``config`` of an OCI or Docker image's config. Raises ValueError."""
        lines = fields.strings("Env") if "Env" in fields else []
        pairs = (line.partition("=") for line in lines if "\0" not in line)
        environment = {name: value for name, _, value in pairs if _VARIABLE.fullmatch(name)}
        return cls(
            environment={**environment, "PATH": _with_default_path(environment.get("PATH", ""))},
            user=fields.text("User", ""),
            workdir=fields.text("WorkingDir", ""),
            entrypoint=tuple(fields.strings("Entrypoint")) if "Entrypoint" in fields else (),
            cmd=tuple(fields.strings("Cmd")) if "Cmd" in fields else (),
            labels=fields.texts("Labels", {}),
        )

    @classmethod
    def parse(cls, data: bytes) -> BaseConfig:
        """Read the file BASE of a layer, which others may have written. Raises ValueError."""
        fields = Fields.of(parse_json(data))
        return cls(
            environment=fields.texts("environment"),
            user=fields.text("user"),
            workdir=fields.text("workdir"),
            entrypoint=tuple(fields.strings("entrypoint")),
            cmd=tuple(fields.strings("cmd")),
            labels=fields.texts("labels"),
        )

    def files(self) -> dict[str, tuple[int, bytes]]:
        """Return the files of the base's layer: path → (mode, content)."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        texts = {
            "/" + BASE: (0o644, self.record()),
            BASE_ENVIRONMENT: (0o755, "\n".join(["#!/bin/sh", *exports, ""])),
            BASE_RUNSCRIPT: (0o755, self._runscript()),
        }
        files = {path: (mode, text.encode("utf-8", "surrogateescape")) for path, (mode, text) in texts.items()}
        return {**files, **Evaluated(self.environment).files()}

    def record(self) -> str:
        """Return the text of the file BASE."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    def _runscript(self) -> str:
        """Return the program of the image as Apptainer runs it: arguments replace Cmd."""
        default = shlex.join(self.cmd or (() if self.entrypoint else ("/bin/sh",)))
        arguments = f"[ $# -gt 0 ] || set -- {default}\n" if default else ""
        return f'#!/bin/sh\n{arguments}exec {shlex.join(self.entrypoint)} "$@"\n'


def _with_default_path(path: str) -> str:
    """Return PATH with the default folders that it lacks at its end, as Apptainer completes it."""
    folders = path.split(":") if path else []
    return ":".join([*folders, *(folder for folder in DEFAULT_PATH.split(":") if folder not in folders)])
