"""From a recipe to its chain of layers, bottom first, each with its cache key.

Equal keys promise equal content. Every input that can change a layer is in its key; labels, help, the layer's own
environment, the executor, mirrors, proxies and parallelism are not.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from builder.definition import Copy, Definition, Stage, declared_arguments, expand, read_definition
from builder.errors import DefinitionError, nearest
from builder.recipe import Recipe
from builder.sif import runtime_files
from builder.stack import Stack, find_stack

KEY_FORMAT = 1  # a change in what the builder itself puts into layers gets a new number
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RECIPE_HOME = "/opt/ekiben/recipe"
TESTS = "/opt/ekiben/tests"
BUILD_MOUNT = "run/ekiben"  # everything that is there only while a layer is built
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def platform() -> str:
    machine = os.uname().machine
    return "linux/" + ARCHITECTURES.get(machine, machine)


@dataclass(frozen=True, slots=True)
class File:
    """A file that goes into a layer: ``destination`` is absolute; the content is a path on the host or bytes."""

    destination: str
    mode: int
    source: Path | None = None
    content: bytes = b""

    @property
    def size(self) -> int:
        return self.source.stat().st_size if self.source else len(self.content)

    def sha256(self) -> str:
        if self.source is None:
            return hashlib.sha256(self.content).hexdigest()
        with self.source.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One step of a chain. ``kind`` says what makes it: the header's bootstrap, a %post, or files alone.

    ``environment`` is what the step below leaves behind and what runs with; ``inputs`` is the readable form of the key.
    """

    name: str
    kind: Literal["bootstrap", "post", "files"]
    stage: Stage | None
    files: tuple[File, ...]
    environment: Mapping[str, str]
    epoch: int
    inputs: Mapping[str, Any]
    cache_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A recipe resolved: its layers bottom first, and what its image says of itself."""

    recipe: Recipe
    stack: Stack
    definitions: tuple[Definition, ...]
    layers: tuple[Layer, ...]
    environment: Mapping[str, str]
    labels: Mapping[str, str]
    deffile: str
    tests: tuple[tuple[str, str], ...] = field(default=())

    @property
    def top(self) -> Layer:
        return self.layers[-1]


def resolve(recipe: Recipe, *, stack: str | None = None, arguments: Mapping[str, str] | None = None) -> Chain:
    """Errors: DefinitionError for anything wrong in the recipe, its stack or its definition files."""
    asked_by = "--stack" if stack else str(recipe.folder / "recipe.yaml")
    bound = find_stack(stack or recipe.file.stack, recipe.image_folders, asked_by=asked_by)
    bound.check_locks()
    definitions = _definitions(recipe, bound, arguments or {})
    layers: list[Layer] = []
    environment: dict[str, str] = {"PATH": DEFAULT_PATH}
    labels: dict[str, str] = {}
    tests: list[tuple[str, str]] = []
    for definition in definitions:
        layers += _layers_of(definition, layers, environment, bound)
        environment = expand(definition.final.environment, environment)
        labels |= definition.final.labels
        if definition.final.test:
            tests.append((definition.name, definition.final.test))
    environment = expand({"EKIBEN_RECIPE": RECIPE_HOME, **recipe.file.environment}, environment)
    if recipe.file.test:
        tests.append((recipe.name, recipe.file.test))
    labels |= {
        "org.opencontainers.image.title": recipe.name,
        "org.opencontainers.image.description": recipe.file.description,
        "org.ekiben.stack": bound.name,
        **recipe.file.labels,
    }
    deffile = "\n\n".join(f"# {item.name}\n{item.text.strip()}" for item in definitions) + "\n"
    chain = Chain(
        recipe=recipe, stack=bound, definitions=tuple(definitions), layers=tuple(layers),
        environment=environment, labels=labels, deffile=deffile, tests=tuple(tests),
    )  # fmt: skip
    return _with_recipe_layer(chain)


def _definitions(recipe: Recipe, stack: Stack, arguments: Mapping[str, str]) -> list[Definition]:
    """The recipe's layer and all below it, bottom first."""
    known = {path.stem: path for folder in reversed(recipe.image_folders) for path in folder.glob("*.def")}
    given = {**stack.file.arguments, **arguments}
    found: list[Definition] = []
    declared: set[str] = set()
    name, asked_by = recipe.file.layer, str(recipe.folder / "recipe.yaml")
    while True:
        if name not in known:
            raise DefinitionError(f"{asked_by}: no layer '{name}'." + nearest(name, known))
        if name in (names := [item.name for item in found]):
            raise DefinitionError(f"{known[name]}: From: goes round in a circle: {' → '.join([*names, name])}")
        root = known[name].parent.parent
        place = stack.folder.relative_to(root) if stack.folder.is_relative_to(root) else stack.folder
        definition = read_definition(known[name], root=root, arguments={**given, "stack": str(place)})
        declared |= declared_arguments(known[name])
        found.append(definition)
        parent = definition.final.parent
        if parent is None:
            break
        name, asked_by = parent, str(definition.path)
    anywhere = declared.union(*(declared_arguments(path) for path in known.values()))
    unused = [("--arg", name, declared, f"no layer of '{recipe.name}'") for name in sorted(set(arguments) - declared)]
    unused += [(str(stack.folder / "stack.yaml"), name, anywhere, "no definition file")
               for name in sorted(set(stack.file.arguments) - anywhere)]  # fmt: skip
    if unused:
        raise DefinitionError(
            "\n".join(
                f"{where}: argument '{name}' is bound but {who} declares it." + nearest(name, names)
                for where, name, names, who in unused
            )
        )
    return found[::-1]


def _layers_of(
    definition: Definition, below: Sequence[Layer], environment: Mapping[str, str], stack: Stack
) -> list[Layer]:
    """The step of a definition's header (when it is a base) and the step of its %files and %post (when it has any)."""
    stage, made = definition.final, list[Layer]()
    epoch = stack.file.epoch
    packages = stack.apt_lock().of(definition.name, lowest=stage.parent is None)
    locked = {"packages": packages} if packages else {}
    if len(definition.stages) > 1:
        raise DefinitionError(
            f"{definition.path}: several stages in one file are not built yet; give each layer one stage"
        )
    if stage.parent is None:
        source = {key: value for key, value in stage.header.items() if value and key not in ("mirrorurl", "stage")}
        if stage.bootstrap == "debootstrap":
            source["include"] = " ".join(sorted(set(source.get("include", "").replace(",", " ").split())))
        inputs = {"kind": "bootstrap", "source": source, **locked, "epoch": epoch, "platform": platform()}
        made.append(_layer(f"{definition.name}-root" if stage.post or stage.files else definition.name,
                           "bootstrap", stage, (), environment, epoch, inputs, below))  # fmt: skip
    files = tuple(file for copy in stage.files for file in _copied(definition, copy))
    if stage.post or files:
        inputs = {
            "kind": "post" if stage.post else "files",
            "post": stage.post,
            "files": [[file.destination, file.mode, file.sha256()] for file in files],
            **locked,
            "environment": dict(environment),
            "epoch": epoch,
            "platform": platform(),
        }
        kind: Literal["post", "files"] = "post" if stage.post else "files"
        made.append(_layer(definition.name, kind, stage, files, environment, epoch, inputs, [*below, *made]))
    return made


def _layer(
    name: str, kind: Literal["bootstrap", "post", "files"], stage: Stage | None, files: tuple[File, ...],
    environment: Mapping[str, str], epoch: int, inputs: dict[str, Any], below: Sequence[Layer],
) -> Layer:  # fmt: skip
    inputs = {"format": KEY_FORMAT, "parent": below[-1].cache_key if below else None, **inputs}
    canonical = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return Layer(
        name=name, kind=kind, stage=stage, files=files, environment=dict(environment), epoch=epoch, inputs=inputs,
        cache_key=hashlib.sha256(canonical.encode()).hexdigest(),
    )  # fmt: skip


def _copied(definition: Definition, copy: Copy) -> list[File]:
    """The files one %files line stands for. A folder is copied as the destination; links are followed."""
    source = definition.root / copy.source
    where = f"{definition.path}:{copy.line}: %files {copy.source}"
    if not source.exists():
        close = source.parent.iterdir() if source.parent.is_dir() else []
        raise DefinitionError(
            f"{where}: no such file under {definition.root}." + nearest(source.name, (p.name for p in close))
        )
    if source.is_file():
        destination = copy.destination + source.name if copy.destination.endswith("/") else copy.destination
        return [File(destination, _mode(source), source)]
    inside = sorted(path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return [File(f"{copy.destination.rstrip('/')}/{path.relative_to(source)}", _mode(path), path) for path in inside]


def _mode(path: Path) -> int:
    """Only the executable bit is an input: a clone's umask is not."""
    return 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644


def _with_recipe_layer(chain: Chain) -> Chain:
    """The last, small layer: the recipe's files, a command per task, and what runtimes read (/.singularity.d)."""
    recipe, epoch = chain.recipe, chain.stack.file.epoch
    files = [File(f"{RECIPE_HOME}/{inside}", _mode(path), path) for inside, path in recipe.members().items()]
    files += [File(f"/usr/local/bin/{name}", 0o755, content=_command(recipe, name)) for name in recipe.file.tasks]
    runtime = runtime_files(
        environment=chain.environment,
        runscript=_runscript(recipe), test=_TEST_SCRIPT, labels=chain.labels, deffile=chain.deffile,
    )  # fmt: skip
    files += [File("/" + path.lstrip("/"), mode, content=content) for path, (mode, content) in runtime.items()]
    about = {"recipe": recipe.name, "stack": chain.stack.name,
             "layers": [{"name": layer.name, "cache_key": layer.cache_key} for layer in chain.layers]}  # fmt: skip
    files += _test_files(chain)
    files.append(File("/opt/ekiben/image.json", 0o644, content=json.dumps(about, indent=1).encode() + b"\n"))
    inputs = {
        "kind": "files",
        "files": [[file.destination, file.mode, file.sha256()] for file in files],
        "epoch": epoch,
        "platform": platform(),
    }
    top = _layer(recipe.name, "files", None, tuple(files), chain.environment, epoch, inputs, chain.layers)
    return Chain(
        recipe=recipe, stack=chain.stack, definitions=chain.definitions, layers=(*chain.layers, top),
        environment=chain.environment, labels=chain.labels, deffile=chain.deffile, tests=chain.tests,
    )  # fmt: skip


def _command(recipe: Recipe, name: str) -> bytes:
    task = recipe.task(name)
    config = f' --config "{RECIPE_HOME}/{task.config}"' if task.config else ""
    python = 'python="/opt/venv/bin/python"; [ -x "$python" ] || python=python3'
    return (
        f"#!/bin/sh\n# {task.help}\n{python}\n"
        f'exec "$python" "{RECIPE_HOME}/entrypoints/{task.entrypoint}"{config} "$@"\n'
    ).encode()


def _runscript(recipe: Recipe) -> str:
    """With words, run them; without, say what there is to run."""
    lines = [f"{recipe.name}: {recipe.file.description}", "", "Tasks (each takes --help):"]
    width = max((len(name) for name in recipe.file.tasks), default=0)
    lines += [f"  {name:<{width}}  {task.help}" for name, task in recipe.file.tasks.items()]
    text = "\n".join(lines)
    return f"if [ $# -gt 0 ]; then exec \"$@\"; fi\ncat <<'EKIBEN'\n{text}\nEKIBEN\n"


def _test_files(chain: Chain) -> list[File]:
    """A child passes its parents' tests: every %test of the chain is a file, run bottom first."""
    return [File(f"{TESTS}/{number:02}-{name}.sh", 0o644, content=script.encode())
            for number, (name, script) in enumerate(chain.tests, 1)]  # fmt: skip


_TEST_SCRIPT = f"""\
for script in {TESTS}/*.sh; do
    [ -e "$script" ] || continue
    echo "test: ${{script##*/}}"
    /bin/sh -e "$script" </dev/null || {{ echo "test: ${{script##*/}} FAILED"; exit 1; }}
done
echo "test: all passed"
"""
