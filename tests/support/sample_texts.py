"""Draw a sample of the project's names and texts, to be read against the rules of CONTRIBUTING.md.

python tests/support/sample_texts.py SEED [FOLDER]...

Prints 15 names, 15 docstrings, 15 messages and help texts, 8 comments and 7 commit subjects, by default from ekiben,
entrypoints and recipes. The same seed draws the same sample from the same tree.
"""

from __future__ import annotations

import ast
import io
import random
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ekiben", "entrypoints", "recipes")
COUNTS = {"name": 15, "docstring": 15, "message": 15, "comment": 8, "commit": 7}
COMMITS = 200


def texts_of(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the kind, the line and the text of each name and text of a module."""
    source = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
            yield "docstring", getattr(node, "lineno", 1), text
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield "name", node.lineno, node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield "name", node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield "name", node.lineno, node.arg
        elif isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            text = ast.unparse(node)
            if id(node) not in docstrings and text.count(" ") >= 3:
                yield "message", node.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.string.count(" ") >= 3:
            yield "comment", token.start[0], token.string


def main(seed: str, *folders: str) -> None:
    """Print the sample."""
    texts_by_kind: dict[str, set[str]] = {kind: set() for kind in COUNTS}
    for folder in folders or FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for kind, line, text in texts_of(path):
                where = "" if kind == "name" else f"{path.relative_to(ROOT)}:{line}: "
                texts_by_kind[kind].add(where + text)
    log = ["git", "-C", str(ROOT), "log", f"--max-count={COMMITS}", "--format=%s"]
    texts_by_kind["commit"] |= set(subprocess.run(log, capture_output=True, text=True, check=True).stdout.splitlines())
    dice = random.Random(seed)
    for kind, count in COUNTS.items():
        for text in dice.sample(sorted(texts_by_kind[kind]), count):
            print(f"[{kind}] {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
