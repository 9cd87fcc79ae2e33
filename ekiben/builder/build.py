"""Build an image.

resolve   recipe → layers with cache keys                   (ekiben.resolve.resolve)
plan      CACHED, PULL or BUILD, and why; decided once      (ekiben.builder.plan)
build     make each missing layer, bottom first; name the image
          (for one with build stages: their outputs, compiled first, kept when the layer passes its test)
          one layer (ekiben.builder.layer), one stage (ekiben.builder._stage)
export    SIF and Docker image out of the store             (ekiben.artifacts.exporters)
verify    every %test in the finished image                 (ekiben.builder.verify)

A missing layer is looked up once more, under its lock: another process may have made it meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben.builder.base_config import base_config_of, merged_labels
from ekiben.builder.early_cutoff import equal_layer
from ekiben.builder.environment import evaluated_of
from ekiben.builder.layer import LayerBuilder, prepare_job, refuse_drift
from ekiben.builder.plan import (
    Action,
    BuildContext,
    Options,
    StageAction,
    ask_registry,
    plan,
    plan_layers,
    plan_stages,
)
from ekiben.core.command_name import command_name
from ekiben.core.decisions import log_decision
from ekiben.core.emulation import check_programs
from ekiben.core.environment import host_arch
from ekiben.core.errors import CorruptBlob, DefinitionError, EngineError, StoreError, VerifyError
from ekiben.formats import oci
from ekiben.resolve.graph import BuildStage, Layer, ResolvedRecipe, StageCopy, all_layers, stages_of
from ekiben.resolve.recipe_layer import separate_test
from ekiben.resolve.start import start_of
from ekiben.store import Image, Store, StoredLayer, StoredResult

if TYPE_CHECKING:
    from ekiben.store.remote import LayerCache

__all__ = [
    "BuildContext",
    "Options",
    "ask_registry",
    "build",
    "ensure_layers",
    "image_name",
    "import_wheel",
    "plan",
    "prepare_job",
    "stored_image",
]

Results = Mapping[str, StoredResult]  # by the stage's key


def build(context: BuildContext, actions: Sequence[Action] | None = None) -> Image:
    """Build the layers that ``actions`` (by default plan()'s) say are missing, bottom first, and name the image.

    Raises LayerError, EngineError (also for another architecture that does not run here), StoreError, FetchError;
    LockMismatchError when ``options.locked`` refuses a layer; DefinitionError when a lock file that is needed could not
    lock something.
    """
    resolved, store, options, progress = context.resolved, context.store, context.options, context.progress
    if actions is None:
        actions = plan(resolved, store, registry=options.registry, progress=progress)
    layers = [action.stored for action in actions if action.stored]
    if options.locked:
        refuse_drift([line for layer in layers for line in layer.drift])
    for path in resolved.included_files:
        progress.log(f"{resolved.recipe.name}: includes {path}, outside the recipe's folder")
    if len(layers) < len(actions):
        _refuse_unlocked(resolved, actions)
        _refuse_emulation(resolved, actions)
        store.open_for_writing()
        is_large = any(action.stored is None and action.layer.kind != "files" for action in actions)
        with store.building((layer.cache_key for layer in all_layers(resolved.layers)), background=is_large):
            scripts = [
                item.layer.cache_key for item in actions if item.layer.kind == "post" and item.decision == "BUILD"
            ]
            builder = LayerBuilder(context, scripts[-1] if scripts else None)
            _refuse_missing_commits(actions, builder)
            return _named(resolved, store, _Build(builder).ensure_layers(actions))
    return _named(resolved, store, layers)


def stored_image(resolved: ResolvedRecipe, store: Store) -> Image:
    """Return the image of the layers in the store. Raises VerifyError when one is missing."""
    actions = plan(resolved, store)
    if missing := ", ".join(action.layer.name for action in actions if not action.stored):
        name = resolved.recipe.name
        raise VerifyError(f"{name} is not built: missing {missing}", hint=f"{command_name()} build {resolved.cli_args}")
    return _image_of(resolved, [action.stored for action in actions if action.stored], store)


def ensure_layers(context: BuildContext, layers: Sequence[Layer]) -> list[StoredLayer]:
    """Return the layers below a build stage; build those that the store lacks. Raises as build() does."""
    store = context.store
    store.open_for_writing()
    with store.building(layer.cache_key for layer in layers):
        return _Build(LayerBuilder(context)).ensure_layers(plan_layers(layers, store))


def build_sources(context: BuildContext, copies: Sequence[StageCopy]) -> list[StoredResult]:
    """Return the wheels of stages that build sources, and build what the store lacks. Raises as build() does."""
    store = context.store
    check_programs(context.resolved.stack.arch)
    store.open_for_writing()
    with store.building(layer.cache_key for layer in all_layers(context.resolved.layers)):
        return _Build(LayerBuilder(context)).ensure_results(copies)


def import_wheel(context: BuildContext, wheel: Path, sha256: str | None = None) -> StoredResult:
    """Import a wheel compiled elsewhere: check it, make the layer it is for, run that layer's %test, keep both.

    Raises UsageError when the recipe compiles no such package; VerifyError when the wheel is not for it.
    """
    from ekiben.builder import wheels
    from ekiben.builder._stage import import_result

    resolved, store = context.resolved, context.store
    digest = wheels.digest_of(wheel)
    if sha256 and digest != f"sha256:{sha256.lower().removeprefix('sha256:')}":
        raise VerifyError(f"{wheel} has the hash {digest[7:]}, not the one given; it is not imported")
    stage = wheels.stage_for(resolved, wheel)
    record = wheels.read_record(wheel, stage)
    if (existing := store.result(stage.cache_key)) is not None:
        if digest in [file.digest for file in existing.files]:
            return existing
        raise VerifyError(
            f"there is a wheel for {stage.name} already ({existing.origin}), with other bytes; two of one key "
            "would make two images of one key",
            hint=f"{command_name()} prune --wheels removes one that no image needs",
        )
    check_programs(resolved.stack.arch)
    store.open_for_writing()
    with store.building(layer.cache_key for layer in all_layers(resolved.layers)):
        imported = import_result(stage, wheel, record, store)
        count = next(number for number, layer in enumerate(resolved.layers, 1) if stage in stages_of(layer.copies))
        recursion = _Build(LayerBuilder(context), {stage.cache_key: imported})
        layer = recursion.ensure_layers(plan_layers(resolved.layers[:count], store))[-1]
        if store.result(stage.cache_key) is None:  # the layer exists: its %test passed, if it has this very wheel
            if digest[7:] not in layer.notes.get("outputs", {}).values():
                raise VerifyError(
                    f"{layer.name} is in the store, made with another wheel than {wheel}, which is not imported"
                )
            store.put_result(imported)
    return imported


class _Build:
    """The recursion of one build(): a layer needs outputs of build stages, a stage needs its layers.

    ``imported``: wheels to use instead of compiling, by the stage's key.
    """

    def __init__(self, builder: LayerBuilder, imported: Results | None = None) -> None:
        self.builder, self.store, self.progress = builder, builder.store, builder.progress
        self._imported = imported or {}
        self._layers: dict[str, StoredLayer] = {}
        self._unproven: dict[str, StoredResult] = {}  # kept when the layer that holds them has passed its %test
        self._locked: dict[str, StoredResult] = {}  # results by the key whose lock this build holds
        self._cache: LayerCache | None = None

    def ensure_layers(self, actions: Sequence[Action]) -> list[StoredLayer]:
        """Return the layers, bottom first; build those that are missing."""
        done: list[StoredLayer] = []
        for action in actions:
            done.append(action.stored or self._ensure_layer(action, done))
        return done

    def ensure_results(self, copies: Sequence[StageCopy]) -> list[StoredResult]:
        """Return the outputs of the stages; build those that are missing."""
        deps = {dep.step.cache_key: dep for dep in plan_stages(copies, self.store)}
        with self._results(copies, deps) as results:
            return list(results.values())

    def _ensure_layer(self, action: Action, lower: Sequence[StoredLayer]) -> StoredLayer:
        def on_wait() -> None:
            self.progress.log(f"layer {action.layer.name}: another process is building it; waiting")

        key = action.layer.cache_key
        if key in self._layers:  # built for a build stage, or for an earlier one
            return self._layers[key]
        with self.store.lock(key, on_wait):
            layer = self.store.layer(key)
            if layer is not None:
                log_decision(f"layer {layer.name}", "CACHED", "another process stored it after the plan")
            else:
                layer = self._pull(action)
            if layer is None:
                layer = self._reuse(action.layer, lower) or self._make(action, lower)
                self.store.put_layer(layer)
        self._layers[key] = layer
        return layer

    def _pull(self, action: Action) -> StoredLayer | None:
        """Return the registry's layer; None when the plan does not pull it, or the registry no longer has it."""
        registry = self.builder.options.registry
        if registry is None or not action.in_registry:
            return None
        if self._cache is None:
            from ekiben.store.remote import LayerCache

            self._cache = LayerCache(registry, self.progress)
        layer = self._cache.fetch(action.layer.cache_key, self.store)
        if layer is None:
            log_decision(f"layer {action.layer.name}", "BUILD", f"planned as PULL, and {registry} no longer has it")
        return layer

    def _reuse(self, layer: Layer, lower: Sequence[StoredLayer]) -> StoredLayer | None:
        """Return a stored layer with the same inputs on layers with the same files; None where there is none.

        Raises LockMismatchError when ``options.locked`` refuses what was installed.
        """
        stored = equal_layer(layer, lower, self.store)
        if stored is None:
            return None
        if self.builder.options.locked:
            refuse_drift(stored.drift)
        self.store.put_layer(stored)
        if self.store.layer(layer.cache_key) is None:  # a prune that began before this build removed its blob
            return None
        self.builder.reused.append(layer.name)
        log_decision(f"layer {layer.name}", "not built", "the layers below came out as before, its inputs are the same")
        self.progress.log(f"layer {layer.name}: not built again, the layers below came out as before")
        return stored

    def _make(self, action: Action, lower: Sequence[StoredLayer]) -> StoredLayer:
        layer = action.layer
        if not layer.copies:
            with self.progress.step(f"layer {layer.name} ({action.reason})"):
                return self.builder.make(layer, lower)
        from ekiben.builder._stage import files_for

        # Nothing is planned below a layer that was to be pulled; if the pull fails, plan again.
        deps = action.stage_deps or plan_stages(layer.copies, self.store)
        with self._results(layer.copies, {dep.step.cache_key: dep for dep in deps}) as results:
            with self.progress.step(f"layer {layer.name} ({action.reason})"):
                stored = self.builder.make(layer, lower, files_for(layer.copies, results, self.store))
                if any(key in self._unproven for key in results):
                    self.builder.run_test(layer, [*lower, stored])
            self._keep(results)
        return stored

    @contextlib.contextmanager
    def _results(self, copies: Sequence[StageCopy], deps: Mapping[str, StageAction]) -> Iterator[Results]:
        """Yield the outputs of the stages; compile those that are missing. Drop new ones on an error inside."""
        with contextlib.ExitStack() as locks:
            results: dict[str, StoredResult] = {}
            try:
                for stage in stages_of(copies):
                    results[stage.cache_key] = self._ensure_result(stage, copies, deps, locks)
                    _check_source(stage, results[stage.cache_key])
                yield results
            except BaseException:
                for result in [self._unproven.pop(key) for key in results if key in self._unproven]:
                    self._drop(result)
                raise

    def _ensure_result(
        self,
        stage: BuildStage,
        copies: Sequence[StageCopy],
        deps: Mapping[str, StageAction],
        locks: contextlib.ExitStack,
    ) -> StoredResult:
        from ekiben.builder._stage import compile_stage, files_for

        key = stage.cache_key
        if key in self._locked:  # this build has the lock itself, for a later stage: waiting would be a deadlock
            return self._locked[key]
        if stored := deps[key].stored:
            if self._is_intact(stored):
                return stored
            deps = {dep.step.cache_key: dep for dep in plan_stages(copies, self.store)}
        if imported := self._imported.get(key):
            log_decision(f"stage {stage.name}", "not compiled", "its wheel is imported")
            self._unproven[key] = imported
            return imported
        waiting = f"stage {stage.name}: another process is compiling it; waiting"
        locks.enter_context(self.store.lock(key, lambda: self.progress.log(waiting)))
        locks.callback(self._locked.pop, key, None)
        if (stored := self.store.result(key)) and self._is_intact(stored):
            log_decision(f"stage {stage.name}", "CACHED", "another process stored its outputs after the plan")
            self._locked[key] = stored
            return stored
        with self._results(stage.copies, deps) as below:
            lower = self.ensure_layers(deps[key].layers)
            files = [*stage.files, *files_for(stage.copies, below, self.store)]
            with self.progress.step(f"stage {stage.name}" + (f" (compiles {stage.wheel})" if stage.wheel else "")):
                result = compile_stage(stage, lower, files, self.builder)
            self._keep(below)
        if stage.wheel is None:
            self.store.put_result(result)
        else:
            self._unproven[key] = result
        self._locked[key] = result
        return result

    def _is_intact(self, result: StoredResult) -> bool:
        try:
            for file in result.files:
                self.store.check_blob(file.digest)
        except CorruptBlob as error:
            self.progress.log(f"{error}; it is built again")
            self.store.drop_blob(error.digest)
            return False
        return True

    def _keep(self, results: Results) -> None:
        from ekiben.builder._stage import remove_work

        for key, result in results.items():
            if self._unproven.pop(key, None):
                self.store.put_result(result)
                remove_work(result, self.store)

    def _drop(self, result: StoredResult) -> None:
        kept = {file.digest for other in self.store.results() for file in other.files}
        for file in result.files:
            if file.digest not in kept:
                self.store.drop_blob(file.digest)


def _check_source(stage: BuildStage, result: StoredResult) -> None:
    """Raise VerifyError when the wheel of a source is not the one that its lock names."""
    source = stage.source
    if source is None or not source.wheel_sha256:
        return
    built = [file.digest.removeprefix("sha256:") for file in result.files]
    if built != [source.wheel_sha256]:
        raise VerifyError(
            f"{source.name} {source.version}: its source was built to the wheel {', '.join(built)[:12]}… here, and the"
            f" lock names {source.wheel_sha256[:12]}…: its build is not the same everywhere",
            hint=f"`{command_name()} lock` the recipe here to take this one, or build where it was locked and publish",
        )


def _refuse_unlocked(resolved: ResolvedRecipe, actions: Sequence[Action]) -> None:
    """Raise DefinitionError, before a layer is built, for a requirement that its lock file left unresolved."""
    stack = resolved.stack
    locks = {
        file.source
        for action in actions
        if not action.stored
        for file in action.layer.files
        if file.source and file.source.suffix == ".lock"
    }
    if missing := [f"{lock}: {line} is not locked" for lock in sorted(locks) for line in stack.unlocked(lock)]:
        raise DefinitionError(
            "\n".join(missing),
            hint=(
                "where an index that has it can be reached: "
                f"UV_EXTRA_INDEX_URL=<index> {command_name()} lock {stack.name} --keep"
            ),
        )


def _refuse_emulation(resolved: ResolvedRecipe, actions: Sequence[Action]) -> None:
    """Check, before a layer is built, that programs of another architecture run here.

    Raises EngineError when its programs do not run here, or are to be compiled.
    """
    arch = resolved.stack.arch
    missing = [action for action in actions if action.decision == "BUILD" and action.layer.kind != "files"]
    if arch == host_arch() or not missing:
        return
    check_programs(arch)
    log_decision(f"programs for {arch}", "emulated", f"this machine is {host_arch()}")
    for action in missing:
        for dep in action.stage_deps:
            if isinstance(dep.step, BuildStage) and dep.step.wheel and not (dep.is_stored or dep.in_registry):
                raise EngineError(
                    f"no package index has {dep.step.wheel} for {arch}, and to compile it here under emulation takes"
                    " days",
                    hint=(
                        f"build on an {arch} machine, or bring its wheel from one: "
                        f"{command_name()} wheels import {resolved.cli_args} WHEEL"
                    ),
                )


def _refuse_missing_commits(actions: Sequence[Action], builder: LayerBuilder) -> None:
    """Fetch the git commits of the stages, before a layer is built. Raises FetchError."""
    from ekiben.packages.git import mount_repositories

    for action in actions:
        for dep in action.stage_deps:
            if not dep.is_stored and isinstance(dep.step, BuildStage) and builder.uses_git:
                with builder.store.staging() as staging:
                    mount_repositories(dep.step.stage.arguments, staging)


def image_name(resolved: ResolvedRecipe) -> str:
    """Return the name of the image in the store."""
    return resolved.recipe.image_name(resolved.stack.name, resolved.stack.arch)


def _named(resolved: ResolvedRecipe, store: Store, layers: Sequence[StoredLayer]) -> Image:
    """Name the image of ``layers`` in the store, and return it."""
    image = _image_of(resolved, layers, store)
    metadata = {
        "config": image.image_id,
        "recipe": image.recipe,
        "stack": image.stack,
        "tasks": dict(image.tasks),
        "keys": [layer.cache_key for layer in layers],
        **({"is_custom": True} if resolved.gpu_arch or resolved.deciding_arguments else {}),
    }
    ref = store.image(image.name)
    is_same = ref is not None and all(ref.get(field) == value for field, value in metadata.items())
    if ref is None or not is_same or (store.is_writable() and not _are_complete(store, layers, ref)):
        store.open_for_writing()
        store.put_blob(image.config)
        for layer in layers:
            store.note_last(layer.name, layer.cache_key)
        store.put_image(image.name, oci.store_manifest(image.config, layers), metadata)
    return image


def _are_complete(store: Store, layers: Sequence[StoredLayer], ref: Mapping[str, Any]) -> bool:
    """Return whether the other records of a build can be read: a damaged one counts as missing."""
    return _are_intact(store, (ref["config"], ref["manifest"])) and all(
        store.last_inputs(layer.name) is not None for layer in layers
    )


def _are_intact(store: Store, digests: Iterable[str]) -> bool:
    """Return whether these small blobs are there with the bytes of their digests.

    A build reads no more of a store than its layers.
    """
    try:
        for digest in digests:
            store.get_blob(digest)
    except StoreError:
        return False
    return True


def _runscript(resolved: ResolvedRecipe) -> str:
    return next(file.text() for file in resolved.top.files if file.destination == oci.RUNSCRIPT[-1])


def _image_of(resolved: ResolvedRecipe, layers: Sequence[StoredLayer], store: Store) -> Image:
    recipe, epoch = resolved.recipe, resolved.stack.file.epoch
    evaluated = evaluated_of(layers, store) if resolved.scripts else None
    base = base_config_of(layers, store)
    labels = merged_labels(resolved.labels, layers, store)
    config = oci.image_config(
        layers,
        environment={**resolved.environment, **(evaluated.fixed if evaluated else {})},
        labels=labels,
        epoch=epoch,
        platform=resolved.stack.platform,
        start=start_of(
            recipe.file.docker,
            base,
            _runscript(resolved),
            has_tasks=bool(recipe.file.tasks),
            at_start=bool(evaluated and evaluated.at_start),
        ),
    )
    copies = (item for layer in resolved.layers for item in layer.copies)
    return Image(
        name=image_name(resolved),
        image_id=oci.digest_of(config),
        config=config,
        layers=tuple(layers),
        recipe=recipe.file.name,
        stack=resolved.stack.name,
        description=recipe.file.description,
        tasks={name: task.help for name, task in recipe.file.tasks.items()},
        environment={**resolved.environment, **(evaluated.values if evaluated else {})},
        labels=labels,
        deffile=resolved.deffile,
        epoch=epoch,
        arch=resolved.stack.arch,
        cli_args=resolved.cli_args,
        result_keys=tuple(stage.cache_key for stage in stages_of(copies)),
        recipe_test=separate_test(resolved),
    )
