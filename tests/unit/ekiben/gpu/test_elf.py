"""What is read of a compiled library, compared with what the compiler was given."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ekiben.gpu.elf import read_library


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
