"""Evaluate a Dockerfile's instructions in order, as far as possible before the build."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ekiben.core.errors import DefinitionError, nearest
from ekiben.project.dockerfile.base_config import BaseConfig
from ekiben.project.dockerfile.context import BuildContext
from ekiben.project.dockerfile.copy import copy_files
from ekiben.project.dockerfile.evaluation import Evaluation, Settings
from ekiben.project.dockerfile.expansion import expand_word, split_line
from ekiben.project.dockerfile.image_config import (
    set_healthcheck,
    set_ports,
    set_stop_signal,
    set_trigger,
    set_volumes,
)
from ekiben.project.dockerfile.model import Settings as StageSettings
from ekiben.project.dockerfile.model import Stage, Step
from ekiben.project.dockerfile.reader import Dockerfile, Instruction, parse_dockerfile
from ekiben.project.dockerfile.run import run_step
from ekiben.project.dockerfile.shell import UNKNOWN, quoted

_STAGE_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Arguments that BuildKit sets for each stage that declares them.
_PREDEFINED = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")


def evaluate(dockerfile: Dockerfile, context: BuildContext, settings: Settings) -> Evaluation:
    """Return the stages. Raises DefinitionError that lists every problem of the file."""
    evaluation = Evaluation(dockerfile, context, settings)
    for instruction in dockerfile.instructions:
        _perform(evaluation, instruction)
    known = evaluation.used_arguments
    for name in sorted(set(settings.arguments) - known - set(_PREDEFINED) - {item.lower() for item in _PREDEFINED}):
        evaluation.problems.append(f"{dockerfile.path}: --build-arg {name}: no ARG declares it." + nearest(name, known))
    if evaluation.problems:
        raise DefinitionError("\n".join(dict.fromkeys(evaluation.problems)))
    return evaluation


def _perform(evaluation: Evaluation, instruction: Instruction) -> None:
    if not evaluation.stages and instruction.name not in ("ARG", "FROM"):
        evaluation.problem(instruction, "only ARG may come before FROM")
        return
    try:
        _HANDLERS[instruction.name](evaluation, instruction)
    except ValueError as error:
        evaluation.problem(instruction, str(error))
        return
    if instruction.name not in ("ARG", "FROM"):
        evaluation.stage.group.lines.add(instruction.line)


# -- stages ------------------------------------------------------------------------------------------------------


def _from(evaluation: Evaluation, instruction: Instruction) -> None:
    argv = instruction.text.split()
    if len(argv) not in (1, 3) or (len(argv) == 3 and argv[1].upper() != "AS"):
        raise ValueError(f"expected FROM IMAGE or FROM IMAGE AS NAME, found: {instruction.text}")
    platforms = _platform_arguments(evaluation.settings.arch)
    values = {**platforms, **evaluation.global_arguments}
    reference = expand_word(argv[0], values.get, evaluation.dockerfile.escape)
    name = argv[2].lower() if len(argv) == 3 else ""
    if name and not _STAGE_NAME.fullmatch(name):
        raise ValueError(f"a stage's name is a letter, then letters, digits, '.', '_' and '-', found: {argv[2]}")
    if not reference:
        raise ValueError(f"{argv[0]} is empty: give it with --build-arg, or write a default: ARG NAME=IMAGE")
    for flag, value in instruction.flags:
        expected = expand_word(value, values.get, evaluation.dockerfile.escape)
        if flag != "platform" or expected not in (platforms["TARGETPLATFORM"], "linux"):
            raise ValueError(f"--{flag}={value} is refused: a layer is built for one architecture, which --arch names")
    parent = evaluation.find_stage(reference, len(evaluation.stages))
    parent = None if reference.isdigit() else parent
    stage = Stage(number=len(evaluation.stages), name=name, where=instruction.where)
    if parent is not None:
        _inherit(stage, evaluation.stages[parent])
    elif reference == "scratch":
        raise ValueError(
            "scratch has no shell, in which a definition file's scripts run; copy into a small base, such as debian"
        )
    else:
        stage.base = reference
        stage.config = config = _config(evaluation, reference)
        stage.user, stage.workdir = config.user, config.workdir or "/"
        stage.shell = config.shell or stage.shell
        stage.entrypoint, stage.cmd = config.entrypoint, config.cmd
        stage.docker = StageSettings(
            user=config.user,
            shell=config.shell,
            ports=set(config.ports),
            volumes=set(config.volumes),
            stop_signal=config.stop_signal,
            healthcheck=config.healthcheck,
        )
        if not config.is_known:
            evaluation.note(
                instruction,
                f"the registry of {reference} did not answer: what the image sets (WORKDIR, USER, SHELL, ENTRYPOINT)"
                " is not known here, and taken to be Docker's defaults",
            )
    evaluation.stages.append(stage)
    triggers = stage.config.onbuild if parent is None else evaluation.stages[parent].docker.onbuild
    _run_triggers(evaluation, reference, triggers)


def _config(evaluation: Evaluation, reference: str) -> BaseConfig:
    if reference not in evaluation.configs:
        evaluation.configs[reference] = evaluation.settings.base_config(reference)
    return evaluation.configs[reference]


def _inherit(stage: Stage, parent: Stage) -> None:
    stage.parent, stage.config = parent.number, parent.config
    stage.environment, stage.labels = dict(parent.environment), dict(parent.labels)
    stage.visible, stage.lower = dict(parent.visible), dict(parent.environment)
    stage.user, stage.workdir, stage.shell = parent.user, parent.workdir, parent.shell
    stage.entrypoint, stage.cmd, stage.is_start_set = parent.entrypoint, parent.cmd, parent.is_start_set
    stage.folders, stage.docker = set(parent.folders), parent.docker.child()


def _run_triggers(evaluation: Evaluation, base: str, triggers: Iterable[str]) -> None:
    """Evaluate the ONBUILD instructions of the base in the current stage."""
    for trigger in triggers:
        text = f"FROM {base}\n{trigger}\n"
        path = Path(f"{evaluation.stage.where} (ONBUILD of {base})")
        for instruction in parse_dockerfile(path, text).instructions[1:]:
            _perform(evaluation, instruction)


# -- state for later instructions ---------------------------------------------------------------------------------


def _platform_arguments(arch: str) -> dict[str, str]:
    values = {"OS": "linux", "ARCH": arch, "PLATFORM": f"linux/{arch}", "VARIANT": ""}
    return {f"{kind}{name}": value for kind in ("TARGET", "BUILD") for name, value in values.items()}


def _arg(evaluation: Evaluation, instruction: Instruction) -> None:
    options_arguments, is_global = evaluation.settings.arguments, not evaluation.stages
    values: dict[str, str | None] = {}
    for word in split_line(instruction.text, evaluation.dockerfile.escape):
        name, equals, default = word.partition("=")
        if not _NAME.fullmatch(name):
            raise ValueError(f"'{name}' is not the name of a variable: letters, digits and '_'")
        evaluation.used_arguments.add(name)
        platforms = _platform_arguments(evaluation.settings.arch)
        value: str | None = None
        if equals:
            look = evaluation.global_arguments.get if is_global else evaluation.look
            value = expand_word(default, look, evaluation.dockerfile.escape)
        if name in options_arguments:
            value = options_arguments[name]
        elif value is None and not is_global:
            value = evaluation.global_arguments.get(name, platforms.get(name))
            if name in platforms and name not in evaluation.global_arguments:
                evaluation.note(instruction, f"{name} is {value}, that of the architecture that this is written for")
        values[name] = value
    if is_global:
        evaluation.global_arguments.update(values)
    else:
        evaluation.stage.visible |= {name: value for name, value in values.items() if value is not None}


def _pairs(evaluation: Evaluation, instruction: Instruction) -> dict[str, str]:
    """Return the names and values of ENV and LABEL; those of one line do not refer to each other."""
    text = instruction.text
    argv = split_line(text, evaluation.dockerfile.escape)
    if "=" not in argv[0]:
        name, value = argv[0], text[len(argv[0]) :].strip()
        if not value:
            raise ValueError(f"{name} has no value; write {name}=VALUE")
        return {evaluation.expand(name): evaluation.expand(value)}
    pairs: dict[str, str] = {}
    for word in argv:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"expected NAME=VALUE, found: {word}")
        pairs[evaluation.expand(name)] = evaluation.expand(value)
    return pairs


def _env(evaluation: Evaluation, instruction: Instruction) -> None:
    pairs = _pairs(evaluation, instruction)
    for name in pairs:
        if not _NAME.fullmatch(name):
            raise ValueError(f"'{name}' is not a name that a shell can set: letters, digits and '_'")
    stage = evaluation.stage
    stage.environment |= pairs
    stage.visible |= pairs
    stage.group.environment |= pairs


def _label(evaluation: Evaluation, instruction: Instruction) -> None:
    for name, value in _pairs(evaluation, instruction).items():
        if UNKNOWN in name + value:
            raise ValueError(f"{name}: the base's registry did not answer, so its variables are not known here")
        if not name or re.search(r"\s", name) or "\n" in value or value != value.strip() or "{{" in name + value:
            evaluation.note(instruction, f"{name} is left out: %labels holds lines 'NAME VALUE', with no blank in NAME")
            continue
        evaluation.stage.labels[name] = value


def _maintainer(evaluation: Evaluation, instruction: Instruction) -> None:
    evaluation.stage.labels["org.opencontainers.image.authors"] = instruction.text
    evaluation.note(instruction, "kept as the label org.opencontainers.image.authors")


def _workdir(evaluation: Evaluation, instruction: Instruction) -> None:
    stage = evaluation.stage
    stage.workdir = posixpath.normpath(posixpath.join(stage.workdir, evaluation.expand_path(instruction.text)))
    stage.workdir = "/" + stage.workdir.lstrip("/")
    stage.folders.add(stage.workdir)
    if stage.workdir == "/":
        return
    path = quoted(stage.workdir)
    if stage.user and stage.user.split(":")[0] not in ("root", "0"):
        owner = stage.user if ":" in stage.user else f"{stage.user}:{stage.user if stage.user.isdigit() else ''}"
        step = Step((f"make_folder {quoted(owner)} {path}",), ("make_folder",))
    else:
        step = Step((f"mkdir -p {path}",))
    stage.group.steps.append(step)


def _user(evaluation: Evaluation, instruction: Instruction) -> None:
    stage = evaluation.stage
    stage.user = evaluation.expand_path(instruction.text)
    if not stage.user or re.search(r"\s", stage.user):
        raise ValueError(f"expected USER NAME or USER NAME:GROUP, found: {instruction.text}")
    stage.docker.user = stage.user
    name, _, group = stage.user.partition(":")
    stage.user = "" if name in ("root", "0") and group in ("", "root", "0") else stage.user


def _shell(evaluation: Evaluation, instruction: Instruction) -> None:
    if not instruction.argv:
        raise ValueError(f'expected SHELL ["PROGRAM", "-c"], found: {instruction.text}')
    evaluation.stage.shell = evaluation.stage.docker.shell = instruction.argv


def _start_argv(evaluation: Evaluation, instruction: Instruction) -> tuple[str, ...]:
    if instruction.argv is not None:
        return instruction.argv
    return (*evaluation.stage.shell, instruction.text)


def _entrypoint(evaluation: Evaluation, instruction: Instruction) -> None:
    stage = evaluation.stage
    stage.entrypoint, stage.is_start_set = _start_argv(evaluation, instruction), True
    if not stage.is_cmd_set:
        stage.cmd = ()


def _cmd(evaluation: Evaluation, instruction: Instruction) -> None:
    stage = evaluation.stage
    stage.cmd, stage.is_start_set, stage.is_cmd_set = _start_argv(evaluation, instruction), True, True


def _run(evaluation: Evaluation, instruction: Instruction) -> None:
    run_step(evaluation, instruction)


_HANDLERS: dict[str, Callable[[Evaluation, Instruction], None]] = {
    "FROM": _from,
    "ARG": _arg,
    "ENV": _env,
    "LABEL": _label,
    "MAINTAINER": _maintainer,
    "WORKDIR": _workdir,
    "USER": _user,
    "SHELL": _shell,
    "ENTRYPOINT": _entrypoint,
    "CMD": _cmd,
    "RUN": _run,
    "COPY": copy_files,
    "ADD": copy_files,
    "EXPOSE": set_ports,
    "VOLUME": set_volumes,
    "STOPSIGNAL": set_stop_signal,
    "HEALTHCHECK": set_healthcheck,
    "ONBUILD": set_trigger,
}

__all__ = ["evaluate"]
