"""Edit lists of requirements and definition files: comments, order and line ends stay."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from uv import find_uv_bin

from ekiben.core.errors import DefinitionError, UsageError
from ekiben.packages.edit_definition import add_packages, installed_packages, remove_package
from ekiben.packages.edit_requirements import add_line, edit_project, remove_lines

PATH = Path("x.def")


@pytest.mark.parametrize(
    ("text", "argument", "after"),
    [
        ("", "b", "b\n"),
        ("# about a\na  # why\n", "b>1", "# about a\na  # why\nb>1\n"),
        ("a", "b", "a\nb\n"),
        ("a\r\nz\r\n", "b", "a\r\nz\r\nb\r\n"),
        ("a\r\nz # z\r\n", "z<2", "a\r\nz<2 # z\r\n"),
        (
            "z==1 \\\n  ; python_version < '4'  # z\na\n",
            "z==2 ; python_version < '4'",
            'z==2; python_version < "4"  # z\na\n',
        ),
        ("a==1\n", "a", "a==1\n"),
        ("# a\n-r more.txt\n\n", "A.b", "# a\n-r more.txt\n\nA.b\n"),
    ],
)
def test_a_line_is_added_and_the_rest_stays(text: str, argument: str, after: str) -> None:
    assert add_line(text, argument, "x")[0] == after


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a==1", "a"),
        ("a", "a==1"),
        ("a[x]==1", "a[y]"),
        ("A_b>1", "a-b<2"),
        ("a==1", "a ; sys_platform == 'linux'"),
        ("a ; sys_platform == 'linux'", "a==2"),
        ("a ; sys_platform == 'linux'", "a==2 ; sys_platform == 'linux'"),
        ("a", "a @ git+https://git.example/a@main"),
        ("a @ git+https://git.example/a@main", "a>2"),
    ],
)
def test_a_package_in_the_list_changes_as_uv_changes_it(old: str, new: str, tmp_path: Path) -> None:
    """uv's own add, on a pyproject.toml with the same requirement."""
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "x"\nversion = "1"\ndependencies = ["""{old}"""]\n')
    options = ["--frozen", "--raw", "--no-config", "--quiet", "--python", sys.executable, "--project", tmp_path]
    subprocess.run([find_uv_bin(), "add", *options, new], check=True)
    expected = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = add_line(f"{old}\n", new, "x")[0].splitlines()
    assert {Requirement(line) for line in lines} == {Requirement(line) for line in expected}


def test_a_package_is_removed_wherever_the_list_names_it() -> None:
    text = "# kept\na\nB.c==1 \\\n  ; python_version < '4' # gone\nb-c==2 ; python_version >= '4'\nz\n"
    left, changes = remove_lines(text, lambda line: line[:3].lower() in ("b-c", "b.c"))
    assert left == "# kept\na\nz\n"
    assert [str(change)[:8] for change in changes] == ["- B.c==1", "- b-c==2"]


@pytest.mark.parametrize("argument", ["", "a b", "a==", "a\nb", "git+https://git.example/a", "--pre", "-r x"])
def test_what_is_no_requirement_is_refused(argument: str) -> None:
    with pytest.raises(UsageError, match=r"is not a requirement"):
        add_line("a\n", argument, "x")


def test_a_package_listed_twice_is_left_to_the_user() -> None:
    with pytest.raises(UsageError, match="x names a in the lines 1, 3; edit"):
        add_line("a\nb\na==2\n", "a==3", "x")


def test_a_project_keeps_its_remarks(tmp_path: Path) -> None:
    text = (
        '[project]\nname = "x"\nversion = "1"\n# first\ndependencies = [\n    "b", # b\n    "z",\n]\n[tool.x]\ny = 1\n'
    )
    assert edit_project(text, tmp_path, add=["y>1"]) == text.replace('    "z",\n', '    "y>1",\n    "z",\n')
    assert edit_project(text, tmp_path, remove=["z"]) == text.replace('    "z",\n', "")
    with pytest.raises(DefinitionError, match="uv does not edit it"):
        edit_project("[project]\n", tmp_path, add=["y"])


HEAD = "Bootstrap: localimage\nFrom: python.sif\n\n"
NEW = "    apt-get update\n    apt-get install -y --no-install-recommends {}\n    rm -rf /var/lib/apt/lists/*\n"


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (
            f"{HEAD}%post\n    echo x\n%test\n    true\n",
            f"{HEAD}%post\n{NEW.format('bb cc')}    echo x\n%test\n    true\n",
        ),
        (
            f"{HEAD}%post\n    #!/bin/bash\n    echo x\n",
            f"{HEAD}%post\n    #!/bin/bash\n{NEW.format('bb cc')}    echo x\n",
        ),
        (f"{HEAD}%test\n    true\n", f"{HEAD}%test\n    true\n\n%post\n{NEW.format('bb cc')}"),
        (f"{HEAD}%post\n  apt-get install -y aa && x\n", f"{HEAD}%post\n  apt-get install -y aa bb cc && x\n"),
        (
            f"{HEAD}%post\n  # apt-get install zz\n  apt-get install -y \\\n    aa \\\n    dd\n",
            f"{HEAD}%post\n  # apt-get install zz\n  apt-get install -y \\\n    aa \\\n    dd \\\n    bb \\\n    cc\n",
        ),
        (  # the last stage is the image's
            f"{HEAD}%post\n  apt-get install aa\n{HEAD}%post\n  apt-get install dd # d\n",
            f"{HEAD}%post\n  apt-get install aa\n{HEAD}%post\n  apt-get install dd bb cc # d\n",
        ),
    ],
)
def test_debian_packages_are_added_and_removed(text: str, after: str) -> None:
    added = add_packages(text, ["bb", "cc"], PATH)
    assert added == after
    assert installed_packages(added, PATH)[-2:] == ["bb", "cc"]
    for name in ("cc", "bb"):
        added = remove_package(added, name, PATH)
    assert added.removesuffix("\n%post\n") == text


def test_debian_packages_of_another_program_or_command_are_left_to_the_user() -> None:
    with pytest.raises(DefinitionError, match=r"x\.def:5: %post is run by /usr/bin/python3"):
        add_packages(f"{HEAD}%post -c /usr/bin/python3\n    print()\n", ["bb"], PATH)
    with pytest.raises(DefinitionError, match=r"x\.def:5: this line installs nothing else"):
        remove_package(f"{HEAD}%post\n    apt-get update && apt-get install -y bb\n", "bb", PATH)
