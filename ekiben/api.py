"""Ekiben from Python, for experiments that are scripts: plan and build a recipe, open its SIF, run programs in it.

    import ekiben

    for layer in ekiben.plan("lora-opencalm"):
        print(layer.name, layer.reason)
    with ekiben.build("lora-opencalm") as image:
        image.execute(["train", "--smoke"], check=True)

Errors are those of ekiben.core.errors; every one is an EkibenError, with a ``hint`` where there is something to do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from ekiben.core.errors import EkibenError, StoreError, UsageError, nearest
from ekiben.core.process import name_exit, quoted
from ekiben.run.containers import Inspection, Instance, Result, Runtime
from ekiben.run.contract import gives_gpus

if TYPE_CHECKING:
    from ekiben.resolve.graph import ResolvedRecipe
    from ekiben.store import Store

__all__ = [
    "BuildOptions",
    "ExecutionError",
    "Image",
    "Inspection",
    "Metadata",
    "PlannedLayer",
    "RecipeOptions",
    "Result",
    "RunningImage",
    "build",
    "open",
    "plan",
]

_IMAGE_JSON = "opt/ekiben/image.json"
_RECIPE = "opt/ekiben/recipe/recipe.yaml"
_LABELS = ".singularity.d/labels.json"


class ExecutionError(EkibenError):
    """A program in an image ended with another exit code than 0; ``result`` has what it wrote."""

    def __init__(self, argv: Sequence[str], result: Result) -> None:
        """Return the program and the last lines of its output."""
        self.result = result
        output = "\n".join((result.stderr or result.stdout).rstrip().splitlines()[-15:])
        super().__init__(f"{name_exit(result.exit_code)}: {quoted(argv)}\n{output}".rstrip())


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """A layer of a recipe. ``is_stored``: it is there, and nothing has to be built; ``reason`` says why, or why not."""

    name: str
    cache_key: str
    is_stored: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of a SIF that Ekiben wrote.

    ``tasks``: the commands of its recipe → their help; ``layers``: name → cache key.
    """

    recipe: str
    stack: str
    description: str
    tasks: Mapping[str, str]
    layers: Mapping[str, str]
    labels: Mapping[str, str]


class RecipeOptions(TypedDict, total=False):
    """Keyword arguments of plan() and build(): which layers a recipe has.

    stack: a stack to use instead of the recipe's.
    arguments: values for arguments of the definition files; ``mirror`` is a Debian archive.
    gpu_arch: compute capabilities to compile for, as "8.0,9.0", or "native".
    arch: "amd64" or "arm64" (default: this machine's).
    store: the store (default: $EKIBEN_STORE, else ~/.cache/ekiben/store).
    layers: layers to add to the recipe's, in this order.
    include: files and folders outside the recipe's folder that it may use.
    """

    stack: str | None
    arguments: Mapping[str, str] | None
    gpu_arch: str | None
    arch: str | None
    store: Path | None
    layers: Sequence[str]
    include: Sequence[str | Path]


class BuildOptions(RecipeOptions, total=False):
    """Keyword arguments of build().

    output: the file (default: ./NAME.sif).
    engine: what runs the layers' scripts (default: "auto", the first that can).
    locked: refuse versions other than the locked ones (default: False).
    verify: run the tests (default: True).
    """

    output: str | Path | None
    engine: str
    locked: bool
    verify: bool


def plan(recipe: str | Path, **options: Unpack[RecipeOptions]) -> list[PlannedLayer]:
    """Return each layer of a recipe, bottom first, and whether it would be built. Nothing is run or written.

    ``recipe`` is a name or a folder.

    Raises:
        UsageError: there is no such recipe.
        DefinitionError: the recipe, its stack or a definition file is wrong.
    """
    from ekiben.builder.build import plan as plan_layers

    _refuse_unknown("plan", options, RecipeOptions)
    actions = plan_layers(_resolve(recipe, options), _open_store(options.get("store")))
    return [
        PlannedLayer(item.layer.name, item.layer.cache_key, item.stored is not None, item.reason) for item in actions
    ]


def build(recipe: str | Path, **options: Unpack[BuildOptions]) -> Image:
    """Build a recipe's missing layers, write its SIF, run every test in it, and open it.

    ``recipe`` is a name or a folder.

    Raises:
        UsageError: there is no such recipe or engine.
        DefinitionError: the recipe, its stack or a definition file is wrong.
        EngineError: nothing here can build it.
        LayerError: a layer's script failed.
        FetchError: a package could not be downloaded.
        VerifyError: a test failed.
        LockMismatchError: with ``locked``, for a version other than the locked one.
    """
    from ekiben.artifacts.make import BuildRequest, make_image
    from ekiben.builder.plan import BuildContext, Options
    from ekiben.core.progress import Progress
    from ekiben.core.settings import read_settings

    _refuse_unknown("build", options, BuildOptions)
    output = options.get("output")
    build_options = Options(
        engine=options.get("engine", "auto"),
        locked=options.get("locked", False),
        mirror=(options.get("arguments") or {}).get("mirror"),
        registry=read_settings(os.environ).registry,
    )
    context = BuildContext(_resolve(recipe, options), _open_store(options.get("store")), build_options, Progress())
    request = BuildRequest(
        formats=("sif",), output=Path(output) if output else None, verify=options.get("verify", True)
    )
    return Image(Path(make_image(context, request).artifacts[0].ref))


def open(name: str | Path, *, include: Sequence[str | Path] = ()) -> Image:
    """Open the SIF file ``name``, that of the recipe ``name`` in this folder, what was published as NAME[:VERSION], or
    an image in a registry, which is pulled once.

    Args:
        name: a file, a recipe's name or folder, a published image, or a registry's reference
            (``oras://HOST/NAME:TAG``); where both are there, the recipe's.
        include: files and folders outside the recipe's own that it may use.

    Raises:
        UsageError: there is no such recipe.
        DefinitionError: recipe.yaml is wrong, or points out of the recipe's folder.
        StoreError: the file is not there, or is not a SIF.
        FetchError: the registry does not have the image, or does not answer.
    """
    from ekiben.artifacts.pulled import pull_once
    from ekiben.core.progress import Progress
    from ekiben.core.settings import read_settings
    from ekiben.formats.sif import read_runnable_sif
    from ekiben.images import ImageOptions, find_image
    from ekiben.store import Store

    reference = os.fspath(name)
    if reference.endswith(".sif") and not Path(name).is_file():
        raise StoreError(f"{reference} is not there")
    settings = read_settings(os.environ)
    options = ImageOptions(
        included=tuple(map(Path, include)),
        shared=lambda: settings.shared,
        pull=lambda reference: pull_once(reference, Store(settings.store), Progress()),
    )
    image = find_image(reference, options)
    if image.recipe and not image.sif.is_file():
        raise StoreError(f"{image.sif} is not here", hint=f"ekiben.build({os.fspath(name)!r}) builds it")
    if image.pulled and not image.sif.is_file():
        raise StoreError(f"{image.pulled} is a Docker image that was not made by Ekiben, and is not opened")
    read_runnable_sif(image.sif)
    return Image(image.sif)


class Image:
    """A SIF file. What it says of itself is read without a runtime; programs are run by Apptainer or SingularityCE."""

    def __init__(self, path: Path) -> None:
        """Keep the path; the file is read on first use."""
        self.path = path.absolute()

    def __enter__(self) -> Image:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: no file stays open between calls."""

    def __repr__(self) -> str:
        return f"ekiben.open({str(self.path)!r})"

    @cached_property
    def metadata(self) -> Metadata:
        """Recipe, stack, tasks, layers and labels. Raises UsageError when the SIF is not one of Ekiben's."""
        image_json, recipe, labels = self._read_top(_IMAGE_JSON, _RECIPE, _LABELS)
        if image_json is None or recipe is None:
            raise UsageError(f"{self.path} was not made by Ekiben: it has no /{_IMAGE_JSON}")
        from ekiben.core.checked import Fields, parse_json
        from ekiben.spec.recipe import ShippedRecipe

        try:
            image, written = Fields.of(parse_json(image_json)), ShippedRecipe.parse(recipe)
            return Metadata(
                recipe=image.text("recipe"),
                stack=image.text("stack"),
                description=written.description,
                tasks={name: task.help for name, task in written.tasks.items()},
                layers={layer.text("name"): layer.text("cache_key") for layer in image.objects("layers")},
                labels=Fields.of({"labels": parse_json(labels or b"{}")}).texts("labels"),
            )
        except ValueError as error:
            raise UsageError(f"{self.path} does not say what it is made of: {error}") from error

    @property
    def tasks(self) -> Mapping[str, str]:
        """Return the tasks of the image's recipe, as name → help."""
        return self.metadata.tasks

    def inspect(self) -> Inspection:
        """Return the labels, definition and scripts that the runtime reads in the file. Raises EngineError."""
        return Runtime().inspect(self.path)

    def execute(
        self,
        argv: Sequence[str],
        *,
        gpu: bool | None = None,
        binds: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        check: bool = False,
    ) -> Result:
        """Run a task or another program in the image, in this folder, and wait for its end.

        Args:
            argv: the program and its arguments.
            gpu: give it the GPUs (default: when there are some).
            binds: further folders to see inside, at their own paths; this one, and those that ``argv`` names, are seen
                anyway.
            environment: variables to set inside.
            on_line: gets each line of stdout and stderr as it comes; the result then has none.
            check: raise when the exit code is not 0.

        Raises:
            EngineError: there is no runtime here.
            UsageError: ``argv`` is empty, or a folder is not there.
            ExecutionError: ``check``, and the exit code is not 0.
            VerifyError: it lacks the signature that config.yaml requires.
        """
        _refuse_unsigned(self.path)
        result = Runtime().execute(
            self.path, argv, gpu=_gives_gpus(gpu), binds=binds, environment=environment, on_line=on_line
        )
        return _checked(argv, result) if check else result

    @contextlib.contextmanager
    def instance(
        self, name: str | None = None, *, gpu: bool | None = None, binds: Sequence[Path] = ()
    ) -> Iterator[RunningImage]:
        """Start the image as an instance, in which several programs run one after the other; it is stopped at the end.

        Raises:
            UsageError: ``name`` cannot be an instance's, or a folder of ``binds`` is not there.
            EngineError: it does not start, or cannot be stopped.
            VerifyError: it lacks the signature that config.yaml requires.
        """
        _refuse_unsigned(self.path)
        runtime, gpu = Runtime(), _gives_gpus(gpu)
        started = runtime.start(self.path, name=name, gpu=gpu, binds=binds)
        try:
            yield RunningImage(runtime, started, gpu)
        finally:
            runtime.stop(started)

    def _read_top(self, *paths: str) -> list[bytes | None]:
        """Return files of the last layer, which has all that Ekiben writes into an image; None for a missing one."""
        from ekiben.core.files import open_regular
        from ekiben.formats.sif import read_sif
        from ekiben.formats.squashfs import SquashfsReader

        with open_regular(self.path) as stream:
            layers = read_sif(self.path).layers
            if not layers:
                raise StoreError(f"{self.path}: holds no squashfs partition")
            reader = SquashfsReader(stream, layers[-1].offset)
            return [reader.read_file(path) if reader.lookup(path) else None for path in paths]


class RunningImage:
    """An image that was started as an instance."""

    def __init__(self, runtime: Runtime, started: Instance, gpu: bool) -> None:
        """Refer to the instance that ``Image.instance`` started."""
        self._runtime, self._started, self._gpu = runtime, started, gpu

    @property
    def name(self) -> str:
        """Return the name that `apptainer instance list` shows."""
        return self._started.name

    @property
    def pid(self) -> int:
        """Return the process id on this machine."""
        return self._started.pid

    @property
    def logs(self) -> tuple[str, str]:
        """Return stdout and stderr of the instance's programs, without those of ``execute``."""
        files = (self._started.stdout, self._started.stderr)
        return tuple(path.read_text(encoding="utf-8", errors="replace") if path.exists() else "" for path in files)  # type: ignore[return-value]

    def execute(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        check: bool = False,
    ) -> Result:
        """Run a program in the instance, as Image.execute() does."""
        result = self._runtime.execute(self._started, argv, gpu=self._gpu, environment=environment, on_line=on_line)
        return _checked(argv, result) if check else result


def _refuse_unsigned(sif: Path) -> None:
    from ekiben.core.settings import read_settings

    settings = read_settings(os.environ)
    if settings.require_signature:
        from ekiben.core.progress import Progress
        from ekiben.signing.policy import required_signature
        from ekiben.store import Store

        required_signature(settings.require_signature, Store(settings.store), Progress()).check(sif)


def _gives_gpus(gpu: bool | None) -> bool:
    return gives_gpus(os.environ) if gpu is None else gpu


def _checked(argv: Sequence[str], result: Result) -> Result:
    if result.exit_code:
        raise ExecutionError(argv, result)
    return result


def _refuse_unknown(function: str, options: Mapping[str, object], known: type) -> None:
    """Raise TypeError, as Python does, for a keyword that is not one of ``known``."""
    for name in options:
        if name not in known.__annotations__:
            raise TypeError(
                f"{function}() got an unexpected keyword argument '{name}'.{nearest(name, known.__annotations__)}"
            )


def _resolve(recipe: str | Path, options: RecipeOptions) -> ResolvedRecipe:
    from ekiben.resolve.resolve import resolve
    from ekiben.spec.recipe import find_recipe

    name = f"{recipe}/" if isinstance(recipe, Path) else recipe  # a Path is a folder, also one of one word
    recipe_file = find_recipe(name, map(Path, options.get("include", ())))
    return resolve(
        replace(recipe_file, layers=tuple(options.get("layers", ()))),
        stack=options.get("stack"),
        arguments=options.get("arguments"),
        gpu_arch=options.get("gpu_arch"),
        arch=options.get("arch"),
    )


def _open_store(path: Path | None) -> Store:
    from ekiben.core.settings import read_settings
    from ekiben.store import Store

    settings = read_settings(os.environ, store=path)
    if settings.shared is None:
        return Store(settings.store)
    from ekiben.store.shared import open_shared

    return Store(settings.store, open_shared(settings.shared))
