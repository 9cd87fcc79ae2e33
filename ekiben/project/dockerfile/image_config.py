"""EXPOSE, VOLUME, STOPSIGNAL, HEALTHCHECK, ONBUILD: what only the configuration of a Docker image has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ekiben.project.dockerfile.evaluation import Evaluation
from ekiben.project.dockerfile.reader import INSTRUCTIONS, Instruction
from ekiben.spec.container import ContainerConfig, Healthcheck

_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?(?:/(tcp|udp|sctp))?", re.IGNORECASE)
_FLAGS = {"interval": "interval", "timeout": "timeout", "start-period": "start_period", "retries": "retries"}
_NO_TRIGGERS = ("ONBUILD", "FROM", "MAINTAINER")


def set_ports(evaluation: Evaluation, instruction: Instruction) -> None:
    """EXPOSE PORT[-PORT][/PROTOCOL]…. Raises ValueError."""
    for argument in evaluation.expand_path(instruction.text).split():
        evaluation.stage.docker.ports |= {*_ports(argument)}


def _ports(argument: str) -> Iterator[str]:
    match = _PORTS.fullmatch(argument)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not match or not 0 < first <= last < 2**16:
        raise ValueError(f"expected EXPOSE PORT, PORT-PORT or PORT/udp, found: {argument}")
    for port in range(first, last + 1):
        yield f"{port}/{(match[3] or 'tcp').lower()}"


def set_volumes(evaluation: Evaluation, instruction: Instruction) -> None:
    """VOLUME PATH…, or a JSON list. Raises ValueError."""
    arguments = (
        instruction.text.split() if instruction.argv is None else instruction.argv
    )  # Docker's shell form has no quotes
    paths = [evaluation.expand_path(argument) for argument in arguments]
    if not all(paths):
        raise ValueError("expected VOLUME PATH, and the path is empty")
    ContainerConfig(volumes=tuple(paths))
    evaluation.stage.docker.volumes |= {*paths}


def set_stop_signal(evaluation: Evaluation, instruction: Instruction) -> None:
    """STOPSIGNAL NAME or NUMBER. Raises ValueError."""
    signal = evaluation.expand_path(instruction.text)
    ContainerConfig(stop_signal=signal)
    evaluation.stage.docker.stop_signal = signal


def set_healthcheck(evaluation: Evaluation, instruction: Instruction) -> None:
    """HEALTHCHECK NONE, or [OPTIONS] CMD COMMAND. Raises ValueError."""
    kind, _, command = instruction.text.partition(" ")
    values: dict[str, str] = {}
    for flag, value in instruction.flags:
        if flag not in _FLAGS:
            raise ValueError(f"--{flag}: expected {', '.join(f'--{name}' for name in _FLAGS)}")
        values[_FLAGS[flag]] = value
    if kind.upper() == "NONE" and not command.strip() and not values:
        evaluation.stage.docker.healthcheck = Healthcheck(test=("NONE",))
        return
    if kind.upper() != "CMD" or not command.strip():
        raise ValueError(f"expected HEALTHCHECK [OPTIONS] CMD COMMAND, or HEALTHCHECK NONE, found: {instruction.text}")
    retries = values.pop("retries", "0")
    if not (retries.isascii() and retries.isdigit()):
        raise ValueError(f"--retries={retries}: expected a number")
    test = ("CMD-SHELL", command.strip())
    try:
        argv = json.loads(command)
        if isinstance(argv, list) and argv and all(isinstance(item, str) for item in argv):
            test = ("CMD", *argv)
    except (ValueError, RecursionError):
        pass  # [ is a command, too
    evaluation.stage.docker.healthcheck = Healthcheck(test=test, retries=int(retries[:12]), **values)


def set_trigger(evaluation: Evaluation, instruction: Instruction) -> None:
    """ONBUILD INSTRUCTION. Raises ValueError."""
    name = instruction.text.split(None, 1)[0].upper()
    if name not in INSTRUCTIONS or name in _NO_TRIGGERS:
        raise ValueError(f"{name} cannot follow ONBUILD")
    evaluation.stage.docker.onbuild.append(instruction.text)
