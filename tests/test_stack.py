"""stack.yaml and apt.lock."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from builder.chain import resolve
from builder.errors import DefinitionError
from builder.recipe import HOUSE, find_recipe
from builder.stack import Stack, find_stack, read_pins
from own_recipe import Own


def find(own: Own, name: str = "tiny") -> Stack:
    return find_stack(name, [own.path / "images", HOUSE / "images"])


def test_the_nearest_folder_wins(own: Own) -> None:
    assert find(own).folder == own.path / "images/stacks/tiny"
    assert find(own, "cu130").folder == HOUSE / "images/stacks/cu130"
    own.write("images/stacks/cu130/stack.yaml", (own.path / "images/stacks/tiny/stack.yaml").read_text())
    assert find(own, "cu130").folder == own.path / "images/stacks/cu130"


def test_an_unknown_stack(own: Own) -> None:
    with pytest.raises(DefinitionError, match=r"^no stack 'tny'\. Did you mean 'tiny'\?"):
        find(own, "tny")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"suit": "x"}, "unknown key 'suit'. Did you mean 'suite'?"),
        ({"epoch": "today"}, "epoch: should be a whole number (found: 'today')"),
        ({"epoch": 0}, "epoch: should be seconds since 1970, from 1 to 2**32 - 1 (found: 0)"),
        ({"epoch": 2**32}, f"epoch: should be seconds since 1970, from 1 to 2**32 - 1 (found: {2**32})"),
        ({"python": 3.11}, "python: should be a string (found: 3.11)"),
        ({"arguments": {"a": 1}}, "arguments.a: should be a string (found: 1)"),
        ({"compute_capabilities": [9.0]}, "compute_capabilities.0: should be a string (found: 9.0)"),
    ],
)
def test_what_is_refused(own: Own, change: dict[str, Any], said: str) -> None:
    own.stack(**change)
    with pytest.raises(DefinitionError) as caught:
        find(own)
    assert str(caught.value) == f"{own.path}/images/stacks/tiny/stack.yaml: {said}"


def test_apt_lock(own: Own) -> None:
    assert find(own).apt_lock().packages == {}
    lock: Path = own.write("images/stacks/tiny/apt.lock", "# a remark\nb=1:2.0-3\n\na=1=2\n")
    assert find(own).apt_lock().packages == {"b": "1:2.0-3", "a": "1=2"}
    lock.write_text("a=1\nb 2\n")
    with pytest.raises(DefinitionError, match=r"apt.lock:2: expected package=version, found: b 2"):
        find(own).apt_lock()


def test_apt_lock_by_layer(own: Own) -> None:
    own.write("images/stacks/tiny/apt.lock", "snapshot: 20260102T030405Z\n[ground]\na=1\n\n[walls]\nb=2\n")
    lock = find(own).apt_lock()
    assert lock.snapshot == "20260102T030405Z"
    assert lock.packages == {"a": "1", "b": "2"}
    assert lock.of("ground", lowest=True) == {"a": "1"}
    assert lock.of("walls", lowest=False) == {"b": "2"}
    assert lock.of("roof", lowest=False) == {}
    own.write("images/stacks/tiny/apt.lock", "snapshot: yesterday\n")
    with pytest.raises(DefinitionError, match=r"apt.lock:1: expected package=version, found: snapshot: yesterday"):
        find(own).apt_lock()


def test_a_list_without_layers_is_the_lowest_ones(own: Own) -> None:
    own.write("images/stacks/tiny/apt.lock", "a=1\n")
    lock = find(own).apt_lock()
    assert lock.of("ground", lowest=True) == {"a": "1"}
    assert lock.of("walls", lowest=False) == {}


def test_what_was_edited_by_hand_is_named(own: Own) -> None:
    files = {"walls.in": "one\n", "walls.lock": "one==1 \\\n    --hash=sha256:0\n", "apt.lock": "a=1\n"}
    for name, text in files.items():
        own.write(f"images/stacks/tiny/{name}", text)
    find(own).check_locks()  # nobody has said what they should be
    sums = [f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in files.items()]
    own.write("images/stacks/tiny/SHA256SUMS", "".join(sums))
    find(own).check_locks()
    own.write("images/stacks/tiny/walls.in", "two\n")
    own.write("images/stacks/tiny/walls.lock", "one==2\n")
    (own.path / "images/stacks/tiny/apt.lock").unlink()
    with pytest.raises(DefinitionError) as caught:
        resolve(find_recipe(str(own.path)))
    folder = own.path / "images/stacks/tiny"
    assert str(caught.value).splitlines() == [
        f"{folder}/walls.in: was changed and not locked again",
        f"{folder}/walls.lock: was edited by hand",
        f"{folder}/apt.lock: was locked, and is gone",
    ]
    assert "build.py lock tiny --keep" in str(caught.value.hint)


def test_what_a_lock_of_python_packages_pins() -> None:
    one, two = "a" * 64, "b" * 64
    text = f"# by hand\nidna==3.1 ; python_version > '3' \\\n    --hash=sha256:{two} \\\n    --hash=sha256:{one}\n# not locked: x==1\nTorch==2+cu118\n"
    assert read_pins(text) == [("idna", "3.1", [one, two]), ("Torch", "2+cu118", [])]
    assert read_pins("") == []
