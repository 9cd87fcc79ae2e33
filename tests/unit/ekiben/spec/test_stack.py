"""stack.yaml and apt.lock."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import DefinitionError
from ekiben.core.paths import PROJECT_ROOT
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.spec.stack import Stack, find_stack, read_pins
from support.sample_recipe import SampleRecipe


def find(sample: SampleRecipe, name: str = "tiny") -> Stack:
    return find_stack(name, [sample.path / "images", PROJECT_ROOT / "images"])


def test_the_nearest_folder_wins(sample: SampleRecipe) -> None:
    assert find(sample).folder == sample.path / "images/stacks/tiny"
    assert find(sample, "cu130").folder == PROJECT_ROOT / "images/stacks/cu130"
    sample.write("images/stacks/cu130/stack.yaml", (sample.path / "images/stacks/tiny/stack.yaml").read_text())
    assert find(sample, "cu130").folder == sample.path / "images/stacks/cu130"


def test_unknown_stack_is_refused(sample: SampleRecipe) -> None:
    with pytest.raises(DefinitionError, match=r"^no stack 'tny'\. Did you mean 'tiny'\?"):
        find(sample, "tny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suit": "x"}, "unknown key 'suit'. Did you mean 'suite'?"),
        ({"epoch": "today"}, "epoch: should be a whole number (found: 'today')"),
        ({"epoch": 0}, "epoch: should be seconds since 1970, from 1 to 2**32 - 1 (found: 0)"),
        ({"epoch": 2**32}, f"epoch: should be seconds since 1970, from 1 to 2**32 - 1 (found: {2**32})"),
        ({"python": 3.11}, "python: should be a string (found: 3.11)"),
        ({"cuda": "thirteen"}, "cuda: should be a version (found: thirteen)"),
        ({"compute_capabilities": ["9.0", "sm_90"]}, "compute_capabilities: should be a version (found: sm_90)"),
        ({"arguments": {"a": 1}}, "arguments.a: should be a string (found: 1)"),
        ({"compute_capabilities": [9.0]}, "compute_capabilities.0: should be a string (found: 9.0)"),
    ],
)
def test_invalid_stacks_are_refused(sample: SampleRecipe, change: dict[str, Any], message: str) -> None:
    sample.stack(**change)
    with pytest.raises(DefinitionError) as caught:
        find(sample)
    assert str(caught.value) == f"{sample.path}/images/stacks/tiny/stack.yaml: {message}"


def test_apt_lock_is_parsed(sample: SampleRecipe) -> None:
    assert find(sample).apt_lock().packages == {}
    lock: Path = sample.write("images/stacks/tiny/apt.lock", "# a remark\nb=1:2.0-3\n\na=1=2\n")
    assert find(sample).apt_lock().packages == {"b": "1:2.0-3", "a": "1=2"}
    lock.write_text("a=1\nb 2\n")
    with pytest.raises(DefinitionError, match=r"apt.lock:2: expected package=version, found: b 2"):
        find(sample).apt_lock()


def test_apt_lock_by_layer(sample: SampleRecipe) -> None:
    sample.write("images/stacks/tiny/apt.lock", "snapshot: 20260102T030405Z\n[ground]\na=1\n\n[walls]\nb=2\n")
    lock = find(sample).apt_lock()
    assert lock.snapshot == "20260102T030405Z"
    assert lock.packages == {"a": "1", "b": "2"}
    assert lock.of("ground", lowest=True) == {"a": "1"}
    assert lock.of("walls", lowest=False) == {"b": "2"}
    assert lock.of("roof", lowest=False) == {}
    sample.write("images/stacks/tiny/apt.lock", "snapshot: yesterday\n")
    with pytest.raises(DefinitionError, match=r"apt.lock:1: expected package=version, found: snapshot: yesterday"):
        find(sample).apt_lock()


def test_apt_lock_without_layers_belongs_to_the_lowest(sample: SampleRecipe) -> None:
    sample.write("images/stacks/tiny/apt.lock", "a=1\n")
    lock = find(sample).apt_lock()
    assert lock.of("ground", lowest=True) == {"a": "1"}
    assert lock.of("walls", lowest=False) == {}


def test_lock_edited_by_hand_is_named(sample: SampleRecipe) -> None:
    files = {"walls.in": "one\n", "walls.lock": "one==1 \\\n    --hash=sha256:0\n", "apt.lock": "a=1\n"}
    for name, text in files.items():
        sample.write(f"images/stacks/tiny/{name}", text)
    find(sample).check_locks()  # nothing records their expected digests
    sums = [f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in files.items()]
    sample.write("images/stacks/tiny/SHA256SUMS", "".join(sums))
    find(sample).check_locks()
    sample.write("images/stacks/tiny/walls.in", "two\n")
    sample.write("images/stacks/tiny/walls.lock", "one==2\n")
    (sample.path / "images/stacks/tiny/apt.lock").unlink()
    with pytest.raises(DefinitionError) as caught:
        resolve(find_recipe(str(sample.path)))
    folder = sample.path / "images/stacks/tiny"
    assert str(caught.value).splitlines() == [
        f"{folder}/walls.in: was changed and not locked again",
        f"{folder}/walls.lock: was edited by hand",
        f"{folder}/apt.lock: was locked, and is gone",
    ]
    assert "lock tiny --keep" in str(caught.value.hint)


def test_pins_of_a_python_lock() -> None:
    one, two = "a" * 64, "b" * 64
    text = (
        f"# by hand\nidna==3.1 ; python_version > '3' \\\n    --hash=sha256:{two} \\\n    --hash=sha256:{one}\n# not"
        " locked: x==1\nTorch==2+cu118\n"
    )
    assert read_pins(text) == [("idna", "3.1", [one, two]), ("Torch", "2+cu118", [])]
    assert read_pins("") == []
