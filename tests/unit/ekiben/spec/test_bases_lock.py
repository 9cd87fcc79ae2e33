"""bases.lock: a tag with a lock has the keys of the digest written by hand."""

from __future__ import annotations

import json

import pytest

from ekiben.core.environment import host_arch
from ekiben.core.errors import DefinitionError, LockMismatchError
from ekiben.project.lock_bases import lock_bases, recipe_bases
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from support.sample_recipe import SampleRecipe

DIGEST = f"sha256:{'5' * 64}"
HERE = f"linux/{host_arch()}"


def ground(sample: SampleRecipe, header: str, lock: object = None) -> None:
    (sample.path / "images/ground.def").write_text(f"Bootstrap: docker\n{header}\n")
    if lock is not None:
        (sample.path / "bases.lock").write_text(lock if isinstance(lock, str) else json.dumps(lock))


def keys(sample: SampleRecipe) -> list[str]:
    """Without the recipe's own layer, which holds the definitions' text."""
    return [layer.cache_key for layer in resolve(find_recipe(str(sample.path))).layers[:-1]]


@pytest.mark.parametrize(
    ("header", "reference"),
    [
        ("From: debian:12", "debian:12"),
        ("From: debian", "debian"),
        ("From: r.example.org/lab/debian:12", "r.example.org/lab/debian:12"),
        ("From: debian:12\nNamespace: lab\nRegistry: r.example.org", "r.example.org/lab/debian:12"),
        ("From: lab/debian\nRegistry: r.example.org:5000", "r.example.org:5000/lab/debian"),
    ],
)
def test_locked_tag_has_the_keys_of_its_digest(sample: SampleRecipe, header: str, reference: str) -> None:
    ground(sample, header, {reference: {HERE: DIGEST, "linux/other": f"sha256:{'6' * 64}"}})
    locked = keys(sample)
    ground(sample, f"From: {reference}@{DIGEST}", {})
    assert keys(sample) == locked
    ground(sample, header, {reference: {HERE: f"sha256:{'7' * 64}"}})
    assert keys(sample)[0] != locked[0]


@pytest.mark.parametrize(
    ("lock", "message", "hint"),
    [
        (None, "ground.def:2: From: debian:12 is not locked", "lock {}"),
        ({"debian:13": {HERE: DIGEST}}, "ground.def:2: From: debian:12 is not locked", "lock {}"),
        ({"debian:12": {"linux/s390x": DIGEST}}, "is locked for linux/s390x, and not for", "lock {} --arch"),
        ({"debian:12": {HERE: "latest"}}, "bases.lock: .*is not a digest", "delete it"),
        ({"debian:12": DIGEST}, "bases.lock: .*is not an object", "delete it"),
        ("[1]", "bases.lock: is not an object", "delete it"),
        ("{", "bases.lock: is not JSON", "delete it"),
    ],
)
def test_tag_without_a_digest_is_an_error(sample: SampleRecipe, lock: object, message: str, hint: str) -> None:
    ground(sample, "From: debian:12", lock)
    with pytest.raises(DefinitionError, match=message) as caught:
        keys(sample)
    assert hint.format(sample.path) in str(caught.value.hint)


def test_lock_elsewhere_is_not_read(sample: SampleRecipe) -> None:
    ground(sample, "From: debian:12")
    (sample.path / "bases.lock").symlink_to("/etc/passwd")
    with pytest.raises(DefinitionError, match=r"bases\.lock points to /etc/passwd"):
        keys(sample)
    with pytest.raises(DefinitionError, match=r"bases\.lock points to /etc/passwd"):
        recipe_bases(find_recipe(str(sample.path)))


@pytest.mark.parametrize(
    ("lock", "message"),
    [
        ({}, "no digest of debian:12"),
        ({"debian:12": {HERE: DIGEST}, "debian:11": {HERE: DIGEST}}, "no definition asks for"),
    ],
)
def test_check_reaches_no_registry(sample: SampleRecipe, lock: object, message: str) -> None:
    ground(sample, "From: debian:12", lock)
    with pytest.raises(LockMismatchError, match=message):
        list(lock_bases(recipe_bases(find_recipe(str(sample.path))), check=True))
    ground(sample, "From: debian:12", {"debian:12": {HERE: DIGEST}})
    for options in ({"check": True}, {"keep": True}):
        lines = list(lock_bases(recipe_bases(find_recipe(str(sample.path))), **options))
        assert lines == [f"{sample.path / 'bases.lock'}: up to date"]
