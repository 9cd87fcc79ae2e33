"""What a container of a recipe's image starts with under Docker: `docker:` of recipe.yaml, fields of an OCI config."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ekiben.core.checked import Fields

_PORT = re.compile(r"\d{1,5}/(?:tcp|udp|sctp)")
_SIGNAL = re.compile(r"[A-Za-z0-9+-]+")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h)")
_NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_MAX_DURATION = 2**63 - 1  # nanoseconds
_HEALTH_TESTS = ("NONE", "CMD", "CMD-SHELL")


def parse_duration(text: str) -> int:
    """Return the nanoseconds of a duration as Docker writes it: ``30s``, ``1m30s``. Raises ValueError."""
    matches = list(_DURATION.finditer(text))
    if not matches or "".join(match[0] for match in matches) != text:
        raise ValueError(f"'{text:.40}' is not a duration; write it as 30s, 1m30s or 500ms")
    total = sum(round(float(match[1]) * _NANOSECONDS[match[2]]) for match in matches if len(match[1]) < 20)
    if not 0 < total <= _MAX_DURATION:
        raise ValueError(f"'{text:.40}' is not a duration above zero, or too long")
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthcheck:
    """A command by which Docker finds out whether a container works. Durations as ``30s``; "" and 0: Docker's own."""

    test: tuple[str, ...]
    interval: str = ""
    timeout: str = ""
    start_period: str = ""
    retries: int = 0

    def __post_init__(self) -> None:
        if self.test[:1] == ("NONE",) and len(self.test) == 1:
            pass
        elif len(self.test) < 2 or self.test[0] not in _HEALTH_TESTS[1:]:
            raise ValueError("test: begins with CMD, CMD-SHELL or NONE, and a command follows: [CMD-SHELL, test -e /x]")
        elif self.test[0] == "CMD-SHELL" and (len(self.test) > 2 or "\n" in self.test[1]):
            raise ValueError("test: one line, and nothing else, follows CMD-SHELL")
        for duration in (self.interval, self.timeout, self.start_period):
            if duration:
                parse_duration(duration)
        if not 0 <= self.retries <= 10**6:
            raise ValueError("retries: should be a number from 0 to 1000000")

    @classmethod
    def parse(cls, fields: Fields) -> Healthcheck:
        """Read the key of a recipe.yaml in an image. Raises ValueError."""
        return cls(
            test=tuple(fields.strings("test")),
            interval=fields.text("interval", ""),
            timeout=fields.text("timeout", ""),
            start_period=fields.text("start_period", ""),
            retries=fields.size("retries") if "retries" in fields else 0,
        )

    @classmethod
    def parse_oci(cls, fields: Fields) -> Healthcheck:
        """Read the ``Healthcheck`` of a Docker image's config, whose durations are nanoseconds. Raises ValueError."""

        def duration(name: str) -> str:
            count = fields.size(name) if name in fields else 0
            return f"{count}ns" if count else ""

        return cls(
            test=tuple(fields.strings("Test")),
            interval=duration("Interval"),
            timeout=duration("Timeout"),
            start_period=duration("StartPeriod"),
            retries=fields.size("Retries") if "Retries" in fields else 0,
        )

    def instruction(self) -> str:
        """Return the instruction of a Dockerfile that sets it."""
        kind, *command = self.test
        if kind == "NONE":
            return "HEALTHCHECK NONE"
        values = {"interval": self.interval, "timeout": self.timeout, "start-period": self.start_period}
        flags = [f"--{name}={value}" for name, value in values.items() if value]
        flags += [f"--retries={self.retries}"] if self.retries else []
        return " ".join(["HEALTHCHECK", *flags, "CMD", json.dumps(command) if kind == "CMD" else command[0]])

    def fields(self) -> dict[str, Any]:
        """Return the ``Healthcheck`` of an image's config."""
        durations = {"Interval": self.interval, "Timeout": self.timeout, "StartPeriod": self.start_period}
        return {
            "Test": [*self.test],
            **{name: parse_duration(text) for name, text in durations.items() if text},
            **({"Retries": self.retries} if self.retries else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerConfig:
    """What a recipe sets of the config of its Docker image; the rest is the base's, or Ekiben's.

    ``entrypoint`` alone has no ``cmd``, as in a Dockerfile. None and "": not set.
    """

    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    user: str = ""
    workdir: str = ""
    ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    stop_signal: str = ""
    healthcheck: Healthcheck | None = None
    shell: tuple[str, ...] = ()
    onbuild: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if re.search(r"[\s\0]", self.user):
            raise ValueError("user: is a name or a number, with :GROUP or without, and has no blank")
        for name, paths in (("workdir", (self.workdir,) if self.workdir else ()), ("volumes", self.volumes)):
            for path in paths:
                if not path.startswith("/") or "\0" in path:
                    raise ValueError(f"{name}: '{path:.80}' is not an absolute path")
        for port in self.ports:
            if not _PORT.fullmatch(port) or not 0 < int(port.partition("/")[0]) < 2**16:
                raise ValueError(f"ports: '{port:.40}' is not a port; write it as 8080/tcp")
        if self.stop_signal and not _SIGNAL.fullmatch(self.stop_signal):
            raise ValueError(f"stop_signal: '{self.stop_signal:.40}' is not a signal, as SIGINT")

    @classmethod
    def parse(cls, fields: Fields) -> ContainerConfig:
        """Read the key of a recipe.yaml in an image; keys of a later version are ignored. Raises ValueError."""

        def texts(name: str) -> tuple[str, ...]:
            return tuple(fields.strings(name)) if name in fields else ()

        return cls(
            entrypoint=texts("entrypoint") if "entrypoint" in fields else None,
            cmd=texts("cmd") if "cmd" in fields else None,
            user=fields.text("user", ""),
            workdir=fields.text("workdir", ""),
            ports=texts("ports"),
            volumes=texts("volumes"),
            stop_signal=fields.text("stop_signal", ""),
            healthcheck=Healthcheck.parse(fields.object("healthcheck")) if "healthcheck" in fields else None,
            shell=texts("shell"),
            onbuild=texts("onbuild"),
        )

    def further_fields(self) -> dict[str, Any]:
        """Return the fields of an image's config besides the program, the user and the folder."""
        fields: dict[str, Any] = {
            "ExposedPorts": {port: {} for port in sorted(self.ports)},
            "Volumes": {path: {} for path in sorted(self.volumes)},
            "StopSignal": self.stop_signal,
            "Healthcheck": self.healthcheck.fields() if self.healthcheck else None,
            "Shell": [*self.shell],
            "OnBuild": [*self.onbuild],
        }
        return {name: value for name, value in fields.items() if value}

    def instructions(self) -> Iterator[str]:
        """Yield the instructions of a Dockerfile that set it, but for the program."""
        if self.ports:
            yield f"EXPOSE {' '.join(self.ports)}"
        if self.volumes:
            yield f"VOLUME {json.dumps([*self.volumes])}"
        if self.stop_signal:
            yield f"STOPSIGNAL {self.stop_signal}"
        if self.healthcheck:
            yield self.healthcheck.instruction()
        if self.shell:
            yield f"SHELL {json.dumps([*self.shell])}"
        yield from (f"ONBUILD {line}" for line in self.onbuild)
        if self.workdir:
            yield f"WORKDIR {self.workdir}"
        if self.user:
            yield f"USER {self.user}"

    def key(self) -> Mapping[str, Any]:
        """Return the keys of a recipe.yaml that have a value."""
        values = asdict(self)
        if self.healthcheck:
            values["healthcheck"] = {name: value for name, value in values["healthcheck"].items() if value}
        is_empty_list = {name for name in ("entrypoint", "cmd") if values[name] == ()}
        return {name: _as_lists(value) for name, value in values.items() if value or name in is_empty_list}


def _as_lists(value: Any) -> Any:
    """Return a value with lists in place of tuples, as YAML writes them."""
    if isinstance(value, dict):
        return {name: _as_lists(item) for name, item in value.items()}
    return [*value] if isinstance(value, tuple) else value
