"""Read definition files: https://apptainer.org/docs/user/latest/definition_files.html

A faithful reader: section bodies are kept to the byte (heredocs, tabs, case). All problems of a file are
reported together, each with its line and the nearest known name.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, Protocol, TypedDict, cast

from ekiben.core import plugins
from ekiben.core.errors import DefinitionError, UsageError, nearest
from ekiben.core.files import read_source
from ekiben.spec.definition_apps import APPS, App, install_script, read_apps
from ekiben.spec.definition_scripts import SHEBANG_SECTIONS, post_command, script_file
from ekiben.spec.definition_text import ARGUMENT, BOM, NAMELESS, Section, assignments, bind, header_pairs, split
from ekiben.spec.environment import read_table, without_comment

BASES, BASES_GROUP = "ekiben.builder.bases", "ekiben.bases"
# Apptainer's headers. Each agent uses some of them and ignores the others, as Apptainer does.
HEADERS = (
    *("bootstrap", "from", "stage", "osversion", "mirrorurl", "include", "registry", "namespace", "fingerprints"),
    *("confurl", "includecmd", "library", "modules", "product", "productpgp", "regcode", "registerurl", "setopt"),
    *("updateurl", "user"),
)
SECTIONS = ("arguments", "files", "post", "environment", "labels", "test", "help", "runscript", "startscript")
SCRIPTS = ("post", "test", "help", "runscript", "startscript")
# A build stage is never run: Apptainer ignores these, too.
FINAL_ONLY = ("environment", "help", "runscript", "startscript")
# Known and unsupported: refused rather than ignored.
UNUSED = {
    "fingerprints": "no signature is checked while an image is built; `verify --key` checks one",
}
SCRATCH = "scratch"  # has no files
LOCAL = "localimage"  # names the layer below; its agent is for the path of a SIF
PATHS = ("/", "./", "../")  # begin a From: that is a file
REFUSED = {
    "setup": "it runs on the host, outside any cache key; do the work in %post",
    "pre": "it runs on the host, outside any cache key; do the work in %post",
}

_MODULES = {"docker-archive": "docker_archive", "oci-archive": "oci_archive"}  # whose name no module can have

# Headers that each agent reads; plug-ins declare their headers.
AGENT_HEADERS = {
    LOCAL: ("from",),
    "docker": ("from", "registry", "namespace"),
    **dict.fromkeys(("docker-archive", "oci", "oci-archive", "oras"), ("from",)),
    SCRATCH: (),
    "busybox": ("mirrorurl",),
    "debootstrap": ("osversion", "mirrorurl", "include"),
}

# Unsupported agents of Apptainer, and alternatives.
_PULLED = "`apptainer pull base.sif {}://…` once, then Bootstrap: localimage and From: ./base.sif"
_CONVERTED = "`apptainer build base.sif {}` once, then Bootstrap: localimage and From: ./base.sif"
OTHER_AGENTS = {
    "library": _PULLED.format("library"),
    "shub": _PULLED.format("shub"),
    "docker-daemon": "push the image to a registry, then Bootstrap: docker; or "
    + _CONVERTED.format("docker-daemon:NAME"),
    "arch": "an image of the distribution from a registry: Bootstrap: docker and From: archlinux",
    **dict.fromkeys(
        ("yum", "dnf"), "an image of the distribution from a registry: Bootstrap: docker and From: rockylinux:9"
    ),
    "zypper": "an image of the distribution from a registry: Bootstrap: docker and From: opensuse/leap",
}


@dataclass(frozen=True, slots=True)
class Copy:
    """One line of %files: ``source`` relative to the folder that holds images/, or a path in ``stage``."""

    source: str
    destination: str
    stage: str | None
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One header with its sections; a file has one, or several whose files the last one copies.

    ``shell`` is the command that runs ``post`` where /bin/sh alone does not; the other scripts may have a shebang.
    ``environment_text`` is %environment as written, ``environment_line`` the number of its first line; ``environment``
    is empty where that is not a table of values. ``path`` is the file, ``post_numbers`` the numbers of the lines of
    ``post`` in it.
    """

    name: str | None
    header: Mapping[str, str]
    arguments: Mapping[str, str]
    files: tuple[Copy, ...] = ()
    post: str = ""
    shell: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    environment_text: str = ""
    environment_line: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    test: str = ""
    help: str = ""
    runscript: str = ""
    startscript: str = ""
    apps: tuple[App, ...] = ()
    path: Path | None = None
    post_numbers: tuple[int, ...] = ()

    @property
    def bootstrap(self) -> str:
        """Return the agent's name, or localimage."""
        return self.header["bootstrap"]

    @property
    def parent(self) -> str | None:
        """Return the definition below this stage: ``From: python.sif`` names ``python``; a path names a file."""
        source = self.header["from"]
        is_layer = self.bootstrap == LOCAL and not source.startswith(PATHS)
        return Path(source).name.removesuffix(".sif") if is_layer else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A definition file. ``root`` is the folder that holds its images/ folder: %files paths start there."""

    name: str
    path: Path
    root: Path
    text: str
    stages: tuple[Stage, ...]

    @property
    def final(self) -> Stage:
        """Return the stage that becomes the layer."""
        return self.stages[-1]


def read_definition(path: Path, *, root: Path, arguments: Mapping[str, str] | None = None) -> Definition:
    """Read ``path`` with ``arguments`` bound over its own %arguments; undeclared names are ignored here.

    Raises DefinitionError that lists every problem of the file.
    """
    text = read_source(path).replace("\r\n", "\n")  # a lone carriage return ends no line: a script may contain it
    return _Reader(path, text).read(root, arguments or {})


class Agent(Protocol):
    """What a header's ``Bootstrap:`` names, as far as reading goes (see ekiben.builder.bases)."""

    def header_problems(self, header: Mapping[str, str]) -> list[str]:
        """Return the problems of a header; its keys are in lower case."""

    def key_inputs(self, header: Mapping[str, str]) -> dict[str, str]:
        """Return the part of a header that decides the content, normalized, for the cache key."""


def load_agent(bootstrap: str) -> Agent:
    """Load the agent of a ``Bootstrap:``. Raises UsageError when there is none of this name.

    Agents make root file systems, above this module: here they are a folder to which others add, and known by name.
    """
    if bootstrap in _MODULES.values():
        raise UsageError(f"Bootstrap: no agent '{bootstrap}'." + nearest(bootstrap, _MODULES))
    name = _MODULES.get(bootstrap, bootstrap)
    return cast(Agent, plugins.load(BASES, BASES_GROUP, name, option="Bootstrap", kind="agent"))


def agent_names() -> list[str]:
    """Return the names of all agents."""
    of_module = {module: name for name, module in _MODULES.items()}
    return sorted(of_module.get(name, name) for name in plugins.names(BASES, BASES_GROUP))


def used_arguments(text: str) -> set[str]:
    """Return the names in the ``{{ }}`` of a definition file's text."""
    return set(ARGUMENT.findall(text))


def declared_arguments(text: str) -> set[str]:
    """Return the names in the %arguments of a definition file's text."""
    return {name for section in split(text) if section.name == "arguments" for name in assignments(section.body)}


def parent_argument(text: str) -> str | None:
    """Return the argument that names the layer below (``From: {{ base }}.sif``); None where From: names it."""
    header = [section for section in split(text) if not section.name][-1]
    pairs = header_pairs(header, lambda number, problem: None)
    values = [value.removesuffix(".sif") for _, key, value in pairs if key.lower() == "from"]
    match = ARGUMENT.fullmatch(values[-1]) if values else None
    return match[1] if match else None


class _Reader:
    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        self.problems: list[str] = []

    def problem(self, line: int, message: str) -> None:
        self.problems.append(f"{self.path}:{line}: {message}")

    def give_up(self) -> NoReturn:
        raise DefinitionError("\n".join(self.problems))

    def read(self, root: Path, bound_arguments: Mapping[str, str]) -> Definition:
        if self.text.startswith(BOM):
            self.problem(
                1,
                "the file begins with a byte order mark (BOM), which Apptainer reads as part of the first key; save it"
                " as UTF-8 without BOM",
            )
        groups: list[list[Section]] = []
        for section in split(self.text):
            if not section.name:
                groups.append([section])
            else:
                groups[-1].append(section)
        for section in [section for group in groups[:-1] for section in group if section.name == "test"]:
            what = "%test of a build stage is refused"
            self.problem(section.line - 1, f"{what}: the stage only compiles files; test in its %post")
        groups = [
            *([section for section in group if section.name not in FINAL_ONLY] for group in groups[:-1]),
            groups[-1],
        ]
        stages = tuple(self.stage(group, bound_arguments) for group in groups)
        names = [stage.name for stage in stages if stage.name]
        for earlier, stage in enumerate(stages):
            for copy in stage.files:
                if copy.stage and copy.stage not in names[:earlier]:
                    self.problem(
                        copy.line,
                        f"%files from {copy.stage}: no such stage before this one."
                        + nearest(copy.stage, names[:earlier]),
                    )
        if self.problems:
            self.give_up()
        return Definition(name=self.path.stem, path=self.path, root=root, text=self.text, stages=stages)

    def stage(self, parts: list[Section], bound_arguments: Mapping[str, str]) -> Stage:
        defaults = assignments(line for section in parts if section.name == "arguments" for line in section.body)
        arguments = {name: bound_arguments.get(name, default) for name, default in defaults.items()}
        used: set[str] = set()
        # A name without a default is right where something else gives it a value, as --build-arg does.
        values = {**bound_arguments, **arguments}
        bound = [self.bind(section, values, used) for section in parts]
        arguments |= {name: values[name] for name in sorted(used & values.keys() - arguments.keys())}
        for name in sorted(set(arguments) - used):
            self.problem(
                next(section.line for section in parts if section.name == "arguments"),
                f"argument '{name}' is declared and never used; remove it or write {{{{ {name} }}}}",
            )
        header = self.header(bound[0])
        sections = self.sections(bound[1:])
        apps = read_apps(bound[1:], self.problem)
        texts = {
            name: script_file(section, self.problem) if name in SHEBANG_SECTIONS else section.text()
            for name, section in sections.items()
            if name in SCRIPTS
        }
        if apps:
            texts["post"] = texts.get("post", "") + install_script(apps)
        return Stage(
            name=header.get("stage"),
            header=header,
            arguments={name: bind(value, arguments, lambda name: None, used) for name, value in arguments.items()},
            files=tuple(copy for section in bound if section.name == "files" for copy in self.files(section)),
            **_environment(sections.get("environment")),
            labels=self.labels(sections.get("labels")),
            shell=post_command(sections["post"], self.problem) if "post" in sections else "",
            apps=apps,
            path=self.path,
            post_numbers=tuple(sections["post"].text_numbers()) if "post" in sections else (),
            **texts,
        )

    def bind(self, section: Section, arguments: Mapping[str, str], used: set[str]) -> Section:
        def bound(number: int, line: str) -> str:
            def unknown(name: str) -> None:
                declared = f"argument '{name}' is not declared in %arguments." + nearest(name, arguments)
                if "Did you mean" not in declared:
                    declared += f" A value without a default is given by --build-arg {name}=VALUE."
                self.problem(number, declared)

            return bind(line, arguments, unknown, used)

        body = [bound(number, line) for number, line in section.lines()]
        return replace(section, options=bound(section.line - 1, section.options), body=body)

    def header(self, section: Section) -> dict[str, str]:
        header: dict[str, str] = {}
        for number, name, value in header_pairs(section, self.problem):
            key = name.lower()
            if key not in HEADERS and not re.fullmatch(r"otherurl[0-9]+", key):
                self.problem(number, f"unknown key '{name}'." + nearest(key, HEADERS))
            elif key in header:
                self.problem(number, f"'{name}:' appears twice; leave one")
            else:
                header[key] = value
        return self.checked_header(header, section.line)

    def checked_header(self, header: dict[str, str], line: int) -> dict[str, str]:
        bootstrap = header.setdefault("bootstrap", "")
        for key in sorted(header.keys() & UNUSED.keys()):
            self.problem(line, f"'{key}:' is refused: {UNUSED[key]}")
        if bootstrap in AGENT_HEADERS:
            read = {"bootstrap", "stage", *AGENT_HEADERS[bootstrap]}
            header = {key: value for key, value in header.items() if key in read}
        if bootstrap == LOCAL:
            if not header.get("from"):
                self.problem(line, f"Bootstrap: {LOCAL} needs 'From:'")
            elif header["from"].startswith("~"):
                self.problem(line, f"From: {header['from']}: write the file's path, as /home/NAME/base.sif")
        else:
            try:
                for problem in load_agent(bootstrap).header_problems(header):
                    self.problem(line, problem)
            except UsageError as error:
                known = agent_names()
                missing = f"'Bootstrap: {bootstrap}' is not supported" if bootstrap else "no 'Bootstrap:' key"
                way = f": {OTHER_AGENTS[bootstrap]}" if bootstrap in OTHER_AGENTS else f".{nearest(bootstrap, known)}"
                self.problem(line, str(error) if bootstrap in known else missing + way)
        header.setdefault("from", "")
        return header

    def sections(self, parts: list[Section]) -> dict[str, Section]:
        sections: dict[str, Section] = {}
        for section in parts:
            if section.name == NAMELESS:
                text = self.text.removeprefix(BOM).split("\n")[section.line - 2].strip()
                self.problem(
                    section.line - 1,
                    f"'{text:.60}' is not a section: a % after blanks starts one; write its name"
                    " directly after a % in the first column, or begin a line of text with another character",
                )
            elif section.name in REFUSED:
                self.problem(section.line - 1, f"%{section.name} is refused: {REFUSED[section.name]}")
            elif section.name not in (*SECTIONS, *APPS):
                self.problem(
                    section.line - 1, f"unknown section %{section.name}." + nearest(section.name, (*SECTIONS, *APPS))
                )
            sections[section.name] = sections[section.name].join(section) if section.name in sections else section
        return sections

    def files(self, section: Section) -> Iterator[Copy]:
        tokens = section.tokens
        stage = tokens[1] if len(tokens) == 2 and tokens[0] == "from" else None
        if tokens and stage is None:
            where = f"%files {section.options.strip()}"
            self.problem(section.line - 1, f"{where}: expected '%files' or '%files from <stage>'")
        elif stage is None and section.options.split("#")[0] and any(line.strip() for line in section.body):
            self.problem(section.line - 1, "Apptainer copies nothing of a %files that blanks follow; remove them")
        for number, line in section.lines():
            text = without_comment(line)
            try:
                paths = shlex.split(text)
            except ValueError as error:
                self.problem(number, f"%files: {error}: {line.strip()}")
                continue
            if len(paths) == 1 and text != line:
                self.problem(
                    number,
                    f"%files: Apptainer takes the # for the destination; write one before it: {line.strip()}",
                )
            elif len(paths) in (1, 2) and ".." in paths[-1].split("/"):
                self.problem(
                    number, f"%files: the destination climbs with '..'; write the path it means: {line.strip()}"
                )
            elif len(paths) in (1, 2):
                folder = "/" if paths[-1].endswith("/") else ""  # the file keeps its name in that folder
                yield Copy(paths[0], posixpath.normpath("/" + paths[-1].strip("/")).rstrip("/") + folder, stage, number)
            elif paths:
                self.problem(number, f"%files needs 'source [destination]', found {len(paths)} words: {line.strip()}")

    def labels(self, section: Section | None) -> dict[str, str]:
        labels: dict[str, str] = {}
        for line in section.body if section else []:
            name, value = [*line.split(None, 1), "", ""][:2]
            if name and not name.startswith("#"):
                labels[name] = value.strip()
        return labels


class _Environment(TypedDict, total=False):
    environment: Mapping[str, str]
    environment_text: str
    environment_line: int


def _environment(section: Section | None) -> _Environment:
    """Return the fields of a stage that hold its %environment."""
    if section is None or all(not line.strip() or line.lstrip().startswith("#") for line in section.body):
        return {}
    first = next(at for at, line in enumerate(section.body) if line.strip())
    return {
        "environment": read_table(section.body) or {},
        "environment_text": "\n".join(section.body[first:]).rstrip() + "\n",
        "environment_line": section.numbers[first],
    }
