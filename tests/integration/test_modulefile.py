"""Modulefiles of a published image, read by Environment Modules and by Lmod: what is loaded by which name, what is not found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ekiben.publish.prune import prune
from ekiben.publish.publish import Published
from ekiben.store import Store
from ekiben.store.shared import SharedStore
from support.module_systems import NAMES, ModuleSystem, module_system
from support.published import put, put_next, version
from support.sample_recipe import SampleRecipe

pytestmark = pytest.mark.covers("ekiben/run", "ekiben/publish")


@pytest.fixture
def shared_dir(tmp_path: Path) -> Path:
    return tmp_path / "lab"


@pytest.fixture(params=NAMES)
def modules(request: pytest.FixtureRequest) -> ModuleSystem:
    return module_system(request.param)


def module_output(modules: ModuleSystem, shared_dir: Path, script: str, **options: Any) -> str:
    """What the script prints, messages of `module` included."""
    done = modules.run(shared_dir / "modulefiles", script, home=shared_dir.parent, **options)
    return done.stdout + done.stderr


def loaded(modules: ModuleSystem, shared_dir: Path, *names: str) -> str:
    """Which SIF's command `greet` is, after these were loaded one after the other."""
    script = "".join(f"module load {name}\n" for name in names)
    done = modules.run(
        shared_dir / "modulefiles", f"{script}command -v greet; echo $EKIBEN_IMAGE", home=shared_dir.parent
    )
    assert done.stdout.count("\n") == 2, done.stdout + done.stderr
    command, image = map(Path, done.stdout.splitlines())
    assert command.parent == image.with_suffix(".bin")
    assert image.is_file()
    return image.name


def test_default_module_is_the_current_version(
    modules: ModuleSystem, files_only: SampleRecipe, store: Store, shared_dir: Path
) -> None:
    first = put(files_only, store, shared_dir, version="9", tags=["stable", "default"], module=True)
    assert loaded(modules, shared_dir, "ekiben/own") == first.sif.name
    second = put_next(files_only, store, shared_dir, version="10")
    third = put_next(files_only, store, shared_dir, version="11", current=False)
    for name, done in {
        "ekiben/own": second, "ekiben/own/current": second, "ekiben/own/stable": first,
        "ekiben/own/9": first, "ekiben/own/10": second, "ekiben/own/11": third,
        **{f"ekiben/own/{version(done)}": done for done in (first, second, third)},
    }.items():  # fmt: skip
        assert loaded(modules, shared_dir, name) == done.sif.name, name
    # A link that is moved by hand is followed as well.
    current = first.sif.with_name("current")
    current.unlink()
    current.symlink_to(first.sif.name)
    assert loaded(modules, shared_dir, "ekiben/own") == first.sif.name


def test_version_without_digest_loads_newest_or_tag(
    modules: ModuleSystem, files_only: SampleRecipe, store: Store, shared_dir: Path
) -> None:
    first = put(files_only, store, shared_dir, version="2.0", module=True)
    short = str(first.module).rpartition("-")[0]
    os.utime(first.sif.with_suffix(".module"), (1, 1))
    second = put_next(files_only, store, shared_dir, version="2.0", current=False)
    assert loaded(modules, shared_dir, short) == second.sif.name
    first.sif.with_name("2.0").symlink_to(first.sif.name)
    assert loaded(modules, shared_dir, short) == first.sif.name


def test_module_works_after_a_move_and_through_a_link(
    modules: ModuleSystem, files_only: SampleRecipe, store: Store, shared_dir: Path, tmp_path: Path
) -> None:
    """As where nodes see it under another path, and where a site takes the modules into its own tree."""
    done = put(files_only, store, shared_dir, module=True)
    shared_dir = shared_dir.rename(tmp_path / "elsewhere")
    assert loaded(modules, shared_dir, "ekiben/own") == done.sif.name
    (tmp_path / "site/modulefiles").mkdir(parents=True)
    (tmp_path / "site/modulefiles/ekiben").symlink_to(shared_dir / "modulefiles/ekiben")
    assert loaded(modules, tmp_path / "site", "ekiben/own") == done.sif.name


def other_image(files_only: SampleRecipe, store: Store, shared_dir: Path) -> Published:
    """A second image in the same folder, with a task of the same name."""
    files_only.recipe(name="other")
    done = put(files_only, store, shared_dir, module=True)
    files_only.recipe()
    return done


def test_one_image_is_loaded_at_a_time(
    modules: ModuleSystem, files_only: SampleRecipe, store: Store, shared_dir: Path
) -> None:
    """Both have a task `greet`; a version of the same image has, too."""
    first, second = put(files_only, store, shared_dir, module=True), put_next(files_only, store, shared_dir)
    other = other_image(files_only, store, shared_dir)
    for name, done in {f"ekiben/own/{version(second)}": second, "ekiben/other": other}.items():
        before = f"ekiben/own/{version(first)}"
        if modules.name == "lmod":
            assert loaded(modules, shared_dir, before, name) == done.sif.name
        else:
            assert loaded(modules, shared_dir, before, name) == first.sif.name
            assert "onflict" in module_output(modules, shared_dir, f"module load {before}; module load {name}")
        script = f"module load {before}\nmodule swap {before} {name}\necho $PATH; module purge; echo $PATH"
        paths = modules.run(shared_dir / "modulefiles", script, home=shared_dir.parent).stdout
        assert paths.splitlines() == [f"{done.sif.with_suffix('.bin')}:/usr/bin:/bin", "/usr/bin:/bin"]


def test_pruned_version_has_no_module(
    modules: ModuleSystem, files_only: SampleRecipe, store: Store, shared_dir: Path
) -> None:
    first, second = put(files_only, store, shared_dir, module=True), put_next(files_only, store, shared_dir)
    assert loaded(modules, shared_dir, f"ekiben/own/{version(first)}") == first.sif.name
    prune(shared_dir, names=[first.sif.name])
    assert {path.name for path in first.sif.parent.iterdir() if path.name.startswith(first.sif.stem)} == set()
    assert {path.name for path in (shared_dir / "modulefiles/ekiben/own").iterdir()} == {".modulerc", version(second)}
    assert version(first) not in module_output(modules, shared_dir, "module avail")
    missing = module_output(modules, shared_dir, f"module load ekiben/own/{version(first)}; echo [$EKIBEN_IMAGE]")
    assert "[]" in missing
    assert "unknown" in missing or "Unable to locate a modulefile" in missing
    assert loaded(modules, shared_dir, "ekiben/own") == second.sif.name
    prune(shared_dir, grace=0)
    assert list((shared_dir / "trash").iterdir()) == []


def test_module_of_a_version_linked_during_prune_is_kept(
    modules: ModuleSystem, files_only: SampleRecipe, store: Store, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put(files_only, store, shared_dir, module=True)
    put_next(files_only, store, shared_dir)
    discard = SharedStore.discard

    def link_and_discard(shared: SharedStore, path: Path) -> None:
        if path.name == f"{first.sif.stem}.json":
            first.sif.with_name("mine").symlink_to(first.sif.name)
        discard(shared, path)

    monkeypatch.setattr(SharedStore, "discard", link_and_discard)
    prune(shared_dir, names=[first.sif.name])
    assert loaded(modules, shared_dir, "ekiben/own/mine") == first.sif.name


NASTY = 'A "quoted" {brace [exit 7] $env(HOME) \\ ]===] os.exit(7) 日本語 é # %s'


def test_help_and_whatis_texts_are_verbatim(
    modules: ModuleSystem, files_only: SampleRecipe, store: Store, shared_dir: Path
) -> None:
    files_only.recipe(description=f"{NASTY}\n second line", tasks={"greet": {"entrypoint": "greet.py", "help": NASTY}})
    done = put(files_only, store, shared_dir, version="1", module=True)
    shown = NASTY.replace("]=", "] =")
    about = module_output(modules, shared_dir, "module help ekiben/own")
    assert f"own {version(done)}: {shown} second line" in about
    assert f"  greet  {shown}\n" in about
    assert "EKIBEN_CPU=1" in about
    assert "programs of the host with these names are hidden" in about
    assert f"own {version(done)}: {shown} second line" in module_output(modules, shared_dir, "module whatis ekiben/own")
    # In a locale without these letters, too, nothing breaks.
    assert "second line" in module_output(modules, shared_dir, "module help ekiben/own", env={"LC_ALL": "C"})
    listed = module_output(modules, shared_dir, "module show ekiben/own")
    assert f"{done.sif.with_suffix('.bin')}" in listed
    assert "ERROR" not in listed
