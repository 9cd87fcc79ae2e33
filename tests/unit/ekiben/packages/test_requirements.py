"""What a file of requirements from elsewhere asks for runs no code on this machine. uv is the real one; no index is
asked.
"""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from ekiben.core.errors import DefinitionError, FetchError
from ekiben.packages.lock import _resolve
from ekiben.packages.outdated import find_newer
from ekiben.packages.requirements import read_requirements
from ekiben.project.lock import lock_recipe
from ekiben.spec.source_folders import SourceFolders
from ekiben.spec.stack import Stack, find_stack
from support.own_recipes import recipe_in
from support.sample_recipe import SampleRecipe


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once code of ``evil`` has run: a folder with a build backend and setup.py, and a source
    distribution of it.
    """
    ran, evil = tmp_path / "ran", tmp_path / "evil-1.0"
    evil.mkdir()
    code = f"open({str(ran)!r}, 'w')\n"
    (evil / "backend.py").write_text(code)
    (evil / "setup.py").write_text(code)
    (evil / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (evil / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (tmp_path / "links").mkdir()
    with tarfile.open(tmp_path / "links/evil-1.0.tar.gz", "w:gz") as archive:
        archive.add(evil, "evil-1.0")
    for name, value in (
        ("NO_INDEX", "1"),
        ("FIND_LINKS", str(tmp_path / "links")),
        ("CACHE_DIR", str(tmp_path / "uv")),
    ):
        monkeypatch.setenv(f"UV_{name}", value)
    return ran


@pytest.fixture
def stack(sample: SampleRecipe) -> Stack:
    return find_stack("tiny", [sample.path / "images"])


@pytest.mark.parametrize(
    "line",
    [
        "-e {0}",
        "--editable={0}",
        "{0}",
        "evil @ file://{0}",
        "evil @ git+file://{0}",
        "-r {0}/PKG-INFO",
        "-c {0}/PKG-INFO",
        "--no-binary :all:",
        "./evil-1.0",
    ],
)
def test_an_in_file_of_a_stack_names_packages_of_an_index_alone(
    stack: Stack, ran: Path, tmp_path: Path, line: str
) -> None:
    source = stack.folder / "top.in"
    source.write_text(f"{line.format(tmp_path / 'evil-1.0')}\n")
    with pytest.raises(DefinitionError, match=r"top\.in:1: .*only packages of an index can be locked"):
        _resolve(source, "", "", stack, SourceFolders(tmp_path))
    assert not ran.exists()


@pytest.mark.parametrize("name", ["evil-1.0.tar.gz", "evil.zip"])
def test_a_name_is_never_an_archive_of_the_working_folder(
    stack: Stack, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """uv takes a name that ends as an archive for one, and builds it; it is also the name of a package."""
    cloned = tmp_path / "cloned"
    cloned.mkdir()
    with tarfile.open(cloned / "evil-1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "evil-1.0", "evil-1.0")
    with zipfile.ZipFile(cloned / "evil.zip", "w") as zipped:
        for path in (tmp_path / "evil-1.0").iterdir():
            zipped.write(path, f"evil-1.0/{path.name}")
    monkeypatch.chdir(cloned)
    source = stack.folder / "evil-source.in"
    source.write_text(f"{name}\n")
    with pytest.raises(FetchError, match=r"evil-1-0-tar-gz|evil-zip"):
        _resolve(source, "", "", stack, SourceFolders(tmp_path))
    assert not ran.exists()


def test_a_source_distribution_is_refused_and_not_built(stack: Stack, ran: Path) -> None:
    source = stack.folder / "top.in"
    source.write_text("evil==1.0\n")
    with pytest.raises(FetchError, match=r"evil==1\.0 has no usable wheels"):
        _resolve(source, "", "", stack, SourceFolders(stack.folder))
    assert not ran.exists()


def test_what_a_stage_compiles_is_locked_and_not_built(stack: Stack, ran: Path) -> None:
    source = stack.folder / "evil-source.in"
    source.write_text("evil==1.0\n")
    assert _resolve(source, "", "", stack, SourceFolders(stack.folder)) == "evil==1.0\n"  # the hash comes from an index
    assert not ran.exists()


@pytest.mark.parametrize("setting", ["uv.toml", "pyproject.toml", ".venv"])
def test_settings_of_the_working_folder_start_no_interpreter(
    stack: Stack, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """`ekiben lock .` in a recipe from elsewhere: uv would start the interpreter that uv.toml names, or that of
    .venv.
    """
    cloned = tmp_path / "cloned"
    (cloned / ".venv/bin").mkdir(parents=True)
    python = cloned / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\ntouch {ran}\nexec {shutil.which("python3")} "$@"\n')
    python.chmod(0o755)
    if setting == ".venv":
        (cloned / ".venv/pyvenv.cfg").write_text("home = /usr/bin\n")
    else:
        table = "[pip]" if setting == "uv.toml" else '[project]\nname = "x"\nversion = "1"\n[tool.uv.pip]'
        (cloned / setting).write_text(f'{table}\npython = "{python}"\n')
    monkeypatch.chdir(cloned)
    (stack.folder / "evil-source.in").write_text("evil==1.0\n")
    assert _resolve(stack.folder / "evil-source.in", "", "", stack, SourceFolders(tmp_path))
    assert find_newer({}) == {}
    assert not ran.exists()


def test_a_recipe_with_a_source_distribution_alone_is_refused(sample: SampleRecipe, ran: Path) -> None:
    sample.replace("images/roof.def", "%files", "%files\n    images/roof.lock /opt/")
    sample.write("requirements.txt", "evil==1.0\n")
    with pytest.raises(DefinitionError, match="or an index has no wheel for it"):
        list(lock_recipe(recipe_in(sample.path), arch="amd64"))
    assert not ran.exists()


@pytest.mark.parametrize(
    "text", ["[project]\ndependencies = 3\n", "project = 3\n", '[project]\ndynamic = ["dependencies"]\n', "[" * 9999]
)
def test_a_project_without_a_list_of_dependencies_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(DefinitionError, match=r"pyproject\.toml: "):
        read_requirements(tmp_path / "pyproject.toml", SourceFolders(tmp_path))


@pytest.mark.parametrize(
    "index",
    [
        "'{0}'",
        '"{0}"',
        '"../elsewhere"',
        "../elsewhere#/../../cloned",
        "%2e%2e/elsewhere",
        "FILE://{0}",
        "file:.{0}",
        "../elsewhere?/../../cloned",
    ],
)
def test_uv_reads_no_folder_but_the_one_that_was_checked(
    index: str, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv removes quotes and what follows a #, and decodes %2e."""
    folder, elsewhere = tmp_path / "cloned/images/stacks/tiny", tmp_path / "cloned/images/stacks/elsewhere"
    folder.mkdir(parents=True)
    elsewhere.mkdir()
    metadata = {
        "METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(elsewhere / "evil-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in metadata.items():
            wheel.writestr(f"evil-1.0.dist-info/{name}", text)
    source = folder / "top.in"
    source.write_text(f"evil\n--find-links {index.format(elsewhere)}\n")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    with pytest.raises((DefinitionError, FetchError)):
        _resolve(source, "", "", stack, SourceFolders(folder))
    source.write_text("evil[Extra]==1.* ; python_version > '3' # a remark \\\n-f=../elsewhere\n")
    with pytest.raises(DefinitionError, match="outside the recipe's folder"):
        _resolve(source, "", "", stack, SourceFolders(folder))
    assert "evil==1.0" in _resolve(source, "", "", stack, SourceFolders(folder, (elsewhere,)))


@pytest.mark.parametrize("text", ["--pre", "--index-url https://index.example", "a ; python_version < '3\\n-e .\\n'"])
def test_a_dependency_of_a_project_is_a_requirement_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project]\ndependencies = ["{text}"]\n')
    with pytest.raises(DefinitionError, match="only packages of an index can be locked"):
        read_requirements(tmp_path / "pyproject.toml", SourceFolders(tmp_path))


def test_uv_gets_what_was_checked(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    source = tmp_path / "requirements.txt"
    source.write_text(
        "# exclude-newer: 2026-01-01\n-f links\nB.c_d[Y,x] >= 1, != 1.5 \\\n  ; python_version < '4' # why\n--pre\n"
        "a\n-i 'https://index.example/simple'\n"
    )
    assert read_requirements(source, SourceFolders(tmp_path)).text.splitlines() == [
        f"--find-links {(tmp_path / 'links').as_uri()}",
        "--pre",
        "--index-url https://index.example/simple",
        'b-c-d[Y,x]!=1.5,>=1 ; python_version < "4"',
        "a",
    ]


@pytest.mark.parametrize("option", ["--find-links ", "-f ", "--index-url=", "--extra-index-url "])
@pytest.mark.parametrize("index", ["{0}", "file://{0}", "file:{0}", "../elsewhere", "folder/../../elsewhere", "link"])
def test_an_index_outside_the_folder_is_refused(option: str, index: str, tmp_path: Path) -> None:
    """Its packages would get into the image."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "cloned"
    elsewhere.mkdir()
    (folder / "folder").mkdir(parents=True)
    (folder / "link").symlink_to(elsewhere)
    source = folder / "requirements.txt"
    source.write_text(f"evil\n{option}{index.format(elsewhere)}\n")
    with pytest.raises(DefinitionError, match=r"requirements.txt:2: .*outside the recipe's folder"):
        read_requirements(source, SourceFolders(folder))
    assert len(read_requirements(source, SourceFolders(folder, (elsewhere,))).requirements) == 1
    source.write_text(f"evil\n{option}{folder}/folder\n{option}https://index.example/simple\n")
    assert len(read_requirements(source, SourceFolders(folder)).requirements) == 1


def test_a_variable_is_not_sent_to_an_index(tmp_path: Path) -> None:
    """uv puts it into the URL that it asks."""
    (tmp_path / "requirements.txt").write_text("evil\n--index-url https://index.example/${HF_TOKEN}/simple\n")
    with pytest.raises(DefinitionError, match=r"requirements.txt:2: \$\{HF_TOKEN\} would be sent to the index"):
        read_requirements(tmp_path / "requirements.txt", SourceFolders(tmp_path))


@pytest.mark.parametrize(
    "before", ["# x \\", "--pre # x \\", "humanize # x \\", "\\\n# x \\", "humanize \\\n# x \\", "#\\"]
)
@pytest.mark.parametrize(
    "line", ["-e ./evil", "--index-url https://index.example/${HF_TOKEN}", "--find-links /elsewhere"]
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_remark_hides_no_line(before: str, line: str, end: str, tmp_path: Path) -> None:
    """uv reads the line after a remark that ends with a backslash."""
    source = tmp_path / "requirements.txt"
    source.write_bytes(f"{before}\n{line}\n".replace("\n", end).encode())
    with pytest.raises(DefinitionError):
        read_requirements(source, SourceFolders(tmp_path))


def test_lines_are_joined_and_numbered(tmp_path: Path) -> None:
    source = tmp_path / "requirements.txt"
    source.write_text("# one \\\nhumanize \\\n  >= 4 \\\n  , < 5\ntabulate # two \\\n\n-e .\n")
    with pytest.raises(DefinitionError, match=r"requirements.txt:7: -e \."):
        read_requirements(source, SourceFolders(tmp_path))
    source.write_text(source.read_text().replace("-e .", "rich \\"))
    read = read_requirements(source, SourceFolders(tmp_path))
    assert list(map(str, read.requirements)) == ["humanize<5,>=4", "tabulate", "rich"]
