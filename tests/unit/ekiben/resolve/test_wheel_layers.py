"""Keys of layers that install a lock file: they do not name the base, but all else that decides about the content."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ekiben.core.paths import PROJECT_ROOT
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe

STACK = PROJECT_ROOT / "images/stacks/cu130"
LAYERS = ("base", "python", "compiler", "pytorch", "huggingface", "mine")
Edit = Callable[[Path], None]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe on huggingface with a stack of its own, which is cu130."""
    folder = tmp_path / "mine"
    shutil.copytree(STACK, folder / "images/stacks/own")
    (folder / "images/stacks/own/SHA256SUMS").unlink()
    text = (STACK / "stack.yaml").read_text().replace("name: cu130", "name: own")
    (folder / "images/stacks/own/stack.yaml").write_text(text)
    (folder / "recipe.yaml").write_text("{name: mine, description: x, stack: own, layer: huggingface, tasks: {}}")
    return folder


def keys(recipe: Path) -> dict[str, str]:
    return {layer.name: layer.cache_key for layer in resolve(find_recipe(str(recipe)), arch="amd64").layers}


def of_stack(name: str, before: str, after: str) -> Edit:
    def edit(recipe: Path) -> None:
        path = recipe / "images/stacks/own" / name
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after))

    return edit


def definition(name: str, before: str, after: str) -> Edit:
    """A definition file of the recipe's own in place of Ekiben's."""

    def edit(recipe: Path) -> None:
        text = (PROJECT_ROOT / f"images/{name}.def").read_text()
        assert before in text
        text = text.replace(before, after).replace("images/stacks/cu130", "{{ stack }}")
        (recipe / f"images/{name}.def").write_text(text)
        shutil.copytree(PROJECT_ROOT / "images/scripts", recipe / "images/scripts")

    return edit


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        (of_stack("apt.lock", "dpkg=1.21.23", "dpkg=1.21.24"), {"pytorch", "huggingface"}),
        (definition("base", "Include: ca-certificates", "Include: ca-certificates file"), {"pytorch", "huggingface"}),
        (of_stack("apt.lock", "libexpat1=", "libexpat1=9."), {"base", "pytorch", "huggingface"}),
        (of_stack("apt.lock", "linux-libc-dev=", "linux-libc-dev=9."), {"base", "python", "pytorch", "huggingface"}),
        (of_stack("apt.lock", "python3.11-minimal=", "python3.11-minimal=9."), {"base"}),
        (of_stack("apt.lock", "binutils=", "binutils=9."), {"base", "python"}),
        (of_stack("python.lock", "uv==", "# \nuv=="), {"base"}),
        (of_stack("pytorch.lock", "torch==", "# \ntorch=="), {"base", "python", "compiler"}),
        (of_stack("huggingface.lock", "peft==", "# \npeft=="), {"base", "python", "compiler", "pytorch"}),
        (definition("python", "umask 022", "umask 022\n    true"), {"base"}),
        (definition("compiler", "umask 022", "umask 022\n    true"), {"base", "python"}),
        (definition("huggingface", "%post\n", "%post\n    true\n"), {"base", "python", "compiler", "pytorch"}),
        (
            definition("huggingface", "%post\n", "    recipe.yaml /etc/x\n\n%post\n"),
            {"base", "python", "compiler", "pytorch"},
        ),
    ],
)
def test_keys_name_what_decides_on_the_content(edit: Edit, kept: set[str], recipe: Path) -> None:
    before = keys(recipe)
    assert tuple(before) == LAYERS
    edit(recipe)
    after = keys(recipe)
    assert {name for name in LAYERS if before[name] == after[name]} == kept


def test_layer_on_one_that_is_not_ekiben_s_has_its_parent(recipe: Path) -> None:
    definition("python", "umask 022", "umask 022\n    # a remark")(recipe)
    layers = {layer.name: layer for layer in resolve(find_recipe(str(recipe)), arch="amd64").layers}
    assert layers["pytorch"].inputs["parent"] == layers["compiler"].cache_key
    assert layers["mine"].inputs["parent"] == layers["huggingface"].cache_key


def test_layer_on_wheel_layers_names_all_below(recipe: Path) -> None:
    layers = {layer.name: layer for layer in resolve(find_recipe(str(recipe)), arch="amd64").layers}
    assert "parent" not in layers["huggingface"].inputs
    below = [layers[name].cache_key for name in ("compiler", "pytorch", "huggingface")]
    assert layers["mine"].inputs["parent"] == below
