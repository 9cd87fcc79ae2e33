"""Modulefiles of a published image, read by Environment Modules and by Lmod: what is loaded by which name, what is not
found.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ekiben.core.errors import UsageError
from ekiben.core.inner_path import InnerPath
from ekiben.publish.prune import prune
from ekiben.publish.publish import PublishOptions, publish
from ekiben.run.modulefile import check_shared_dir, command_files
from ekiben.store import Store
from ekiben.store.shared import SharedStore
from support.published import Lab, unused, version
from support.sample_recipe import RunCli, SampleRecipe, chain_of, image_of, quiet


@pytest.fixture
def shared_dir(tmp_path: Path) -> Path:
    return tmp_path / "lab"


# -------------------------------------------------------------------------------------------------------- what is there


def test_modulefile_belongs_to_its_version(lab: Lab) -> None:
    before = os.umask(0o077)
    try:
        done = lab.put(version="1.2", module=True)
    finally:
        os.umask(before)
    assert done.module == f"ekiben/own/{version(done)}"
    stem, folder = done.sif.stem, lab.folder / "modulefiles/ekiben/own"
    assert {path.name for path in folder.iterdir()} == {".modulerc", version(done)}
    assert (folder / version(done)).readlink() == Path(f"../../../images/own/{stem}.module")
    commands = done.sif.with_suffix(".bin")
    assert {path.name for path in commands.iterdir()} == {"greet", "ekiben-own"}
    modes = {
        path: stat.S_IMODE(path.lstat().st_mode)
        for path in (*commands.iterdir(), *folder.parent.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
    assert {mode for path, mode in modes.items() if path.parent == commands} == {0o555}
    assert {mode for path, mode in modes.items() if path.parent != commands} == {0o444}
    for made in (commands, folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o2755
    assert stat.S_IMODE(done.sif.with_suffix(".module").stat().st_mode) == 0o444


def test_modulefile_is_added_later_and_kept_for_new_versions(lab: Lab) -> None:
    first = lab.put()
    assert first.module is None
    assert not (lab.folder / "modulefiles").exists()
    kept = {path: path.lstat().st_mtime_ns for path in lab.folder.rglob("*") if not path.is_dir()}
    again = lab.put(module=True)
    assert (again.created, again.module) == (False, f"ekiben/own/{version(first)}")
    assert kept == {path: path.lstat().st_mtime_ns for path in kept}
    kept = {path: path.lstat().st_mtime_ns for path in lab.folder.rglob("*") if not path.is_dir()}
    lab.put(module=True)
    assert kept == {path: path.lstat().st_mtime_ns for path in lab.folder.rglob("*") if not path.is_dir()}
    assert lab.put_next().module  # else `module load` would stay behind `current`


def test_an_end_at_any_rename_leaves_no_half_module(
    files_only: SampleRecipe, store: Store, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found is whole; the next run adds what is missing."""
    image, rename, where, count, ended = image_of(files_only, store), os.rename, 0, 0, True
    publish(image, store, shared_dir, PublishOptions(check=False), quiet())

    def end(source: Any, target: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count == where:
            raise KeyboardInterrupt
        rename(source, target, **options)

    while ended:
        where, count, ended = where + 1, 0, False
        shutil.rmtree(shared_dir / "modulefiles", ignore_errors=True)
        for path in (shared_dir / "images/own").glob("*.bin"):
            shutil.rmtree(path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", end)
            try:
                done = publish(image, store, shared_dir, PublishOptions(check=False, module=True), quiet())
            except KeyboardInterrupt:
                ended = True
        if ended:
            found = [path for path in (shared_dir / "modulefiles").glob("ekiben/own/[0-9]*") if path.exists()]
            assert found == []
            done = publish(image, store, shared_dir, PublishOptions(check=False, module=True), quiet())
        assert (shared_dir / "modulefiles" / str(done.module)).is_file()
        assert len(list(done.sif.with_suffix(".bin").iterdir())) == 2
    assert where == 10  # four folders, two commands, two files of Tcl, the link; and then none


@pytest.mark.parametrize("name", ["two words", "a:b", "a'b", "$HOME", "a;b", "a(b"])
def test_paths_invalid_in_modulepath_are_refused(lab: Lab, name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Lmod cannot read modulefiles there"):
        replace(lab, folder=tmp_path / name).put(module=True)
    assert not (tmp_path / name).exists()
    replace(lab, folder=tmp_path / name).put()  # the image itself may lie there


def test_other_paths_are_accepted() -> None:
    check_shared_dir(Path("/gs1/groups/gaa50000/共有/ekiben-2.0+x_y"))


# ------------------------------------------------------------------------------------------------------ which is loaded


def test_modulefile_left_by_a_killed_prune_is_removed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lab.put(module=True)
    lab.put_next()
    discard, count = SharedStore.discard, 0

    def end(shared: SharedStore, path: InnerPath) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        discard(shared, path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SharedStore, "discard", end)
        prune(lab.folder, names=[first.sif.name])
    assert (lab.folder / "modulefiles" / str(first.module)).exists()
    unused(lab.folder, 1.5)
    prune(lab.folder)
    assert not os.path.lexists(lab.folder / "modulefiles" / str(first.module))
    left = [path.name for path in first.sif.parent.glob(f"{first.sif.stem}*")]
    assert left == [f"{first.sif.stem}.removed"]  # who removed it


# --------------------------------------------------------------------------------------------------------------- output


def test_publish_modulefile_by_command(
    run_cli: RunCli, files_only: SampleRecipe, store: Store, shared_dir: Path, tmp_path: Path
) -> None:
    argv = ("--store", store.root, "publish", files_only.path, "--to", shared_dir, "--no-verify", "--modulefile")
    out = run_cli(*argv).stdout
    assert f"module     module use {shared_dir}/modulefiles; module load ekiben/own\n" in out
    files_only.write("files/data.txt", "new\n")
    out = run_cli(*argv[:-1], "--no-current", "--version", "2").stdout
    assert "; module load ekiben/own/2-" in out
    refused = run_cli(*argv[:5], tmp_path / "a b", *argv[6:], code=2)
    assert f"' ' in {tmp_path}/a b: Lmod cannot read modulefiles there" in refused.stderr


# --------------------------------------------------------------------------------------------------------- the commands


def host_without_runtime(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in ("sh", "awk", "grep", "uname", "mkdir"):
        found = shutil.which(program)
        assert found
        (folder / program).symlink_to(found)
    return folder


def test_module_command_names_missing_requirements(lab: Lab, tmp_path: Path) -> None:
    """Tasks called like what it needs itself do not send it round in circles."""
    names = ("greet", "sh", "uname", "awk")
    lab.recipe.recipe(tasks={name: {"entrypoint": "greet.py", "help": "x"} for name in names})
    done = lab.put(module=True)
    commands, host = done.sif.with_suffix(".bin"), host_without_runtime(tmp_path)

    def failed(command: Path, path: str) -> str:
        ran = subprocess.run([command], env={"PATH": path}, capture_output=True, text=True, timeout=20, check=False)
        assert (ran.returncode, ran.stdout) == (127, "")
        return ran.stderr

    for path in (f"{commands}:{host}", f"{host}:{commands}", f"{host}:{commands}:/nowhere", str(host)):
        for name in names:
            assert (
                failed(commands / name, path)
                == f"ekiben-own: neither apptainer nor singularity is on PATH of {os.uname().nodename}: "
                "load a module that has one of them\n"
            )
    done.sif.unlink()
    stderr = failed(commands / "greet", str(host))
    assert stderr.startswith(f"ekiben-own: {done.sif} is gone, or closed to you: load a version that is there")


def test_image_of_another_stack_has_its_own_module(files_only: SampleRecipe, store: Store, shared_dir: Path) -> None:
    assert (
        chain_of(files_only).recipe.image_name("cu124") == "own-cu124"
    )  # own, version cu124-…, would be another module
    assert set(command_files("own-cu124", "own-cu124-1-0123456789ab", {})) == {"ekiben-own-cu124"}
