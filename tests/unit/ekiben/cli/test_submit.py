"""submit says what is wrong with a request before it submits, and with --dry-run, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sample_recipe import RunCli

DRY = ("submit", "--scheduler", "slurm", "--dry-run")
TASK = ("lora-opencalm", "train")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("1X=2", "a variable's name has letters"),
        ("=x", "a variable's name has letters"),
        ("A B=1", "a variable's name has letters"),
        ("NOT_SET_ANYWHERE", "is not set here"),
    ],
)
def test_a_variable_that_cannot_be_set_is_refused(run_cli: RunCli, word: str, message: str) -> None:
    assert message in run_cli(*DRY, "--env", word, *TASK, code=2).stderr


@pytest.mark.parametrize(
    ("seeds", "message"), [(",", "a seed is missing"), ("1,,2", "a seed is missing"), ("1,1", "1 is there twice")]
)
def test_seeds_are_complete_and_unique(run_cli: RunCli, seeds: str, message: str) -> None:
    assert message in run_cli(*DRY, "--seeds", seeds, *TASK, code=2).stderr


def test_a_file_is_no_folder_of_runs(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for runs in ("file", "file/below"):
        assert f"{tmp_path}/file is not a folder" in run_cli(*DRY, "--runs", runs, *TASK, code=2).stderr


def test_a_file_that_is_no_sif_is_refused(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "junk.sif").write_bytes(b"junk" * 100)
    assert "junk.sif is not a SIF file" in run_cli(*DRY, "--sif", "junk.sif", *TASK, code=2).stderr


@pytest.mark.parametrize("name", ["EKIBEN_STORE", "XDG_CONFIG_HOME"])
def test_the_home_of_nobody_is_refused(run_cli: RunCli, name: str) -> None:
    stderr = run_cli("submit", "--site", "no-such-site", *TASK, code=2, env={name: "~nobody99/x"}).stderr
    assert "~nobody99/x begins with a home folder that this machine does not know" in stderr


def test_a_site_in_the_home_of_nobody_is_refused(run_cli: RunCli) -> None:
    stderr = run_cli("submit", "--site", "~nobody99/x.yaml", *TASK, code=2).stderr
    assert "--site: ~nobody99/x.yaml begins with a home folder" in stderr
