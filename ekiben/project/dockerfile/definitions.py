"""Write the definition files of a Dockerfile's stages."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ekiben.project.dockerfile.evaluation import Evaluation
from ekiben.project.dockerfile.model import Group, Stage
from ekiben.project.dockerfile.shell import (
    HELPERS,
    SCRATCH,
    export_lines,
    quoted,
    runscript,
)

_GLOB = "*?["


def definition_files(evaluation: Evaluation, name: str) -> dict[str, str]:
    """Return the text of each layer's definition file by the layer's name; the image's top layer comes last.

    Raises ValueError for a name that no definition file can hold.
    """
    files: dict[str, str] = {}
    for stage in _needed(evaluation):
        for number, group in enumerate(_groups(stage), 1):
            is_last = stage is evaluation.final and number == len(_groups(stage))
            files[_layer_name(evaluation, stage, number, name)] = _definition(
                evaluation, stage, (number, group), name, is_last=is_last
            )
    return files


def _groups(stage: Stage) -> list[Group]:
    """Return the stage's layers; a base without any instruction is one, too."""
    groups = [group for group in stage.groups if not group.is_empty]
    return groups or [Group()]


def _needed(evaluation: Evaluation) -> list[Stage]:
    """Return the stages that the final one needs, each after those that it needs."""
    order: list[Stage] = []

    def add(stage: Stage) -> None:
        if stage in order:
            return
        numbers = [archive.stage for group in stage.groups for archive in group.archives]
        for number in [*([] if stage.parent is None else [stage.parent]), *numbers]:
            add(evaluation.stages[number])
        order.append(stage)

    add(evaluation.final)
    return order


def _layer_name(evaluation: Evaluation, stage: Stage, number: int, name: str) -> str:
    if stage is evaluation.final:
        return f"{name}-{number}"
    return f"{name}-{_short_name(stage)}-{number}"


def _short_name(stage: Stage) -> str:
    return f"stage{stage.number}" if not stage.name or stage.name.startswith(" ") else stage.name


def _definition(evaluation: Evaluation, stage: Stage, numbered: tuple[int, Group], name: str, *, is_last: bool) -> str:
    number, group = numbered
    if number > 1:
        header = f"Bootstrap: localimage\nFrom: {_layer_name(evaluation, stage, number - 1, name)}.sif\n"
    elif stage.parent is not None:
        parent = evaluation.stages[stage.parent]
        header = f"Bootstrap: localimage\nFrom: {_layer_name(evaluation, parent, len(_groups(parent)), name)}.sif\n"
    else:
        header = f"Bootstrap: docker\nFrom: {stage.base}\n"
    at = sorted(group.lines)
    source = f"# {evaluation.dockerfile.path.name}" + (f", lines {at[0]} to {at[-1]}" if at else "")
    parts = [*_packing_stages(evaluation, group, name), header]
    parts[0] = f"{source}\n{parts[0]}"
    if group.files:
        parts.append("%files\n" + _indented(group.files))
    by_stage: dict[int, list[str]] = {}
    for archive in group.archives:
        by_stage.setdefault(archive.stage, []).append(archive.archive)
    for other, paths in by_stage.items():
        lines = [f"{path} {path}" for path in paths]
        parts.append(f"%files from {_short_name(evaluation.stages[other])}\n" + _indented(lines))
    if post := _post(group):
        parts.append("%post\n" + post)
    if group.environment:
        parts.append("%environment\n" + _indented(export_lines(group.environment)))
    if is_last:
        if stage.labels:
            parts.append("%labels\n" + _indented([f"{key} {value}" for key, value in stage.labels.items()]))
        if stage.is_start_set:
            parts.append("%runscript\n" + _script(runscript(stage.entrypoint, stage.cmd, stage.workdir).splitlines()))
    return "\n".join(parts)


def _packing_stages(evaluation: Evaluation, group: Group, name: str) -> Iterator[str]:
    """Yield the build stages that pack files of other stages: %files from takes files, not links and empty folders."""
    numbers = dict.fromkeys(archive.stage for archive in group.archives)
    for number in numbers:
        stage = evaluation.stages[number]
        lines = [f"Bootstrap: localimage\nFrom: {_layer_name(evaluation, stage, len(_groups(stage)), name)}.sif"]
        lines += [f"Stage: {_short_name(stage)}\n", "%post"]
        script = [*HELPERS["archive_files"].splitlines()]
        for archive in group.archives:
            if archive.stage == number:
                script.append(f"archive_files {archive.archive} {' '.join(map(_pattern, archive.sources))}")
        yield "\n".join(lines) + "\n" + _indented(script)


def _pattern(path: str) -> str:
    """Return a source of COPY --from for a shell: its patterns, with hidden files, and all else quoted."""
    if not any(letter in path for letter in _GLOB):
        return quoted(path)
    folder, _, last = path.rpartition("/")
    argv = [_quote_around(path)]
    if last[:1] in ("*", "?"):
        argv.append(_quote_around(f"{folder}/.[!.]{last if last[0] == '*' else last[1:]}"))
    return " ".join(argv)


def _quote_around(path: str) -> str:
    result = ""
    for at, letter in enumerate(path):
        if letter in "^!" and path[at - 1] == "[":
            result += "!" if letter == "^" else "\\!"
        else:
            result += letter if letter in "*?[]/-" or letter.isalnum() else shlex.quote(letter)
    return result


def _post(group: Group) -> str:
    """Return %post: the functions that it calls, then the steps, each with its variables."""
    if not group.steps:
        return ""
    names = dict.fromkeys(helper for step in group.steps for helper in step.helpers)
    lines = [line for name in names for line in HELPERS[name].splitlines()]
    known: dict[str, str] = {}
    for step in group.steps:
        new = {name: value for name, value in step.exports.items() if known.get(name) != value}
        known |= new
        lines += [*export_lines(new), *step.lines]
    if group.uses_scratch:
        lines.append(f"rm -rf {SCRATCH}")
    return _script(lines)


def _script(lines: list[str]) -> str:
    """Indent lines, but for those with lines of their own in them: a heredoc's end is not indented."""
    return "".join(f"{line}\n" if "\n" in line else _indented([line]) for line in lines)


def _indented(lines: list[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
