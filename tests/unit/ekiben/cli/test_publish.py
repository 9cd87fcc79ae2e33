"""`publish` checks everything before it builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sample_recipe import RunCli


@pytest.mark.parametrize(
    "argv", [("--to", "/proc/nope"), ("--to", "lab", "--version", "a b"), ("--to", "lab", "--tag", "x.sif")]
)
def test_publish_refuses_before_it_builds(argv: tuple[str, ...], run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("--store", tmp_path / "store", "publish", "hello", *argv, code=2 if "lab" in argv else 6)
    assert "error: " in done.stderr
    assert not (tmp_path / "store").exists()
