"""Modulefiles of a published image, read by Environment Modules and by Lmod: what is loaded by which name, what is not found."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from builder.errors import UsageError
from builder.modulefile import check_place, command_files
from builder.publish import Published, prune, publish
from builder.shared import SharedStore
from builder.store import Store
from module_systems import NAMES, ModuleSystem, module_system
from own_recipe import Own, RunCli, chain_of, seeded
from test_publish import image_of, put, put_next, quiet, unused


@pytest.fixture
def store(flat: Own, tmp_path: Path) -> Store:
    return seeded(flat, tmp_path / "store", "ground")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "lab"


@pytest.fixture(params=NAMES)
def modules(request: pytest.FixtureRequest) -> ModuleSystem:
    return module_system(request.param)


def said(modules: ModuleSystem, place: Path, script: str, **options: Any) -> str:
    """What the script prints, messages of `module` included."""
    done = modules.run(place / "modulefiles", script, home=place.parent, **options)
    return done.stdout + done.stderr


def loaded(modules: ModuleSystem, place: Path, *names: str) -> str:
    """Which SIF's command `greet` is, after these were loaded one after the other."""
    script = "".join(f"module load {name}\n" for name in names)
    done = modules.run(place / "modulefiles", f"{script}command -v greet; echo $EKIBEN_IMAGE", home=place.parent)
    assert done.stdout.count("\n") == 2, done.stdout + done.stderr
    command, image = map(Path, done.stdout.splitlines())
    assert command.parent == image.with_suffix(".bin")
    assert image.is_file()
    return image.name


def version(done: Published) -> str:
    return done.sif.stem.removeprefix("own-")


# ------------------------------------------------------------------------------------------------------------ what is there


def test_a_module_is_files_of_its_version(flat: Own, store: Store, place: Path) -> None:
    before = os.umask(0o077)
    try:
        done = put(flat, store, place, version="1.2", module=True)
    finally:
        os.umask(before)
    assert done.module == f"ekiben/own/{version(done)}"
    stem, folder = done.sif.stem, place / "modulefiles/ekiben/own"
    assert {path.name for path in folder.iterdir()} == {".modulerc", version(done)}
    assert (folder / version(done)).readlink() == Path(f"../../../images/own/{stem}.module")
    commands = done.sif.with_suffix(".bin")
    assert {path.name for path in commands.iterdir()} == {"greet", "ekiben-own"}
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in (*commands.iterdir(), *folder.parent.rglob("*"))
             if path.is_file() and not path.is_symlink()}  # fmt: skip
    assert {mode for path, mode in modes.items() if path.parent == commands} == {0o555}
    assert {mode for path, mode in modes.items() if path.parent != commands} == {0o444}
    for made in (commands, folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o2755
    assert stat.S_IMODE(done.sif.with_suffix(".module").stat().st_mode) == 0o444


def test_it_is_added_to_what_was_there_and_later_versions_have_it(flat: Own, store: Store, place: Path) -> None:
    first = put(flat, store, place)
    assert first.module is None
    assert not (place / "modulefiles").exists()
    kept = {path: path.lstat().st_mtime_ns for path in place.rglob("*") if not path.is_dir()}
    again = put(flat, store, place, module=True)
    assert (again.made, again.module) == (False, f"ekiben/own/{version(first)}")
    assert kept == {path: path.lstat().st_mtime_ns for path in kept}
    kept = {path: path.lstat().st_mtime_ns for path in place.rglob("*") if not path.is_dir()}
    put(flat, store, place, module=True)
    assert kept == {path: path.lstat().st_mtime_ns for path in place.rglob("*") if not path.is_dir()}
    assert put_next(flat, store, place).module  # else `module load` would stay behind `current`


def test_an_end_at_any_rename_leaves_no_half_module(
    flat: Own, store: Store, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found is whole; the next run adds what is missing."""
    image, rename, where, count, ended = image_of(flat, store), os.rename, 0, 0, True
    publish(image, store, place, quiet(), check=False)

    def end(source: Any, target: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count == where:
            raise KeyboardInterrupt
        rename(source, target, **options)

    while ended:
        where, count, ended = where + 1, 0, False
        shutil.rmtree(place / "modulefiles", ignore_errors=True)
        for path in (place / "images/own").glob("*.bin"):
            shutil.rmtree(path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", end)
            try:
                done = publish(image, store, place, quiet(), check=False, module=True)
            except KeyboardInterrupt:
                ended = True
        if ended:
            found = [path for path in (place / "modulefiles").glob("ekiben/own/[0-9]*") if path.exists()]
            assert found == []
            done = publish(image, store, place, quiet(), check=False, module=True)
        assert (place / "modulefiles" / str(done.module)).is_file()
        assert len(list(done.sif.with_suffix(".bin").iterdir())) == 2
    assert where == 10  # four folders, two commands, two files of Tcl, the link; and then none


@pytest.mark.parametrize("name", ["two words", "a:b", "a'b", "$HOME", "a;b", "a(b"])
def test_a_place_that_no_module_path_can_have_is_refused(name: str, tmp_path: Path, flat: Own, store: Store) -> None:
    with pytest.raises(UsageError, match="Lmod cannot read modulefiles there"):
        put(flat, store, tmp_path / name, module=True)
    assert not (tmp_path / name).exists()
    put(flat, store, tmp_path / name)  # the image itself may lie there


def test_other_places_are_not_refused() -> None:
    check_place(Path("/gs1/groups/gaa50000/共有/ekiben-2.0+x_y"))


# ----------------------------------------------------------------------------------------------------------- which is loaded


def test_the_default_is_what_is_current(modules: ModuleSystem, flat: Own, store: Store, place: Path) -> None:
    first = put(flat, store, place, version="9", tags=["stable", "default"], module=True)
    assert loaded(modules, place, "ekiben/own") == first.sif.name
    second = put_next(flat, store, place, version="10")
    third = put_next(flat, store, place, version="11", current=False)
    for name, done in {
        "ekiben/own": second, "ekiben/own/current": second, "ekiben/own/stable": first,
        **{f"ekiben/own/{version(done)}": done for done in (first, second, third)},
    }.items():  # fmt: skip
        assert loaded(modules, place, name) == done.sif.name, name
    # A link that is moved by hand is followed as well.
    current = first.sif.with_name("current")
    current.unlink()
    current.symlink_to(first.sif.name)
    assert loaded(modules, place, "ekiben/own") == first.sif.name


def test_a_place_that_moved_and_a_link_to_its_modules(
    modules: ModuleSystem, flat: Own, store: Store, place: Path, tmp_path: Path
) -> None:
    """As where nodes see it under another path, and where a site takes the modules into its own tree."""
    done = put(flat, store, place, module=True)
    place = place.rename(tmp_path / "elsewhere")
    assert loaded(modules, place, "ekiben/own") == done.sif.name
    (tmp_path / "site/modulefiles").mkdir(parents=True)
    (tmp_path / "site/modulefiles/ekiben").symlink_to(place / "modulefiles/ekiben")
    assert loaded(modules, tmp_path / "site", "ekiben/own") == done.sif.name


def other_image(flat: Own, store: Store, place: Path) -> Published:
    """A second image in the same place, with a task of the same name."""
    flat.recipe(name="other")
    done = put(flat, store, place, module=True)
    flat.recipe()
    return done


def test_one_image_is_loaded_at_a_time(modules: ModuleSystem, flat: Own, store: Store, place: Path) -> None:
    """Both have a task `greet`; a version of the same image has, too."""
    first, second = put(flat, store, place, module=True), put_next(flat, store, place)
    other = other_image(flat, store, place)
    for name, done in {f"ekiben/own/{version(second)}": second, "ekiben/other": other}.items():
        before = f"ekiben/own/{version(first)}"
        if modules.name == "lmod":
            assert loaded(modules, place, before, name) == done.sif.name
        else:
            assert loaded(modules, place, before, name) == first.sif.name
            assert "onflict" in said(modules, place, f"module load {before}; module load {name}")
        script = f"module load {before}\nmodule swap {before} {name}\necho $PATH; module purge; echo $PATH"
        paths = modules.run(place / "modulefiles", script, home=place.parent).stdout
        assert paths.splitlines() == [f"{done.sif.with_suffix('.bin')}:/usr/bin:/bin", "/usr/bin:/bin"]


def test_what_was_pruned_is_not_found(modules: ModuleSystem, flat: Own, store: Store, place: Path) -> None:
    first, second = put(flat, store, place, module=True), put_next(flat, store, place)
    assert loaded(modules, place, f"ekiben/own/{version(first)}") == first.sif.name
    prune(place, names=[first.sif.name])
    assert {path.name for path in first.sif.parent.iterdir() if path.name.startswith(first.sif.stem)} == set()
    assert {path.name for path in (place / "modulefiles/ekiben/own").iterdir()} == {".modulerc", version(second)}
    assert version(first) not in said(modules, place, "module avail")
    missing = said(modules, place, f"module load ekiben/own/{version(first)}; echo [$EKIBEN_IMAGE]")
    assert "[]" in missing
    assert "unknown" in missing or "Unable to locate a modulefile" in missing
    assert loaded(modules, place, "ekiben/own") == second.sif.name
    prune(place, grace=0)
    assert list((place / "trash").iterdir()) == []


def test_what_a_killed_prune_left_is_not_found_for_long(
    flat: Own, store: Store, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put(flat, store, place, module=True)
    put_next(flat, store, place)
    discard, count = SharedStore.discard, 0

    def end(shared: SharedStore, path: Path) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        discard(shared, path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SharedStore, "discard", end)
        prune(place, names=[first.sif.name])
    assert (place / "modulefiles" / str(first.module)).exists()
    unused(place, 1.5)
    prune(place)
    assert not os.path.lexists(place / "modulefiles" / str(first.module))
    assert not list(first.sif.parent.glob(f"{first.sif.stem}*"))


def test_one_who_links_it_while_it_is_removed_keeps_its_module(
    modules: ModuleSystem, flat: Own, store: Store, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put(flat, store, place, module=True)
    put_next(flat, store, place)
    discard = SharedStore.discard

    def link_and_discard(shared: SharedStore, path: Path) -> None:
        if path.name == f"{first.sif.stem}.json":
            first.sif.with_name("mine").symlink_to(first.sif.name)
        discard(shared, path)

    monkeypatch.setattr(SharedStore, "discard", link_and_discard)
    prune(place, names=[first.sif.name])
    assert loaded(modules, place, "ekiben/own/mine") == first.sif.name


# ------------------------------------------------------------------------------------------------------------- what is said

NASTY = 'A "quoted" {brace [exit 7] $env(HOME) \\ ]===] os.exit(7) 日本語 é # %s'


def test_help_and_whatis_say_texts_as_they_are(modules: ModuleSystem, flat: Own, store: Store, place: Path) -> None:
    flat.recipe(description=f"{NASTY}\n second line", tasks={"greet": {"entrypoint": "greet.py", "help": NASTY}})
    done = put(flat, store, place, version="1", module=True)
    shown = NASTY.replace("]=", "] =")
    about = said(modules, place, "module help ekiben/own")
    assert f"own {version(done)}: {shown} second line" in about
    assert f"  greet  {shown}\n" in about
    assert "EKIBEN_CPU=1" in about
    assert "programs of the host with these names are hidden" in about
    assert f"own {version(done)}: {shown} second line" in said(modules, place, "module whatis ekiben/own")
    # In a locale without these letters, too, nothing breaks.
    assert "second line" in said(modules, place, "module help ekiben/own", env={"LC_ALL": "C"})
    listed = said(modules, place, "module show ekiben/own")
    assert f"{done.sif.with_suffix('.bin')}" in listed
    assert "ERROR" not in listed


def test_by_command(run_cli: RunCli, flat: Own, store: Store, place: Path, tmp_path: Path) -> None:
    words = ("--store", store.root, "publish", flat.path, "--to", place, "--no-verify", "--modulefile")
    out = run_cli(*words).stdout
    assert f"module     module use {place}/modulefiles; module load ekiben/own\n" in out
    flat.write("files/data.txt", "new\n")
    out = run_cli(*words[:-1], "--no-current", "--version", "2").stdout
    assert "; module load ekiben/own/2-" in out
    refused = run_cli(*words[:5], tmp_path / "a b", *words[6:], code=2)
    assert f"' ' in {tmp_path}/a b: Lmod cannot read modulefiles there" in refused.stderr


# ---------------------------------------------------------------------------------------------------------------- the commands


def test_the_commands_are_plain_sh(tmp_path: Path) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed (tests/services.sh install)")
    for name, script in command_files("own", "own-1-0123456789ab", {"greet": "say hello; rm -rf $HOME `x`"}).items():
        (tmp_path / name).write_text(script)
        # SC2013: names of variables have no blanks.
        subprocess.run(["shellcheck", "--shell=sh", "--exclude=SC2013", tmp_path / name], check=True)


def host_without_runtime(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in ("sh", "awk", "grep", "uname", "mkdir"):
        found = shutil.which(program)
        assert found
        (folder / program).symlink_to(found)
    return folder


def test_a_command_says_what_it_misses(flat: Own, store: Store, place: Path, tmp_path: Path) -> None:
    """Tasks called like what it needs itself do not send it round in circles."""
    names = ("greet", "sh", "uname", "awk")
    flat.recipe(tasks={name: {"entrypoint": "greet.py", "help": "x"} for name in names})
    done = put(flat, store, place, module=True)
    commands, host = done.sif.with_suffix(".bin"), host_without_runtime(tmp_path)

    def failed(command: Path, path: str) -> str:
        ran = subprocess.run([command], env={"PATH": path}, capture_output=True, text=True, timeout=20, check=False)
        assert (ran.returncode, ran.stdout) == (127, "")
        return ran.stderr

    for path in (f"{commands}:{host}", f"{host}:{commands}", f"{host}:{commands}:/nowhere", str(host)):
        for name in names:
            assert failed(commands / name, path) == (
                f"ekiben-own: neither apptainer nor singularity is on PATH of {os.uname().nodename}: "
                "load a module that has one of them\n"
            )
    done.sif.unlink()
    said = failed(commands / "greet", str(host))
    assert said.startswith(f"ekiben-own: {done.sif} is gone, or closed to you: load a version that is there")


def test_the_chain_of_another_stack_has_a_module_of_its_own(flat: Own, store: Store, place: Path) -> None:
    assert chain_of(flat).recipe.image_name("cu124") == "own-cu124"  # own, version cu124-…, would be another module
    assert set(command_files("own-cu124", "own-cu124-1-0123456789ab", {})) == {"ekiben-own-cu124"}
