"""Plan a build, layer by layer, with reasons: decided once, before anything runs.

Every skip and every run carries its reason. build() follows the plan, and asks the store again for missing layers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ekiben.core.decisions import is_logging, log_decision
from ekiben.core.progress import Progress
from ekiben.resolve.graph import BuildStage, Layer, ResolvedRecipe, StageCopy, stages_of
from ekiben.store import Store, StoredLayer, StoredResult

if TYPE_CHECKING:
    from ekiben.packages.host_config import PackageSources
    from ekiben.store.remote import LayerCache

Decision = Literal["CACHED", "PULL", "BUILD"]


@dataclass(frozen=True, slots=True)
class Action:
    """The action for one layer, and its reason.

    ``stored`` is the layer when the store has it; ``stage_deps`` are the actions of the build stages it copies from, in
    order; ``in_registry``: it is pulled.
    """

    layer: Layer
    stored: StoredLayer | None
    reason: str
    stage_deps: tuple[StageAction, ...] = ()
    in_registry: bool = False

    @property
    def decision(self) -> Decision:
        """Return CACHED, PULL or BUILD."""
        return "CACHED" if self.stored else "PULL" if self.in_registry else "BUILD"


@dataclass(frozen=True, slots=True)
class StageAction:
    """The action for a build stage, or for a layer that is below build stages alone.

    ``stored`` is the outputs of the stage, when the store has them; else ``layers`` are those below the stage, bottom
    first.
    """

    step: Layer | BuildStage
    reason: str
    stored: StoredResult | None = None
    layers: tuple[Action, ...] = ()
    in_registry: bool = False

    @property
    def is_stored(self) -> bool:
        """Return whether its outputs are stored."""
        return self.stored is not None

    @property
    def decision(self) -> Decision:
        """Return CACHED, PULL or BUILD."""
        return "CACHED" if self.stored else "PULL" if self.in_registry else "BUILD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of building missing layers.

    ``sources`` replaces the site's mirrors and indexes; ``registry`` has layers by key. ``debug``: a %post
    that fails opens a shell on this terminal.
    """

    engine: str = "auto"
    mirror: str | None = None
    locked: bool = False
    sources: PackageSources | None = None
    registry: str | None = None
    debug: bool = False


@dataclass(frozen=True, slots=True)
class BuildContext:
    """A build of one recipe: the store of its layers, how missing ones are made, and where progress is shown.

    ``reused`` takes the names of layers that were planned to be built, and were not: see early_cutoff.
    """

    resolved: ResolvedRecipe
    store: Store
    options: Options
    progress: Progress
    reused: list[str] = field(default_factory=list)


def plan(
    resolved: ResolvedRecipe, store: Store, *, registry: str | None = None, progress: Progress | None = None
) -> list[Action]:
    """Decide for each layer, bottom first: CACHED in ``store``, PULL from ``registry``, or BUILD.

    Write and run nothing.
    """
    actions = plan_layers(resolved.layers, store)
    if registry and any(action.stored is None for action in actions):
        from ekiben.store.remote import LayerCache

        actions = ask_registry(actions, LayerCache(registry, progress or Progress()))
    if is_logging():
        _log_actions(actions, store, registry)
    return actions


def _log_actions(actions: Iterable[Action], store: Store, registry: str | None) -> None:
    """Log the action and reason of each layer and each build stage for -v."""
    absent = f"; not available from {registry}" if registry else ""
    for action in actions:
        for dep in action.stage_deps:
            log_decision(f"stage {dep.step.name}", dep.decision, dep.reason)
        reason = action.reason + (absent if action.decision == "BUILD" else "")
        if action.stored and (partition := store.find(action.stored.digest)):
            reason = f"stored: {partition.path}"
        log_decision(f"layer {action.layer.name}", action.decision, reason)


def plan_layers(layers: Sequence[Layer], store: Store) -> list[Action]:
    """Plan layers, each on the one before, bottom first."""
    return _Lookup(store).actions(layers)


def plan_stages(copies: Iterable[StageCopy], store: Store) -> list[StageAction]:
    """Decide for the build stages that a layer copies from."""
    return list(_Lookup(store).stages(copies, ()))


def ask_registry(actions: Sequence[Action], cache: LayerCache) -> list[Action]:
    """Turn BUILD into PULL where ``cache`` has the layer; nothing is built for it then."""
    reason = f"from {cache.registry.reference}"
    has = lru_cache(maxsize=None)(cache.has)

    def plan_stage(dep: StageAction) -> StageAction:
        if isinstance(dep.step, BuildStage):
            return replace(dep, layers=tuple(map(plan_layer, dep.layers)))
        return replace(dep, reason=reason, in_registry=True) if has(dep.step.cache_key) else dep

    def plan_layer(action: Action) -> Action:
        if action.stored is None and has(action.layer.cache_key):
            return replace(action, reason=reason, stage_deps=(), in_registry=True)
        return replace(action, stage_deps=tuple(map(plan_stage, action.stage_deps)))

    return list(map(plan_layer, actions))


@dataclass(slots=True)
class _Lookup:
    """Looks up each layer and each build stage once, however many stages need it."""

    store: Store
    layers: dict[str, StoredLayer | None] = field(default_factory=dict)
    results: dict[str, StoredResult | None] = field(default_factory=dict)

    def layer(self, key: str) -> StoredLayer | None:
        if key not in self.layers:
            self.layers[key] = self.store.layer(key)
        return self.layers[key]

    def result(self, key: str) -> StoredResult | None:
        if key not in self.results:
            self.results[key] = self.store.result(key)
        return self.results[key]

    def actions(self, layers: Sequence[Layer]) -> list[Action]:
        actions: list[Action] = []
        for layer in layers:
            if stored := self.layer(layer.cache_key):
                actions.append(Action(layer, stored, "stored"))
                continue
            rebuilt = any(action.stored is None for action in actions)
            reason = _reason(layer, self.store, parent_is_rebuilt=rebuilt)
            actions.append(Action(layer, None, reason, tuple(self.stages(layer.copies, layers))))
        return actions

    def stages(self, copies: Iterable[StageCopy], shipped: Sequence[Layer]) -> Iterator[StageAction]:
        """Yield the build stages; before each, its own stages and its missing layers that are not ``shipped``."""
        shipped_keys = {layer.cache_key for layer in shipped}
        for stage in stages_of(copies):
            if stored := self.result(stage.cache_key):
                yield StageAction(stage, f"stored, {stored.origin}", stored)
                continue
            yield from self.stages(stage.copies, shipped)
            below = tuple(self.actions(stage.layers))
            yield from (
                StageAction(action.layer, action.reason)
                for action in below
                if not action.stored and action.layer.cache_key not in shipped_keys
            )
            yield StageAction(stage, _reason(stage, self.store, parent_is_rebuilt=False), layers=below)


def _reason(step: Layer | BuildStage, store: Store, *, parent_is_rebuilt: bool) -> str:
    last = store.last_inputs(step.name)
    if last is None:
        return "parent is rebuilt" if parent_is_rebuilt else "never built in this store"
    if isinstance(step, Layer) and "parent" in last and "parent" not in step.inputs:
        return "the key no longer names the parent"
    changes = [
        _change(field, last.get(field), value) for field, value in step.inputs.items() if last.get(field) != value
    ]
    return ", ".join(changes) or "its data is gone from the store"


_CHANGES = {
    "parent": "parent changed",
    "below": "a layer below changed",
    "post": "%post changed",
    "from": "outputs of a build stage changed",
}


def _change(field: str, before: Any, now: Any) -> str:
    if field in _CHANGES:
        return _CHANGES[field]
    if field == "capabilities":
        return f"compute capabilities changed: {' '.join(before or ())} → {' '.join(now)}"
    if field == "files":
        old, new = ({item[0]: item[1:] for item in files or []} for files in (before, now))
        return "file changed: " + _format_first(_changed_keys(old, new))
    if field in ("packages", "tools"):
        return "Debian packages changed: " + _format_first(_changed_keys(before or {}, now or {}))
    if field == "environment":
        return "environment changed: " + ", ".join(_changed_keys(before or {}, now or {}))
    return f"{field} changed"


def _changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _format_first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
