"""Why requirements do not go with the layers below, and what would work, with an index of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.command_name import command_name
from ekiben.core.errors import DefinitionError
from ekiben.project.create import create_recipe
from ekiben.project.explain import find_constraints
from ekiben.project.lock import read_below
from ekiben.spec.stack import find_stack
from support.own_recipes import lock, recipe_in
from support.package_index import Index, serve


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A recipe on the layer `python`, and an index where above 2 wants another pip than that has."""
    create_recipe(tmp_path / "mine", layer="python")
    with serve(Index()) as index:
        monkeypatch.setenv("UV_DEFAULT_INDEX", index.url())
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        for version in ("0.9", pip_of(tmp_path / "mine")):
            index.add_wheel("pip", version)
        index.add_wheel("uv", version_of(tmp_path / "mine", "uv"))
        index.add_wheel("above", "1.0", requires=["plain"])
        index.add_wheel("above", "2.0", requires=["pip<1"])
        index.add_wheel("plain", "1.0")
        index.add_wheel("plain", "1.1", requires=["pip<1"])
        yield tmp_path / "mine"


def pip_of(folder: Path) -> str:
    return version_of(folder, "pip")


def version_of(folder: Path, name: str) -> str:
    recipe = recipe_in(folder)
    return read_below(recipe, find_stack("cu130", recipe.image_folders)).versions[name]


def test_conflict_names_layer_and_requirement_and_what_works(folder: Path) -> None:
    with pytest.raises(DefinitionError) as caught:
        lock(folder, "above>=2\n")
    assert f"\n  the layer 'python' has pip {pip_of(folder)}, and above>=2.0 depends on pip<1\n" in str(caught.value)
    assert caught.value.hint == (
        "tested solutions: above==1.0 goes with these layers; you ask for above>=2; or"
        f" `{command_name()} add --replace pip {folder}`: the recipe's layer installs 0.9 over the"
        f" {pip_of(folder)} of the layer 'python'"
    )


def test_conflict_without_a_way_out_suggests_nothing_that_was_not_tried(folder: Path) -> None:
    with pytest.raises(DefinitionError) as caught:
        lock(folder, "above>=3\n")
    assert "what works" not in str(caught.value.hint)


@pytest.mark.parametrize(
    ("requirements", "warned"), [("above\n", True), ("above<2\n", False), ("above==1.0\n", False), ("plain\n", False)]
)
def test_version_far_below_the_newest_is_a_warning(folder: Path, requirements: str, warned: bool) -> None:
    lines = [line for line in lock(folder, requirements) if line.startswith("warning")]
    expected = (
        "warning: above 1.0 is far below 2.0, the newest: the layer 'python' has pip"
        f" {pip_of(folder)}, and above>=2.0 depends on pip<1"
    )
    assert lines == ([expected] if warned else [])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Because x==1 depends on b>=2,<3 and you require b==1.5, …", ["'low' has b 1.5, and x==1 depends on b>=2,<3"]),
        ("Because you require b<1 and b==1.5, we can", ["'low' has b 1.5, and you ask for b<1"]),
        (
            "Because a==1.0 depends on\n  b==2.0 and b==1.5",
            ["'low' has b 1.5, and a==1.0 depends on b==2.0", "'up' has a 1.0"],
        ),
        ("Because lib-b==1.5 and b==1.50 and a==1.0.1", []),
    ],
)
def test_constraints_are_read_from_messages_of_uv(message: str, expected: list[str]) -> None:
    constraints = find_constraints(message, {"low": "b==1.5 \\\n", "up": "a==1.0 \\\n"})
    assert [str(item).removeprefix("the layer ") for item in constraints] == expected
