"""Files of a recipe that point out of its folder: refused before a byte of them is read, and taken with --include."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import ekiben
from ekiben.core.errors import DefinitionError, StoreError, UsageError
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import find_recipe
from ekiben.spec.source_folders import SourceFolders, local_path
from ekiben.store import Store
from support.hostile_recipes import LEAD_OUT, SECRET
from support.sample_recipe import AS_SIF, RunCli, SampleRecipe

NO_MATCH = ("a pattern that matches nothing", "a name that is not there")
NO_CONTENT = (
    "a definition file that nothing uses",
    "requirements.txt",
    "the layer's lock",
    "SHA256SUMS",
    "an apt.lock",
)


@pytest.mark.parametrize("case", LEAD_OUT)
def test_a_link_out_of_the_folder_is_refused(
    files_only: SampleRecipe, run_cli: RunCli, tmp_path: Path, case: str
) -> None:
    outside = LEAD_OUT[case](files_only)
    store = ("--store", tmp_path / "store")
    for argv in (["plan"], ["render", "--to", "def", "-o", "out"], ["image", "--no-verify", "--format", "sif"]):
        done = run_cli(*store, argv[0], files_only.path, *argv[1:], code=3)
        assert f"outside the recipe's folder {files_only.path}" in done.stderr
        assert f"--include {outside}" in done.stderr
        assert SECRET not in done.stdout + done.stderr
        assert "kez?" not in done.stderr and "'key'" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "own.sif").exists()


def test_the_way_to_a_private_file_is_not_shown(files_only: SampleRecipe, run_cli: RunCli, tmp_path: Path) -> None:
    """What a stranger's recipe wants of it is hardly what its owner does."""
    outside = LEAD_OUT["data"](files_only)
    outside.chmod(0o600)
    done = run_cli("--store", tmp_path / "store", "plan", files_only.path, code=3)
    assert f"outside the recipe's folder {files_only.path}" in done.stderr
    assert "it is private" in done.stderr and "--include" not in done.stderr
    run_cli("--store", tmp_path / "store", "plan", files_only.path, "--include", outside)


@pytest.mark.parametrize("case", [case for case in LEAD_OUT if case not in (*NO_MATCH, *NO_CONTENT)])
def test_included_files_are_used_and_listed(
    files_only: SampleRecipe, run_cli: RunCli, tmp_path: Path, case: str
) -> None:
    outside = LEAD_OUT[case](files_only)
    argv = [files_only.path, "--include", outside]
    shown = run_cli("--store", tmp_path / "store", "plan", *argv).stdout
    assert f"included  {outside}" in shown
    assert f"included  {outside}" in run_cli("render", *argv, "--to", "def", "-o", "out").stderr


@pytest.mark.parametrize("way", ["absolute", "relative", "two links", "a folder", "/proc/self/root", "/proc/self/cwd"])
def test_every_way_out_is_seen(files_only: SampleRecipe, tmp_path: Path, way: str) -> None:
    (tmp_path / "secret").mkdir()
    key = tmp_path / "secret/key"
    key.write_text(SECRET)
    link = files_only.path / "notes.txt"
    files_only.recipe(data=["notes.txt"])
    if way == "two links":
        (files_only.path / "one").symlink_to("../secret/key")
        link.symlink_to("one")
    elif way == "a folder":
        (files_only.path / "dir").symlink_to("../secret")
        link.symlink_to("dir/key")
    else:
        climb = os.path.relpath(key, Path.cwd())
        ways = {"absolute": str(key), "relative": "../secret/key", "/proc/self/root": f"/proc/self/root{key}"}
        link.symlink_to(ways.get(way, f"/proc/self/cwd/{climb}"))
    with pytest.raises(DefinitionError, match=r"notes\.txt points to .*/secret/key, outside the recipe's folder"):
        resolve(find_recipe(str(files_only.path)))


@pytest.mark.parametrize("target", ["/proc/self/environ", "/etc/passwd", "/dev/zero", "/dev/stdin"])
def test_files_of_the_system_are_refused(files_only: SampleRecipe, target: str) -> None:
    (files_only.path / "notes.txt").symlink_to(target)
    files_only.recipe(data=["notes.txt"])
    with pytest.raises(DefinitionError, match=r"outside the recipe's folder|is named but .* is not a file"):
        resolve(find_recipe(str(files_only.path)))


def test_links_within_the_folder_stay_links_to_files(files_only: SampleRecipe) -> None:
    before = [layer.cache_key for layer in resolve(find_recipe(str(files_only.path))).layers]
    for name in ("files/data.txt", "files/tree/sub", "configs/greet.yaml"):
        (files_only.path / name).rename(files_only.path / Path(name).name)
        (files_only.path / name).symlink_to(files_only.path / Path(name).name)
    resolved = resolve(find_recipe(str(files_only.path)))
    assert [layer.cache_key for layer in resolved.layers] == before
    assert resolved.included_files == []


def test_a_recipe_may_be_reached_by_a_link(files_only: SampleRecipe, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(files_only.path)
    assert resolve(find_recipe(f"{tmp_path}/link")).included_files == []


def test_include_is_a_part_of_the_commands_that_are_shown(files_only: SampleRecipe, tmp_path: Path) -> None:
    outside = LEAD_OUT["data"](files_only)
    resolved = resolve(find_recipe(str(files_only.path), [outside, tmp_path]))
    assert resolved.included_files == [outside]
    assert resolved.cli_args == f"{files_only.path} --include {outside} --include {tmp_path}"
    (files_only.path / "notes.txt").unlink()
    files_only.recipe()
    assert resolve(find_recipe(str(files_only.path), [tmp_path])).cli_args == str(files_only.path)


def test_plan_as_json_and_python_name_what_is_included(
    files_only: SampleRecipe, run_cli: RunCli, tmp_path: Path
) -> None:
    outside, store = LEAD_OUT["data"](files_only), tmp_path / "store"
    layers = json.loads(
        run_cli("--store", store, "plan", files_only.path, "--json", "--include", "elsewhere/notes.txt").stdout
    )
    assert [layer.get("included") for layer in layers] == [None, None, [str(outside)]]
    assert len(ekiben.plan(files_only.path, store=store, include=[outside])) == 3
    with pytest.raises(DefinitionError, match=r"notes\.txt points to"):
        ekiben.plan(files_only.path, store=store)
    with pytest.raises(UsageError, match=r"--include .*none: no such file or folder"):
        ekiben.plan(files_only.path, store=store, include=[tmp_path / "none"])


def test_open_takes_what_is_included(files_only: SampleRecipe) -> None:
    outside = LEAD_OUT["recipe.yaml"](files_only)
    with pytest.raises(DefinitionError, match="outside the recipe's folder"):
        ekiben.open(files_only.path)
    with pytest.raises(StoreError, match=r"own.sif is not here"):
        ekiben.open(files_only.path, include=[outside])


def test_a_build_lists_what_it_includes(
    files_only: SampleRecipe, store: Store, run_cli: RunCli, tmp_path: Path
) -> None:
    outside = LEAD_OUT["data"](files_only)
    argv = ("--store", store.root, "image", files_only.path, *AS_SIF, "-o", "own.sif")
    shown = run_cli(*argv, "--include", outside).stderr
    assert f"own: includes {outside}, outside the recipe's folder" in shown
    assert ekiben.open(tmp_path / "own.sif")._read_top("opt/ekiben/recipe/notes.txt") == [SECRET.encode()]


def test_a_file_that_is_exchanged_after_it_was_checked_is_not_read(files_only: SampleRecipe, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("data\n")
    top = resolve(find_recipe(str(files_only.path))).layers[-2]
    data = next(file for file in top.files if file.destination.endswith("data.txt"))
    (files_only.path / "files/data.txt").unlink()
    (files_only.path / "files/data.txt").symlink_to(tmp_path / "key")
    with pytest.raises(OSError, match="it no longer points to"):
        data.open()
    (files_only.path / "files").rename(files_only.path / "before")
    (tmp_path / "files").mkdir()
    (tmp_path / "files/data.txt").write_text(SECRET)
    (files_only.path / "files").symlink_to(tmp_path / "files")
    with pytest.raises(OSError, match="it no longer points to"):
        data.sha256()


def test_names_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(DefinitionError, match="cannot be a path"):
        SourceFolders(tmp_path).check(tmp_path / "a\0b")
    with pytest.raises(DefinitionError, match="cannot be read"):
        SourceFolders(tmp_path).check_file(tmp_path / "round")
    with pytest.raises(DefinitionError, match="cannot be read"):
        SourceFolders(tmp_path).check_file(tmp_path / ("x" * 300))


@pytest.mark.parametrize("location", ["{0}", "file://{0}", "file://localhost{0}"])
def test_a_repository_outside_the_folder_is_refused(sample: SampleRecipe, tmp_path: Path, location: str) -> None:
    """A stage's script gets its files."""
    repository = location.format(tmp_path / "thesis.git")
    (tmp_path / "thesis.git").mkdir()
    arguments = f"    tiny_repository={repository}\n    tiny_commit={'1' * 40}\n"
    sample.replace("images/walls.def", "%arguments\n", f"%arguments\n{arguments}")
    sample.replace("images/walls.def", "echo {{ word }}", "echo {{ word }} {{ tiny_repository }} {{ tiny_commit }}")
    with pytest.raises(DefinitionError, match=r"walls.def: tiny_repository: .*outside the recipe's folder"):
        resolve(find_recipe(str(sample.path)))
    resolve(find_recipe(str(sample.path), included=[tmp_path / "thesis.git"]))
    resolve(find_recipe(str(sample.path)), arguments={"tiny_repository": repository})  # the user's own word


@pytest.mark.parametrize("location", ["https://x/y", "git@host:lab/x.git", "ssh://x/y", "host:x.git", "git://x/y"])
def test_what_lies_elsewhere_has_no_path_here(location: str) -> None:
    assert local_path(location) is None
