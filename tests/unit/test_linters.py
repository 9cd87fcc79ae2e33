"""ruff, mypy and shellcheck as tests; and what no file that we keep may say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(*args: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name(args[0])
    if not program.exists():
        pytest.skip(f"{args[0]} is not installed (make lint installs it)")
    return subprocess.run([program, *args[1:]], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "argv",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy",),
        ("mypy", "tests/integration/conftest.py"),  # one run cannot check two modules called conftest
    ],
    ids=" ".join,
)
def test_linter(argv: tuple[str, ...]) -> None:
    done = tool(*argv)
    assert done.returncode == 0, done.stdout + done.stderr


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
