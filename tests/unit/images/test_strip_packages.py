"""images/scripts/strip_packages.py: what a training run never reads is removed from site-packages."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.image_scripts import SCRIPTS, package


def record(site: Path, name: str) -> dict[str, tuple[str, str]]:
    rows = csv.reader((site / f"{name}-1.0.dist-info" / "RECORD").read_text().splitlines())
    return {path: (digest, size) for path, digest, size in rows}


def strip_packages(site: Path) -> str:
    script = [sys.executable, str(SCRIPTS / "strip_packages.py"), str(site)]
    return subprocess.run(script, check=True, capture_output=True, text=True).stdout


def test_removes_files_training_never_reads_and_updates_record(tmp_path: Path) -> None:
    package(tmp_path, "torch", {"torch/version.py": b"cuda: Optional[str] = '13.0'\n", "torch/bin/protoc": b"x",
                                "torch/testing/__init__.py": b"", "torch/include/a.h": b""})  # fmt: skip
    package(tmp_path, "bitsandbytes", {f"bitsandbytes/libbitsandbytes_{build}.so": b"12345"
                                       for build in ("cpu", "cuda128", "cuda130", "rocm72")})  # fmt: skip
    package(tmp_path, "a", {"a/__init__.py": b"", "a/tests/b/tests/test_c.py": b"x", "a/latest/d.py": b""})
    stdout = strip_packages(tmp_path)
    assert "bitsandbytes (2 paths)" in stdout
    assert "a/tests: " in stdout
    assert set(record(tmp_path, "torch")) == {"torch/version.py", "torch/testing/__init__.py", "torch/include/a.h"}
    assert set(record(tmp_path, "a")) == {"a/__init__.py", "a/latest/d.py"}
    assert {path.name for path in tmp_path.glob("bitsandbytes/*")} == {
        "libbitsandbytes_cpu.so",
        "libbitsandbytes_cuda130.so",
    }
    assert not (tmp_path / "a" / "tests").exists()
    assert len(strip_packages(tmp_path).splitlines()) == 1


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("strip")), reason="needs a C compiler and binutils")
def test_strips_large_libraries_except_nvidia_s(tmp_path: Path) -> None:
    source = tmp_path / "large.c"
    source.write_text("static char data[17 << 20] = {1};\nchar *get(void) { return data; }\nstatic int unused(void) { return 1; }\n"
                      "int (*use)(void) = unused;\n")  # fmt: skip
    subprocess.run(["cc", "-g", "-shared", "-fPIC", "-o", tmp_path / "large.so", source], check=True)
    data = (tmp_path / "large.so").read_bytes()
    site = tmp_path / "site"
    paths = ["a/large.so", "a/small.so", "nvidia/lib/large.so", "a.libs/large.so"]
    package(site, "a", {path: data if "large" in path else data[:1000] for path in paths})
    os.link(site / "a" / "large.so", tmp_path / "other-name.so")
    strip_packages(site)
    stripped = (site / "a" / "large.so").read_bytes()
    assert b".symtab" in data
    assert b".symtab" not in stripped
    assert record(site, "a")["a/large.so"][1] == str(len(stripped))
    assert record(site, "a")["a/large.so"][0] != "sha256=x"
    assert [record(site, "a")[path][0] for path in paths[1:]] == ["sha256=x"] * 3
    assert (site / "nvidia/lib/large.so").read_bytes() == (site / "a.libs/large.so").read_bytes() == data
    assert (tmp_path / "other-name.so").read_bytes() == data
