"""Modulefiles of a published image, read by Environment Modules and by Lmod: what is loaded by which name, what is not
found.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.inner_path import InnerPath
from ekiben.publish.prune import prune
from ekiben.publish.publish import Published
from ekiben.store.shared import SharedStore
from support.module_systems import NAMES, ModuleSystem, module_system
from support.published import Lab, version

pytestmark = pytest.mark.covers("ekiben/run", "ekiben/publish")


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


def test_default_module_is_the_current_version(lab: Lab, modules: ModuleSystem) -> None:
    first = lab.put(version="9", tags=["stable", "default"], module=True)
    assert loaded(modules, lab.folder, "ekiben/own") == first.sif.name
    second = lab.put_next(version="10")
    third = lab.put_next(version="11", current=False)
    for name, done in {
        "ekiben/own": second,
        "ekiben/own/current": second,
        "ekiben/own/stable": first,
        "ekiben/own/9": first,
        "ekiben/own/10": second,
        "ekiben/own/11": third,
        **{f"ekiben/own/{version(done)}": done for done in (first, second, third)},
    }.items():
        assert loaded(modules, lab.folder, name) == done.sif.name, name
    # A link that is moved by hand is followed as well.
    current = first.sif.with_name("current")
    current.unlink()
    current.symlink_to(first.sif.name)
    assert loaded(modules, lab.folder, "ekiben/own") == first.sif.name


def test_version_without_digest_loads_newest_or_tag(lab: Lab, modules: ModuleSystem) -> None:
    first = lab.put(version="2.0", module=True)
    short = str(first.module).rpartition("-")[0]
    os.utime(first.sif.with_suffix(".module"), (1, 1))
    second = lab.put_next(version="2.0", current=False)
    assert loaded(modules, lab.folder, short) == second.sif.name
    first.sif.with_name("2.0").symlink_to(first.sif.name)
    assert loaded(modules, lab.folder, short) == first.sif.name


def test_module_works_after_a_move_and_through_a_link(lab: Lab, modules: ModuleSystem, tmp_path: Path) -> None:
    """As where nodes see it under another path, and where a site takes the modules into its own tree."""
    done = lab.put(module=True)
    folder = lab.folder.rename(tmp_path / "elsewhere")
    assert loaded(modules, folder, "ekiben/own") == done.sif.name
    (tmp_path / "site/modulefiles").mkdir(parents=True)
    (tmp_path / "site/modulefiles/ekiben").symlink_to(folder / "modulefiles/ekiben")
    assert loaded(modules, tmp_path / "site", "ekiben/own") == done.sif.name


def other_image(lab: Lab) -> Published:
    """A second image in the same folder, with a task of the same name."""
    lab.recipe.recipe(name="other")
    done = lab.put(module=True)
    lab.recipe.recipe()
    return done


def test_one_image_is_loaded_at_a_time(lab: Lab, modules: ModuleSystem) -> None:
    """Both have a task `greet`; a version of the same image has, too."""
    first, second = lab.put(module=True), lab.put_next()
    other = other_image(lab)
    for name, done in {f"ekiben/own/{version(second)}": second, "ekiben/other": other}.items():
        before = f"ekiben/own/{version(first)}"
        if modules.name == "lmod":
            assert loaded(modules, lab.folder, before, name) == done.sif.name
        else:
            assert loaded(modules, lab.folder, before, name) == first.sif.name
            assert "onflict" in module_output(modules, lab.folder, f"module load {before}; module load {name}")
        script = f"module load {before}\nmodule swap {before} {name}\necho $PATH; module purge; echo $PATH"
        paths = modules.run(lab.folder / "modulefiles", script, home=lab.folder.parent).stdout
        assert paths.splitlines() == [f"{done.sif.with_suffix('.bin')}:/usr/bin:/bin", "/usr/bin:/bin"]


def test_pruned_version_has_no_module(lab: Lab, modules: ModuleSystem) -> None:
    first, second = lab.put(module=True), lab.put_next()
    assert loaded(modules, lab.folder, f"ekiben/own/{version(first)}") == first.sif.name
    prune(lab.folder, names=[first.sif.name])
    left = {path.name for path in first.sif.parent.iterdir() if path.name.startswith(first.sif.stem)}
    assert left == {f"{first.sif.stem}.removed"}  # who removed it, and when
    assert {path.name for path in (lab.folder / "modulefiles/ekiben/own").iterdir()} == {".modulerc", version(second)}
    assert version(first) not in module_output(modules, lab.folder, "module avail")
    missing = module_output(modules, lab.folder, f"module load ekiben/own/{version(first)}; echo [$EKIBEN_IMAGE]")
    assert "[]" in missing
    assert "unknown" in missing or "Unable to locate a modulefile" in missing
    assert loaded(modules, lab.folder, "ekiben/own") == second.sif.name
    prune(lab.folder, grace=0)
    assert list((lab.folder / "trash").iterdir()) == []


def test_module_linked_during_prune_is_kept(lab: Lab, modules: ModuleSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lab.put(module=True)
    lab.put_next()
    discard = SharedStore.discard

    def link_and_discard(shared: SharedStore, path: InnerPath) -> None:
        if path.name == f"{first.sif.stem}.json":
            first.sif.with_name("mine").symlink_to(first.sif.name)
        discard(shared, path)

    monkeypatch.setattr(SharedStore, "discard", link_and_discard)
    prune(lab.folder, names=[first.sif.name])
    assert loaded(modules, lab.folder, "ekiben/own/mine") == first.sif.name


NASTY = 'A "quoted" {brace [exit 7] $env(HOME) \\ ]===] os.exit(7) 日本語 é # %s'


def test_help_and_whatis_texts_are_verbatim(lab: Lab, modules: ModuleSystem) -> None:
    lab.recipe.recipe(description=f"{NASTY}\n second line", tasks={"greet": {"entrypoint": "greet.py", "help": NASTY}})
    done = lab.put(version="1", module=True)
    shown = NASTY.replace("]=", "] =")
    about = module_output(modules, lab.folder, "module help ekiben/own")
    assert f"own {version(done)}: {shown} second line" in about
    assert f"  greet  {shown}\n" in about
    assert "EKIBEN_CPU=1" in about
    assert "programs of the host with these names are hidden" in about
    assert f"own {version(done)}: {shown} second line" in module_output(modules, lab.folder, "module whatis ekiben/own")
    # In a locale without these letters, too, nothing breaks.
    assert "second line" in module_output(modules, lab.folder, "module help ekiben/own", env={"LC_ALL": "C"})
    listed = module_output(modules, lab.folder, "module show ekiben/own")
    assert f"{done.sif.with_suffix('.bin')}" in listed
    assert "ERROR" not in listed
