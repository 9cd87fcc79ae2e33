"""Requirements of Python packages: parsed, and passed to uv without running any of their code on this machine.

uv runs the build script of a folder, an archive or a repository to know what it depends on; of an editable one even
where building is off. So a file may name packages of an index alone, and uv gets what was read and checked, in a file
of ours: it would read some lines of the user's file differently. And uv would take settings, and the interpreter that
it starts, from ``uv.toml`` and ``.venv`` in the working folder, which may be a recipe from elsewhere: it gets an empty
project and this interpreter instead.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import SplitResult, unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from uv import find_uv_bin

from ekiben.core.errors import DefinitionError
from ekiben.core.files import read_source
from ekiben.core.process import Argv, run
from ekiben.spec.base_packages import BasePackage
from ekiben.spec.source_folders import SourceFolders, local_path
from ekiben.spec.sources import is_subdirectory
from ekiben.spec.stack import Stack

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_LIBC = "glibc 2.28"  # the oldest that images of Ekiben's own have to run on
_MANYLINUX = (17, 28, *range(31, 41))  # versions 2.N of glibc that uv knows as platforms
_EXTRA = re.compile(r"""extra == ["']([\w.-]+)""")
_REPLACED = re.compile(r"^# replace:[ \t]*(\S.*)$", re.MULTILINE)
_DATE = re.compile(r"^# exclude-newer: (\S+)", re.MULTILINE)
_OPTION = re.compile(
    r"(?P<name>-i|-f|--index-url|--extra-index-url|--find-links)(?:=|\s+)(?P<index>\S+)|--pre|--prefer-binary"
)
_LONG_OPTION = {"-i": "--index-url", "-f": "--find-links"}
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_ARCHIVE = re.compile(r"\.(whl|zip|tar|tgz|tar\.\w+)$", re.IGNORECASE)
_HINTS = (
    (
        re.compile(r"\s--hash[=\s]"),
        "`ekiben lock` writes hashes itself; without them: sed -i -E 's/[ \\\\]*--hash[= ][^ ]+//g; s/[ \\\\]+$//'"
        " requirements.txt",
    ),
    (
        re.compile(r"https?://"),
        "an archive's URL is not locked: name the package, and its index with --extra-index-url or --find-links",
    ),
    (
        _ARCHIVE,
        "a file is not locked: name the package, and the file's folder: --find-links ./FOLDER",
    ),
    (
        re.compile(r"^(-e|--editable|\.|/)|file:|@\s*[./]"),
        "a folder goes into a recipe's requirements.txt (./FOLDER, or NAME @ file:FOLDER), not into a stack's .in file"
        " or a constraint",
    ),
)
_VARIABLE = re.compile(r"\$\{[^}]*\}")
_FILE = re.compile(r"(?P<name>-r|-c|--requirements?|--constraints?)(?:=|\s+|(?<=-[rc]))(?P<path>\S.*)")
_GIT = re.compile(r"(^|[@\s])git\+", re.IGNORECASE)
_FOLDER = re.compile(
    r"(?P<editable>(?:-e|--editable)(?:\s+|=|(?<=-e)))?"
    r"(?:(?P<name>[A-Za-z0-9][\w.-]*)\s*(?P<named>\[[^\]]*\])?\s*@\s*(?=file:|[./]))?"
    r"(?P<path>(?:file:)?[^\s;\[\]]+)(?P<extras>\[[^\]]*\])?\s*(?:;\s*(?P<marker>.+))?"
)
_WEB_URL = re.compile(r"https?://", re.IGNORECASE)

INDEXES = (  # variables of uv and pip that name package indexes
    "UV_DEFAULT_INDEX",
    "UV_INDEX",
    "UV_INDEX_URL",
    "UV_EXTRA_INDEX_URL",
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
)


@dataclass(frozen=True, slots=True)
class GitRequirement:
    """NAME @ git+URL@REFERENCE. ``reference`` is a branch, a tag, a commit, or HEAD; ``subdirectory`` is a path in the
    repository, "" for its top folder.
    """

    requirement: Requirement
    repository: str
    reference: str
    subdirectory: str = ""


@dataclass(frozen=True, slots=True)
class LocalRequirement:
    """A folder of the recipe's with a Python project: ``./package``, or ``-e ./package`` (``is_editable``).

    ``requirement`` has the package's name, extras and marker; ``folder`` is without links.
    """

    requirement: Requirement
    folder: Path
    is_editable: bool = False


@dataclass(frozen=True, slots=True)
class RequirementsFile:
    """A requirements file that was read and checked. ``options`` are those of indexes, as uv takes them;
    ``exclude_newer`` is the date of its comment, "" without one; ``git`` are those of git repositories.
    ``local`` are folders. ``constraints`` are lines of files after ``-c``, ``files`` all files that were read.
    ``installed``: packages of a base, which no index need have, and of which an index may say something else.
    ``replaced``: packages of the layers below that the recipe's layer installs in a version of its choice, by their
    canonical names: those of a comment ``# replace: NAME``.
    """

    options: tuple[str, ...]
    requirements: tuple[Requirement, ...]
    exclude_newer: str = ""
    git: tuple[GitRequirement, ...] = ()
    constraints: tuple[Requirement, ...] = ()
    files: tuple[Path, ...] = ()
    local: tuple[LocalRequirement, ...] = ()
    installed: tuple[BasePackage, ...] = ()
    replaced: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Return the file for uv. A name is in its canonical form: uv would take ``x-1.tar.gz`` for an archive."""
        return "".join(f"{line}\n" for line in (*self.options, *map(_format_requirement, self.requirements)))


def is_git(line: str) -> bool:
    """Return whether a requirement names a git repository."""
    return _GIT.search(line) is not None


def read_requirements(
    source: Path,
    sources: SourceFolders,
    *,
    is_recipe: bool = False,
    edits: Mapping[Path, str] = MappingProxyType({}),
    _above: tuple[Path, ...] = (),
) -> RequirementsFile:
    """Read requirements.txt, pyproject.toml or an .in file; of a recipe, also git repositories and files after ``-r``
    and ``-c``, which lie in ``sources``. ``edits`` has the text of files that are not written yet.

    Raises:
        DefinitionError: something in it is not a package of an index, or cannot be read; an index is a folder outside
            ``sources``, or its URL has a variable of the user's in it.
    """
    text = edits[source] if source in edits else read_source(source)
    is_project = source.suffix == ".toml"
    options, requirements, git = list[str](), list[Requirement](), list[GitRequirement]()
    local: list[LocalRequirement] = []
    further: list[tuple[str, RequirementsFile]] = []
    lines = project_requirements(source, text) if is_project else _list_requirements(text)
    for number, line in lines:
        if not is_project and (option := _OPTION.fullmatch(line)):
            options.append(_check_option(option, source, number, sources))
        elif is_recipe and not is_project and (other := _FILE.fullmatch(line)):
            where = f"{source}:{number}"
            path = sources.check(source.parent / other["path"].strip("\"'"), where)
            if path in (*_above, source) or not path.is_file():
                problem = "is not a file" if not path.is_file() else "names the file that names it"
                raise DefinitionError(f"{where}: {path} {problem}")
            file = read_requirements(path, sources, is_recipe=True, edits=edits, _above=(*_above, source))
            further.append((other["name"], file))
        elif is_recipe and is_git(line):
            git.append(_git_requirement(line, f"{source}:{number}"))
        elif is_recipe and (match := match_folder(line)):
            local.append(read_folder(match, source.parent, sources, f"{source}:{number}"))
        elif line:
            requirements.append(_requirement(source, number, line))
    date = _DATE.search(text)
    constraints = [item for _, file in further for item in file.constraints]
    for name, file in further:
        options += file.options
        git += file.git
        local += file.local
        (constraints if name.lstrip("-").startswith("c") else requirements).extend(file.requirements)
    files = (source, *(path for _, file in further for path in file.files))
    return RequirementsFile(
        options=tuple(options),
        requirements=tuple(requirements),
        exclude_newer=date[1] if date else "",
        git=tuple(git),
        constraints=tuple(constraints),
        files=files,
        local=tuple(local),
        replaced=replaced_names(text, str(source)) if is_recipe else (),
    )


def replaced_names(text: str, where: str) -> tuple[str, ...]:
    """Return the names in the comments ``# replace: NAME`` of a list. Raises DefinitionError."""
    names = [name for line in _REPLACED.findall(text) for name in line.replace(",", " ").split()]
    for name in names:
        if not _NAME.fullmatch(name):
            raise DefinitionError(f"{where}: # replace: {name:.80} is not the name of a package")
    return tuple(dict.fromkeys(map(canonicalize_name, names)))


def _git_requirement(line: str, where: str) -> GitRequirement:
    """Read NAME @ git+https://HOST/PATH@REFERENCE. Raises DefinitionError."""
    example = "NAME @ git+https://HOST/PATH@COMMIT, or git+ssh://"
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        requirement = None
    if requirement is None or requirement.url is None:
        raise DefinitionError(f"{where}: {line:.200}: a git repository is written as {example}")
    parts = urlsplit(requirement.url)
    if parts.scheme not in ("git+https", "git+ssh"):
        raise DefinitionError(f"{where}: {parts.scheme}:// is not fetched; write {example}")
    if parts.password or (parts.username and parts.scheme == "git+https"):
        raise DefinitionError(
            f"{where}: a user or a password in the URL would be in the lock file",
            hint="leave it out; git asks its credential helper (`git config credential.helper`), or ~/.netrc",
        )
    subdirectory = _subdirectory(parts, where)
    path, _, reference = parts.path.partition("@")
    repository = parts._replace(scheme=parts.scheme.removeprefix("git+"), path=path, fragment="").geturl()
    return GitRequirement(requirement, repository, reference or "HEAD", subdirectory)


def _subdirectory(parts: SplitResult, where: str) -> str:
    """Return the folder that a git URL's fragment names. Raises DefinitionError for another fragment."""
    key, _, path = parts.fragment.partition("=")
    path = unquote(path).strip("/")
    if not parts.fragment and not parts.query:
        return ""
    if parts.query or key != "subdirectory" or not is_subdirectory(path):
        shown = f"?{parts.query}" if parts.query else f"#{parts.fragment}"
        raise DefinitionError(
            f"{where}: '{shown:.200}' is not supported after a repository's URL",
            hint="'#subdirectory=PATH' names the folder of the package; extras go after the name: NAME[EXTRA] @ git+…",
        )
    return path


def match_folder(line: str) -> re.Match[str] | None:
    """Return the parts of a line that names a folder of this machine; None for another line."""
    match = _FOLDER.fullmatch(line)
    if match is None or _ARCHIVE.search(match["path"]):
        return None
    path = match["path"]
    is_path = (
        bool(match["editable"] or match["name"]) or path.startswith(("./", "../", "/", "file:")) or path in (".", "..")
    )
    return match if is_path or ("/" in path and "@" not in path and ":" not in path) else None


def read_folder(match: re.Match[str], start: Path, sources: SourceFolders, where: str) -> LocalRequirement:
    """Return the folder that a line names from the folder ``start``, with the name of the package there.

    Raises DefinitionError.
    """
    path = Path(unquote(re.sub(r"^file:(//(localhost)?(?=/))?", "", match["path"])))
    folder = sources.check(start / path, where)
    if not folder.is_dir():
        raise DefinitionError(
            f"{where}: {path} is not a folder", hint="a package of an index is NAME alone, without '/'"
        )
    name = match["name"] or _project_name(folder, sources, where)
    marker = f" ; {match['marker']}" if match["marker"] else ""
    try:
        requirement = Requirement(f"{name}{match['named'] or match['extras'] or ''}{marker}")
    except InvalidRequirement as error:
        raise DefinitionError(f"{where}: {match[0]:.200}: cannot be read: {error}") from error
    return LocalRequirement(requirement, folder, bool(match["editable"]))


def _project_name(folder: Path, sources: SourceFolders, where: str) -> str:
    """Return the name that pyproject.toml says. Raises DefinitionError where none is said without running code."""
    file = folder / "pyproject.toml"
    if not file.is_file() and not (folder / "setup.py").is_file():
        raise DefinitionError(
            f"{where}: {folder} is not a Python package: it has neither pyproject.toml nor setup.py",
            hint="scripts that need no installation go into the recipe's entrypoints/",
        )
    try:
        text = read_source(sources.check_file(file, where)) if file.is_file() else ""
        values = tomllib.loads(text)
        for table in (values.get("project", {}), values.get("tool", {}).get("poetry", {})):
            if isinstance(name := table.get("name"), str) and _NAME.fullmatch(name):
                return name
    except (ValueError, AttributeError, RecursionError) as error:
        raise DefinitionError(f"{where}: {file}: cannot be read: {error}") from error
    raise DefinitionError(
        f"{where}: {folder} does not say the package's name in pyproject.toml, and no code is run to know it",
        hint=f"write it: NAME @ file:./{os.path.relpath(folder, sources.folder)}",
    )


def _check_option(option: re.Match[str], source: Path, number: int, sources: SourceFolders) -> str:
    """Return an option for uv, with a folder as a URL. Raises DefinitionError for a URL that a foreign file
    must not name: uv expands variables in it.
    """
    if not option["name"]:
        return option[0]
    where = f"{source}:{number}"
    name, index = _LONG_OPTION.get(option["name"], option["name"]), option["index"].strip("\"'")
    if variable := _VARIABLE.search(index):
        raise DefinitionError(
            f"{where}: {variable[0]} would be sent to the index",
            hint="what an index asks for belongs in ~/.netrc, or in uv's own settings: UV_INDEX_NAME_PASSWORD",
        )
    if _WEB_URL.match(index):
        return f"{name} {index}"
    if (folder := local_path(index)) is None:
        raise DefinitionError(f"{where}: {index:.200} is neither a folder nor a URL of http or https")
    return f"{name} {sources.check(source.parent / folder, where).as_uri()}"


def _format_requirement(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    marker = f" ; {requirement.marker}" if requirement.marker else ""
    return f"{canonicalize_name(requirement.name)}{extras}{requirement.specifier}{marker}"


def project_requirements(source: Path, text: str) -> Iterable[tuple[int, str]]:
    try:
        project = tomllib.loads(text).get("project", {})
        dynamic, dependencies = project.get("dynamic", ()), project.get("dependencies", ())
        if any(not isinstance(value, list | tuple) for value in (dynamic, dependencies)):
            raise TypeError("[project]: dependencies and dynamic should be lists")
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DefinitionError(f"{source}: cannot be read: {error}") from error
    if "dependencies" in dynamic:
        raise DefinitionError(
            f"{source}: dependencies are dynamic, so its own code would be run to know them; list them in "
            "[project] dependencies"
        )
    return enumerate(map(str, dependencies), 1)


def _list_requirements(text: str) -> Iterator[tuple[int, str]]:
    return ((span.start, line) for span, line in requirement_lines(text))


def requirement_lines(text: str) -> Iterator[tuple[range, str]]:
    """Yield the lines of a list with the numbers of the text's lines that each takes, as uv has them: a remark ends at
    its line's end, also after a backslash.
    """
    first, joined, number = 1, "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if joined else number
        bare = re.sub(r"(^|\s)#.*", "", line)
        joined += bare
        if bare == line and bare.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        yield range(first, number + 1), joined.strip()
        joined = ""
    if joined:
        yield range(first, number + 1), joined.strip()


def _requirement(source: Path, number: int, line: str) -> Requirement:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        requirement = None
    if requirement is None or requirement.url or len(line.splitlines()) > 1:
        raise DefinitionError(
            f"{source}:{number}: {line:.200}: only packages of an index can be locked, with a version and hashes",
            hint=next(
                (hint for pattern, hint in _HINTS if pattern.search(line)),
                "write one NAME, or NAME==VERSION, a line; of options, only those of indexes are supported",
            ),
        )
    return requirement


def run_uv(arguments: Argv, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``uv pip`` with this interpreter. Raises ProcessError when it fails.

    ``folder``, an empty one of ours, is the project whose settings uv reads, beside those of the user and of the
    system.
    """
    (folder / "uv.toml").touch()  # else uv searches the parent folders, which others may write
    command, *rest = arguments
    return run(
        [find_uv_bin(), "pip", command, "--project", folder, "--python", sys.executable, *rest],
        env={"UV_SYSTEM_CERTS": "1", **os.environ},
    )


def python_options(stack: Stack) -> list[str]:
    """Return uv's options for the stack's Python and C library. Raises DefinitionError for one that no wheel is for."""
    return ["--python-version", stack.file.python, "--python-platform", _python_platform(stack)]


def _python_platform(stack: Stack) -> str:
    """Return the newest platform that uv knows and that the stack's C library runs."""
    machine, libc = _MACHINES[stack.arch], stack.file.libc or _LIBC
    if libc == "musl":
        return f"{machine}-unknown-linux-musl"
    major, minor = map(int, libc.removeprefix("glibc ").split("."))
    fitting = [known for known in _MANYLINUX if (2, known) <= (major, minor)]
    if not fitting:
        raise DefinitionError(f"{stack.folder / 'stack.yaml'}: libc: {libc}: wheels need glibc 2.17 or later")
    return f"{machine}-manylinux_2_{max(fitting)}"


def _write_installed(installed: Iterable[BasePackage], folder: Path) -> list[str]:
    """Let uv know of a base's packages as they are: a wheel without content for each, and its metadata in uv's
    settings, which hold also where an index has the same version. Return uv's options.
    """
    wheels, settings = folder / "base", []
    for package in installed:
        wheels.mkdir(exist_ok=True)
        name = package.name.replace("-", "_")
        info = f"{name}-{package.version}.dist-info"
        with zipfile.ZipFile(wheels / f"{name}-{package.version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n"
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
            wheel.writestr(f"{info}/RECORD", "")
        extras = sorted({extra for line in package.extras for extra in _EXTRA.findall(line)})
        settings.append(
            f"[[dependency-metadata]]\nname = {json.dumps(package.name)}\nversion = {json.dumps(package.version)}\n"
            f"requires-dist = {json.dumps(package.extras)}\nprovides-extra = {json.dumps(extras)}\n"
        )
    (folder / "uv.toml").write_text("".join(settings), encoding="utf-8")
    return ["--find-links", wheels.as_uri()] if settings else []


def compile_lock(
    checked: RequirementsFile,
    stack: Stack,
    *,
    below: str,
    absent: Sequence[str],
    old: str,
    wheels_only: bool = True,
) -> str:
    """Return uv's lock of requirements that fit the pins ``below``, with those.

    ``absent``: requirements to leave out, as no index has them. ``old``: the last lock, whose versions are kept as far
    as they fit. Raises ProcessError.
    """
    with tempfile.TemporaryDirectory(prefix="ekiben-lock-") as folder:
        names = ("requirements.txt", "below.txt", "absent.txt", "out.lock")
        requirements, constraints, overrides, out = (Path(folder) / name for name in names)
        requirements.write_text(checked.text, encoding="utf-8")
        limits = "".join(f"{_format_requirement(item)}\n" for item in checked.constraints)
        constraints.write_text(below + limits, encoding="utf-8")
        never = "".join(f"{line} ; python_version < '3'\n" for line in absent)
        overrides.write_text(never, encoding="utf-8")
        if old:
            out.write_text(old, encoding="utf-8")
        options = ["--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate"]
        options += [*python_options(stack), *_write_installed(checked.installed, Path(folder))]
        # Without dependencies uv asks for no metadata, for which it would build a source distribution.
        options += ["--only-binary", ":all:"] if wheels_only else ["--no-deps"]
        options += ["--exclude-newer", checked.exclude_newer] if checked.exclude_newer else []
        files: list[str | Path] = [
            "--override",
            overrides,
            "--constraints",
            constraints,
            requirements,
            "--output-file",
            out,
        ]
        run_uv(["compile", "--quiet", *options, *files], Path(folder))
        return out.read_text(encoding="utf-8")
