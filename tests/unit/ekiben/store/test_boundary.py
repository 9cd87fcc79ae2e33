"""Only ekiben.store knows where a store keeps what: nothing else opens a blob or a record."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


def store_internals(text: str) -> Iterator[int]:
    """Yield the lines that join a path to a store's root, or use its parts."""
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("records", "blobs", "staging_area")
            and "store" in ast.unparse(node.value)
        ):
            yield node.lineno
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and ast.unparse(node.left).endswith(("store.root", "shared.root"))
        ):
            yield node.lineno


def test_only_the_store_package_touches_store_files() -> None:
    paths = [path for path in (ROOT / "ekiben").rglob("*.py") if not path.is_relative_to(ROOT / "ekiben" / "store")]
    assert len(paths) > 50
    assert [f"{path}:{line}" for path in paths for line in store_internals(path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    "code",
    ["(store.root / 'keys' / 'x').read_text()", "self.store.records.read('keys', 'x')", "shared.root / 'layers'"],
)
def test_checker_finds_access_to_store_files(code: str) -> None:
    assert list(store_internals(code)) == [1]
