"""Text I/O names its encoding: without one, another locale reads and writes other bytes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
# To be mended; this list only shrinks.


def implicit_encodings(text: str) -> Iterator[int]:
    """Yield the lines of calls that read or write text in the locale's encoding."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or any(word.arg in ("encoding", None) for word in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {word.arg: word.value for word in node.keywords}
        if name == "read_text":
            is_text = not node.args
        elif name == "write_text":
            is_text = len(node.args) < 2
        elif name in ("open", "NamedTemporaryFile", "fdopen") and "fileobj" not in keywords:
            first = (
                0 if (isinstance(node.func, ast.Attribute) and name == "open") or name == "NamedTemporaryFile" else 1
            )
            mode = keywords.get("mode") or (node.args[first] if len(node.args) > first else None)
            default = "r" if name == "open" and isinstance(node.func, ast.Name) else "rb"
            value = mode.value if isinstance(mode, ast.Constant) else default
            is_text = re.fullmatch(r"[rwaxt+]+", str(value)) is not None
        else:
            is_text = any(isinstance(keywords.get(key), ast.Constant) for key in ("text", "universal_newlines"))
        if is_text:
            yield node.lineno


@pytest.mark.parametrize("folder", sorted(path.name for path in (ROOT / "ekiben").iterdir() if path.is_dir()))
def test_text_io_names_its_encoding(folder: str) -> None:
    paths = sorted((ROOT / "ekiben" / folder).rglob("*.py"))
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in paths for line in implicit_encodings(path.read_text("utf-8"))
    ]
    assert not found


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("p.read_text()", True),
        ("p.read_text(errors='replace')", True),
        ("p.read_text('utf-8')", False),
        ("p.write_text(t)", True),
        ("p.write_text(t, encoding='utf-8')", False),
        ("open(p)", True),
        ("open(p, 'rb')", False),
        ("open(p, 'w', encoding='utf-8')", False),
        ("p.open('a')", True),
        ("p.open('xb')", False),
        ("tarfile.open(fileobj=f, mode='w')", False),
        ("run(argv, text=True)", True),
        ("run(argv, encoding='utf-8')", False),
        ("os.fdopen(n, 'w')", True),
    ],
)
def test_checker_finds_an_implicit_encoding(code: str, is_found: bool) -> None:
    assert list(implicit_encodings(code)) == ([1] if is_found else [])
