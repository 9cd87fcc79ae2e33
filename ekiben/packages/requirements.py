"""Requirements of Python packages: read, and given to uv so that none of their code is run on this machine.

uv runs the build script of a folder, an archive or a repository to know what it depends on; of an editable one even
where building is off. So a file may name packages of an index alone. And uv would take settings, and the interpreter
that it starts, from ``uv.toml`` and ``.venv`` in the working folder, which may be a recipe from elsewhere: it gets an
empty project and this interpreter instead.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from uv import find_uv_bin

from ekiben.core.errors import DefinitionError
from ekiben.core.files import read_source
from ekiben.core.process import Argv, run
from ekiben.spec.source_folders import SourceFolders, local_path

_INDEX_OPTION = re.compile(
    r"(?:-i|-f|--index-url|--extra-index-url|--find-links)[ =]+(?P<index>\S+)|--pre|--prefer-binary"
)
_VARIABLE = re.compile(r"\$\{[^}]*\}")


def read_requirements(source: Path, sources: SourceFolders) -> list[Requirement]:
    """Return the requirements in requirements.txt, pyproject.toml or an .in file.

    Raises:
        DefinitionError: something in it is not a package of an index, or cannot be read; an index is a folder outside
            ``sources``, or its URL has a variable of the user's in it.
    """
    text = read_source(source)
    lines = _of_project(source, text) if source.suffix == ".toml" else _of_list(text)
    requirements = []
    for number, line in lines:
        if option := _INDEX_OPTION.fullmatch(line):
            _check_index(option["index"] or "", source, number, sources)
        elif line:
            requirements.append(_requirement(source, number, line))
    return requirements


def _check_index(index: str, source: Path, number: int, sources: SourceFolders) -> None:
    """Raise DefinitionError for what a file from elsewhere must not name: uv puts variables into the URL it asks."""
    where = f"{source}:{number}"
    if variable := _VARIABLE.search(index):
        raise DefinitionError(
            f"{where}: {variable[0]} would be sent to the index",
            hint="what an index asks for belongs in ~/.netrc, or in uv's own settings: UV_INDEX_NAME_PASSWORD",
        )
    if index and (folder := local_path(index)):
        sources.check(source.parent / folder, where)


def _of_project(source: Path, text: str) -> Iterable[tuple[int, str]]:
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


def _of_list(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines with their numbers, as uv has them: a remark ends at its line's end, also after a backslash."""
    first, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        first = first if joined else number
        bare = re.sub(r"(^|\s)#.*", "", line)
        joined += bare
        if bare == line and bare.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        yield first, joined.strip()
        joined = ""
    yield first, joined.strip()


def _requirement(source: Path, number: int, line: str) -> Requirement:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        requirement = None
    if requirement is None or requirement.url:
        raise DefinitionError(
            f"{source}:{number}: {line:.200}: only packages of an index can be locked, with a version and hashes",
            hint="write one NAME, or NAME==VERSION, a line; options other than of indexes, files and URLs are refused",
        )
    return requirement


def run_uv(arguments: Argv, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``uv pip`` with this interpreter. Raises ProcessError when it fails.

    ``folder``, an empty one of ours, is the project whose settings uv reads, beside those of the user and of the
    system.
    """
    (folder / "uv.toml").touch()  # else uv looks for one in the folders above, which may be everybody's
    command, *rest = arguments
    return run(
        [find_uv_bin(), "pip", command, "--project", folder, "--python", sys.executable, *rest],
        env={"UV_SYSTEM_CERTS": "1", **os.environ},
    )
