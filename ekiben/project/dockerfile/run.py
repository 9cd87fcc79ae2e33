"""RUN: a command of %post, with its heredocs and mounts."""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass

from ekiben.project.dockerfile.context import FOLDER
from ekiben.project.dockerfile.copy import stage_archive
from ekiben.project.dockerfile.evaluation import Evaluation
from ekiben.project.dockerfile.model import Step
from ekiben.project.dockerfile.reader import Instruction
from ekiben.project.dockerfile.shell import SCRATCH, continue_lines, quoted, run_lines, shell_argument

_ALONE = re.compile(r"\d*<<-?(?:\"\w+\"|'\w+'|\w+)")
_ALIASES = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly", "rw": "readwrite"}
_KNOWN = {
    "bind": ("source", "target", "from", "readonly", "readwrite"),
    "cache": ("target", "id", "sharing", "mode", "uid", "gid", "readonly"),
    "tmpfs": ("target", "size"),
}
_REFUSED = {
    "secret": "a secret would get into a layer or a log; fetch what needs it outside the build, and copy it",
    "ssh": "no agent reaches a build; fetch what needs it outside the build, and copy it",
}


@dataclass(frozen=True, slots=True)
class _Mount:
    before: tuple[str, ...]
    after: tuple[str, ...]


def run_step(evaluation: Evaluation, instruction: Instruction) -> None:
    """Add a RUN to the current layer. Raises ValueError for what cannot be converted."""
    stage = evaluation.stage
    mounts: list[_Mount] = []
    for name, value in instruction.flags:
        if name == "mount":
            mounts.append(_mount(evaluation, instruction, value, len(mounts)))
        elif (name, value) not in (("network", "default"), ("security", "sandbox")):
            raise ValueError(f"--{name}={value} is not supported; omit it")
    is_root = stage.user.split(":")[0] in ("", "root", "0") and ":" not in stage.user
    user = "" if is_root else stage.user
    lines = [line for mount in mounts for line in mount.before]
    lines += _command_lines(evaluation, instruction, user)
    lines += [line for mount in reversed(mounts) for line in mount.after]
    helpers = (["as_user"] if user else []) + (["mount_folder"] if mounts else [])
    group = stage.group
    group.steps.append(Step(tuple(lines), tuple(helpers), stage.exports()))
    group.is_run = True
    group.uses_scratch = group.uses_scratch or bool(mounts)


def _command_lines(evaluation: Evaluation, instruction: Instruction, user: str) -> list[str]:
    stage = evaluation.stage
    if instruction.argv is not None:
        if not instruction.argv:
            raise ValueError("the list is empty")
        return run_lines(instruction.argv, stage.shell, user, stage.workdir)
    command = continue_lines(instruction.lines)
    heredocs = instruction.heredocs
    if heredocs and _ALONE.fullmatch(instruction.text):
        content = heredocs[0].content
        if len(heredocs) == 1 and content.startswith("#!"):
            return _script_lines(evaluation, content, user)
        command = [content.removesuffix("\n")]
    elif heredocs:
        command = ["\n".join([instruction.text, *(f"{item.content}{item.name}" for item in heredocs)])]
    return run_lines((), stage.shell, user, stage.workdir, command=command)


def _script_lines(evaluation: Evaluation, content: str, user: str) -> list[str]:
    """Return the lines that run a heredoc with a line #! of its own."""
    path = f"{SCRATCH}/{len(evaluation.stage.group.steps)}.script"
    evaluation.stage.group.uses_scratch = True
    return [
        f"mkdir -p {SCRATCH}",
        f"printf '%s\\n' {shell_argument(content.removesuffix(chr(10)))} >{path}",
        f"chmod 755 {path}",
        *run_lines((path,), (), user, evaluation.stage.workdir),
    ]


# -- mounts --------------------------------------------------------------------------------------------------------


def _mount(evaluation: Evaluation, instruction: Instruction, text: str, number: int) -> _Mount:
    options: dict[str, str] = {}
    for item in evaluation.expand_path(text).split(","):
        name, _, value = item.partition("=")
        options[_ALIASES.get(name, name)] = value
    kind = options.pop("type", "bind")
    if kind in _REFUSED:
        raise ValueError(f"--mount=type={kind} is refused: {_REFUSED[kind]}")
    if kind not in _KNOWN:
        raise ValueError(f"--mount=type={kind}: bind, cache and tmpfs are known")
    if unknown := sorted(options.keys() - set(_KNOWN[kind])):
        raise ValueError(f"--mount=type={kind}: {unknown[0]} is not supported; omit it")
    if not options.get("target"):
        raise ValueError("--mount needs target=PATH")
    target = "/" + posixpath.normpath(posixpath.join(evaluation.stage.workdir, options["target"])).lstrip("/")
    if kind == "bind":
        return _bind(evaluation, instruction, options, (target, number))
    before = [f"mount_folder {quoted(target)}"]
    if options.get("mode"):
        before.append(f"chmod {shlex.quote(options['mode'])} {quoted(target)}")
    if options.get("uid") or options.get("gid"):
        before.append(f"chown {options.get('uid', '0')}:{options.get('gid', '0')} {quoted(target)}")
    return _Mount(tuple(before), (f"unmount_folder {quoted(target)}",))


def _bind(
    evaluation: Evaluation, instruction: Instruction, options: dict[str, str], target_number: tuple[str, int]
) -> _Mount:
    """Copy the source of a bind mount to its target, and remove it after the command."""
    target, number = target_number
    source = options.get("source", ".")
    group = evaluation.stage.group
    folder = f"{SCRATCH}/{len(group.steps)}-bind{number}"
    if name := options.get("from"):
        archive = stage_archive(evaluation, instruction, name, (posixpath.join("/", source),))
        before = [f"mkdir -p {folder}", f"tar -C {folder} -xpf {archive}"]
        content = f"{folder}/content/."
        before += [
            f"if [ -n \"$(ls -A {folder}/files)\" ]; then echo '{instruction.where}: name a folder' >&2; exit 1; fi"
        ]
    else:
        matches = evaluation.context.find(source)
        if len(matches) != 1 or not matches[0].is_folder:
            raise ValueError(f"--mount source={source}: name one folder")
        if any(item.is_link for item in matches[0].items):
            raise ValueError(f"--mount source={source}: there are links in it; COPY it, and remove it in the RUN")
        evaluation.context.take(matches[0])
        group.files.append(f"{shlex.quote(f'{FOLDER}/{matches[0].path}'.rstrip('/'))} {folder}")
        before, content = [], f"{folder}/."
    before += [
        f'if [ -n "$(ls -A {quoted(target)} 2>/dev/null)" ]; then',
        "echo 'RUN --mount: the image has files there, which cannot be hidden' >&2; exit 1",
        "fi",
        f"mount_folder {quoted(target)}",
        f"cp -a {content} {quoted(target)}/",
    ]
    return _Mount(tuple(before), (f"unmount_folder {quoted(target)}",))
