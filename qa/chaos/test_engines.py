"""A short cut of `make chaos`: killed engines. Beside tests that use an engine, its containers cannot be counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import engines
from chaos.cut import campaign

pytestmark = pytest.mark.covers("qa/chaos", "ekiben/executors", "ekiben/builder")


@pytest.mark.parametrize("kind", engines.KINDS)
def test_killed_engine_leaves_nothing_after_the_next_command(kind: str, tmp_path: Path) -> None:
    if reason := engines.unavailable(kind):
        pytest.skip(f"{reason} (tests/services.sh)")
    assert campaign([kind], tmp_path, workers=1, kills=1, minutes=3)[kind]["kills"] >= 1
