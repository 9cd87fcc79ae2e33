"""Packages without a wheel in a recipe's lock: an index of this machine, and a build that the test plays."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, EkibenError, FetchError, UsageError
from ekiben.project.create import create_recipe
from ekiben.project.lock import lock_recipe
from ekiben.project.sources import SourceSettings
from ekiben.resolve.resolve import resolve
from ekiben.spec.recipe import Recipe
from ekiben.spec.sources import Source, format_sources, read_sources
from ekiben.spec.stack import Stack
from support.own_recipes import recipe_in
from support.package_index import Index, serve

LOCK, SOURCES = "images/mine-packages.lock", "images/mine-packages.sources.json"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with serve(Index(login="reader:s3cret")) as index:
        index.add_source("needed", "1.0")
        index.add_source("needed", "2.0", requires=["plain"])
        index.add_wheel("plain", "1.0")
        index.add_wheel("above", "1.0", requires=["needed"])
        index.add_wheel("older", "1.0", requires=["needed<2"])
        monkeypatch.setenv("UV_DEFAULT_INDEX", index.url(index.login))
        monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
        yield index


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_recipe(tmp_path / "mine", layer="python")
    return tmp_path / "mine"


built: list[str] = []


def play_build(recipe: Recipe, stack: Stack, source: Source) -> Source:
    """What a build stage gives: here nothing is built."""
    built.append(f"{source.name} {source.version}")
    requires = ("plain",) if source.version == "2.0" else ()
    source = replace(source, version=source.version or "2.0")
    wheel = f"{source.name.replace('-', '_')}-{source.version}-py3-none-any.whl"
    return replace(source, wheel=wheel, wheel_sha256=hashlib.sha256(wheel.encode()).hexdigest(), requires=requires)


def lock(folder: Path, requirements: str, *, only_binary: bool = False, **options: bool) -> list[str]:
    built.clear()
    (folder / "requirements.txt").write_text(requirements)
    settings = SourceSettings(play_build, folder.parent / "cache", only_binary)
    return list(lock_recipe(recipe_in(folder), settings=settings, **options))


def test_source_of_a_package_without_wheel_is_built_and_its_wheel_is_locked(folder: Path, index: Index) -> None:
    lines = lock(folder, "above\n")
    assert built == ["needed 2.0"]
    assert f"mine/{SOURCES}: needed 2.0 is built from its source" in lines
    (source,) = read_sources(folder / SOURCES)
    assert source.sha256 == hashlib.sha256(index.files["needed-2.0.tar.gz"]).hexdigest()
    text = (folder / LOCK).read_text()
    assert f"needed==2.0 \\\n    --hash=sha256:{source.wheel_sha256}\n" in text
    assert "plain==1.0" in text  # what the built wheel depends on
    assert "s3cret" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert SOURCES in (folder / "SHA256SUMS").read_text()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits, which git finds for https://git.example/tools: the first is tagged v1."""
    folder = tmp_path / "tools"
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{folder}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://git.example/tools")
    git(tmp_path, "init", "--quiet", "--initial-branch=main", folder)
    (folder / "pyproject.toml").write_text('[build-system]\nrequires = ["plain"]\nbuild-backend = "x"\n')
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    git(folder, "tag", "-a", "-m", "one", "v1")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "second")
    return folder


def git(folder: Path, *args: str | Path) -> str:
    user = ("-c", "user.name=x", "-c", "user.email=x@y.z")
    return subprocess.run(
        ["git", "-C", folder, *user, *args], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.parametrize(("reference", "expected"), [("", "main"), ("@main", "main"), ("@v1", "v1^{}")])
def test_git_requirement_is_locked_to_the_commit_that_it_means(
    folder: Path, index: Index, repository: Path, reference: str, expected: str
) -> None:
    line = f"above\nNeeded @ git+https://git.example/tools{reference} ; python_version > '3'\n"
    lines = lock(folder, line)
    (source,) = read_sources(folder / SOURCES)
    assert source.commit == git(repository, "rev-parse", expected)
    assert (source.repository, source.version) == ("https://git.example/tools", "2.0")
    assert [pin.partition("==")[0] for pin in source.build] == ["plain"]
    assert f"needed 2.0 is built from the commit {source.commit[:12]}" in "\n".join(lines)
    assert "needed==2.0" in (folder / LOCK).read_text()
    assert lock(folder, line, check=True) == ["mine: up to date"]
    git(repository, "commit", "--quiet", "--allow-empty", "-m", "third")
    assert lock(folder, line, keep=True) == ["mine: up to date"]
    lock(folder, line)
    assert len(built) == (0 if reference == "@v1" else 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x @ git+https://me:s3cret@git.example/tools", "a user or a password in the URL would be in the lock file"),
        ("x @ git+http://git.example/tools", "git\\+http:// is not fetched; write NAME @ git\\+https://"),
        ("x @ git+file:///tools", "git\\+file:// is not fetched"),
        ("git+https://git.example/tools", "a git repository is written as NAME @ git\\+https://HOST/PATH@COMMIT"),
        ("-e git+https://git.example/tools#egg=x", "a git repository is written as NAME @ git"),
        ("x @ git+https://git.example/tools#subdirectory=../a", "'#subdirectory=../a' is not supported"),
        ("x @ git+https://git.example/tools#egg=a", "'#egg=a' is not supported"),
        ("x @ git+https://git.example/tools@absent", "has no branch and no tag 'absent'"),
        ("x @ git+https://git.example/tools@--upload-pack=touch", "has no branch and no tag '--upload-pack=touch'"),
    ],
)
def test_git_requirement_that_cannot_be_locked_is_refused(
    folder: Path, index: Index, repository: Path, line: str, message: str
) -> None:
    with pytest.raises(EkibenError, match=message) as caught:
        lock(folder, f"plain\n{line}\n")
    assert "HOST" not in message or str(caught.value).startswith(f"{folder}/requirements.txt:2: ")


def test_kept_and_checked_locks_build_nothing(folder: Path, index: Index) -> None:
    lock(folder, "above\n")
    index.add_source("needed", "3.0")
    for options in ({"keep": True}, {"check": True}):
        assert lock(folder, "above\n", **options) == ["mine: up to date"]
    assert built == []
    lock(folder, "above\n")
    assert built == ["needed 3.0"]
    assert "plain" not in (folder / LOCK).read_text()
    lock(folder, "plain\n")
    assert not (folder / SOURCES).exists()


@pytest.mark.parametrize(
    ("requirements", "versions"),
    [
        ("needed<2\n", ["needed 1.0"]),
        ("needed\nabove\n", ["needed 2.0"]),
        ("above\nolder\n", ["needed 2.0", "needed 1.0"]),
    ],
)
def test_newest_source_that_the_requirements_allow_is_built(
    folder: Path, index: Index, requirements: str, versions: list[str]
) -> None:
    lock(folder, requirements)
    assert built == versions


def test_files_after_r_and_c_are_read_and_noticed(folder: Path, index: Index) -> None:
    (folder / "more").mkdir()
    (folder / "more/more.txt").write_text("above\n-c limits.txt\n")
    (folder / "more/limits.txt").write_text("needed<2\n")
    lock(folder, "plain\n-r more/more.txt\n")
    assert built == ["needed 1.0"]
    assert "above==1.0" in (folder / LOCK).read_text()
    (folder / "more/limits.txt").write_text("needed\n")
    with pytest.raises(DefinitionError, match=r"more/limits\.txt: was changed and not locked again"):
        resolve(recipe_in(folder), arch="amd64")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-r ../outside.txt", "outside the recipe's folder"),
        ("--requirement=absent.txt", "absent.txt is not a file"),
        ("-r requirements.txt", "names the file that names it"),
        ("plain==1.0 --hash=sha256:00", "only packages of an index"),
        ("-e .", "is not a Python package"),
        ("./absent", "absent is not a folder"),
        ("-e ../mine2", "outside the recipe's folder"),
        ("x @ file:./x-1.0.whl", "only packages of an index"),
    ],
)
def test_line_that_is_not_read_is_refused_with_its_number(folder: Path, index: Index, line: str, message: str) -> None:
    (folder.parent / "outside.txt").write_text("plain\n")
    with pytest.raises(DefinitionError, match=message) as caught:
        lock(folder, f"plain\n{line}\n")
    assert str(caught.value).startswith(f"{folder}/requirements.txt:2: ")
    assert caught.value.hint or "absent" in message or "names" in message


@pytest.mark.parametrize("name", ["uv.lock", "pylock.toml", "poetry.lock", "Pipfile.lock", "environment.yml"])
def test_locks_of_other_tools_are_refused_with_the_command_that_converts(folder: Path, name: str) -> None:
    (folder / "requirements.txt").unlink()
    (folder / name).write_text('[[packages]]\nname = "plain"\nversion = "1.0"\n')
    with pytest.raises(UsageError, match=r"has no requirements\.txt or pyproject.toml to lock") as caught:
        list(lock_recipe(recipe_in(folder)))
    assert "requirements.txt" in str(caught.value.hint)
    if name == "pylock.toml":
        subprocess.run(["sh", "-c", str(caught.value.hint)], cwd=folder, check=True)
        assert (folder / "requirements.txt").read_text() == "plain==1.0\n"


def test_packages_that_want_different_versions_of_a_source_end_in_an_error(folder: Path, index: Index) -> None:
    index.add_wheel("newer", "1.0", requires=["needed>=2"])
    with pytest.raises(DefinitionError, match="newer"):
        lock(folder, "older\nnewer\n")
    assert len(built) <= 3


def test_only_binary_refuses_packages_without_a_wheel(folder: Path, index: Index) -> None:
    with pytest.raises(DefinitionError, match="needed have no usable wheels"):
        lock(folder, "above\n", only_binary=True)
    assert not (folder / LOCK).exists()


def test_a_password_of_the_index_is_in_no_message(folder: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    lock(folder, "plain\n")
    monkeypatch.setenv("UV_DEFAULT_INDEX", index.url("reader:wr0ng"))
    with pytest.raises(FetchError) as caught:
        lock(folder, "above\n")
    assert "wr0ng" not in f"{caught.value} {caught.value.hint}"


def test_a_layer_takes_its_wheels_from_stages_of_their_sources(folder: Path, index: Index) -> None:
    lock(folder, "above\n")
    resolved = resolve(recipe_in(folder), arch="amd64")
    layer = resolved.layers[-2]
    (copy,) = layer.copies
    assert copy.stage.name == "mine-packages.needed"
    assert copy.stage.inputs["parent"] == resolved.layers[-3].cache_key
    (source,) = read_sources(folder / SOURCES)
    (folder / SOURCES).write_text(format_sources([replace(source, build=("x==1 --hash=sha256:" + "0" * 64,))]))
    with pytest.raises(DefinitionError, match=r"sources\.json: was changed and not locked again"):
        resolve(recipe_in(folder), arch="amd64")


@pytest.mark.parametrize(
    "change",
    [
        '"format": 2',
        '"name": "../x"',
        '"name": "Needed"',
        '"wheel": "other-2.0-py3-none-any.whl"',
        '"wheel": "a/b"',
        '"sha256": "12"',
        '"build": ["x==1 --hash=sha256:0 --index-url=http://evil"]',
        '"requires": ["a b"]',
    ],
)
def test_a_foreign_sources_file_is_checked(tmp_path: Path, change: str) -> None:
    source = Source(
        name="needed",
        version="2.0",
        file="needed-2.0.tar.gz",
        sha256="0" * 64,
        build=(),
        wheel="needed-2.0-py3-none-any.whl",
        wheel_sha256="1" * 64,
    )
    path = tmp_path / "x.sources.json"
    path.write_text(format_sources([source]))
    assert read_sources(path) == [source]
    key = change.partition(":")[0]
    lines = [f"{change}," if line.strip().startswith(key) else line for line in path.read_text().splitlines()]
    text = "\n".join(lines).replace(",\n  }", "\n  }")
    path.write_text(text)
    with pytest.raises(DefinitionError, match=r"x\.sources\.json: is not as `ekiben lock` writes it"):
        read_sources(path)


PROJECT = '[project]\nname = "My.Tool"\nversion = "2.0"\n[build-system]\nrequires = ["plain"]\nbuild-backend = "x"\n'


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("-e .", ""),
        ("./package", "package"),
        ("--editable=package/  # why", "package"),
        ("my-tool @ file:./package", "package"),
        ("my_tool[x]@file:package ; python_version > '3'", "package"),
        ("./package[x]", "package"),
    ],
)
def test_folder_is_locked_and_an_edit_is_noticed(folder: Path, index: Index, line: str, where: str) -> None:
    package = folder / where
    package.mkdir(exist_ok=True)
    (package / "pyproject.toml").write_text(PROJECT)
    (package / "__pycache__").mkdir()
    lines = lock(folder, f"{line}\nabove\n")
    assert built[0] == "my-tool "
    assert [item.partition(":")[0] for item in lines].count("note") == ("-e" in line or "editable" in line)
    local, _ = read_sources(folder / SOURCES)
    assert (local.name, local.version, local.folder) == ("my-tool", "2.0", where or ".")
    assert [pin.partition("==")[0] for pin in local.build] == ["plain"]
    keys = [layer.cache_key for layer in resolve(recipe_in(folder), arch="amd64").layers]
    (package / "__pycache__/x.pyc").write_text("written by an import")
    assert [layer.cache_key for layer in resolve(recipe_in(folder), arch="amd64").layers] == keys
    assert "mine: up to date" in lock(folder, f"{line}\nabove\n", check=True)

    (package / "code.py").write_text("x = 1\n")
    with pytest.raises(DefinitionError, match="the package my-tool was changed, and is not locked again"):
        resolve(recipe_in(folder), arch="amd64")
    lock(folder, f"{line}\nabove\n", keep=True)
    assert built == ["my-tool "]
    changed = [layer.cache_key for layer in resolve(recipe_in(folder), arch="amd64").layers]
    assert [old == new for old, new in zip(keys, changed, strict=True)] == [*[True] * (len(keys) - 2), False, False]


def test_git_repository_has_its_submodules_and_a_package_below_its_top(
    folder: Path, index: Index, repository: Path
) -> None:
    inner = repository.parent / "inner"
    git(repository.parent, "init", "--quiet", inner)
    (inner / "inner.c").write_text("int x;\n")
    git(inner, "add", ".")
    git(inner, "commit", "--quiet", "-m", "first")
    (repository / "python").mkdir()
    (repository / "pyproject.toml").rename(repository / "python/pyproject.toml")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "python/inner")
    (repository / ".gitmodules").write_text(
        (repository / ".gitmodules").read_text().replace(str(inner), "../tools/../inner")
    )
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "with a submodule")
    insteads = {"GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_1": f"url.file://{inner}.insteadOf"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**insteads, "GIT_CONFIG_VALUE_1": "https://git.example/inner"}.items():
            patch.setenv(name, value)
        lock(folder, "needed @ git+https://git.example/tools@main#subdirectory=python\n")
    (source,) = read_sources(folder / SOURCES)
    assert (source.subdirectory, source.submodules) == ("python", True)
    assert [pin.partition("==")[0] for pin in source.build] == ["plain"]
    with tarfile.open(folder.parent / f"cache/sources/commit-{source.commit}.tar") as tar:
        assert {"source/python/pyproject.toml", "source/python/inner/inner.c"} <= set(tar.getnames())
    assert (lock_text := json.loads((folder / SOURCES).read_text())["sources"][0])["submodules"] is True
    assert "inner" not in json.dumps(lock_text)
