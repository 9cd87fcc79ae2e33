"""Whether an image has what its recipe describes now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ekiben.artifacts import recipe_state
from ekiben.artifacts.exporters.sif import make_sif
from ekiben.artifacts.recipe_state import RecipeState, state_in_engine, state_of_sif
from ekiben.builder.build import BuildContext, build
from ekiben.builder.plan import Options
from ekiben.core.command_name import command_name
from ekiben.formats.layer import Entry, LayerEntry, write_entries
from ekiben.formats.sif import SifInfo
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.inspect.metadata import IMAGE_METADATA
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Store
from support.sample_recipe import SampleRecipe, image_of, quiet

Edit = Callable[[SampleRecipe], object]
EDITS: dict[str, tuple[Edit, RecipeState]] = {
    "nothing": (lambda sample: None, RecipeState("same")),
    "a script": (
        lambda sample: sample.write("entrypoints/greet.py", "print('bye')\n"),
        RecipeState("edited", ("entrypoints/greet.py",)),
    ),
    "a mode": (
        lambda sample: (sample.path / "entrypoints/greet.py").chmod(0o755),
        RecipeState("edited", ("entrypoints/greet.py",)),
    ),
    "a new script": (
        lambda sample: sample.write("entrypoints/more.py", ""),
        RecipeState("edited", ("entrypoints/more.py",)),
    ),
    "settings": (
        lambda sample: sample.write("configs/greet.yaml", "name: me\n"),
        RecipeState("edited", ("configs/greet.yaml",)),
    ),
    "the recipe's test": (
        lambda sample: sample.recipe(test="greet --again\n"),
        RecipeState("edited", ("recipe.yaml",)),
    ),
    "a file of a layer": (
        lambda sample: sample.write("files/data.txt", "other\n"),
        RecipeState("edited", below=("what layer roof is made of",)),
    ),
    "a test of a layer": (
        lambda sample: sample.replace("images/roof.def", "%files", "%test\n    true\n\n%files"),
        RecipeState("edited", below=("roof.def",)),
    ),
    "the lowest layer": (
        lambda sample: sample.stack(arguments={}, epoch=1_700_000_001),
        RecipeState("edited", below=("what layer ground is made of",)),
    ),
    "a recipe that is wrong": (
        lambda sample: sample.replace("images/roof.def", "ground.sif", "grund.sif"),
        RecipeState("unknown", reason="roof.def: no layer 'grund'. Did you mean 'ground'?", fix="mend that"),
    ),
    "a recipe that is wrong, and a script": (
        lambda sample: (
            sample.replace("images/roof.def", "ground.sif", "grund.sif"),
            sample.write("entrypoints/greet.py", "print('bye')\n"),
        ),
        RecipeState(
            "unknown",
            ("entrypoints/greet.py",),
            reason="roof.def: no layer 'grund'. Did you mean 'ground'?",
            fix="mend that",
        ),
    ),
    "requirements that are not locked": (
        lambda sample: (
            sample.write("requirements.txt", "six\n"),
            sample.write("SHA256SUMS", f"{'0' * 64}  requirements.txt\n"),
        ),
        RecipeState(
            "unknown",
            reason="requirements.txt: was changed and not locked again",
            fix=f"{command_name()} lock FOLDER --keep",
        ),
    ),
}


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("name", EDITS)
def test_edits_since_a_sif_was_built_are_named(
    name: str, squash: bool, files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    edit, expected = EDITS[name]
    make_sif(image_of(files_only, store), store, tmp_path / "x.sif", squash=squash)
    edit(files_only)
    state = state_of_sif(tmp_path / "x.sif", find_recipe(str(files_only.path)))
    reason = state.reason.replace(f"{files_only.path}/", "").replace("images/", "")
    fix = state.fix and state.fix.replace(str(files_only.path), "FOLDER")
    assert replace(state, reason=reason, fix=fix) == expected


def test_a_removed_script_is_an_edit(files_only: SampleRecipe, store: Store, tmp_path: Path) -> None:
    files_only.write("entrypoints/more.py", "")
    make_sif(image_of(files_only, store), store, tmp_path / "x.sif", squash=False)
    (files_only.path / "entrypoints/more.py").unlink()
    state = state_of_sif(tmp_path / "x.sif", find_recipe(str(files_only.path)))
    assert state == RecipeState("edited", ("entrypoints/more.py (removed)",))


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\0" * 70_000])
def test_a_file_of_another_builder_is_unknown(content: bytes, files_only: SampleRecipe, tmp_path: Path) -> None:
    (tmp_path / "x.sif").write_bytes(content)
    assert state_of_sif(tmp_path / "x.sif", find_recipe(str(files_only.path))).kind == "unknown"


def test_edits_since_an_engine_got_its_image_are_known_by_the_store(files_only: SampleRecipe, store: Store) -> None:
    image, recipe = image_of(files_only, store), find_recipe(str(files_only.path))
    assert state_in_engine(image.image_id, image.name, recipe, store) == RecipeState("same")
    files_only.write("entrypoints/greet.py", "print('bye')\n")
    assert state_in_engine(image.image_id, image.name, recipe, store).files == ("the recipe's own files",)
    files_only.write("files/data.txt", "other\n")
    assert state_in_engine(image.image_id, image.name, recipe, store).below == ("what layer roof is made of",)
    later = state_in_engine("sha256:" + "0" * 64, image.name, recipe, store)
    assert (later.kind, later.reason, later.fix) == (
        "unknown",
        "the image that was built last as own is not this one",
        "",
    )
    other = state_in_engine(image.image_id, "other", recipe, store)
    assert (other.kind, other.reason) == ("unknown", f"the store {store.root} has no record of other")
    files_only.replace("images/roof.def", "ground.sif", "grund.sif")
    assert "no layer 'grund'" in state_in_engine(image.image_id, image.name, recipe, store).reason


def test_an_image_of_build_arguments_is_compared_without_them(
    files_only: SampleRecipe, store: Store, tmp_path: Path
) -> None:
    files_only.replace("images/roof.def", "%files", "%arguments\n    word=a\n\n%files")
    files_only.replace("images/roof.def", "/opt/tree", "/opt/{{ word }}")
    recipe = find_recipe(str(files_only.path))
    image = build(BuildContext(resolve(recipe, arguments={"word": "b"}), store, Options(), quiet()))
    make_sif(image, store, tmp_path / "x.sif", squash=False)
    assert state_of_sif(tmp_path / "x.sif", recipe) == RecipeState("same")
    custom = state_in_engine(image.image_id, image.name, recipe, store)
    assert (custom.reason, custom.fix) == ("it was built with --gpu-arch or --build-arg", None)
    files_only.write("entrypoints/greet.py", "print('bye')\n")
    assert state_of_sif(tmp_path / "x.sif", recipe).files == ("entrypoints/greet.py",)


def test_a_sif_without_a_squashfs_is_unknown(
    files_only: SampleRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.sif").write_bytes(b"")
    info = SifInfo(id="0" * 32, arch="amd64", created=0, descriptors=())
    monkeypatch.setattr(recipe_state, "read_sif", lambda path: info)
    assert state_of_sif(tmp_path / "x.sif", find_recipe(str(files_only.path))).kind == "unknown"


def _squashfs(path: Path, entries: list[LayerEntry]) -> None:
    with path.open("w+b") as out:
        write_entries(sorted(entries, key=lambda item: item[0].order), SquashfsWriter(out, epoch=0))


@pytest.mark.parametrize("kind", ["deep", "large metadata", "large definition"])
def test_an_image_that_means_harm_is_unknown(
    kind: str, files_only: SampleRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders without end, and files of holes: neither a traceback nor the memory of this machine."""
    metadata, large = b'{"recipe":"own","stack":"tiny","layers":[]}', 64 << 20
    folders = ["", ".singularity.d", "opt", "opt/ekiben", "opt/ekiben/recipe"]
    folders += ["opt/ekiben/recipe" + "/d" * depth for depth in range(1, 1500)] if kind == "deep" else []
    files = {".singularity.d/Singularity": b"x", IMAGE_METADATA: metadata, "opt/ekiben/recipe/recipe.yaml": b"x"}
    files |= {IMAGE_METADATA: metadata + b" " * large} if kind == "large metadata" else {}
    files |= {".singularity.d/Singularity": b"#" * large} if kind == "large definition" else {}
    entries: list[LayerEntry] = [(Entry(folder, "dir"), None) for folder in folders]
    entries += [(Entry(name, "file", 0o644, size=len(data)), [data]) for name, data in files.items()]
    _squashfs(tmp_path / "own.sif", entries)
    monkeypatch.setattr(recipe_state, "read_sif", lambda path: SimpleNamespace(layers=[SimpleNamespace(offset=0)]))
    state = state_of_sif(tmp_path / "own.sif", find_recipe(str(files_only.path)))
    assert (state.kind, state.files) == ("unknown", ())
    assert state.reason
