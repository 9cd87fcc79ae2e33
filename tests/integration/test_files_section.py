"""%files copies as Apptainer does: each line of the table is built by Apptainer, too, and the trees are the same."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.errors import EkibenError
from support.files_section import Tree, base, definition, ours, sources

pytestmark = pytest.mark.covers("ekiben/resolve")


SAME = {
    "a file under a new name": "a /opt/new",
    "a file into a folder that is there": "a /opt",
    "a file into an empty folder": "a /empty",
    "a file into a folder with a slash": "a /opt/",
    "a file into a new folder": "a /srv/new/",
    "a file in a new folder": "a /srv/new/a",
    "a file over a file": "a /etc/conf",
    "a file without a destination": "a",
    "a program": "tool.sh /usr/bin/tool",
    "a file below a link to a folder": "a /bin/a",
    "a file into a link to a folder": "a /bin",
    "a file into an absolute link to a folder": "a /to-opt",
    "a file through a link to a file": "a /to-conf",
    "a link to a file": "link-a /opt/x",
    "a link to a file into a folder": "link-a /opt",
    "a folder under a new name": "d /opt/new",
    "a folder into a folder that is there": "d /empty",
    "a folder into a folder that has one of its name": "d /opt",
    "a folder onto one of its own name": "d /opt/d",
    "a folder into a new folder": "d /srv/new/",
    "a folder without a destination": "d",
    "a link to a folder": "link-d /opt/new",
    "a link to a folder into a folder": "link-d /opt",
    "an empty folder": "void /opt/void",
    "an empty folder into a folder": "void /opt",
    "a pattern into a folder": "g*.txt /opt",
    "a pattern into a new folder": "g?.txt /srv/new/",
    "a pattern that matches one": "g1* /opt/one",
    "two lines, the first makes the folder": "a /srv/new/\n    b /srv/new",
    "two lines, the last wins": "a /opt/x\n    b /opt/x",
    "a name that is not ASCII": "日本 /opt",
    "a relative destination": "a opt/x",
}
# name → the line, and what we say. Apptainer refuses these as well.
REFUSED = {
    "nothing there": ("nothing /opt", "no such file under"),
    "a pattern without a match": ("z*.txt /opt", "matches"),
    "a dangling link": ("dangling /opt", "a link to nowhere, which does not exist"),
    "a dangling link in a folder": ("bad /opt", "a link to nowhere, which does not exist"),
    "a file below a file": ("a /etc/conf/a", "/etc/conf is not a folder"),
    "a folder onto a file": ("void /etc/conf", "is not a folder in the layers below"),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of sources and a root file system, as a sandbox and as a layer."""
    root = tmp_path_factory.mktemp("files")
    (root / "images").mkdir()
    (root / "base").mkdir()
    sources(root)
    base(root / "base")
    yield root


def theirs(tree: Path, lines: str, out: Path) -> Tree | None:
    """None when Apptainer refuses."""
    if not shutil.which("apptainer") or os.geteuid():
        pytest.skip("apptainer and root are needed")
    source = definition(tree, lines, f"{tree}/base")
    argv = ["apptainer", "--quiet", "build", "--force", "--sandbox", str(out), str(source)]
    if subprocess.run(argv, cwd=tree, capture_output=True, check=False, timeout=60).returncode:
        return None
    kept = ("etc/conf", "etc", "opt", "usr", "bin", "empty", "srv", "to-opt", "to-conf", "a", "d")
    found: Tree = {}
    for path in sorted(out.rglob("*")):
        inside = path.relative_to(out).as_posix()
        if inside not in kept and not inside.startswith(("opt/", "usr/bin", "empty/", "srv/", "bin/", "a/", "d/")):
            continue
        if path.is_symlink():
            found[inside] = f"symlink  {path.readlink()}"
        elif path.is_dir():
            found[inside] = "dir"
        else:
            found[inside] = (
                f"file {'x' if path.stat().st_mode & 0o100 else ''} {path.read_text(encoding='utf-8')}".strip()
            )
    return found


@pytest.mark.parametrize("lines", SAME.values(), ids=SAME)
def test_files_section_gives_apptainers_tree(tree: Path, tmp_path: Path, lines: str) -> None:
    expected = theirs(tree, lines, tmp_path / "sandbox")
    assert expected is not None
    assert {path: what.rstrip() for path, what in ours(tree, lines, tmp_path / "x").items()} == {
        path: what.rstrip() for path, what in expected.items()
    }


@pytest.mark.parametrize(("lines", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_what_apptainer_refuses(tree: Path, tmp_path: Path, lines: str, message: str) -> None:
    assert theirs(tree, lines, tmp_path / "sandbox") is None
    with pytest.raises(EkibenError, match=message):
        ours(tree, lines, tmp_path / "x")
