"""What the documentation shows exists: commands, options, targets, files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

import build

ROOT = Path(__file__).resolve().parent.parent
DOCS = [
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("recipes/*/README.md"), *ROOT.glob("bench/*.md"))
    if path.name != "CHANGELOG.md"
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) - {""}


def code(path: Path) -> list[str]:
    """Lines of code blocks, and words between backquotes."""
    text = path.read_text()
    blocks = re.findall(r"```.*?\n(.*?)```", text, re.DOTALL)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(
        r"^(?: {4}|\t)(.*)$", prose, re.MULTILINE
    )
    return [line.strip() for line in lines] + re.findall(r"`([^`\n]+)`", prose)


def commands(path: Path, program: str) -> list[str]:
    found = (re.search(rf"(?:^|[\s/]){re.escape(program)} (\S.*)", line) for line in code(path))
    return [match[1] for match in found if match]


def test_there_is_something_to_read() -> None:
    assert ROOT / "README.md" in DOCS
    assert len(commands(ROOT / "README.md", "build.py")) >= 5
    assert len(commands(ROOT / "README.md", "make")) >= 2


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
class TestDocument:
    def test_build_py(self, path: Path) -> None:
        for said in commands(path, "build.py"):
            name, *words = shlex.split(re.split(r"\s#|\s{2,}|[;|&…]", said)[0].replace("[", "").replace("]", ""))
            if name.startswith("-"):
                assert name in {"--help", "-h", "--store", "-v", "--verbose"}, said
                continue
            assert name in build.main.commands, said
            command = build.main.commands[name]
            known = {
                option
                for parameter in command.params
                if isinstance(parameter, click.Option)
                for option in parameter.opts
            }
            words = words[: words.index("--")] if "--" in words else words
            if name != "run":  # what follows the task is the task's own
                assert {word.split("=")[0] for word in words if word.startswith("-")} <= {*known, "--help", "-h"}, said

    def test_make(self, path: Path) -> None:
        for said in commands(path, "make"):
            word = said.split()[0]
            if re.fullmatch(r"[a-z-]+", word) and path.read_text().count(f"make {word}") and said == said.lower():
                assert word in TARGETS, said

    def test_links_lead_somewhere(self, path: Path) -> None:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
            if "://" not in target and not target.startswith("mailto:"):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_table_of_commands_is_complete() -> None:
    named = {said.split()[0] for said in commands(ROOT / "README.md", "build.py")}
    assert set(build.main.commands) <= named


def test_the_tree_names_what_is_there() -> None:
    tree = (ROOT / "README.md").read_text().split("## What is where")[1].split("\n## ")[0]
    names = {line.split()[0].split("/<")[0].strip("/") for line in tree.splitlines() if re.match(r" {4}\S", line)}
    assert {"build.py", "builder", "images", "recipes", "entrypoints", "tests"} <= names
    assert [name for name in names if not (ROOT / name).exists()] == []
    for module in (ROOT / "builder").glob("*.py"):
        if module.stem != "__init__":
            assert re.search(rf"\b{module.stem}\b", tree), f"{module.name} is not in the README's tree"
