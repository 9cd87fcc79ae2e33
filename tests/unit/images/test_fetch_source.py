"""images/scripts/fetch_source.py: the pinned commit from where git says, also through mirrors and bundles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ekiben.core.errors import FetchError
from ekiben.core.process import which
from ekiben.packages.git import GitSource, git_sources, keep_repository, mount_kept, mount_repositories, write_kept
from support.image_scripts import SCRIPTS

REPOSITORY = "https://example.invalid/lab/thing"

pytestmark = pytest.mark.skipif(not which("git"), reason="needs git")


def git(folder: Path, *args: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(folder)]
    return subprocess.run([*command, *args], check=True, capture_output=True, text=True).stdout.strip()


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


def fetch_source(*args: str | Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "fetch_source.py", *map(str, args)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_fetches_only_the_pinned_commit(mirror: Path, tmp_path: Path) -> None:
    first, last = git(mirror, "rev-parse", "v1"), git(mirror, "rev-parse", "HEAD")
    for commit, text in ((first, "one\n"), (last, "two\n")):
        assert fetch_source(f"file://{mirror}", commit, tmp_path / commit) == (0, "")
        assert (tmp_path / commit / "a.txt").read_text() == text
        assert not (tmp_path / commit / ".git").exists()
    (tmp_path / last / "compiled.o").write_text("half a day")
    assert fetch_source("file:///nowhere", first, tmp_path / last) == (0, "")
    assert (tmp_path / last / "compiled.o").exists()


def test_rejects_tags_and_missing_commits(mirror: Path, tmp_path: Path) -> None:
    code, output = fetch_source(f"file://{mirror}", "v1", tmp_path / "out")
    assert code == 1
    assert "'v1' is no commit's full name (40 hexadecimal digits): a tag or branch can move" in output
    code, output = fetch_source(f"file://{mirror}", "0" * 40, tmp_path / "out")
    assert code == 1
    assert f"file://{mirror} does not have the commit {'0' * 40}" in output
    assert fetch_source("file:///nowhere", "0" * 40, tmp_path / "out")[0] == 1
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")] == []


def name_mirror(monkeypatch: pytest.MonkeyPatch, path: Path, url: str) -> None:
    path.write_text(f'[url "{url}"]\n    insteadOf = {REPOSITORY}\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(path))


def shallow_clone(mirror: Path, commit: str, folder: Path) -> Path:
    """A bare repository with one commit and nothing before it, of which no `git bundle` can be made."""
    git(mirror.parent, "init", "--quiet", "--bare", str(folder))
    git(folder, "fetch", "--quiet", "--depth", "1", f"file://{mirror}", f"{commit}:refs/heads/main")
    assert (folder / "shallow").exists()
    return folder


def fetch_through(arguments: dict[str, str], mount: Path, out: Path) -> tuple[int, str]:
    """Fetch as a build stage does, where ``mount`` is at /run/ekiben."""
    mount.mkdir()
    settings = mount_repositories(arguments, mount)
    inside = {name: value.replace("/run/ekiben", str(mount)) for name, value in settings.items()}
    nothing = {"GIT_CONFIG_GLOBAL": "/dev/null"}  # the host's settings are not there inside
    return fetch_source(arguments["a_repository"], arguments["a_commit"], out, env={**nothing, **inside})


@pytest.mark.parametrize("kind", ["file URL", "folder", "shallow folder", "bundle file"])
def test_stage_fetches_through_a_mirror(
    kind: str, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(mirror, "rev-parse", "v1" if kind != "shallow folder" else "HEAD")
    git(mirror, "bundle", "create", "--quiet", str(tmp_path / "thing.bundle"), "--all")
    urls = {
        "file URL": f"file://{mirror}",
        "folder": str(mirror),
        "shallow folder": str(shallow_clone(mirror, commit, tmp_path / "shallow.git")),
        "bundle file": str(tmp_path / "thing.bundle"),
    }
    name_mirror(monkeypatch, tmp_path / "gitconfig", urls[kind])
    arguments = {"a_repository": REPOSITORY, "a_commit": commit}
    assert fetch_through(arguments, tmp_path / "mount", tmp_path / "out") == (0, "")
    assert (tmp_path / "out/a.txt").read_text() == ("two\n" if kind == "shallow folder" else "one\n")


def test_mirror_without_the_commit_is_named(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name_mirror(monkeypatch, tmp_path / "gitconfig", str(mirror))
    missing = {"a_repository": REPOSITORY, "a_commit": "0" * 40}
    with pytest.raises(FetchError, match=f"^{REPOSITORY} \\(from {mirror}\\) does not have the commit {'0' * 40}$"):
        fetch_through(missing, tmp_path / "one", tmp_path / "out")
    with pytest.raises(FetchError, match="'v1' is not a commit's full name"):
        fetch_through({**missing, "a_commit": "v1"}, tmp_path / "two", tmp_path / "out")
    shutil.rmtree(mirror)
    with pytest.raises(FetchError, match=f"^{REPOSITORY} \\(from {mirror}\\) cannot be read"):
        fetch_through(missing, tmp_path / "three", tmp_path / "out")


def test_stage_without_git_sources_gets_no_git_settings(tmp_path: Path) -> None:
    assert mount_repositories({"apex_extensions": "xentropy"}, tmp_path) == {}
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("missing", ["apex_repository", "apex_commit"])
def test_source_without_a_repository_or_commit_is_refused_before_the_stage_starts(missing: str, tmp_path: Path) -> None:
    arguments = {"apex_commit": "0" * 40, "apex_repository": REPOSITORY, missing: ""}
    with pytest.raises(
        FetchError, match=f"^no value of {missing} is set, so the source of apex cannot be fetched$"
    ) as error:
        mount_repositories(arguments, tmp_path)
    assert error.value.hint == f"--build-arg {missing}=…"
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def outer(mirror: Path, tmp_path: Path) -> GitSource:
    """The first of two commits of a repository that has ``mirror`` as its submodule `inner`."""
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
    return GitSource(f"file://{outer}", git(outer, "rev-parse", "HEAD~1"), ("inner",))


NO_REPOSITORIES = (
    "--upload-pack=touch {0}/run;",
    "-x",
    "origin",
    "ext::touch {0}/run",
    "../work",
    "ssh://-oProxyCommand=touch {0}/run/x",
    "-oProxyCommand=touch {0}/run:x",
    "https://example.invalid/x\n",
    "",
)


@pytest.mark.parametrize("repository", NO_REPOSITORIES)
def test_repository_that_git_takes_for_something_else_is_refused(
    repository: str, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a clone, whose remote git would ask instead of an option."""
    git(tmp_path, "clone", "--quiet", str(mirror), str(tmp_path / "clone"))
    monkeypatch.chdir(tmp_path / "clone")
    with pytest.raises(FetchError, match="is not a git repository's URL"):
        keep_repository(GitSource(repository.format(tmp_path), git(mirror, "rev-parse", "HEAD")), tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("repository", NO_REPOSITORIES[:-2])
def test_submodule_that_git_misunderstands_is_refused(repository: str, outer: GitSource, tmp_path: Path) -> None:
    folder = tmp_path / "outer"
    git(folder, "config", "--file", ".gitmodules", "submodule.inner.url", repository.format(tmp_path))
    git(folder, "commit", "--quiet", "--all", "-m", "hostile")
    hostile = GitSource(outer.repository, git(folder, "rev-parse", "HEAD"), outer.submodules)
    with pytest.raises(FetchError, match="is not a git repository's URL"):
        keep_repository(hostile, tmp_path)
    assert not (tmp_path / "run").exists()


def test_submodule_on_this_machine_of_a_repository_elsewhere_is_refused(
    outer: GitSource, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror is on this machine, too: what counts is what the commit's author wrote."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.{outer.repository}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", REPOSITORY)
    with pytest.raises(
        FetchError, match=f"{REPOSITORY}: its submodule inner is file://{mirror}, on this machine: not fetched"
    ):
        keep_repository(GitSource(REPOSITORY, outer.commit, outer.submodules), tmp_path)


def test_keeps_a_commit_and_its_submodules_for_offline_builds(outer: GitSource, mirror: Path, tmp_path: Path) -> None:
    arguments = {
        "outer_repository": outer.repository,
        "outer_commit": outer.commit,
        "outer_submodules": "inner",
        "none_repository": "",
        "none_commit": "",
    }
    assert git_sources(arguments) == [outer]
    folder = tmp_path / "sources"
    folder.mkdir()
    write_kept(kept := keep_repository(outer, folder), folder)
    assert kept.keys() == {outer.repository, f"file://{mirror}"}
    with pytest.raises(FetchError, match=f"does not have the commit {'0' * 40}"):
        keep_repository(GitSource(outer.repository, "0" * 40), folder)
    with pytest.raises(FetchError, match="has no submodule other; it has: inner"):
        keep_repository(GitSource(outer.repository, outer.commit, ("other",)), folder)
    shutil.rmtree(mirror)
    shutil.rmtree(tmp_path / "outer")
    # As a bundle has it: files alone, no empty folders.
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    code = fetch_source(outer.repository, outer.commit, tmp_path / "out", env=mount_kept(folder, str(folder)))
    assert code == (0, "")
    assert (tmp_path / "out/inner/a.txt").read_text() == "one\n"
    assert not (tmp_path / "out/later").exists()
    assert mount_kept(tmp_path / "out", "/x") == {}


def test_submodules_that_are_not_asked_for_are_not_fetched(outer: GitSource, mirror: Path, tmp_path: Path) -> None:
    """images/apex.def says by submodule.active which ones are."""
    shutil.rmtree(mirror)
    folder = tmp_path / "sources"
    folder.mkdir()
    write_kept(keep_repository(GitSource(outer.repository, outer.commit), folder), folder)
    settings = mount_kept(folder, str(folder))
    count = int(settings["GIT_CONFIG_COUNT"])
    settings |= {
        "GIT_CONFIG_COUNT": str(count + 1),
        f"GIT_CONFIG_KEY_{count}": "submodule.active",
        f"GIT_CONFIG_VALUE_{count}": ".none",
    }
    assert fetch_source(outer.repository, outer.commit, tmp_path / "out", env=settings) == (0, "")
    assert [*(tmp_path / "out/inner").iterdir()] == []
