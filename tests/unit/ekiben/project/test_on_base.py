"""A recipe on a base of others: what is written, what is locked on it, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ekiben.core.environment import host_arch
from ekiben.core.errors import DefinitionError, EkibenError, LockMismatchError, UsageError
from ekiben.project.lock import lock_recipe
from ekiben.project.on_base import BaseRequest, create_on_base, find_base_request
from ekiben.project.shipped import shipped_tasks
from ekiben.project.sources import SourceSettings
from ekiben.resolve.resolve import resolve
from ekiben.spec.base_packages import BasePackage, BasePackages, Constraint
from ekiben.spec.recipe import find_recipe
from ekiben.spec.stack import read_pins
from support.own_recipes import recipe_in
from support.package_index import Index, serve

DIGEST = "sha256:" + "a" * 64
IMAGE = f"docker://registry.example.org/lab/torch@{DIGEST}"
TORCH = "2.9.0a0+50eac811a6.nv25.9"
BASE = BasePackages(
    digest=DIGEST,
    python="/opt/conda/bin/python",
    version="3.12.7",
    libc="glibc 2.35",
    packages=(
        BasePackage("numpy", "1.26.4"),
        BasePackage("pip", "24.0"),
        BasePackage("requests", "2.32.3", ('pysocks>=1.5; extra == "socks"',)),
        BasePackage("torch", TORCH),
    ),
    cuda="13.0",
    device_code=("sm_80", "sm_90a", "compute_120"),
    constraints=(Constraint("/etc/pip/constraint.txt", "held<2"), Constraint("/etc/pip/constraint.txt", "numpy<1")),
    unused=("/etc/pip/constraint.txt:3: x is not used",),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_on_base(tmp_path / "mine", _request(IMAGE), lambda recipe, stack: BASE)
    return tmp_path / "mine"


@pytest.fixture
def index() -> Iterator[Index]:
    """The index has numpy as the base has it, with a dependency that the base's lacks, and newer ones."""
    with serve(Index()) as served:
        served.add_wheel("numpy", "1.26.4", requires=["unwanted"])
        for name, versions in {
            "numpy": ["2.0.0"],
            "torch": ["2.8.0"],
            "held": ["1.5", "2.0"],
            "pysocks": ["1.7.1"],
        }.items():
            for version in versions:
                served.add_wheel(name, version)
        for name in ("unwanted", "plain"):
            served.add_wheel(name, "1.0")
        served.add_wheel("uses", "1.0", requires=["torch>=2.4", "numpy", "requests[socks]", "held"])
        served.add_wheel("modern", "1.0", requires=["numpy>=2"])
        yield served


def _request(source: str, **options: bool) -> BaseRequest:
    request = find_base_request(source, "cu130")
    assert request is not None
    return replace(request, **options)


def lock(folder: Path, index: Index, *lines: str, check: bool = False, base: BasePackages | None = BASE) -> list[str]:
    text = "".join(f"{line}\n" for line in (f"--index-url {index.url()}", *lines))
    (folder / "requirements.txt").write_text(text)
    read = (lambda recipe, stack: base) if base else None
    return list(lock_recipe(recipe_in(folder), check=check, settings=SourceSettings(only_binary=True, read_base=read)))


def pins(folder: Path) -> dict[str, str]:
    text = (folder / "images/mine-packages.lock").read_text()
    return {name: version for name, version, hashes in read_pins(text) if hashes}


def test_the_folder_names_what_the_base_has(folder: Path) -> None:
    stack = (folder / "images/stacks/mine/stack.yaml").read_text()
    for line in ("python: '3.12'", f"torch: {TORCH}", "- '8.0'\n- '9.0'\nepoch", "libc: glibc 2.35"):
        assert line in stack
    assert (
        f"Bootstrap: docker\nFrom: registry.example.org/lab/torch@{DIGEST}\n"
        in (folder / "images/mine-base.def").read_text()
    )
    assert (
        "- torch 2.9.0a0+50eac811a6.nv25.9 for CUDA 13.0, with code for sm_80 sm_90a"
        in (folder / "README.md").read_text()
    )
    assert not [path for path in folder.rglob("*") if path.is_file() and "@{" in path.read_text()]
    (folder / "images/mine-packages.lock").write_text("")
    resolved = resolve(find_recipe(str(folder)))
    command = next(file for file in resolved.top.files if file.destination == "/usr/local/bin/train")
    assert 'python="/opt/conda/bin/python"\n' in command.text()
    assert "export PATH=/opt/conda/bin:$PATH" in (folder / "images/mine-packages.def").read_text()


def test_only_what_is_missing_is_locked_and_the_base_stays(folder: Path, index: Index) -> None:
    lock(folder, index, "uses", "torch", "numpy>=1.20", "plain")
    assert pins(folder) == {"uses": "1.0", "pysocks": "1.7.1", "held": "1.5", "plain": "1.0"}
    assert lock(folder, index, "uses", "torch", "numpy>=1.20", "plain", check=True, base=None) == ["mine: up to date"]
    lock(folder, index, "torch")
    assert pins(folder) == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("modern", r"the layer 'mine-base' has numpy 1\.26\.4, and modern depends on numpy>=2"),
        ("numpy>=2", r"the layer 'mine-base' has numpy 1\.26\.4, and you ask for numpy>=2"),
        ("torch==2.8.0", r"the layer 'mine-base' has torch 2\.9\.0a0\+50eac811a6\.nv25\.9"),
        ("held>=2", r"/etc/pip/constraint\.txt of the base has held<2"),
    ],
)
def test_a_conflict_names_what_of_the_base_is_in_the_way(line: str, message: str, folder: Path, index: Index) -> None:
    with pytest.raises(DefinitionError, match=message):
        lock(folder, index, line)


def test_another_image_below_is_read_again(folder: Path, index: Index) -> None:
    lock(folder, index, "plain")
    definition, other = folder / "images/mine-base.def", "sha256:" + "b" * 64
    definition.write_text(definition.read_text().replace(DIGEST, other))
    with pytest.raises(LockMismatchError, match="lists the packages of another image"):
        lock(folder, index, "plain", check=True, base=None)
    newer = replace(BASE, digest=other, packages=(*BASE.packages, BasePackage("plain", "1.0")))
    assert "mine/images/mine-base.packages.json: lists the packages of another image" in lock(
        folder, index, "plain", base=newer
    )
    assert pins(folder) == {}
    assert other in (folder / "images/mine-base.packages.json").read_text()
    definition.write_text(definition.read_text().replace(other, DIGEST))
    with pytest.raises(DefinitionError, match=r'stack\.yaml: is not of the base, which has python "3\.13", libc musl'):
        lock(folder, index, "plain", base=replace(BASE, version="3.13.1", libc="musl"))


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    created = create_on_base(tmp_path / "mine", _request(IMAGE, is_dry=True), lambda recipe, stack: BASE)
    assert tmp_path / "mine/images/stacks/mine/stack.yaml" in created.texts
    assert created.notes[-1] == BASE.unused[0]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("docker://registry.example.org/A", "is not a reference"),
        ("docker://registry.example.org/a:", "the tag after the colon is missing"),
        ("shub://a/b", "shub"),
        ("docker://", "names no image"),
        ("none.sif", "there is no such file"),
    ],
)
def test_what_is_no_base_is_refused(source: str, message: str) -> None:
    with pytest.raises(EkibenError, match=message):
        find_base_request(source, "cu130")


@pytest.mark.parametrize(("recipe", "stack"), [("hello", "cu130"), ("lora-opencalm", "cu124"), ("fsdp-llama", "cu132")])
def test_tasks_of_a_recipe_of_ekibens_stand_on_a_base(recipe: str, stack: str, tmp_path: Path) -> None:
    tasks = shipped_tasks(recipe, stack)
    create_on_base(tmp_path / "mine", replace(_request(IMAGE), tasks=tasks), lambda recipe, stack: BASE)
    (tmp_path / "mine/images/mine-packages.lock").write_text("")
    created, shipped = find_recipe(str(tmp_path / "mine")), find_recipe(recipe)
    assert (created.file.name, created.file.stack, created.file.layer) == ("mine", "mine", "mine-packages")
    assert (created.file.tasks, created.file.test) == (shipped.file.tasks, shipped.file.test)
    assert created.members().keys() == shipped.members().keys()
    assert (
        (tmp_path / "mine/recipe.yaml").read_text().startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    )
    requirements = (tmp_path / "mine/requirements.txt").read_text()
    assert ("transformers==" in requirements) == (recipe != "hello")
    resolve(created)


@pytest.mark.parametrize(
    ("recipe", "base", "message"),
    [
        ("finetune", BASE, "its layer 'deepspeed-plain' is made for the torch of a stack"),
        ("lora-opencalmm", BASE, "no such recipe. Did you mean 'lora-opencalm'"),
        ("lora-opencalm", replace(BASE, packages=()), "its tasks need torch, and the base has none"),
        ("hello", replace(BASE, version="3.10.4"), r"its tasks need Python 3\.11, and the base has 3\.10\.4"),
    ],
)
def test_tasks_that_cannot_run_on_a_base_are_refused(
    recipe: str, base: BasePackages, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        tasks = shipped_tasks(recipe, "cu130")
        create_on_base(tmp_path / "mine", replace(_request(IMAGE), tasks=tasks), lambda recipe, stack: base)
    assert not (tmp_path / "mine").exists()


def test_an_old_torch_is_noted() -> None:
    old = replace(BASE, packages=(BasePackage("torch", "2.5.0a0+nv"),))
    assert shipped_tasks("fsdp-llama", "cu130").check(old) == ["the tasks were never run with a torch before 2.6.0"]


@pytest.mark.parametrize("source", ["python", "./Dockerfile", "."])
def test_layers_and_dockerfiles_are_no_bases(source: str) -> None:
    assert find_base_request(source, "cu130") is None


def test_wheels_are_for_the_c_library_of_the_base(folder: Path, index: Index) -> None:
    assert host_arch() in ("amd64", "arm64")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}[host_arch()]
    for version, tag in (("1.0", "manylinux_2_34"), ("2.0", "manylinux_2_36")):
        index.add_wheel("compiled", version)
        data = index.files.pop(f"compiled-{version}-py3-none-any.whl")
        index.files[f"compiled-{version}-cp312-cp312-{tag}_{machine}.whl"] = data
    lock(folder, index, "compiled")
    assert pins(folder) == {"compiled": "1.0"}
