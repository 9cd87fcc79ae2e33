"""Add packages to a recipe and remove them, with an index of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, EkibenError, UsageError
from ekiben.project.add import ChangeOptions, add_requirements, change_debian, remove_requirements, replace_packages
from ekiben.project.create import create_recipe
from ekiben.project.lock import read_below
from ekiben.project.sources import SourceSettings
from ekiben.spec.stack import find_stack
from support.own_recipes import lock, recipe_in
from support.package_index import Index, serve
from support.sample_recipe import RunCli

LOCK = "images/mine-packages.lock"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with serve(Index()) as index:
        index.add_wheel("one", "1.0")
        index.add_wheel("two", "1.0", requires=["one"])
        monkeypatch.setenv("UV_DEFAULT_INDEX", index.url())
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        yield index


@pytest.fixture
def folder(tmp_path: Path, index: Index) -> Path:
    create_recipe(tmp_path / "mine", layer="python")
    lock(tmp_path / "mine", "# mine\none  # why\n")
    index.add_wheel("one", "2.0")
    return tmp_path / "mine"


def content(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


def options(*, is_dry: bool = False, is_locked: bool = True) -> ChangeOptions:
    return ChangeOptions(is_dry=is_dry, is_locked=is_locked, settings=SourceSettings(only_binary=True))


def test_package_is_added_and_locked_and_versions_stay(folder: Path) -> None:
    before = content(folder)
    lines = list(add_requirements(recipe_in(folder), ["two"], options(is_dry=True)))
    assert content(folder) == before
    assert list(add_requirements(recipe_in(folder), ["two"], options())) == lines
    assert lines == ["mine/requirements.txt: + two", f"mine/{LOCK}: two (new) → 1.0"]
    assert (folder / "requirements.txt").read_text() == "# mine\none  # why\ntwo\n"
    lock(folder, check=True)
    assert list(remove_requirements(recipe_in(folder), ["Two"], options())) == [
        "mine/requirements.txt: - two",
        f"mine/{LOCK}: two 1.0 → (gone)",
    ]
    assert content(folder) == before


@pytest.mark.parametrize(
    ("removes", "names", "error"),
    [
        (False, ["one>5"], "does not go with the layers"),
        (False, ["missing"], "missing"),
        (False, ["two", "two==1"], "named twice"),
        (True, ["other"], r"other is not in .*requirements.txt\. Known: one"),
        (True, ["one"], "every package in it is already in the layer 'python'"),
    ],
)
def test_every_file_stays_where_that_fails(folder: Path, removes: bool, names: list[str], error: str) -> None:
    before = content(folder)
    change = remove_requirements if removes else add_requirements
    with pytest.raises(EkibenError, match=error):
        list(change(recipe_in(folder), names, options()))
    assert content(folder) == before


def test_a_list_that_another_names_and_a_project_are_edited(folder: Path) -> None:
    (folder / "requirements.txt").write_text("-r more.txt\n")
    (folder / "more.txt").write_text("one\n")
    assert "mine/more.txt: one → one<2" in list(add_requirements(recipe_in(folder), ["one<2"], options()))
    lock(folder, check=True)
    (folder / "requirements.txt").unlink()
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\ndependencies = ["one"]\n')
    lines = list(add_requirements(recipe_in(folder), ["two>=1"], options(is_locked=False)))
    assert lines[0] == "mine/pyproject.toml: + two>=1"
    assert "not locked" in lines[-1]
    assert '"two>=1"' in (folder / "pyproject.toml").read_text()


def test_a_folder_is_added_by_its_path_from_here_and_removed_by_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "src/tool").mkdir(parents=True)
    (folder / "src/tool/pyproject.toml").write_text('[project]\nname = "My_Tool"\nversion = "1"\n')
    monkeypatch.chdir(folder / "src")
    recipe, before = recipe_in(folder), content(folder)
    choice = options(is_locked=False)
    line, *_ = add_requirements(recipe, ["./tool[x]"], choice)
    assert line == "mine/requirements.txt: + ./src/tool[x]"
    with pytest.raises(UsageError, match="asks for my-tool already"):
        list(add_requirements(recipe, ["./tool"], choice))
    line, *_ = remove_requirements(recipe, ["my.tool"], choice)
    assert line == "mine/requirements.txt: - ./src/tool[x]"
    assert content(folder) == before
    list(add_requirements(recipe, ["./tool"], choice))
    list(remove_requirements(recipe, ["./tool"], choice))
    assert content(folder) == before


def test_a_package_of_the_layers_below_is_not_installed_again(folder: Path, index: Index) -> None:
    recipe = recipe_in(folder)
    index.add_wheel("pip", read_below(recipe, find_stack("cu130", recipe.image_folders)).versions["pip"])
    line, *_ = add_requirements(recipe_in(folder), ["pip"], options(is_dry=True))
    assert line.startswith("pip: the layers below have ")


def test_a_package_of_the_layers_below_is_replaced(folder: Path, index: Index) -> None:
    recipe, before = recipe_in(folder), content(folder)
    versions = read_below(recipe, find_stack("cu130", recipe.image_folders)).versions
    for name, version in (*versions.items(), ("pip", "999.1")):
        index.add_wheel(name, version)
    lines = list(replace_packages(recipe, ["pip>999"], options()))
    below = f"{versions['pip']} of the layer 'python'"
    cost = next(line for line in lines if line.startswith(f"pip 999.1 replaces {below}: "))
    assert re.search(r": \d+ B more, as the version below stays in its layer$", cost)
    assert "mine/images/mine-packages.lock: pip (new) → 999.1" in lines
    assert "mine/requirements.txt: + # replace: pip" in lines
    text = (folder / "images/mine-packages.def").read_text()
    assert "sed -i '/^pip==/,/" in text and "$/d' /opt/ekiben/locks/python.lock" in text
    assert f"# replaced: pip {below}\n" in (folder / LOCK).read_text()
    assert lock(folder, check=True) == ["mine: up to date"]
    assert list(replace_packages(recipe, ["pip"], options())) == ["mine: up to date"]
    list(remove_requirements(recipe, ["pip"], options()))
    assert content(folder) == before


@pytest.mark.parametrize(
    ("layer", "asked", "error"),
    [
        ("python", "two", "--replace two: no layer below has two"),
        ("pytorch", "torch", "torch .* of the layer 'pytorch' is not replaced: torch and its libraries"),
        ("pytorch", "nvidia-cublas", "is not replaced"),
        ("flash-attn", "flash-attn", "flash-attn is compiled by a layer below"),
    ],
)
def test_what_cannot_be_replaced_is_refused(folder: Path, layer: str, asked: str, error: str) -> None:
    path = folder / "images/mine-packages.def"
    path.write_text(path.read_text().replace("python.sif", f"{layer}.sif"))
    before = content(folder)
    with pytest.raises(UsageError, match=error):
        list(replace_packages(recipe_in(folder), [asked], options()))
    assert content(folder) == before


def test_a_replacement_that_a_layer_below_does_not_take_is_refused(folder: Path, index: Index) -> None:
    recipe, before = recipe_in(folder), content(folder)
    versions = read_below(recipe, find_stack("cu130", recipe.image_folders)).versions
    index.add_wheel("pip", "999.1")
    index.add_wheel("uv", versions["uv"], requires=[f"pip=={versions['pip']}"])
    with pytest.raises(DefinitionError, match=r"all versions of uv depend on pip=="):
        list(replace_packages(recipe, ["pip>999"], options()))
    assert content(folder) == before


def test_a_replacement_without_lines_in_the_layer_is_refused(folder: Path) -> None:
    with pytest.raises(DefinitionError, match=r"# replace: pip, and .*mine-packages\.def has no line for it"):
        lock(folder, "one\n# replace: pip\n")


def test_a_layer_that_installs_no_lock_is_named(folder: Path) -> None:
    (folder / "images/mine-packages.def").write_text("Bootstrap: localimage\nFrom: python.sif\n")
    with pytest.raises(UsageError, match=r"mine-packages\.def installs no images/mine-packages\.lock"):
        list(add_requirements(recipe_in(folder), ["two"], options()))


def test_debian_packages_change_the_definition_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))  # without apt
    recipe, before = recipe_in(folder), content(folder)
    lines = list(change_debian(recipe, ["git", "ffmpeg"], removes=False, options=options()))
    assert lines == [
        "mine/images/mine-packages.def: + git",
        "mine/images/mine-packages.def: + ffmpeg",
        "note: there is no apt-get here to ask whether the archive has them",
    ]
    assert "install -y --no-install-recommends git ffmpeg\n" in (folder / "images/mine-packages.def").read_text()
    assert list(change_debian(recipe, ["git"], removes=False, options=options())) == ["mine: up to date"]
    with pytest.raises(UsageError, match="no `apt-get install` line names gti"):
        list(change_debian(recipe, ["gti"], removes=True, options=options()))
    list(change_debian(recipe, ["git", "ffmpeg"], removes=True, options=options()))
    assert content(folder) == before


def test_the_recipe_is_the_last_word_or_this_folder(folder: Path, run_cli: RunCli) -> None:
    assert "no recipe is in this folder" in run_cli("add", "two", code=2).stderr
    assert "no package is named" in run_cli("add", folder, code=2).stderr
    done = run_cli("add", "--dry-run", "two", folder)
    assert "mine/requirements.txt: + two" in done.stdout
    assert "next" not in done.stderr
