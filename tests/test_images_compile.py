"""The scripts of build stages: a source from where git says, just the pinned commit, and what one job takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from builder.errors import FetchError
from builder.process import which
from builder.sources import keep_repository, lend_kept, lend_repositories, pinned_repositories, write_kept
from test_images_text import IMAGES, load

REPOSITORY = "https://example.invalid/lab/thing"

pytestmark = pytest.mark.skipif(not which("git"), reason="needs git")


def git(folder: Path, *words: str) -> str:
    own = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(folder)]
    return subprocess.run([*own, *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A bare repository with two commits; the first is tagged."""
    work, bare = tmp_path / "work", tmp_path / "mirrors/lab/thing"
    work.mkdir()
    git(work, "init", "--quiet")
    for text in ("one\n", "two\n"):
        (work / "a.txt").write_text(text)
        git(work, "add", ".")
        git(work, "commit", "--quiet", "-m", text.strip())
    git(work, "tag", "v1", "HEAD~1")
    bare.parent.mkdir(parents=True)
    git(tmp_path, "clone", "--quiet", "--bare", str(work), str(bare))
    return bare


def source(*words: str | Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run([sys.executable, IMAGES / "source.py", *map(str, words)], env={**os.environ, **(env or {})},
                          capture_output=True, text=True, check=False)  # fmt: skip
    return done.returncode, done.stderr


def test_just_the_pinned_commit(mirror: Path, tmp_path: Path) -> None:
    first, last = git(mirror, "rev-parse", "v1"), git(mirror, "rev-parse", "HEAD")
    for commit, text in ((first, "one\n"), (last, "two\n")):
        assert source(f"file://{mirror}", commit, tmp_path / commit) == (0, "")
        assert (tmp_path / commit / "a.txt").read_text() == text
        assert not (tmp_path / commit / ".git").exists()
    (tmp_path / last / "compiled.o").write_text("half a day")
    assert source("file:///nowhere", first, tmp_path / last) == (0, "")
    assert (tmp_path / last / "compiled.o").exists()


def test_what_can_move_and_what_is_not_there(mirror: Path, tmp_path: Path) -> None:
    code, said = source(f"file://{mirror}", "v1", tmp_path / "out")
    assert code == 1
    assert "'v1' is no commit's full name (40 hexadecimal digits): a tag or branch can move" in said
    code, said = source(f"file://{mirror}", "0" * 40, tmp_path / "out")
    assert code == 1
    assert f"file://{mirror} does not have the commit {'0' * 40}" in said
    assert source("file:///nowhere", "0" * 40, tmp_path / "out")[0] == 1
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")] == []


def test_a_mirror_is_named_by_git_s_own_configuration(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gitconfig").write_text(f'[url "file://{mirror.parent.parent}/"]\n    insteadOf = https://example.invalid/\n'
                                        '[url "https://mirror.invalid/"]\n    insteadOf = https://other.invalid/\n')  # fmt: skip
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    mount = tmp_path / "mount"
    mount.mkdir()
    assert lend_repositories({"apex_commit": "x", "apex_repository": ""}, mount) == {}
    assert lend_repositories({"a_repository": "https://plain.invalid/x"}, mount) == {}
    assert lend_repositories({"a_repository": "https://other.invalid/x"}, mount) == {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "url.https://mirror.invalid/x.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://other.invalid/x",
    }
    settings = lend_repositories({"a_repository": REPOSITORY, "b_repository": "https://other.invalid/x"}, mount)
    assert settings["GIT_CONFIG_COUNT"] == "2"
    assert [path.suffix for path in mount.iterdir()] == [".bundle"]
    # Inside, it is at /run/ekiben.
    inside = {name: value.replace("/run/ekiben", str(mount)) for name, value in settings.items()}
    monkeypatch.delenv("GIT_CONFIG_GLOBAL")
    assert source(REPOSITORY, git(mirror, "rev-parse", "v1"), tmp_path / "out", env=inside)[0] == 0
    assert (tmp_path / "out/a.txt").read_text() == "one\n"
    shutil.rmtree(mirror)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    with pytest.raises(FetchError, match=f"the mirror {mirror} of {REPOSITORY} cannot be read"):
        lend_repositories({"a_repository": REPOSITORY}, mount)


def test_a_commit_and_its_submodules_are_kept_for_where_there_is_no_network(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, outer = git(mirror, "rev-parse", "v1"), tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "--quiet")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", f"file://{mirror}", "inner")
    git(outer / "inner", "checkout", "--quiet", first)
    git(outer, "add", ".")
    git(outer, "commit", "--quiet", "-m", "with a submodule")
    (outer / "later").touch()
    git(outer, "add", ".")
    git(outer, "commit", "--quiet", "-m", "a later one")
    commit, repository, folder = git(outer, "rev-parse", "HEAD~1"), f"file://{outer}", tmp_path / "sources"
    arguments = {"outer_repository": repository, "outer_commit": commit, "none_repository": "", "none_commit": "x"}
    assert pinned_repositories(arguments) == [(repository, commit)]
    folder.mkdir()
    write_kept(kept := keep_repository(repository, commit, folder), folder)
    assert kept.keys() == {repository, f"file://{mirror}"}
    with pytest.raises(FetchError, match=f"the commit {'0' * 40} could not be fetched"):
        keep_repository(repository, "0" * 40, folder)
    shutil.rmtree(mirror)
    shutil.rmtree(outer)
    # As a bundle has it: files alone, no empty folders.
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    assert source(repository, commit, tmp_path / "out", env=lend_kept(folder, str(folder))) == (0, "")
    assert (tmp_path / "out/inner/a.txt").read_text() == "one\n"
    assert not (tmp_path / "out/later").exists()
    assert lend_kept(tmp_path / "out", "/x") == {}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_what_one_job_takes_is_the_largest_of_ninja_s_children(tmp_path: Path) -> None:
    shutil.copy(Path("/bin/sh").resolve(), tmp_path / "ninja")
    (tmp_path / "job.py").write_text(
        "import sys, time\ndata = bytearray(int(sys.argv[1]) << 20)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    for size in (30, 90):
        (tmp_path / f"job{size}.sh").write_text(f"'{sys.executable}' '{tmp_path}/job.py' {size}\ntrue\n")
    (tmp_path / "build.sh").write_text("".join(f"sh '{tmp_path}/job{size}.sh' &\n" for size in (30, 90)) + "wait\n")
    outer = subprocess.Popen([tmp_path / "ninja", tmp_path / "build.sh"], stdout=subprocess.PIPE, text=True,
                             start_new_session=True)  # fmt: skip
    try:
        assert outer.stdout is not None
        assert [outer.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
        deadline = time.monotonic() + 60
        while not (found := load("compile").largest_job(os.getpid())) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert 90 << 20 <= found < 119 << 20
    finally:
        os.killpg(outer.pid, 9)
        outer.communicate()
