"""The lock of bases: what it reads of a recipe, and what a damaged one says."""

from __future__ import annotations

import json

import pytest

from ekiben.core.errors import DefinitionError, LockMismatchError
from ekiben.project.lock_bases import lock_bases, recipe_bases
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from support.sample_recipe import SampleRecipe

LOCKED = {"one:1": {"linux/amd64": f"sha256:{'1' * 64}"}}
BROKEN = "Bootstrap: docker\nFrom: two:2\n\n%setup\n    true\n"


def lock(sample: SampleRecipe, *, check: bool = False) -> list[str]:
    return list(lock_bases(recipe_bases(find_recipe(str(sample.path))), check=check, keep=True))


@pytest.fixture
def locked(sample: SampleRecipe) -> SampleRecipe:
    sample.write("images/ground.def", "Bootstrap: docker\nFrom: one:1\n")
    sample.write("bases.lock", json.dumps(LOCKED))
    return sample


def test_a_definition_that_the_recipe_does_not_use_stops_no_lock(locked: SampleRecipe) -> None:
    locked.write("images/unused.def", BROKEN)
    both = {**LOCKED, "two:2": {"linux/amd64": f"sha256:{'2' * 64}"}}
    locked.write("bases.lock", json.dumps(both))
    lines = lock(locked)
    assert "unused.def is not used and left out" in lines[0] and "unused.def:4: %setup is refused" in lines[0]
    assert "up to date" in lines[1]
    assert json.loads((locked.path / "bases.lock").read_text()) == both


def test_a_definition_that_the_recipe_uses_is_an_error(locked: SampleRecipe) -> None:
    locked.write("images/ground.def", BROKEN)
    with pytest.raises(DefinitionError, match=r"ground\.def:4: %setup is refused"):
        lock(locked)


def test_a_damaged_lock_names_the_full_command(locked: SampleRecipe) -> None:
    locked.write("bases.lock", "{")
    for read in (lambda: lock(locked), lambda: resolve(find_recipe(str(locked.path)), arch="amd64")):
        with pytest.raises(DefinitionError, match=r"bases\.lock: is not JSON") as caught:
            read()
        assert str(caught.value.hint).endswith(f" lock {locked.path}")


def test_an_unlocked_tag_fails_the_check(locked: SampleRecipe) -> None:
    (locked.path / "bases.lock").unlink()
    with pytest.raises(LockMismatchError, match="no digest of one:1"):
        lock(locked, check=True)


def test_a_build_argument_takes_no_default(sample: SampleRecipe) -> None:
    sample.write(
        "images/ground.def", "Bootstrap: debootstrap\nOSVersion: {{ suite }}\n\n%post\n    echo {{ greeting }}\n"
    )
    recipe = find_recipe(str(sample.path))
    arguments = {"suite": "bookworm", "greeting": "hello"}
    layers = resolve(recipe, arch="amd64", arguments=arguments).layers
    assert layers[1].stage and "echo hello" in layers[1].stage.post
    with pytest.raises(DefinitionError, match=r"ground\.def:5: argument 'greeting' .* --build-arg greeting=VALUE"):
        resolve(recipe, arch="amd64", arguments={"suite": "bookworm"})
    with pytest.raises(DefinitionError, match="argument 'greetin' is bound but no layer"):
        resolve(recipe, arch="amd64", arguments={**arguments, "greetin": "x"})


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("Bootstrap: docker\nFrom: two:2\n", r"ground\.def:2: From: two:2 is not locked"),
        ("Bootstrap: oras\nFrom: r.example.org/two:2\n", r"ground\.def:2: From: oras://r.example.org/two:2 is not"),
        (
            "Bootstrap: busybox\n\nMirrorURL: https://m.example.org/busybox\n",
            r"ground\.def:3: MirrorURL: https://m.example.org/busybox is not locked",
        ),
    ],
)
def test_what_is_not_locked_is_named_with_its_line(locked: SampleRecipe, header: str, message: str) -> None:
    locked.write("images/ground.def", header)
    with pytest.raises(DefinitionError, match=message):
        resolve(find_recipe(str(locked.path)), arch="amd64")
