"""From a recipe to its chain of layers, bottom first, each with its cache key.

Equal keys promise equal content. Every input that can change a layer is in its key; labels, help, the layer's own
environment, the executor, mirrors, proxies and parallelism are not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from builder.arch import check_torch, has_cxx11_abi, narrowed, served
from builder.definition import Copy, Definition, Stage, declared_arguments, expand, read_definition
from builder.errors import DefinitionError, nearest
from builder.recipe import Recipe
from builder.sif import runtime_files
from builder.stack import Stack, find_stack, read_pins
from builder.unrelated import unrelated

KEY_FORMAT = 1  # a change in what the builder itself puts into layers gets a new number
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RECIPE_HOME = "/opt/ekiben/recipe"
TESTS = "/opt/ekiben/tests"
BUILD_MOUNT = "run/ekiben"  # everything that is there only while a layer is built
WHEEL_LABEL = "org.ekiben.wheel"  # of a build stage: the package whose wheel it hands over
MEMORY_LABEL = "org.ekiben.job-memory"  # of a build stage: what one job of its compiler was seen to take, in GiB
LEAST_LABEL = "org.ekiben.least-capability"  # of a build stage: GPUs below this are none the package is written for
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
    ``taken`` is what it takes from build stages.
    """

    name: str
    kind: Literal["bootstrap", "post", "files"]
    stage: Stage | None
    files: tuple[File, ...]
    environment: Mapping[str, str]
    epoch: int
    inputs: Mapping[str, Any]
    cache_key: str
    taken: tuple[Taken, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStage:
    """A stage that hands files to a later one and never ships. ``name`` is <layer>.<stage>.

    ``layers`` is what it stands on, bottom first; ``hands_over`` the paths later stages take. A stage with a ``wheel``
    compiles that package: its key names what decides about compiled code, and not the layers below. ``job_memory``, in
    bytes, is where the store has not seen one compiled yet.
    """

    name: str
    stage: Stage
    layers: tuple[Layer, ...]
    files: tuple[File, ...]
    taken: tuple[Taken, ...]
    environment: Mapping[str, str]
    epoch: int
    hands_over: tuple[str, ...]
    wheel: str | None
    job_memory: int | None
    inputs: Mapping[str, Any]
    cache_key: str


@dataclass(frozen=True, slots=True)
class Taken:
    """One line of ``%files from``: the file or folder ``source`` of a stage, as ``destination``."""

    stage: BuildStage
    source: str
    destination: str


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


def resolve(
    recipe: Recipe, *, stack: str | None = None, arguments: Mapping[str, str] | None = None, gpu_arch: str | None = None
) -> Chain:
    """``gpu_arch``: see builder.arch. Errors: DefinitionError for anything wrong in the recipe, its stack or its
    definition files; UsageError for a ``gpu_arch`` that is none."""
    asked_by = "--stack" if stack else str(recipe.folder / "recipe.yaml")
    bound = find_stack(stack or recipe.file.stack, recipe.image_folders, asked_by=asked_by)
    bound.check_locks()
    if gpu_arch:
        bound = narrowed(bound, gpu_arch, recipe.image_folders)
    images = _Images(recipe, bound, arguments or {})
    definitions = images.chain_of(recipe.file.layer, str(recipe.folder / "recipe.yaml"))
    layers, environment = images.layers_of(definitions)
    images.check_arguments()
    labels: dict[str, str] = {}
    tests: list[tuple[str, str]] = []
    for definition in definitions:
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


class _Images:
    """The definition files a recipe sees, bound to its stack's arguments."""

    def __init__(self, recipe: Recipe, stack: Stack, arguments: Mapping[str, str]) -> None:
        self.recipe, self.stack, self.arguments = recipe, stack, arguments
        self.known = {path.stem: path for folder in reversed(recipe.image_folders) for path in folder.glob("*.def")}
        self.read: dict[str, Definition] = {}

    def definition(self, name: str, asked_by: str) -> Definition:
        if name not in self.known:
            raise DefinitionError(f"{asked_by}: no layer '{name}'." + nearest(name, self.known))
        if name not in self.read:
            path, folder = self.known[name], self.stack.folder
            root = path.parent.parent
            own = {"stack": str(folder.relative_to(root) if folder.is_relative_to(root) else folder),
                   "capabilities": " ".join(self.stack.file.compute_capabilities)}  # fmt: skip
            given = {**self.stack.file.arguments, **self.arguments, **own}
            self.read[name] = read_definition(path, root=root, arguments=given)
        return self.read[name]

    def chain_of(self, name: str, asked_by: str) -> list[Definition]:
        """A layer's definition and all below it, bottom first."""
        found: list[Definition] = []
        parent: str | None = name
        while parent is not None:
            if parent in (names := [item.name for item in found]):
                raise DefinitionError(
                    f"{self.known[parent]}: From: goes round in a circle: {' → '.join([*names, parent])}"
                )
            found.append(definition := self.definition(parent, asked_by))
            parent, asked_by = definition.final.parent, str(definition.path)
        return found[::-1]

    def layers_of(
        self, definitions: Sequence[Definition], circle: Sequence[str] = ()
    ) -> tuple[list[Layer], dict[str, str]]:
        """The layers of a chain of definitions, bottom first, and the environment they leave."""
        layers: list[Layer] = []
        environment: dict[str, str] = {"PATH": DEFAULT_PATH}
        for definition in definitions:
            if definition.name in circle:
                raise DefinitionError(
                    f"{definition.path}: a stage of it stands on itself: {' → '.join([*circle, definition.name])}"
                )
            layers += self._own_layers(definition, layers, environment, [*circle, definition.name])
            environment = expand(definition.final.environment, environment)
        return layers, environment

    def _own_layers(
        self, definition: Definition, below: Sequence[Layer], environment: Mapping[str, str], circle: Sequence[str]
    ) -> list[Layer]:
        """The step of a definition's header (when it is a base) and the step of its %files and %post (when it has any)."""
        stage, epoch, made = definition.final, self.stack.file.epoch, list[Layer]()
        packages = self.stack.apt_lock().of(definition.name, lowest=stage.parent is None)
        locked = {"packages": packages} if packages else {}
        if stage.parent is None:
            source = {key: value for key, value in stage.header.items() if value and key not in ("mirrorurl", "stage")}
            if stage.bootstrap == "debootstrap":
                source["include"] = " ".join(sorted(set(source.get("include", "").replace(",", " ").split())))
            inputs = {"kind": "bootstrap", "source": source, **locked, "epoch": epoch, "platform": platform()}
            made.append(_layer(f"{definition.name}-root" if stage.post or stage.files else definition.name,
                               "bootstrap", stage, (), environment, epoch, inputs, below))  # fmt: skip
        taken = self._stages(definition, [*below, *made], environment, circle)
        files = tuple(file for copy in stage.files if copy.stage is None for file in _copied(definition, copy))
        if stage.post or files or taken:
            kind: Literal["post", "files"] = "post" if stage.post else "files"
            inputs = {
                "kind": kind,
                "post": stage.post,
                "files": [[file.destination, file.mode, file.sha256()] for file in files],
                **_from(taken),
                **locked,
                "environment": dict(environment),
                "epoch": epoch,
                "platform": platform(),
            }
            made.append(_layer(definition.name, kind, stage, files, environment, epoch, inputs, [*below, *made], taken))
        return made

    def _stages(
        self, definition: Definition, below: Sequence[Layer], environment: Mapping[str, str], circle: Sequence[str]
    ) -> tuple[Taken, ...]:
        """What the last stage takes of those before it, each resolved with all it stands on."""
        if len(definition.stages) > 1:
            check_torch(self.stack)
        made: dict[str, BuildStage] = {}
        for stage in definition.stages[:-1]:
            if stage.parent is None or stage.name is None:
                said = "needs a name (Stage: build)" if stage.parent else "stands on a layer (Bootstrap: localimage)"
                raise DefinitionError(f"{definition.path}: a build stage {said}")
            hands_over = tuple(dict.fromkeys(copy.source for later in definition.stages for copy in later.files
                                             if copy.stage == stage.name))  # fmt: skip
            if not hands_over:
                raise DefinitionError(f"{definition.path}: no later stage takes anything of '{stage.name}'; "
                                      f"write '%files from {stage.name}', or remove the stage")  # fmt: skip
            layers, own = self.layers_of(self.chain_of(stage.parent, str(definition.path)), circle)
            made[stage.name] = self._stage(definition, stage, layers, own, hands_over, made, below, environment)
        return _taken(definition.final, made)

    def _stage(
        self, definition: Definition, stage: Stage, layers: Sequence[Layer], environment: Mapping[str, str],
        hands_over: tuple[str, ...], earlier: Mapping[str, BuildStage], runtime: Sequence[Layer],
        runtime_environment: Mapping[str, str],
    ) -> BuildStage:  # fmt: skip
        about, wheel, taken = self.stack.file, stage.labels.get(WHEEL_LABEL), _taken(stage, earlier)
        files = tuple(file for copy in stage.files if copy.stage is None for file in _copied(definition, copy))
        inputs: dict[str, Any] = {
            "format": KEY_FORMAT,
            "kind": "wheel" if wheel else "stage",
            "post": stage.post,
            "files": [[file.destination, file.mode, file.sha256()] for file in files],
            **_from(taken),
            "hands over": sorted(hands_over),
            "epoch": about.epoch,
            "platform": platform(),
        }
        if wheel:
            # Not the parent's key: a wheel compiled elsewhere, or on the layers of last month, is as good. What only
            # the build stage stands on (the compiler), and the environment that this brings, are the build's flags.
            shipped = {layer.cache_key for layer in runtime}
            inputs |= {
                "wheel": wheel,
                "tools": [[layer.name, _hash({key: value for key, value in layer.inputs.items() if key not in ("parent", "environment")})]
                          for layer in layers if layer.cache_key not in shipped],
                "environment": {key: value for key, value in environment.items() if runtime_environment.get(key) != value},
                "suite": about.suite, "python": about.python, "torch": about.torch, "cuda": about.cuda,
                "cxx11_abi": has_cxx11_abi(about.torch, about.cuda),
                "capabilities": served(about.compute_capabilities, stage.labels.get(LEAST_LABEL), definition.path),
            }  # fmt: skip
        else:
            inputs |= {"parent": layers[-1].cache_key, "environment": dict(environment)}
        return BuildStage(
            name=f"{definition.name}.{stage.name}", stage=stage, layers=tuple(layers), files=files, taken=taken,
            environment=dict(environment), epoch=about.epoch, hands_over=hands_over, wheel=wheel, inputs=inputs,
            job_memory=_job_memory(definition, stage),
            cache_key=_hash(inputs),
        )  # fmt: skip

    def check_arguments(self) -> None:
        """Errors: DefinitionError for what is bound and declared nowhere."""
        declared = set[str]().union(*(declared_arguments(item.path) for item in self.read.values()))
        anywhere = declared.union(*(declared_arguments(path) for path in self.known.values()))
        unused = [
            ("--arg", name, declared, f"no layer of '{self.recipe.name}'")
            for name in sorted(set(self.arguments) - declared)
        ]
        unused += [(str(self.stack.folder / "stack.yaml"), name, anywhere, "no definition file")
                   for name in sorted(set(self.stack.file.arguments) - anywhere)]  # fmt: skip
        if unused:
            raise DefinitionError(
                "\n".join(
                    f"{where}: argument '{name}' is bound but {who} declares it." + nearest(name, names)
                    for where, name, names, who in unused
                )
            )


def _job_memory(definition: Definition, stage: Stage) -> int | None:
    said = stage.labels.get(MEMORY_LABEL)
    try:
        return int(float(said) * 2**30) if said else None
    except ValueError as error:
        raise DefinitionError(f"{definition.path}: {MEMORY_LABEL} is a number of GiB (found: {said})") from error


def stages_of(taken: Iterable[Taken]) -> list[BuildStage]:
    """Each stage once."""
    return list({item.stage.cache_key: item.stage for item in taken}.values())


def files_of(layers: Iterable[Layer | BuildStage]) -> Iterator[File]:
    """All that goes into these and into the build stages that they take from, some of it several times."""
    for step in layers:
        yield from step.files
        for stage in stages_of(step.taken):
            yield from files_of([*stage.layers, stage])


def _taken(stage: Stage, made: Mapping[str, BuildStage]) -> tuple[Taken, ...]:
    return tuple(Taken(made[copy.stage], copy.source, copy.destination) for copy in stage.files if copy.stage)


def _from(taken: Sequence[Taken]) -> dict[str, Any]:
    """What a key says of build stages; nothing where there are none."""
    return {"from": [[item.stage.cache_key, item.source, item.destination] for item in taken]} if taken else {}


def _hash(inputs: Mapping[str, Any]) -> str:
    canonical = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _layer(
    name: str, kind: Literal["bootstrap", "post", "files"], stage: Stage | None, files: tuple[File, ...],
    environment: Mapping[str, str], epoch: int, inputs: dict[str, Any], below: Sequence[Layer],
    taken: tuple[Taken, ...] = (),
) -> Layer:  # fmt: skip
    inputs = {"format": KEY_FORMAT, "parent": below[-1].cache_key if below else None, **inputs}
    return Layer(
        name=name, kind=kind, stage=stage, files=files, environment=dict(environment), epoch=epoch, inputs=inputs,
        cache_key=_hash(inputs), taken=taken,
    )  # fmt: skip


def _copied(definition: Definition, copy: Copy) -> list[File]:
    """The files one %files line stands for. A folder is copied as the destination; links are followed."""
    files = _found(definition, copy)
    for file in files:
        if (
            file.source
            and file.source.suffix in (".lock", ".in")
            and (why := unrelated(file.source.read_text(errors="replace")))
        ):
            raise DefinitionError(f"{file.source}: {why}")
    return files


def _found(definition: Definition, copy: Copy) -> list[File]:
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
    about: dict[str, Any] = {"recipe": recipe.name, "stack": chain.stack.name,
             "layers": [{"name": layer.name, "cache_key": layer.cache_key} for layer in chain.layers]}  # fmt: skip
    made = [_origin(layer, stage) for layer in chain.layers for stage in stages_of(layer.taken)]
    if compiled := [item for item in made if item["package"]]:
        about["compiled"] = compiled
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


def _origin(layer: Layer, stage: BuildStage) -> dict[str, Any]:
    """How a stage made a package: the image says it itself, for the stage and its compilers are not in it."""
    inputs, arguments = stage.inputs, stage.stage.arguments
    pins = [pin for file in stage.files for pin in _pins(file)]
    source: dict[str, Any] = {"name": pins[0][0], "version": pins[0][1], "sha256": pins[0][2]} if len(pins) == 1 else {}
    for name, commit in arguments.items():
        if name.endswith("_commit") and commit and commit in stage.stage.post:
            said = arguments.get(name.removesuffix("_commit") + "_repository", "")
            # A folder of this machine, or a URL with a password in it, is nobody else's business.
            source = {"repository": said if re.fullmatch(r"(https?|git|ssh)://[^@]+", said) else "", "commit": commit}
    about = {
        "package": stage.wheel or source.get("name"),
        "layer": layer.name,
        "cache_key": stage.cache_key,
        "source": source,
    }
    if stage.wheel is None:  # nothing of it is compiled for a GPU
        return about
    compilers: dict[str, str] = {}
    for below in stage.layers:
        locked = below.inputs.get("packages", {})
        compilers |= {name: version for name, version in locked.items() if re.fullmatch(r"g(?:cc|\+\+)-\d+", name)}
        nvcc = {pin[0]: pin[1] for file in below.files for pin in _pins(file)}.get("nvidia-cuda-nvcc")
        if version := nvcc or (below.stage.arguments.get("nvcc") if below.stage else None):
            compilers["nvcc"] = version
    return {**about, "compilers": compilers,
            **{name: inputs[name] for name in ("torch", "cuda", "python", "cxx11_abi", "capabilities")}}  # fmt: skip


def _pins(file: File) -> list[tuple[str, str, list[str]]]:
    """Name, version and hashes of what a lock file of Python packages pins."""
    if file.source is None or file.source.suffix != ".lock":
        return []
    return read_pins(file.source.read_text(errors="replace"))


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
