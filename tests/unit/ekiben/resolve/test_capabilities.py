"""Compute capabilities: which are known to which CUDA, which are wanted, which code serves which."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, UsageError
from ekiben.gpu.devices import nvidia_gpus
from ekiben.resolve.capabilities import (
    check_torch,
    coverage_problem,
    filter_archs,
    has_cxx11_abi,
    known_capabilities,
    native,
    supported_archs,
)
from ekiben.spec.stack import find_stack
from support.sample_recipe import SampleRecipe


def test_capabilities_known_to_a_cuda_version() -> None:
    assert "9.0" in known_capabilities("11.8")
    assert "3.5" in known_capabilities("11.8")
    assert known_capabilities("12.4")[-1] == "9.0"
    assert "7.0" in known_capabilities("12.9")
    assert "7.0" not in known_capabilities("13.0")
    assert {"10.0", "12.1"} <= {*known_capabilities("13.2")}
    with pytest.raises(DefinitionError, match=r"nothing is known of a CUDA before 11\.8"):
        known_capabilities("11.7")


def test_gpu_arch_outside_the_stack(sample: SampleRecipe) -> None:
    folders = [sample.path / "images"]
    stack = find_stack("tiny", folders)
    assert filter_archs(stack, "9.0,8.0, 9.0", folders).file.compute_capabilities == ("8.0", "9.0")
    sample.write(
        "images/stacks/old/stack.yaml",
        (sample.path / "images/stacks/tiny/stack.yaml")
        .read_text()
        .replace('"tiny"', '"old"')
        .replace('"13.0"', '"12.4"'),
    )
    with pytest.raises(
        UsageError, match=r"--gpu-arch 7\.0: CUDA 13\.0 of stack tiny does not know it; it knows 7\.5, 8\.0"
    ) as error:
        filter_archs(stack, "7.0", folders)
    assert error.value.hint == "a stack that does: old"
    with pytest.raises(UsageError, match=r"9\.9.*does not know it") as error:
        filter_archs(stack, "9.9", folders)
    assert error.value.hint == "no stack here does"
    for odd in ("sm_90", "90", ""):
        with pytest.raises(UsageError, match="is not a compute capability"):
            filter_archs(stack, odd, folders)


def test_native_gpu_arch() -> None:
    if nvidia_gpus()[0]:
        assert native()
    else:
        with pytest.raises(UsageError, match="no NVIDIA GPU is found on this machine"):
            native()


def test_package_for_newer_gpus_only() -> None:
    assert supported_archs(["7.5", "8.0", "10.0"], "8.0", Path("x.def")) == ["8.0", "10.0"]
    assert supported_archs(["7.5"], None, Path("x.def")) == ["7.5"]
    with pytest.raises(
        UsageError,
        match=r"x\.def: what it compiles needs compute capability 8\.0 or later; the build selects only 7\.5",
    ):
        supported_archs(["7.5"], "8.0", Path("x.def"))
    with pytest.raises(DefinitionError, match=r"x\.def: many is not a compute capability"):
        supported_archs(["7.5"], "many", Path("x.def"))


@pytest.mark.parametrize(
    ("wanted", "code", "problem"),
    [
        (["8.0", "9.0"], ["sm_80", "sm_90"], None),
        (["8.0", "8.6", "9.0"], ["sm_80", "sm_90"], None),
        (["9.0"], ["sm_90a"], None),
        (["9.0"], ["sm_90", "compute_90"], None),
        (["8.0", "9.0"], ["sm_90"], "no device code for compute capability 8.0 (there is: sm_90)"),
        (["8.0"], ["sm_86"], "no device code for compute capability 8.0 (there is: sm_86)"),
        (["10.3"], ["sm_100a"], "no device code for compute capability 10.3 (there is: sm_100a)"),
        (["9.0"], ["compute_90"], "no device code for compute capability 9.0 (there is: none)"),
        (["9.0"], ["sm_80", "sm_90"], "device code that is not wanted: sm_80 (wanted: 9.0)"),
    ],
)
def test_capability_coverage_is_exact(wanted: list[str], code: list[str], problem: str | None) -> None:
    assert coverage_problem(wanted, code) == problem


def test_cxx11_abi_of_torch() -> None:
    assert [
        has_cxx11_abi(*pair) for pair in (("2.11.0", "13.0"), ("2.6.0", "12.4"), ("2.6.0", "12.6"), ("2.2.0", "11.8"))
    ] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("lock", "pin", "message"),
    [
        ("pytorch.lock", "nvidia-cuda-runtime-cu12==12.4.127", "torch 2.11.0 is of CUDA 12.4"),
        ("pytorch.lock", "torch==2.6.0", "torch 2.11.0, but"),
        ("toolkit.lock", "nvidia-cuda-nvcc==13.2.51", "the compiler is of CUDA 13.2"),
    ],
)
def test_mismatched_torch_and_cuda_are_refused(sample: SampleRecipe, lock: str, pin: str, message: str) -> None:
    stack = find_stack("tiny", [sample.path / "images"])
    (stack.folder / "pytorch.lock").write_text("torch==2.11.0 \\\nnvidia-cuda-runtime==13.0.96 \\\n")
    check_torch(stack)
    (stack.folder / lock).write_text(f"{pin} \\\n")
    with pytest.raises(DefinitionError, match=message):
        check_torch(stack)
