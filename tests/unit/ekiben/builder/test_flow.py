"""One flow from a recipe's name to a SIF: resolved once, planned once, no layer looked up more often than needed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ekiben.artifacts.export import build_and_export
from ekiben.builder import plan as planning
from ekiben.builder.build import BuildContext, _Build, build
from ekiben.builder.layer import LayerBuilder
from ekiben.builder.plan import Options, plan
from ekiben.cli import root
from ekiben.formats.layer import File
from ekiben.resolve import resolve as resolving
from ekiben.resolve.graph import Layer, stages_of
from ekiben.store import StageOutput, Store, StoredLayer, StoredResult
from support.compiled import compiled
from support.sample_recipe import AS_SIF, SampleRecipe, chain_of, quiet, seed, seeded


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a recipe is resolved, layers are planned, and each layer is looked up, by its key."""
    found: Counter[str] = Counter()

    def count(owner: Any, name: str, key: Callable[..., str]) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            found[key(*args)] += 1
            return function(*args, **named)

        monkeypatch.setattr(owner, name, counted)

    count(resolving, "resolve", lambda recipe: "resolve")
    count(planning, "plan_layers", lambda layers, store: "plan")
    count(Store, "layer", lambda store, key: key)
    return found


def keep(store: Store, sample: SampleRecipe) -> StoredResult:
    """A wheel in the store, as if it had been compiled."""
    (stage,) = stages_of(chain_of(sample).layers[-2].copies)
    digest = store.put_blob(b"PK wheel")
    result = StoredResult(
        name=stage.name,
        key=stage.cache_key,
        wheel="tiny",
        inputs=stage.inputs,
        origin="compiled",
        executor="hand",
        seconds=1.0,
        files=(StageOutput("/opt/wheels/tiny/tiny-1.0-cp311-cp311-linux_x86_64.whl", 0o644, digest, 8),),
    )
    store.put_result(result)
    return result


def image(sample: SampleRecipe, store: Store, out: Path) -> None:
    argv = ["--store", str(store.root), "image", str(sample.path), *AS_SIF, "--json", "-o", str(out)]
    root.main(argv, standalone_mode=False)


def test_image_resolves_and_plans_once_and_looks_up_only_missing_layers_twice(
    files_only: SampleRecipe, store: Store, tmp_path: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ground, roof, top = (layer.cache_key for layer in chain_of(files_only).layers)
    calls.clear()
    image(files_only, store, tmp_path / "a.sif")
    assert json.loads(capsys.readouterr().out)["built"] == ["roof", "own"]
    assert calls == {"resolve": 1, "plan": 1, ground: 1, roof: 2, top: 2}
    calls.clear()
    image(files_only, store, tmp_path / "b.sif")
    assert json.loads(capsys.readouterr().out)["built"] == []
    assert calls == {"resolve": 1, "plan": 1, ground: 1, roof: 1, top: 1}


def test_layer_stored_after_the_plan_is_not_rebuilt(files_only: SampleRecipe, store: Store) -> None:
    """Another process made it meanwhile: it is found under the lock."""
    actions = plan(chain_of(files_only), store)
    assert [action.decision for action in actions] == ["CACHED", "BUILD", "BUILD"]
    made = build(BuildContext(chain_of(files_only), store, Options(), quiet()))
    before = {path: path.stat().st_mtime_ns for path in (store.root / "keys").iterdir()}
    assert build(BuildContext(chain_of(files_only), store, Options(), quiet()), actions).image_id == made.image_id
    assert before == {path: path.stat().st_mtime_ns for path in (store.root / "keys").iterdir()}


def test_build_follows_the_planned_actions(files_only: SampleRecipe, tmp_path: Path, calls: Counter[str]) -> None:
    store, resolved = seeded(files_only, tmp_path / "store", "ground"), chain_of(files_only)
    image_id = build(BuildContext(resolved, store, Options(), quiet())).image_id
    actions = plan(resolved, store)
    assert [action.decision for action in actions] == ["CACHED"] * 3
    calls.clear()
    assert build(BuildContext(resolved, store, Options(), quiet()), actions).image_id == image_id
    assert calls == {}


def test_layer_is_built_when_its_planned_pull_fails(sample: SampleRecipe, tmp_path: Path) -> None:
    """With the build stages that it copies from, of which a plan to pull says nothing."""
    store = seeded(compiled(sample), tmp_path / "store", "ground", "walls")
    result = keep(store, sample)
    actions = [
        replace(action, in_registry=True, stage_deps=()) if action.layer.name == "roof" else action
        for action in plan(chain_of(sample), store)
    ]
    assert [action.decision for action in actions] == ["CACHED", "PULL", "BUILD"]
    handed: list[str] = []

    class Hands(LayerBuilder):
        def make(self, layer: Layer, lower: Sequence[StoredLayer], files: Sequence[File] = ()) -> StoredLayer:
            handed.extend(file.destination for file in files)
            seed(self.store, layer)
            made = self.store.layer(layer.cache_key)
            assert made is not None
            return made

    builder = Hands(BuildContext(chain_of(sample), store, Options(registry="127.0.0.1:9/lab/layers"), quiet()))
    layers = _Build(builder).ensure_layers(actions)
    assert [layer.name for layer in layers] == ["ground", "roof", "own"]
    assert handed == [result.files[0].path]


def test_layer_pruned_after_the_plan_is_rebuilt(files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    image_id = build(BuildContext(chain_of(files_only), store, Options(), quiet())).image_id
    actions = plan(chain_of(files_only), store)
    stored = actions[1].stored
    assert stored is not None
    store.blob_path(stored.digest).unlink()
    again, (sif,) = build_and_export(
        BuildContext(chain_of(files_only), Store(store.root), Options(), quiet()),
        actions,
        formats=("sif",),
        output=tmp_path / "x.sif",
    )
    assert (again.image_id, sif.created) == (image_id, True)
