"""images/scripts/install.py: the byte code it writes is reproducible."""

from __future__ import annotations

import py_compile
import shutil
from pathlib import Path

import pytest

from support.image_scripts import load


def test_bytecode_is_hash_based_even_where_an_import_wrote_timestamp_based(tmp_path: Path) -> None:
    install = load("install")
    source = tmp_path / "a.py"
    source.write_text("A = {'b', 'c'}\n")
    py_compile.compile(str(source), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    assert install._uncompiled(source) == [source]
    install._compile([source])
    assert install._uncompiled(source) == []


def test_bytecode_does_not_depend_on_the_hash_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install = load("install")
    source = tmp_path / "a.py"
    source.write_text("def f(x):\n    return x in {'a', 'b', 'c', 'd', 'e'}, __debug__\n")
    compiled = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        monkeypatch.setenv("PYTHONOPTIMIZE", seed)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        install._compile([source])
        (path,) = (tmp_path / "__pycache__").iterdir()
        compiled.append((path.name, path.read_bytes()))
    assert compiled[0] == compiled[1]
