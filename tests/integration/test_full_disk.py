"""A file system without inodes, and a full one: one sentence, nothing is lost, and with space the same command
works.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.paths import PROJECT_ROOT
from support.registries import real_registry
from support.sample_recipe import AS_SIF, Done, RunCli, SampleRecipe, becomes_empty, seeded
from support.small_disk import mount_tmpfs

pytestmark = pytest.mark.covers("ekiben/core", "ekiben/store", "ekiben/publish")

# Of files that a command makes, in all: where the next one fails differs.
INODES = (2, 4, 7, 11, 16, 20, 23, 26, 30, 35)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 50 MB, whose inodes a test sets."""
    with mount_tmpfs(tmp_path / "disk", "size=50m,mode=755") as folder:
        yield folder


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)


def used(disk: Path) -> int:
    stats = os.statvfs(disk)
    return stats.f_files - stats.f_ffree


def try_with_few_inodes(disk: Path, run: RunCli, *argv: str | Path) -> list[Done]:
    """Run a command with more inodes each time, and at last with enough; return how it failed."""
    failed = []
    for more in INODES:
        remount(disk, f"nr_inodes={used(disk) + more}")
        done = run(*argv, code=None)  # type: ignore[arg-type]
        if done.returncode == 0:
            break
        assert done.returncode == 6, f"with {more} inodes: {done.returncode}\n{done.stderr}"
        assert "no inodes left" in done.stderr, f"with {more} inodes: {done.stderr}"
        assert len([line for line in done.stderr.splitlines() if line.startswith("error: ")]) == 1
        failed.append(done)
    remount(disk, "nr_inodes=100000")
    run(*argv)
    assert failed
    return failed


@pytest.fixture
def run(run_cli: RunCli, tmp_path: Path) -> RunCli:
    """The same with any exit code where ``code`` is None."""

    def start(*args: str | Path, code: int | None = 0) -> Done:
        if code is not None:
            return run_cli(*args, code=code)
        argv = [sys.executable, str(PROJECT_ROOT / "build.py"), *map(str, args)]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert "Traceback" not in done.stderr
        return done

    return start


def test_build_without_inodes(disk: Path, run: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    seeded(files_only, tmp_path / "seed", "ground")
    subprocess.run(["cp", "-a", tmp_path / "seed", disk / "store"], check=True)
    blobs = {path.name for path in (disk / "store/blobs/sha256").iterdir()}
    argv = ("--store", disk / "store", "image", files_only.path, *AS_SIF, "-o", disk / "own.sif")
    try_with_few_inodes(disk, run, *argv)
    assert blobs <= {path.name for path in (disk / "store/blobs/sha256").iterdir()}
    assert becomes_empty(disk / "store/staging")
    run("--store", tmp_path / "seed", "image", files_only.path, *AS_SIF, "-o", tmp_path / "own.sif")
    assert (disk / "own.sif").read_bytes() == (tmp_path / "own.sif").read_bytes()
    assert {path.name for path in disk.iterdir()} == {"store", "own.sif"}


def test_publish_without_inodes(disk: Path, run: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    seeded(files_only, tmp_path / "store", "ground")
    argv = ("--store", tmp_path / "store", "publish", files_only.path, "--to", disk / "lab", "--no-verify")
    run(*argv)
    first = (disk / "lab/images/own/current").resolve().read_bytes()
    files_only.write("files/data.txt", "other\n")
    failed = try_with_few_inodes(disk, run, *argv)
    assert all("nothing there was changed" in done.stderr for done in failed)
    assert (disk / "lab/images/own/current").resolve().read_bytes() != first
    assert len(list((disk / "lab/images/own").glob("*.sif"))) == 2
    assert not list((disk / "lab/store/staging").iterdir())


def test_pull_without_inodes(disk: Path, run: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    seeded(files_only, tmp_path / "store", "ground")
    (tmp_path / "registry").mkdir()
    with real_registry(tmp_path / "registry") as host:
        for kind in ("sif", "docker"):
            run("--store", tmp_path / "store", "push", files_only.path, f"{host}/lab/own:{kind}", "--format", kind)
        for kind in ("sif", "docker"):
            folder = disk / kind
            folder.mkdir()
            argv = ("--store", folder / "store", "pull", f"{host}/lab/own:{kind}", "-o", folder / "own.sif")
            remount(disk, f"nr_inodes={used(disk)}")
            done = run(*argv, code=None)  # type: ignore[arg-type]
            assert (done.returncode, "no inodes left" in done.stderr) == (6, True), done.stderr
            assert not [path for path in folder.iterdir() if path.name != "store"]
            if kind == "docker":
                try_with_few_inodes(disk, run, *argv)
            remount(disk, "nr_inodes=100000")
            run(*argv)
            assert [path.name for path in folder.glob("*.sif")] == ["own.sif"]


def test_verify_on_a_full_disk(disk: Path, run: RunCli, files_only: SampleRecipe, tmp_path: Path) -> None:
    """It reads only: what it cannot note is read again."""
    seeded(files_only, tmp_path / "seed", "ground")
    subprocess.run(["cp", "-a", tmp_path / "seed", disk / "store"], check=True)
    run("--store", disk / "store", "image", files_only.path, *AS_SIF, "-o", disk / "own.sif")
    for options in (f"nr_inodes={used(disk)}", "nr_inodes=1000"):
        remount(disk, options)
        if options == "nr_inodes=1000":
            with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(1 << 16))
        done = run("--store", disk / "store", "verify", files_only.path, "--sif", disk / "own.sif", code=None)  # type: ignore[arg-type]
        # The base of this test is not a system: its tests cannot run.
        assert "read every blob: " in done.stderr  # all of them were read
        assert "left in" not in done.stderr, done.stderr


FOLDERS = {
    "init": ("init", "{}/mine"),
    "render": ("render", "hello", "--to", "dockerfile", "-o", "{}/a/context"),
    "render --to compose": ("render", "hello", "--to", "compose", "-o", "{}/b"),
}


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("limit", ["nr_inodes", "size"])
def test_folder_of_files_is_complete_or_missing(disk: Path, run: RunCli, name: str, limit: str) -> None:
    """With room for one file more each time, or for one page."""
    argv = [word.format(disk) for word in FOLDERS[name]]
    failed = 0
    for more in (2**power for power in range(12)):
        remount(disk, f"nr_inodes={used(disk) + more}" if limit == "nr_inodes" else f"size={4 * more}k")
        done = run(*argv, code=None)  # type: ignore[arg-type]
        if done.returncode == 0:
            break
        assert list(disk.iterdir()) == []
        cause = "no inodes left" if limit == "nr_inodes" else "No space left"
        assert f"error: {disk}" in done.stderr and f"cannot be written: {cause}" in done.stderr
        failed += 1
    assert failed or limit == "size"  # one page holds a small file
    assert len(list(disk.iterdir())) == 1
