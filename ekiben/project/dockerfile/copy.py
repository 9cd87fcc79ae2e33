"""Convert COPY and ADD to lines of %files, and to lines of %post where %files cannot express them."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from ekiben.project.dockerfile.context import FOLDER, Item, Source, is_archive
from ekiben.project.dockerfile.evaluation import Evaluation
from ekiben.project.dockerfile.expansion import expand_word, split_line
from ekiben.project.dockerfile.model import Group, StageArchive, Step
from ekiben.project.dockerfile.reader import Heredoc, Instruction
from ekiben.project.dockerfile.shell import SCRATCH, quoted, shell_argument

_REMOTE = re.compile(r"(?:https?|ftp|git|ssh)://|git@")


@dataclass(frozen=True, slots=True)
class _Request:
    """``destination`` is absolute; with a slash at its end it is a folder."""

    sources: tuple[str, ...]
    destination: str
    owner: str
    mode: str


def copy_files(evaluation: Evaluation, instruction: Instruction) -> None:
    """Add what COPY or ADD copies to the current layer. Raises ValueError for what cannot be converted."""
    flags = _flags(evaluation, instruction)
    argv = instruction.argv or tuple(split_line(instruction.text.split("\n")[0], evaluation.dockerfile.escape))
    if len(argv) < 2:
        raise ValueError(f"expected SOURCE… DESTINATION, found: {instruction.text}")
    expanded = [word if _is_heredoc(word, instruction) else evaluation.expand_path(word) for word in argv]
    request = _Request(
        tuple(expanded[:-1]),
        _destination(evaluation, expanded[-1], len(expanded) - 1),
        flags.get("chown", ""),
        flags.get("chmod", ""),
    )
    if name := flags.get("from"):
        _copy_from_stage(evaluation, instruction, name, request)
        return
    for source in request.sources:
        if _REMOTE.match(source):
            raise ValueError(
                f"{source} is not on this machine: write RUN curl -fsSL, with a checksum, for ADD of a URL"
            )
    local = [source for source in request.sources if not _is_heredoc(source, instruction)]
    _write_heredocs(evaluation, instruction, request)
    copied: list[Source] = []
    for source in local:
        matches = evaluation.context.find(source)
        copied += matches
        if not matches:
            evaluation.note(instruction, f"{source} matches nothing in the build context")
    if len(copied) > 1 and len([item for item in copied if not item.is_folder]) > 1 and not _is_folder(request):
        raise ValueError(f"several files go to {request.destination}: end it with a slash, if it is a folder")
    for item in copied:
        if instruction.name == "ADD" and not item.is_folder and is_archive(item.items[0].path):
            _unpack(evaluation, item, request)
        else:
            _copy_source(evaluation, instruction, item, request)


def _flags(evaluation: Evaluation, instruction: Instruction) -> dict[str, str]:
    flags: dict[str, str] = {}
    for name, value in instruction.flags:
        if name not in ("chown", "chmod", "from", "link"):
            raise ValueError(f"--{name} is not supported; omit it, or use RUN")
        flags[name] = evaluation.expand_path(value)
    if flags.get("chmod") and not re.fullmatch(r"[0-7]{3,4}", flags["chmod"]):
        raise ValueError(f"--chmod={flags['chmod']}: expected octal digits, as in 755")
    if flags.get("chown") and not re.fullmatch(r"[\w.-]+(?::[\w.-]+)?", flags["chown"], re.ASCII):
        raise ValueError(f"--chown={flags['chown']}: expected USER or USER:GROUP")
    return flags


def _is_heredoc(word: str, instruction: Instruction) -> bool:
    return word.startswith("<<") and bool(instruction.heredocs)


def _is_folder(request: _Request) -> bool:
    return request.destination.endswith("/")


def _destination(evaluation: Evaluation, word: str, count: int) -> str:
    stage = evaluation.stage
    is_folder = word.endswith("/") or posixpath.basename(word) in (".", "..")
    if count > 1 and not is_folder:
        raise ValueError(f"several sources go to {word}, which has to end with a slash")
    path = "/" + posixpath.normpath(posixpath.join(stage.workdir, word)).lstrip("/")
    is_folder = is_folder or path in stage.folders or path == "/"
    return path.rstrip("/") + "/" if is_folder else path


# -- files of the context ----------------------------------------------------------------------------------------


def _copy_source(evaluation: Evaluation, instruction: Instruction, source: Source, request: _Request) -> None:
    placed = _placed(source, request.destination)
    group = _group_for(evaluation, [path for _, path in placed])
    evaluation.context.take(source)
    if source.is_folder:
        evaluation.stage.folders.add(request.destination.rstrip("/") or "/")
        evaluation.stage.folders |= {path for item, path in placed if item.path.is_dir() and not item.is_link}
        group.files += _folder_lines(source, request.destination)
        for item, path in placed:
            if "__pycache__" in item.inside.split("/") and item.path.is_dir():
                evaluation.note(instruction, f"{path} is left out: bytecode depends on when it was made")
        placed = [(item, path) for item, path in placed if "__pycache__" not in item.inside.split("/")]
    else:
        parent = posixpath.dirname(placed[0][1])
        if _is_folder(request):
            evaluation.stage.folders.add(parent)
        group.files.append(f"{shlex.quote(f'{FOLDER}/{source.path}')} {shlex.quote(request.destination)}")
    lines = _folder_and_link_lines(source, request, placed)
    lines += _owner_lines(request, placed, source)
    lines += _mode_lines(request, placed)
    if lines:
        group.steps.append(Step(tuple(lines)))


def _placed(source: Source, destination: str) -> list[tuple[Item, str]]:
    """Return the destination of each item."""
    if source.is_folder:
        return [(item, f"{destination.rstrip('/')}/{item.inside}") for item in source.items]
    name = posixpath.basename(source.path)
    path = destination + name if destination.endswith("/") else destination
    return [(source.items[0], path)]


def _group_for(evaluation: Evaluation, paths: Iterable[str]) -> Group:
    """Return the layer for these files: a new one after a command, or where an earlier line writes one of them."""
    group, new = evaluation.stage.group, set(paths)
    if group.is_run or new & group.paths:
        group = evaluation.stage.next_group()
    group.paths |= new
    return group


def _folder_lines(source: Source, destination: str) -> list[str]:
    """Return lines of %files that copy the content of a folder into another one, which may be there."""
    top = [item for item in source.items if "/" not in item.inside and not item.is_link]
    below, to = f"{FOLDER}/{source.path}".rstrip("/"), shlex.quote(destination.rstrip("/") + "/")
    if re.search(r"[*?\[\\]", below) or any(item.inside.startswith("..") for item in top):
        return [f"{shlex.quote(f'{below}/{item.inside}')} {to}" for item in top]
    patterns = []
    if any(not item.inside.startswith(".") and item.inside != "__pycache__" for item in top):
        patterns.append("*")
    if any(item.inside.startswith(".") for item in top):
        patterns.append(".[!.]*")
    quoted_below = shlex.quote(below)
    return [f"{quoted_below}/{pattern} {to}" for pattern in patterns]


def _folder_and_link_lines(source: Source, request: _Request, placed: list[tuple[Item, str]]) -> list[str]:
    lines: list[str] = []
    if source.is_folder and not any(item.path.is_file() or item.path.is_dir() for item in source.items):
        lines.append(f"mkdir -p {quoted(request.destination)}")
    for item, path in placed:
        if item.is_link:
            lines.append(f"ln -sfn {quoted(str(item.path.readlink()))} {quoted(path)}")
    return lines


def _owner_lines(request: _Request, placed: list[tuple[Item, str]], source: Source) -> list[str]:
    owner = request.owner
    if not owner or owner in ("root", "0", "root:root", "0:0"):
        return []
    owner = owner if ":" in owner else f"{owner}:{owner if owner.isdigit() else ''}"
    top = [path for item, path in placed if "/" not in item.inside]
    return [f"chown -hR {quoted(owner)} {' '.join(map(quoted, top))}"] if top else []


def _mode_lines(request: _Request, placed: list[tuple[Item, str]]) -> list[str]:
    """Return the lines that set modes which %files does not keep: it knows 0644 and 0755."""
    paths: dict[int, list[str]] = {}
    for item, path in placed:
        if item.is_link:
            continue
        is_folder = item.path.is_dir()
        copied = 0o755 if is_folder or item.path.stat().st_mode & 0o100 else 0o644
        expected = int(request.mode, 8) if request.mode else item.mode
        if expected != copied or (request.owner and expected & 0o6000):
            paths.setdefault(expected, []).append(path)
    lines = []
    for mode, named in sorted(paths.items()):
        # A folder without search permission gets its mode after its content.
        lines.append(f"chmod {mode:04o} {' '.join(map(quoted, named[::-1]))}")
    return lines


def _unpack(evaluation: Evaluation, source: Source, request: _Request) -> None:
    """Add an archive, which ADD unpacks."""
    group = evaluation.stage.group
    evaluation.context.take(source)
    name = f"{SCRATCH}/{len(group.files)}/{posixpath.basename(source.path)}"
    group.files.append(f"{shlex.quote(f'{FOLDER}/{source.path}')} {shlex.quote(name)}")
    to = quoted(request.destination.rstrip("/") or "/")
    options = " --same-owner" if not request.owner else ""
    lines = [f"mkdir -p {to}", f"tar -C {to} -xpf {quoted(name)}{options}"]
    if request.owner or request.mode:
        raise ValueError("--chown and --chmod of an archive are not supported; use RUN")
    evaluation.stage.folders.add(request.destination.rstrip("/") or "/")
    group.steps.append(Step(tuple(lines)))
    group.is_run = group.uses_scratch = True


def _write_heredocs(evaluation: Evaluation, instruction: Instruction, request: _Request) -> None:
    heredocs: list[Heredoc] = [*instruction.heredocs]
    for heredoc in heredocs:
        text = heredoc.content
        if not heredoc.is_quoted:
            text = expand_word(_without_quotes(text), evaluation.look, evaluation.dockerfile.escape)
        path = request.destination + heredoc.name if _is_folder(request) else request.destination
        group = _group_for(evaluation, [path])
        body = shell_argument(text.removesuffix("\n"))
        lines = [f"mkdir -p {quoted(posixpath.dirname(path))}", f"printf '%s\\n' {body} >{quoted(path)}"]
        if text == "":
            lines[-1] = f": >{quoted(path)}"
        lines += [f"chown {quoted(request.owner)} {quoted(path)}"] if request.owner else []
        lines += [f"chmod {request.mode} {quoted(path)}"] if request.mode else []
        group.steps.append(Step(tuple(lines)))


def _without_quotes(text: str) -> str:
    """Escape quotes, which are letters in a heredoc, for expand_word()."""
    return re.sub(r"[\"']", lambda match: "\\" + match[0], text)


# -- files of other stages ---------------------------------------------------------------------------------------


def _copy_from_stage(evaluation: Evaluation, instruction: Instruction, name: str, request: _Request) -> None:
    archive = stage_archive(evaluation, instruction, name, request.sources)
    owner = request.owner and (request.owner if ":" in request.owner else f"{request.owner}:")
    argv = ["put_files", quoted(archive), quoted(request.destination)]
    argv += [quoted(owner)] if owner or request.mode else []
    argv += [request.mode] if request.mode else []
    group = evaluation.stage.group
    group.steps.append(Step((" ".join(argv),), ("put_files",)))
    group.is_run = True


def stage_archive(evaluation: Evaluation, instruction: Instruction, name: str, sources: tuple[str, ...]) -> str:
    """Let another stage, or an image, pack files, and return the archive's path in the current layer."""
    stage = evaluation.stage
    number = evaluation.find_stage(name, stage.number)
    if number is None and name.isdigit():
        raise ValueError(f"--from={name}: there is no such stage before this one")
    if number is None:
        number = evaluation.image_stage(name, instruction.where)
    group = stage.group
    archive = f"{SCRATCH}/{len(group.archives)}.tar"
    paths = tuple("/" + posixpath.normpath(source).lstrip("/") for source in sources)
    group.archives.append(StageArchive(stage=number, archive=archive, sources=paths))
    group.uses_scratch = True
    return archive
