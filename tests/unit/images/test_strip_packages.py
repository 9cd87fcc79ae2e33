"""images/scripts/strip_packages.py: what a training run never reads is removed from site-packages."""

from __future__ import annotations

from pathlib import Path

from support.image_scripts import package, record, strip_packages


def test_removes_files_training_never_reads_and_updates_record(tmp_path: Path) -> None:
    package(
        tmp_path,
        "torch",
        {
            "torch/version.py": b"cuda: Optional[str] = '13.0'\n",
            "torch/bin/protoc": b"x",
            "torch/testing/__init__.py": b"",
            "torch/include/a.h": b"",
        },
    )
    package(
        tmp_path,
        "bitsandbytes",
        {f"bitsandbytes/libbitsandbytes_{build}.so": b"12345" for build in ("cpu", "cuda128", "cuda130", "rocm72")},
    )
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


def test_large_libraries_stay_as_they_are_without_binutils(tmp_path: Path) -> None:
    """The layer `python` has no compiler, and pyarrow has libraries of tens of megabytes."""
    library = b"\x7fELF" + bytes(16 << 20)
    package(tmp_path / "site", "pyarrow", {"pyarrow/libarrow.so.2600": library, "pyarrow/include/a.h": b"x"})
    stdout = strip_packages(tmp_path / "site", PATH=str(tmp_path))
    assert "1 large libraries: not stripped of symbols for debuggers: no binutils here" in stdout
    assert (tmp_path / "site/pyarrow/libarrow.so.2600").read_bytes() == library
    assert not (tmp_path / "site/pyarrow/include").exists()
