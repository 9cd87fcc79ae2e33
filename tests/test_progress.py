"""What is said on the way: plain lines where nobody watches, one live line on a terminal."""

from __future__ import annotations

import io
import os
import re
import select
from pathlib import Path

import pytest

from builder.progress import Progress


def test_plain_lines() -> None:
    out = io.StringIO()
    progress = Progress(out)
    with progress.step("layer base (never built)", total=10):
        progress.note("a detail that nobody sees")
        progress.count(5)
    progress.tell("a line")
    assert re.fullmatch(
        r"layer base \(never built\) …\nlayer base \(never built\): \d+\.\d s\na line\n", out.getvalue()
    )


def test_quiet() -> None:
    out = io.StringIO()
    progress = Progress(out, quiet=True)
    with progress.step("x"):
        progress.tell("y")
    assert out.getvalue() == ""


def test_a_failed_step_is_not_told_as_done() -> None:
    out = io.StringIO()
    with pytest.raises(ValueError), Progress(out).step("x"):
        raise ValueError
    assert out.getvalue() == "x …\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_details_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    progress = Progress(out)
    with progress.step("[bold]not markup[/]"):
        progress.note("Get:1 [arch=amd64] main [/]")
    assert "[bold]not markup[/]" in out.getvalue()
    assert out.getvalue().rstrip().endswith("s")


def test_a_real_terminal(tmp_path: Path) -> None:
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as stream, os.fdopen(leader, "rb", buffering=0) as reader:
        progress = Progress(stream)
        with progress.step("work"):
            progress.note("detail")
        stream.flush()
        seen = b""  # a terminal hands over what has come so far, not what one write held
        while b"work" not in seen and select.select([reader], [], [], 10)[0]:
            seen += reader.read(4096)
        assert b"work" in seen
