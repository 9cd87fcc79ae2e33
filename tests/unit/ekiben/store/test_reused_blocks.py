"""The blocks of a layer's former version, which the store keeps an index of."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ekiben.store import Store, prune
from support.sample_recipe import SampleRecipe, image_of, seeded


def text(seed: str) -> str:
    return "\n".join(hashlib.sha256(f"{seed} {line}".encode()).hexdigest() for line in range(40_000))


def indexes(store: Store) -> set[str]:
    return {path.name.removeprefix("blocks-") for path in (store.root / "checks").glob("blocks-*")}


def test_an_edited_layer_is_the_same_as_in_a_new_store(files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    files_only.write("files/tree/large.txt", text("large"))
    before = image_of(files_only, store)
    assert {layer.digest[7:] for layer in before.layers if layer.name == "roof"} <= indexes(store)
    files_only.write("files/tree/other.txt", text("other"))
    after = image_of(files_only, store)
    new_store = seeded(files_only, tmp_path / "new", "ground")
    assert [layer.digest for layer in after.layers] == [
        layer.digest for layer in image_of(files_only, new_store).layers
    ]
    assert indexes(new_store) <= indexes(store)
    gone = {digest[7:] for digest, _ in prune(store)}
    assert gone & {layer.digest[7:] for layer in before.layers}
    assert not indexes(store) & gone


def test_the_last_version_of_a_layer_is_the_one_that_is_copied_from(files_only: SampleRecipe, store: Store) -> None:
    files_only.write("files/tree/large.txt", text("large"))
    image_of(files_only, store)
    block = text("large").encode()[: 1 << 16]
    with store.reused_blocks("roof") as reuse:
        assert reuse.find(block)[1] is not None
    with store.reused_blocks("unknown") as reuse:
        assert reuse.find(block)[1] is None


def test_layers_of_colleagues_are_not_copied_from(files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    files_only.write("files/tree/large.txt", text("large"))
    image_of(files_only, store)
    mine = Store(tmp_path / "mine", store)
    image_of(files_only, mine)
    with mine.reused_blocks("roof") as reuse:
        assert reuse.find(text("large").encode()[: 1 << 16])[1] is None
