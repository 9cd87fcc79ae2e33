"""Layers for another processor: which lock file counts, what is in the keys, how images are called, what is refused."""

from __future__ import annotations

import hashlib

import pytest

from ekiben.builder import build as building
from ekiben.builder.build import BuildContext, build, image_name
from ekiben.builder.plan import Options
from ekiben.core.errors import EngineError, UsageError
from ekiben.resolve.graph import ResolvedRecipe
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.store import Store
from support.sample_recipe import SampleRecipe, quiet, seeded

BOTH = ["amd64", "arm64"]


def resolved(name: SampleRecipe | str, arch: str, stack: str | None = None) -> ResolvedRecipe:
    return resolve(find_recipe(str(name.path) if isinstance(name, SampleRecipe) else name), stack=stack, arch=arch)


def test_platform_is_in_every_key_and_in_the_name(files_only: SampleRecipe) -> None:
    files_only.recipe(name="sample")
    files_only.stack(arguments={}, architectures=BOTH)
    amd64, arm64 = (resolved(files_only, arch) for arch in BOTH)
    assert {layer.inputs["platform"] for layer in arm64.layers} == {"linux/arm64"}
    assert not {layer.cache_key for layer in amd64.layers} & {layer.cache_key for layer in arm64.layers}
    assert (image_name(amd64), image_name(arm64)) == ("sample", "sample-arm64")
    assert arm64.recipe.image_name("other", "arm64") == "sample-other-arm64"


def test_lock_of_the_architecture_is_chosen_beside_the_common_one(sample: SampleRecipe) -> None:
    sample.stack(architectures=BOTH)
    sample.write("images/packages.lock", "one==1.0\n")
    sample.write("images/stacks/tiny/apt.lock", "[ground]\ncore=1\n")
    sample.replace("images/walls.def", "files/tool.sh /opt/tool.sh", "images/packages.lock /opt/packages.lock")

    def lock_of(arch: str) -> tuple[str, object]:
        ground, walls, *_ = resolved(sample, arch).layers
        (file,) = walls.files
        assert file.destination == "/opt/packages.lock"
        return file.sha256(), ground.inputs["packages"]

    common = (hashlib.sha256(b"one==1.0\n").hexdigest(), {"core": "1"})
    assert lock_of("amd64") == lock_of("arm64") == common
    before = resolved(sample, "amd64").layers
    sample.write("images/packages.arm64.lock", "one==1.0\ntwo==2.0\n")
    sample.write("images/stacks/tiny/apt.arm64.lock", "[ground]\ncore=2\n")
    assert lock_of("arm64") == (hashlib.sha256(b"one==1.0\ntwo==2.0\n").hexdigest(), {"core": "2"})
    assert lock_of("amd64") == common
    assert [layer.cache_key for layer in resolved(sample, "amd64").layers] == [layer.cache_key for layer in before]


def test_stack_without_locks_for_it_is_refused(files_only: SampleRecipe) -> None:
    with pytest.raises(UsageError, match=r"^--arch arm64: stack tiny is locked for amd64 only$") as caught:
        resolved(files_only, "arm64")
    assert caught.value.hint == "a stack that is locked for arm64: cu130, cu132, debian13"
    with pytest.raises(UsageError, match=r"--arch arm46: no such architecture\. Did you mean 'arm64'\?"):
        resolved(files_only, "arm46")


def test_layer_that_compiles_for_other_processors_is_refused(sample: SampleRecipe) -> None:
    sample.stack(arguments={}, architectures=BOTH)
    stage = (
        "Bootstrap: localimage\nFrom: ground.sif\nStage: build\n\n%post\n    true\n\n%labels\n   "
        " org.ekiben.architectures amd64\n\n"
    )
    sample.write(
        "images/walls.def",
        f"{stage}Bootstrap: localimage\nFrom: ground.sif\nStage: last\n\n%files from build\n    /output /output\n",
    )
    resolved(sample, "amd64")
    with pytest.raises(UsageError, match=r"--arch arm64: \S+/images/walls.def compiles walls for amd64 only"):
        resolved(sample, "arm64")


def test_build_without_emulation_does_not_start(files_only: SampleRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    files_only.stack(arguments={}, architectures=BOTH)
    asked: list[str] = []

    def refuse(arch: str) -> None:
        asked.append(arch)
        raise EngineError("no emulator")

    monkeypatch.setattr(building, "check_programs", refuse)
    monkeypatch.setattr(building, "host_arch", lambda: "amd64")
    store = Store(files_only.path.parent / "store")
    with pytest.raises(EngineError, match="no emulator"):
        build(BuildContext(resolved(files_only, "arm64"), store, Options(), quiet()))
    assert asked == ["arm64"]
    assert not store.root.exists()
    # Nothing has to run where only files are missing.
    store = seeded(files_only, store.root, "ground")
    assert build(BuildContext(resolved(files_only, "amd64"), store, Options(), quiet())).arch == "amd64"
    assert asked == ["arm64"]


def test_compiling_under_emulation_is_refused(sample: SampleRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "check_programs", lambda arch: None)
    monkeypatch.setattr(building, "host_arch", lambda: "amd64")
    sample.recipe(name="sample", stack="cu130", layer="flash-attn", tasks={})
    store = Store(sample.path.parent / "store")
    with pytest.raises(EngineError, match="no package index has flash-attn for arm64") as caught:
        build(BuildContext(resolved(sample, "arm64"), store, Options(), quiet()))
    assert f"wheels import {sample.path} --arch arm64 WHEEL" in str(caught.value.hint)
    assert not store.root.exists()


def test_python_locks_of_the_shipped_stacks_are_for_both() -> None:
    """Versions of wheels do not depend on the processor there; Debian's packages do, in part."""
    for stack in ("cu130", "cu132"):
        amd64, arm64 = (resolved("lora-opencalm", arch, stack) for arch in BOTH)
        for one, other in zip(amd64.layers[:-1], arm64.layers[:-1], strict=True):
            assert [file.sha256() for file in one.files] == [file.sha256() for file in other.files]
        packages = {layer.name: layer.inputs["packages"] for layer in arm64.layers if "packages" in layer.inputs}
        assert "binutils-aarch64-linux-gnu" in packages["compiler"]
