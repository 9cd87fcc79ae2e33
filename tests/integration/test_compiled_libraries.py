"""Libraries from a C compiler: what is read of one, compared with its source, and how a large one is stripped."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ekiben.gpu.elf import read_library
from support.image_scripts import package, record, strip_packages

pytestmark = pytest.mark.covers("ekiben/gpu", "images/scripts/strip_packages.py")


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_needed_libraries_and_symbols(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text(
        "extern double cos(double);\nint there;\ndouble half(double x) { return cos(x) / 2; }\n"
    )
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", tmp_path / "a.so", tmp_path / "a.c", "-Wl,--no-as-needed", "-lm"], check=True
    )
    library = read_library((tmp_path / "a.so").read_bytes())
    assert "libm.so.6" in library.needed
    assert {"there", "half"} <= library.defined
    assert "cos" in library.undefined
    assert library.machine == {"x86_64": "x86_64", "aarch64": "aarch64"}.get(
        subprocess.check_output(["uname", "-m"], text=True).strip()
    )


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_truncated_and_foreign_files_are_refused(tmp_path: Path) -> None:
    for data in (b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01\x01" + b"\0" * 100):
        with pytest.raises(ValueError, match="not a 64-bit ELF file"):
            read_library(data)
    (tmp_path / "a.c").write_text("int there;\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "a.so", tmp_path / "a.c"], check=True)
    data = (tmp_path / "a.so").read_bytes()
    for length in (20, 70, len(data) // 2, len(data) - 100):
        with pytest.raises(ValueError):
            read_library(data[:length])


@pytest.mark.skipif(not (shutil.which("cc") and shutil.which("strip")), reason="needs a C compiler and binutils")
def test_strips_large_libraries_except_nvidia_s(tmp_path: Path) -> None:
    source = tmp_path / "large.c"
    source.write_text(
        "static char data[17 << 20] = {1};\nchar *get(void) { return data; }\nstatic int unused(void) { return 1; }\n"
        "int (*use)(void) = unused;\n"
    )
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
