"""Layers that install a lock file alone: recognised, and compiled files from a cache."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ekiben.builder.plan import plan_layers
from ekiben.builder.wheel_layer import trusted_caches
from ekiben.resolve.resolve import resolve
from ekiben.resolve.wheel_layers import ends_with_install, installed_lock, is_wheel_layer
from ekiben.spec.recipe import find_recipe
from ekiben.store import Store
from ekiben.store.gc import prune
from support.image_scripts import load
from support.sample_recipe import seed

INSTALL = "/opt/venv/bin/python /opt/ekiben/install.py /opt/ekiben/locks/a.lock"


@pytest.mark.parametrize(
    ("post", "lock"),
    [
        (INSTALL, "/opt/ekiben/locks/a.lock"),
        (f"    # a remark\n    umask 022\n\n    {INSTALL}\n", "/opt/ekiben/locks/a.lock"),
        (f"true\n{INSTALL}", None),
        (f"{INSTALL}; true", None),
        (f"{INSTALL} /opt/ekiben/locks/b.lock", None),
        ("/opt/venv/bin/python /opt/ekiben/install.py $(id).lock", None),
        ("/opt/venv/bin/python /opt/ekiben/install.py /opt/ekiben/locks/../../a.lock", None),
        (f"umask 077\n{INSTALL}", None),
        ("", None),
    ],
)
def test_only_a_script_that_installs_a_lock_file_alone_is_one(post: str, lock: str | None) -> None:
    assert installed_lock(post) == lock
    assert is_wheel_layer({"kind": "post", "post": post}) == (lock is not None)


@pytest.mark.parametrize("more", [{"from": []}, {"shell": "/bin/bash"}, {"writes": "environment"}, {"kind": "files"}])
def test_a_layer_with_more_inputs_is_none(more: dict[str, object]) -> None:
    assert not is_wheel_layer({"kind": "post", "post": INSTALL, **more})


def test_a_layer_that_goes_on_after_its_installation_leaves_files_uncompiled() -> None:
    assert ends_with_install({"post": f"apt-get update\n{INSTALL}\n"})
    assert not ends_with_install({"post": f"{INSTALL}\npip install x"})


def test_caches_are_for_layers_of_ekiben_alone(tmp_path: Path) -> None:
    resolved = resolve(find_recipe("lora-opencalm"), arch="amd64")
    store, layers = Store(tmp_path / "store"), resolved.layers
    assert trusted_caches(layers[:-1], resolved.stack, store) == store.wheels / "linux-amd64"
    assert trusted_caches(layers, resolved.stack, store) is None  # the recipe's own layer
    python = layers[1]
    updated = replace(python, inputs={**python.inputs, "packages": {"python3.11": "3.11.2-6+deb12u99"}})
    assert trusted_caches([updated], resolved.stack, store)
    edited = replace(python, inputs={**python.inputs, "post": f"{python.inputs['post']}\ntrue"})
    assert trusted_caches([edited], resolved.stack, store) is None


def test_compiled_files_from_the_cache_are_those_of_the_installer(tmp_path: Path) -> None:
    installer, program, site = load("install"), load("install_wheels"), Path(sysconfig.get_path("purelib"))
    sources = {"a/__init__.py": "A = {'b', 'c'}\n", "a/b.py": "def f(x=(1, 2)):\n    return x\n", "a/bad.py": "def\n"}
    runs: list[dict[str, tuple[int, bytes]]] = []
    cache = tmp_path / "cache"
    cache.mkdir()
    for _ in range(3):
        shutil.rmtree(target := tmp_path / "target", ignore_errors=True)
        (target / "a").mkdir(parents=True)
        for name, text in sources.items():
            (target / name).write_text(text)
        (target / "a/b.py").chmod(0o755)
        program._compile(installer, target, site, cache)
        files = sorted((target / "a/__pycache__").iterdir())
        runs.append({file.name: (file.stat().st_mode, file.read_bytes()) for file in files})
        (entry,) = cache.glob("*/*")
        if len(runs) == 2:
            entry.write_bytes(entry.read_bytes()[:-1])  # a damaged one is not used
    assert len(runs[0]) == 2
    assert runs[0] == runs[1] == runs[2]
    code = runs[0][f"b.{sys.implementation.cache_tag}.pyc"][1]
    assert str(site / "a/b.py").encode() in code
    assert str(tmp_path).encode() not in code


def test_prune_removes_compiled_files_that_no_build_used_for_a_month(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.open_for_writing()
    folder = store.wheels / "linux-amd64/compiled/ab"
    folder.mkdir(parents=True)
    for name, days in (("old", 31), ("new", 29)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - days * 86400,) * 2)
    prune(store, dry_run=True)
    assert len(list(folder.iterdir())) == 2
    prune(store)
    assert [path.name for path in folder.iterdir()] == ["new"]


def test_reason_for_a_stored_layer_whose_key_has_the_parent(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    new = resolve(find_recipe("lora-opencalm"), arch="amd64").layers[4]
    assert (new.name, "parent" in new.inputs) == ("huggingface", False)
    old = replace(new, inputs={**new.inputs, "parent": "0" * 64})
    seed(store, old)
    assert [action.reason for action in plan_layers([old], store)] == ["stored"]
    assert [action.reason for action in plan_layers([new], store)] == ["the key no longer names the parent"]
