"""What is proven of a wheel before it is kept, with the wheels of other machines, other stacks and silent failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ekiben.builder.wheels import _library_problems, differences, validate_wheel
from ekiben.core.errors import VerifyError
from ekiben.gpu.elf import Library
from ekiben.spec.name_confusion import find_confusion
from support.compiled import INPUTS, TAG, extension, write_wheel

SO = "tiny/op.cpython-311-x86_64-linux-gnu.so"


def refusal(wheel: Path, **changed: Any) -> str:
    with pytest.raises(VerifyError) as error:
        validate_wheel(wheel, "tiny", {**INPUTS, **changed})
    return str(error.value)


def test_valid_wheel_passes(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, {SO: extension("sm_90"), "tiny/host.so": extension(), "tiny/__init__.py": b""})
    assert validate_wheel(wheel, "tiny", INPUTS) == {"extensions": {SO: ["sm_90"], "tiny/host.so": []}}
    both = write_wheel(tmp_path, {SO: extension("sm_80", "sm_90")})
    validate_wheel(both, "tiny", {**INPUTS, "capabilities": ["8.0", "8.6", "9.0"]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tag": "cp312-cp312-linux_x86_64"}, "is for cp312 on linux_x86_64; expected: cp311 on linux/amd64"),
        ({"tag": "cp311-cp311-linux_aarch64"}, "is for cp311 on linux_aarch64; expected: cp311 on linux/amd64"),
        ({"tag": "py3-none-any"}, "is for py3 on any"),
        ({"name": "other"}, "is a wheel of other; expected: tiny"),
        ({"bad": SO}, f"{SO} differs from the wheel's RECORD"),
    ],
)
def test_wheel_for_another_environment_is_refused(tmp_path: Path, options: dict[str, str], message: str) -> None:
    assert message in refusal(write_wheel(tmp_path, {SO: extension("sm_90")}, **options))


def test_extensions_that_are_missing_or_for_other_gpus(tmp_path: Path) -> None:
    assert "holds no compiled extension" in refusal(write_wheel(tmp_path, {"tiny/__init__.py": b""}))
    assert "there is no device code in it: it was compiled for CPUs only" in refusal(
        write_wheel(tmp_path, {SO: extension()})
    )
    assert "no device code for compute capability 9.0 (there is: sm_80)" in refusal(
        write_wheel(tmp_path, {SO: extension("sm_80")})
    )
    assert "not wanted: sm_80" in refusal(write_wheel(tmp_path, {SO: extension("sm_80", "sm_90")}))
    one_of_two = {SO: extension("sm_90"), "tiny/second.so": extension("sm_80")}
    assert "tiny/second.so: no device code for compute capability 9.0" in refusal(write_wheel(tmp_path, one_of_two))


def test_unreadable_files_are_no_wheels(tmp_path: Path) -> None:
    (tmp_path / f"tiny-1.0-{TAG}.whl").write_bytes(b"not a zip file")
    assert "cannot be read" in refusal(tmp_path / f"tiny-1.0-{TAG}.whl")
    (tmp_path / "tiny.tar.gz").write_bytes(b"")
    assert "is not a wheel's file name" in refusal(tmp_path / "tiny.tar.gz")
    assert "cannot be read" in refusal(write_wheel(tmp_path, {SO: extension("sm_90")[:200]}))


def library(*undefined: str, needed: tuple[str, ...] = ("libtorch.so",), machine: str = "x86_64") -> Library:
    return Library(machine, needed, frozenset(), frozenset(undefined))


def test_linked_libraries_and_cxx_abi_are_checked() -> None:
    new, old = "_ZNK5torch8autograd4Node4nameB5cxx11Ev", "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs"
    assert _library_problems(library(new), INPUTS) == []
    assert "uses the old C++ ABI" in _library_problems(library(old), INPUTS)[0]
    assert "uses the new C++ ABI" in _library_problems(library(new), {**INPUTS, "cxx11_abi": False})[0]
    assert _library_problems(library(old, needed=("libc.so.6",)), INPUTS) == []
    assert "is linked against CUDA 12 (libcudart.so.12); the stack has CUDA 13.0" in _library_problems(
        library(needed=("libcudart.so.12",)), INPUTS
    )
    assert _library_problems(library(needed=("libcudart.so.13",)), INPUTS) == []
    assert _library_problems(library(machine="aarch64"), INPUTS) == ["is for aarch64, not x86_64"]


def test_wheel_differences_are_described() -> None:
    theirs = {"torch": "2.6.0", "capabilities": ["8.0"], "post": "umask 022\n  build x", "files": [1], "python": "3.11"}
    ours = {
        "torch": "2.11.0",
        "capabilities": ["8.0", "9.0"],
        "post": "umask 022\n  build\nmore",
        "files": [2],
        "python": "3.11",
    }
    assert differences(theirs, ours) == [
        "capabilities: 8.0 there, 8.0 9.0 here",
        "files differs",
        "post differs, first in this line:\n    there: build x\n    here:  build",
        "torch: 2.6.0 there, 2.11.0 here",
    ]


@pytest.mark.parametrize("text", ["apex\n", "torch\nApex==0.9 \\\n  --hash=sha256:0\n", "  apex >= 0.1\n"])
def test_the_index_s_apex_is_refused_by_name(text: str) -> None:
    assert "not NVIDIA's apex" in (find_confusion(text) or "")


@pytest.mark.parametrize("text", ["apexpy\n", "# apex\n", "apex @ git+file:///srv/apex\n", "nvidia-apex\n", ""])
def test_other_packages_pass_the_name_confusion_check(text: str) -> None:
    assert find_confusion(text) is None
