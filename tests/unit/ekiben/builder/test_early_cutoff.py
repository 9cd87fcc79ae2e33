"""A layer whose inputs are the same, on layers that came out as before, is not built again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from ekiben.builder.build import BuildContext, build
from ekiben.builder.early_cutoff import equal_layer
from ekiben.builder.plan import Options
from ekiben.core.errors import EngineError, LockMismatchError
from ekiben.resolve.graph import Layer, ResolvedRecipe, parent_of
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Store
from support.sample_recipe import SampleRecipe, edit_record, quiet, seed, seeded

LAYERS = ("ground", "walls", "roof")


@pytest.fixture
def house(sample: SampleRecipe, tmp_path: Path) -> tuple[SampleRecipe, Store]:
    """ground ← walls (%post) ← roof (%post), stored."""
    text = (sample.path / "images/roof.def").read_text()
    sample.write("images/roof.def", f"{text}\n%post\n    echo roof > /roof\n")
    return sample, seeded(sample, tmp_path / "store", *LAYERS)


def resolved(sample: SampleRecipe) -> ResolvedRecipe:
    return resolve(find_recipe(str(sample.path)))


def rebuild_walls(sample: SampleRecipe, store: Store, **changes: Any) -> None:
    """Edit a remark in the %post of walls, and store walls as a build would, with these fields of its record."""
    sample.replace("images/walls.def", "echo {{ word }}", "# a remark\n    echo {{ word }}")
    walls = next(layer for layer in resolved(sample).layers if layer.name == "walls")
    seed(store, walls)
    if changes:
        stored = store.layer(walls.cache_key)
        assert stored is not None
        store.put_layer(replace(stored, **changes))


def is_reused(sample: SampleRecipe, store: Store) -> bool:
    *lower, roof = resolved(sample).layers[:3]
    below = [store.layer(layer.cache_key) for layer in lower]
    return equal_layer(roof, [layer for layer in below if layer], store) is not None


def test_layer_above_an_equal_one_is_not_built(house: tuple[SampleRecipe, Store]) -> None:
    sample, store = house
    before = build(BuildContext(resolved(sample), store, Options(engine="docker"), quiet()))
    rebuild_walls(sample, store)
    context = BuildContext(resolved(sample), store, Options(engine="docker"), quiet())
    after = build(context)
    assert context.reused == ["roof"]
    assert [layer.digest for layer in after.layers[:3]] == [layer.digest for layer in before.layers[:3]]
    for old, new in zip(before.layers[1:3], after.layers[1:3], strict=True):
        assert new.cache_key != old.cache_key
    again = BuildContext(resolved(sample), store, Options(engine="docker"), quiet())
    assert (build(again).image_id, again.reused) == (after.image_id, [])


def drop_ground(sample: SampleRecipe, store: Store) -> None:
    """The record of a layer below is gone: nothing says what the stored roof was built on."""
    store.records.drop("keys", resolved(sample).layers[0].cache_key)


@pytest.mark.parametrize(
    "edit",
    [
        lambda sample, store: sample.replace("images/roof.def", "echo roof", "echo other"),
        lambda sample, store: sample.write("files/data.txt", "edited\n"),
        lambda sample, store: sample.stack(epoch=1_700_000_001),
        lambda sample, store: sample.replace("images/roof.def", "/roof", '"$APPTAINER_ENVIRONMENT"'),
        lambda sample, store: sample.replace("images/walls.def", "GREETING={{ word }}", "GREETING=other"),
        drop_ground,
    ],
)
def test_layer_is_built_where_its_inputs_differ(
    house: tuple[SampleRecipe, Store], edit: Callable[[SampleRecipe, Store], Any]
) -> None:
    sample, store = house
    rebuild_walls(sample, store)
    assert is_reused(sample, store)
    edit(sample, store)
    assert not is_reused(sample, store)


@pytest.mark.parametrize(
    "changes",
    [{"diff_id": f"sha256:{'0' * 64}"}, {"notes": {"labels": {"name": "value"}}}, {"notes": {"drift": ["x"]}}],
)
def test_layer_is_built_where_the_one_below_differs(house: tuple[SampleRecipe, Store], changes: dict[str, Any]) -> None:
    sample, store = house
    rebuild_walls(sample, store, **changes)
    assert not is_reused(sample, store)


def test_a_record_that_does_not_fit_its_key_is_not_used(house: tuple[SampleRecipe, Store]) -> None:
    sample, store = house
    roof = resolved(sample).layers[2]
    sample.replace("images/roof.def", "echo roof", "echo other")
    rebuild_walls(sample, store)
    inputs = {**resolved(sample).layers[2].inputs, "parent": roof.inputs["parent"]}
    edit_record(store.root / f"keys/{roof.cache_key}.json", inputs=inputs)
    assert not is_reused(sample, store)


def test_locked_refuses_a_layer_with_other_packages(house: tuple[SampleRecipe, Store]) -> None:
    sample, store = house
    roof = store.layer(resolved(sample).layers[2].cache_key)
    assert roof is not None
    store.put_layer(replace(roof, notes={"drift": ["a 1 → 2"]}))
    rebuild_walls(sample, store)
    with pytest.raises(LockMismatchError, match="a 1 → 2"):
        build(BuildContext(resolved(sample), store, Options(engine="docker", locked=True), quiet()))


def test_a_pruned_blob_is_built_again(house: tuple[SampleRecipe, Store], monkeypatch: pytest.MonkeyPatch) -> None:
    sample, store = house
    rebuild_walls(sample, store)
    put_layer = Store.put_layer

    def prune_first(self: Store, layer: Any) -> None:
        self.drop_blob(layer.digest)
        put_layer(self, layer)

    monkeypatch.setattr(Store, "put_layer", prune_first)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    with pytest.raises(EngineError):  # it would be built, and cannot be here
        build(BuildContext(resolved(sample), store, Options(engine="docker"), quiet()))


def test_layer_on_wheel_layers_is_not_built_on_an_equal_base(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")

    def step(name: str, **inputs: Any) -> Layer:
        kind: Literal["bootstrap", "post"] = "bootstrap" if name == "base" else "post"
        step = Layer(name=name, kind=kind, stage=None, files=(), environment={}, epoch=1, inputs=inputs)
        seed(store, step)
        return step

    def three_layers(version: str) -> list[Layer]:
        base = step("base", kind="bootstrap", parent=None, version=version)
        wheels = step("wheels", kind="wheels", post="install")
        top = step("top", kind="post", post="true", parent=parent_of([base, wheels]))
        assert top.inputs["parent"] == [base.cache_key, wheels.cache_key]
        return [base, wheels, top]

    *_, old = three_layers("1")
    base, wheels, top = three_layers("2")
    store.records.drop("keys", top.cache_key)
    below = [layer for key in (base.cache_key, wheels.cache_key) if (layer := store.layer(key))]
    reused = equal_layer(top, below, store)
    assert reused
    assert (reused.cache_key, reused.digest) == (top.cache_key, getattr(store.layer(old.cache_key), "digest", ""))
    assert equal_layer(top, [replace(below[0], diff_id="sha256:" + 64 * "0"), below[1]], store) is None
