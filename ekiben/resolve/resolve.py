"""Resolve a recipe to its layers, bottom first, each with its cache key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ekiben.core.command_name import command_name
from ekiben.core.decisions import log_decision
from ekiben.core.environment import ARCHITECTURES, host_arch
from ekiben.core.errors import DefinitionError, UsageError, nearest
from ekiben.core.files import read_source
from ekiben.core.paths import RECIPE_HOME
from ekiben.formats import oci
from ekiben.formats.evaluated import written_path
from ekiben.formats.layer import File
from ekiben.resolve.apps import app_environment, app_files
from ekiben.resolve.base_layer import FileStep, add_base, add_files, add_script
from ekiben.resolve.capabilities import check_torch, filter_archs, has_cxx11_abi, supported_archs
from ekiben.resolve.copies import copied_files, copy_inputs, file_inputs
from ekiben.resolve.graph import BuildStage, ImageState, Layer, ResolvedRecipe, StageCopy
from ekiben.resolve.keys import KEY_FORMAT, hash_inputs, parent_name
from ekiben.resolve.recipe_layer import add_recipe_layer
from ekiben.resolve.sources import locked_sources, source_copies
from ekiben.resolve.wheel_layers import wheel_inputs
from ekiben.spec.bases_lock import bind_bases
from ekiben.spec.definition import (
    SCRATCH,
    Copy,
    Definition,
    Stage,
    declared_arguments,
    parent_argument,
    read_definition,
    used_arguments,
)
from ekiben.spec.definition_scripts import with_shebang
from ekiben.spec.environment import (
    EnvironmentScript,
    depends_on_caller,
    expand,
    is_known,
    table_script,
    writes_environment,
)
from ekiben.spec.recipe import Recipe
from ekiben.spec.source_folders import local_path
from ekiben.spec.stack import Stack, StackFile, find_stack, stacks
from ekiben.spec.sums import check_recipe_locks

WHEEL_LABEL = "org.ekiben.wheel"  # of a build stage: the package whose wheel it compiles
MEMORY_LABEL = "org.ekiben.job-memory"  # of a build stage: the memory of one compiler job, in GiB, as measured
MINIMUM_LABEL = (
    "org.ekiben.least-capability"  # of a build stage: the lowest compute capability that the package supports
)
ABOVE_LABEL = "org.ekiben.above"  # of a layer: the layers below it whose files it replaces
ARCH_LABEL = "org.ekiben.architectures"  # of a build stage: the only architectures that it compiles for


def resolve(
    recipe: Recipe,
    *,
    stack: str | None = None,
    arguments: Mapping[str, str] | None = None,
    gpu_arch: str | None = None,
    arch: str | None = None,
) -> ResolvedRecipe:
    """Resolve a recipe on its stack, or on ``stack``, with ``arguments`` bound over the stack's.

    ``gpu_arch``: "8.0,9.0" or "native"; ``arch``: "amd64" or "arm64", by default this host's. Raises DefinitionError
    when something is wrong in the recipe, its stack or its definition files, UsageError when ``gpu_arch`` is none or
    the CUDA of the stack does not know it, and when the stack is not locked for ``arch``.
    """
    asked_by = "--stack" if stack else str(recipe.folder / "recipe.yaml")
    bound = find_stack(stack or recipe.file.stack, recipe.image_folders, asked_by=asked_by, sources=recipe.sources)
    bound = _bind_arch(bound, arch or host_arch(), recipe)
    bound.check_locks()
    check_recipe_locks(recipe.sources, recipe.file.layer)
    if gpu_arch:
        bound = filter_archs(bound, gpu_arch, recipe.image_folders)
    log_decision("stack", f"{bound.name} in {bound.folder}", "requested" if stack else "named in recipe.yaml")
    log_decision("architecture", bound.arch, "requested" if arch else "this machine's")
    log_decision(
        "compute capabilities",
        " ".join(bound.file.compute_capabilities),
        f"requested: {gpu_arch}" if gpu_arch else "the stack's",
    )
    images = _Images(recipe, bound, arguments or {})
    definitions = images.definitions_of(recipe.file.layer, str(recipe.folder / "recipe.yaml"))
    for layer in recipe.layers:
        definitions = images.add_layer(definitions, layer)
    if recipe.added_layer and recipe.added_layer not in [item.name for item in definitions]:
        definitions = images.add_layer(definitions, recipe.added_layer)
    state = images.state_of(definitions)
    images.check_arguments()
    labels: dict[str, str] = {}
    tests: list[tuple[str, str]] = []
    for definition in definitions:
        labels |= definition.final.labels
        if definition.final.test:
            tests.append((definition.name, definition.final.test))
    variables, path = {"EKIBEN_RECIPE": RECIPE_HOME, **recipe.file.environment}, recipe.folder / "recipe.yaml"
    if state.scripts:
        environment = {**state.environment, "EKIBEN_RECIPE": RECIPE_HOME}
        if recipe.file.environment:
            state = images.add_script(recipe.name, table_script(variables, path, f"{path}: "), state)
    else:
        environment = expand(variables, state.environment, f"{path}: ")
    if recipe.file.test:
        tests.append((recipe.name, with_shebang(recipe.file.test, "-e")))
    labels |= {
        "org.opencontainers.image.title": recipe.name,
        "org.opencontainers.image.description": recipe.file.description,
        "org.ekiben.stack": bound.name,
        **({oci.LAYER_LABEL: " ".join(recipe.layers)} if recipe.layers else {}),
        **recipe.file.labels,
    }
    deffile = "\n\n".join(f"# {item.name}\n{item.text.strip()}" for item in definitions) + "\n"
    resolved = ResolvedRecipe(
        recipe=recipe,
        stack=bound,
        definitions=tuple(definitions),
        layers=tuple(state.layers),
        environment=environment,
        labels=labels,
        deffile=deffile,
        tests=tuple(tests),
        gpu_arch=gpu_arch,
        arguments=arguments or {},
        scripts=state.scripts,
    )
    if arguments:
        resolved = replace(resolved, deciding_arguments=_deciding_arguments(resolved, arch))
    return add_recipe_layer(resolved)


def resolve_below(recipe: Recipe, stack: Stack) -> ImageState:
    """Return the layers below a recipe's top layer, on ``stack``: where its packages are built. Raises
    DefinitionError.
    """
    images = _Images(recipe, stack, {})
    return images.state_of(images.definitions_of(recipe.file.layer, str(recipe.folder / "recipe.yaml"))[:-1])


def resolve_layers(recipe: Recipe, stack: Stack, name: str) -> tuple[Layer, ...]:
    """Return the layer ``name`` on ``stack`` and those below it, as ``recipe`` sees them. Raises DefinitionError."""
    images = _Images(recipe, stack, {})
    return tuple(images.state_of(images.definitions_of(name, str(recipe.folder / "recipe.yaml"))).layers)


def _deciding_arguments(resolved: ResolvedRecipe, arch: str | None) -> tuple[str, ...]:
    """Return the names of the command line's arguments where some of them change keys, as a mirror does not."""
    try:
        plain = resolve(resolved.recipe, stack=resolved.stack.name, gpu_arch=resolved.gpu_arch, arch=arch)
    except DefinitionError:  # it needs them
        return tuple(sorted(resolved.arguments))
    is_same = [layer.cache_key for layer in plain.layers[:-1]] == [layer.cache_key for layer in resolved.layers]
    return () if is_same else tuple(sorted(resolved.arguments))


def _bind_arch(stack: Stack, arch: str, recipe: Recipe) -> Stack:
    """Return the stack for ``arch``. Raises UsageError when it has no locks for that."""
    if arch in stack.file.architectures:
        return replace(stack, arch=arch)
    known = stacks(recipe.image_folders, recipe.sources)
    suitable = [other.name for other in known if arch in other.file.architectures]
    if arch not in ARCHITECTURES.values():
        raise UsageError(f"--arch {arch}: no such architecture." + nearest(arch, ARCHITECTURES.values()))
    raise UsageError(
        f"--arch {arch}: stack {stack.name} is locked for {', '.join(stack.file.architectures)} only",
        hint=(
            f"a stack that is locked for {arch}: {', '.join(suitable)}"
            if suitable
            else (
                "no stack here is; "
                f"one is after `architectures: [amd64, {arch}]` in its stack.yaml and {command_name()} lock"
            )
        ),
    )


class _Images:
    """The definition files a recipe sees, bound to its stack's arguments."""

    def __init__(self, recipe: Recipe, stack: Stack, arguments: Mapping[str, str]) -> None:
        self.recipe, self.stack, self.arguments = recipe, stack, arguments
        self.known = {
            path.stem: path for folder in reversed(recipe.image_folders) for path in _definition_files(folder)
        }
        for path in self.known.values():
            recipe.sources.check(path)
        self.read: dict[str, Definition] = {}
        self.parents: dict[str, dict[str, str]] = {}  # of an added layer: the argument that names its parent
        self.apt_lock = stack.apt_lock()

    def definition(self, name: str, asked_by: str) -> Definition:
        if name not in self.known:
            raise DefinitionError(f"{asked_by}: no layer '{name}'." + nearest(name, self.known))
        if name not in self.read:
            path, folder = self.known[name], self.stack.folder
            root = path.parent.parent
            own = {
                "stack": str(folder.relative_to(root) if folder.is_relative_to(root) else folder),
                "capabilities": " ".join(self.stack.file.compute_capabilities),
            }
            arguments = {**self.stack.file.arguments, **self.parents.get(name, {}), **self.arguments, **own}
            definition = read_definition(path, root=root, arguments=arguments)
            self.read[name] = bind_bases(definition, self.recipe.folder, self.stack, self.recipe.sources)
            self._check_repositories(self.read[name])
        return self.read[name]

    def _check_repositories(self, definition: Definition) -> None:
        """Raise DefinitionError for a repository on this machine outside the recipe's folder that no user named."""
        for stage in definition.stages:
            for name, value in stage.arguments.items():
                named = name.endswith("_repository") and value and name not in self.arguments
                if named and (folder := local_path(value)):
                    self.recipe.sources.check(folder, f"{definition.path}: {name}")

    def add_layer(self, definitions: Sequence[Definition], name: str) -> list[Definition]:
        """Add a layer on top of ``definitions``, bottom first; or replace the layer with the same packages; or below
        the one that replaces its files.

        Raises DefinitionError when there is no such layer, the stack lacks it, or it leaves out one of them.
        """
        asked_by = f"--layer {name}"
        added = self.definition(name, asked_by)
        if name in [item.name for item in definitions]:
            raise DefinitionError(f"{asked_by}: '{self.recipe.file.name}' has it already; omit the option")
        self._check_has_locks(added, asked_by)
        packages = _packages_of(added)
        same = [number for number, item in enumerate(definitions) if packages & _packages_of(item)]
        if less := [definitions[number].name for number in same if not packages >= _packages_of(definitions[number])]:
            raise DefinitionError(
                f"{asked_by}: '{self.recipe.file.name}' has '{less[0]}', with the same packages and more"
            )
        over = [number for number, item in enumerate(definitions) if name in _replaced_by(item)]
        position = min([*same, *over], default=len(definitions))
        replaced = ", ".join(definitions[number].name for number in same)
        covering = ", ".join(definitions[number].name for number in over)
        reason = f"below {covering}, which replaces its files" if covering else "on top"
        log_decision(
            f"layer {name}", "added", f"replaces {replaced}, which has the same packages" if replaced else reason
        )
        above = [item for number, item in enumerate(definitions[position:], position) if number not in same]
        below = list(definitions[:position])
        for step in (name, *(item.name for item in above)):
            below = self._rebase(below, step, asked_by)
        return below

    def _rebase(self, below: Sequence[Definition], name: str, asked_by: str) -> list[Definition]:
        """Return the layer ``name`` and all below it: with its usual parent where that has all of ``below``, else with
        ``below``.

        Raises DefinitionError where neither is possible.
        """
        definitions = self.definitions_of(name, asked_by)
        lost = _missing(below, definitions)
        if lost and (argument := parent_argument(definitions[-1].text)):
            self.parents[name] = {argument: below[-1].name}
            del self.read[name]
            definitions = self.definitions_of(name, asked_by)
            lost = _missing(below, definitions)
        compilers = [stage.parent for stage in definitions[-1].stages if WHEEL_LABEL in stage.labels and stage.parent]
        if needed := [
            layer for one in compilers for layer in _missing(self.definitions_of(one, asked_by)[:-1], definitions)
        ]:
            raise DefinitionError(
                f"{asked_by}: '{name}' is compiled for {', '.join(needed)}, which '{self.recipe.file.name}' lacks"
            )
        if lost:
            raise DefinitionError(
                f"{asked_by}: '{name}' is on top of '{definitions[-2].name if definitions[1:] else 'nothing'}' (From:"
                f" in {definitions[-1].path}), and '{self.recipe.file.name}' would be without {', '.join(lost)}"
            )
        return definitions

    def _check_has_locks(self, definition: Definition, asked_by: str) -> None:
        """Raise DefinitionError where the stack has no lock of a layer."""
        folder = self.stack.folder
        for stage in definition.stages:
            for copy in stage.files:
                lock = definition.root / copy.source
                if lock.suffix == ".lock" and lock.is_relative_to(folder) and not lock.exists():
                    raise DefinitionError(f"{asked_by}: stack '{self.stack.name}' lacks it: missing {lock}")

    def definitions_of(self, name: str, asked_by: str) -> list[Definition]:
        """Return a layer's definition and all below it, bottom first."""
        definitions: list[Definition] = []
        parent: str | None = name
        while parent is not None:
            if parent in (names := [item.name for item in definitions]):
                raise DefinitionError(f"{self.known[parent]}: From: is circular: {' → '.join([*names, parent])}")
            definitions.append(definition := self.definition(parent, asked_by))
            parent, asked_by = definition.final.parent, str(definition.path)
        return definitions[::-1]

    def state_of(self, definitions: Sequence[Definition], circle: Sequence[str] = ()) -> ImageState:
        """Return the layers of these definitions, bottom first, and the environment that they leave."""
        state = ImageState()
        for definition in definitions:
            if definition.name in circle:
                raise DefinitionError(
                    f"{definition.path}: a stage of it is its own parent: {' → '.join([*circle, definition.name])}"
                )
            state = self._add_definition(definition, state, [*circle, definition.name])
        return state

    def _add_definition(self, definition: Definition, state: ImageState, circle: Sequence[str]) -> ImageState:
        """Add the layer of a definition's header (of a base), and that of its %files and %post (if it has any)."""
        stage, epoch = definition.final, self.stack.file.epoch
        environment: Mapping[str, str] = state.environment
        packages = self.apt_lock.of(definition.name, lowest=stage.parent is None)
        locked = {"packages": packages} if packages else {}
        if stage.parent is None:
            state = add_base(definition, state, locked, self.stack)
            environment = state.environment
        environment = {**environment, **app_environment(stage.apps)}
        copies = self._stages(definition, state, circle)
        files = self._files_of(definition, stage)
        if stage.post:
            sources = locked_sources(files, self.recipe)
            copies += source_copies(definition.name, sources, state, self.stack, self.recipe.folder)
        parent = parent_name(state.parent) if state.layers else ""
        writes = writes_environment("\n".join([stage.post, *(file.destination for file in files)]))
        if stage.bootstrap == SCRATCH and stage.post:  # its shell is one of the files
            if not (files or copies):
                raise DefinitionError(
                    f"{definition.path}: %post needs a shell, and Bootstrap: {SCRATCH} has none",
                    hint="copy one by %files, as busybox to /bin/sh, or leave %post out",
                )
            filled = FileStep(f"{definition.name}-files", files, copies, environment)
            state, files, copies = add_files(filled, stage, state, self.stack), (), ()
        if stage.post or files or copies:
            kind: Literal["post", "files"] = "post" if stage.post else "files"
            inputs = {
                "format": KEY_FORMAT,
                "parent": state.parent,
                "kind": kind,
                "post": stage.post,
                **_shell_input(stage),
                **file_inputs(files),
                **copy_inputs(copies),
                **locked,
                "environment": dict(environment),
                **({"writes": "environment"} if writes else {}),
                "epoch": epoch,
                "platform": self.stack.platform,
            }
            inputs = wheel_inputs(inputs, state) or inputs
            layer = Layer(
                name=definition.name,
                kind=kind,
                stage=stage,
                files=files,
                environment=environment,
                epoch=epoch,
                inputs=inputs,
                copies=copies,
                scripts=state.scripts,
            )
            state = state.add(layer)
        state = replace(state, environment=environment)
        if writes:
            text = f". {written_path(parent)}\n{stage.environment_text}"
            script = EnvironmentScript(text, definition.path, max(0, stage.environment_line - 1))
            return self.add_script(definition.name, script, state)
        if not stage.environment_text:
            return state
        if stage.environment and not state.scripts and is_known(stage.environment, environment):
            return replace(state, environment=expand(stage.environment, environment, f"{definition.path}: %"))
        table = {} if depends_on_caller(stage.environment) else stage.environment
        script = EnvironmentScript(stage.environment_text, definition.path, stage.environment_line, table=table)
        return self.add_script(definition.name, script, state)

    def add_script(self, name: str, script: EnvironmentScript, state: ImageState) -> ImageState:
        """Add the layer that evaluates a script of the environment in those below it. It is a layer of its own, so that
        another script runs no %post again.
        """
        is_used = name in (self.recipe.name, *(layer.name for layer in state.layers))
        return add_script(f"{name}-environment" if is_used else name, script, state, self.stack)

    def _files_of(self, definition: Definition, stage: Stage) -> tuple[File, ...]:
        """Return the files that a stage copies from this machine, after those of its apps."""
        of_apps = [Copy(copy.source, copy.destination, None, copy.line) for app in stage.apps for copy in app.files]
        return (
            *app_files(stage.apps),
            *(
                file
                for copy in (*of_apps, *stage.files)
                if copy.stage is None
                for file in copied_files(definition, copy, self.recipe.sources, self.stack.arch)
            ),
        )

    def _stages(self, definition: Definition, below: ImageState, circle: Sequence[str]) -> tuple[StageCopy, ...]:
        """Return the lines of ``%files from`` of the last stage, with their stages resolved."""
        if len(definition.stages) > 1:
            check_torch(self.stack)
        stages: dict[str, BuildStage] = {}
        for stage in definition.stages[:-1]:
            if stage.parent is None or stage.name is None:
                requirement = (
                    "needs a name (Stage: build)" if stage.parent else "needs a layer below (Bootstrap: localimage)"
                )
                raise DefinitionError(f"{definition.path}: a build stage {requirement}")
            _refuse_writes(definition, stage)
            state = self.state_of(self.definitions_of(stage.parent, str(definition.path)), circle)
            stages[stage.name] = self._stage(definition, stage, state, below, stages)
        return _stage_copies(definition.final, stages)

    def _stage(
        self,
        definition: Definition,
        stage: Stage,
        state: ImageState,
        runtime: ImageState,
        earlier: Mapping[str, BuildStage],
    ) -> BuildStage:
        """Return a build stage on the layers of ``state``, for a layer on those of ``runtime``."""
        stack_file, wheel, copies = self.stack.file, stage.labels.get(WHEEL_LABEL), _stage_copies(stage, earlier)
        outputs = tuple(
            dict.fromkeys(
                copy.source for later in definition.stages for copy in later.files if copy.stage == stage.name
            )
        )
        if not outputs:
            raise DefinitionError(
                f"{definition.path}: no later stage copies a file of '{stage.name}'; "
                f"write '%files from {stage.name}', or remove the stage"
            )
        files = self._files_of(definition, stage)
        inputs: dict[str, Any] = {
            "format": KEY_FORMAT,
            "kind": "wheel" if wheel else "stage",
            "post": stage.post,
            **_shell_input(stage),
            **file_inputs(files),
            **copy_inputs(copies),
            "hands over": sorted(outputs),
            "epoch": stack_file.epoch,
            "platform": self.stack.platform,
        }
        if self.stack.arch not in (able := stage.labels.get(ARCH_LABEL, self.stack.arch).split()):
            raise UsageError(
                f"--arch {self.stack.arch}: {definition.path} compiles {wheel or definition.name} for "
                f"{', '.join(able)} only"
            )
        if wheel:
            archs = supported_archs(stack_file.compute_capabilities, stage.labels.get(MINIMUM_LABEL), definition.path)
            inputs |= {"wheel": wheel, **_compiler_inputs(stack_file, state, runtime), "capabilities": archs}
        else:
            inputs |= {"parent": state.parent, "environment": dict(state.environment)}
        return BuildStage(
            name=f"{definition.name}.{stage.name}",
            stage=stage,
            layers=tuple(state.layers),
            files=files,
            copies=copies,
            environment=dict(state.environment),
            epoch=stack_file.epoch,
            outputs=outputs,
            wheel=wheel,
            inputs=inputs,
            job_memory=_job_memory(definition, stage),
            scripts=state.scripts,
        )

    def check_arguments(self) -> None:
        """Raise DefinitionError when an argument is bound that no definition file declares."""
        texts = [item.text for item in self.read.values()]
        declared = set[str]().union(*map(declared_arguments, texts), *map(used_arguments, texts))
        unused_paths = (path for name, path in self.known.items() if name not in self.read)
        anywhere = declared.union(*(declared_arguments(read_source(path, errors="replace")) for path in unused_paths))
        unused = [
            ("--build-arg", name, declared, f"no layer of '{self.recipe.name}'")
            for name in sorted(set(self.arguments) - declared)
        ]
        unused += [
            (str(self.stack.folder / "stack.yaml"), name, anywhere, "no definition file")
            for name in sorted(set(self.stack.file.arguments) - anywhere)
        ]
        if unused:
            raise DefinitionError(
                "\n".join(
                    f"{where}: argument '{name}' is bound but {who} declares it." + nearest(name, names)
                    for where, name, names, who in unused
                )
            )


def _shell_input(stage: Stage) -> dict[str, str]:
    """Return the input of a key for what runs a %post; nothing for /bin/sh."""
    return {"shell": stage.shell} if stage.shell else {}


def _compiler_inputs(stack_file: StackFile, state: ImageState, runtime: ImageState) -> dict[str, Any]:
    """Return the inputs of compiled code besides its source.

    Not the parent's key: a wheel compiled elsewhere, or on the layers of last month, is as good. What only the build
    stage has below it (the compiler), with its environment, are the build's flags.
    """
    shipped = {layer.cache_key for layer in runtime.layers}
    tools = [
        [
            layer.name,
            hash_inputs({key: value for key, value in layer.inputs.items() if key not in ("parent", "environment")}),
        ]
        for layer in state.layers
        if layer.cache_key not in shipped
    ]
    environment = {key: value for key, value in state.environment.items() if runtime.environment.get(key) != value}
    return {
        "tools": tools,
        "environment": environment,
        "suite": stack_file.suite,
        "python": stack_file.python,
        "torch": stack_file.torch,
        "cuda": stack_file.cuda,
        "cxx11_abi": has_cxx11_abi(stack_file.torch, stack_file.cuda),
    }


def _refuse_writes(definition: Definition, stage: Stage) -> None:
    """Raise DefinitionError for a build stage whose %post adds to the image's environment or labels."""
    if writes_environment(stage.post):
        raise DefinitionError(
            f"{definition.path}: the %post of '{stage.name}' adds to the image's environment or labels, and the"
            " stage does not ship; write it in the last stage"
        )


def _missing(required: Sequence[Definition], definitions: Sequence[Definition]) -> list[str]:
    """Return the names of those of ``required`` that ``definitions`` lack."""
    names = {item.name for item in definitions}
    return [item.name for item in required if item.name not in names]


def _packages_of(definition: Definition) -> set[str]:
    """Return the names of a layer's lock files, and of the packages whose wheels it compiles."""
    locks = {Path(copy.source).name for copy in definition.final.files if copy.source.endswith(".lock")}
    return locks.union(stage.labels[WHEEL_LABEL] for stage in definition.stages if WHEEL_LABEL in stage.labels)


def _replaced_by(definition: Definition) -> list[str]:
    """Return the layers below whose files a layer replaces."""
    return definition.final.labels.get(ABOVE_LABEL, "").split()


def _definition_files(folder: Path) -> list[Path]:
    """Return the definition files of a folder. Raises OSError for a folder that cannot be read."""
    return [path for path in folder.iterdir() if path.suffix == ".def"] if folder.is_dir() else []


def _job_memory(definition: Definition, stage: Stage) -> int | None:
    label = stage.labels.get(MEMORY_LABEL)
    try:
        return int(float(label) * 2**30) if label else None
    except ValueError as error:
        raise DefinitionError(f"{definition.path}: {MEMORY_LABEL} is a number of GiB (found: {label})") from error


def _stage_copies(stage: Stage, stages: Mapping[str, BuildStage]) -> tuple[StageCopy, ...]:
    return tuple(
        StageCopy(stages[copy.stage], copy.source, copy.destination, copy.line) for copy in stage.files if copy.stage
    )
