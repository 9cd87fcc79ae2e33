"""That the linters run; and what no file that we keep may say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_lint_runs_before_the_tests() -> None:
    """ruff and mypy run once, as ``make lint``, which the tests of a change begin with."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^check: lint\b", makefile, re.MULTILINE)
    assert re.search(r"^make .*\blint$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    recipe = makefile.partition("\nlint:")[2].partition("\n\n")[0]
    for command in ("ruff check .", "ruff format --check .", "mypy", "mypy tests/integration/conftest.py"):
        assert f"$(PYTHON) -m {command}" in recipe


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# In two pieces each, so that this file may be kept, too.
HOSTS = [
    "pypi" + ".org",
    "python" + "hosted.org",
    "deb." + "debian.org",
    "security." + "debian.org",
    "archive." + "ubuntu.com",
]
PLACES = ["/work" + "/main", "/work" + "/shared", "/tmp" + "/prompts"]


def test_no_file_names_a_package_registry_or_local_path() -> None:
    paths = tracked()
    assert ROOT / "README.md" in paths
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in paths
        for word in (*HOSTS, *PLACES)
        if word.encode() in path.read_bytes()
    ]
    assert found == []


def test_texts_are_utf8_with_plain_line_ends() -> None:
    for path in tracked():
        data = path.read_bytes()
        if path.suffix in {".py", ".md", ".def", ".yaml", ".toml", ".sh", ".lock", ".in", ".jsonl", ".svg"}:
            assert data.decode("utf-8").endswith("\n") or not data, path
            assert b"\r" not in data, path
