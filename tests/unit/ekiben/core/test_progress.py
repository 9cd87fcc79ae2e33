"""Progress messages: plain lines without a terminal, one live line on a terminal."""

from __future__ import annotations

import io
import os
import re
import select
import time
from pathlib import Path

import pytest

from ekiben.core.progress import Progress


def test_plain_lines_without_a_terminal() -> None:
    out = io.StringIO()
    progress = Progress(out)
    with progress.step("layer base (never built)", total=10):
        progress.note("a detail that nobody sees")
        progress.count(5)
    progress.log("a line")
    assert re.fullmatch(
        r"layer base \(never built\) …\nlayer base \(never built\): \d+\.\d s\na line\n", out.getvalue()
    )


def test_quiet_prints_nothing() -> None:
    out = io.StringIO()
    progress = Progress(out, quiet=True)
    with progress.step("x"):
        progress.log("y")
    assert out.getvalue() == ""


def test_a_failed_step_prints_no_duration() -> None:
    out = io.StringIO()
    with pytest.raises(ValueError), Progress(out).step("x"):
        raise ValueError
    assert out.getvalue() == "x …\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(terminal: Terminal) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())


def wait_for(terminal: Terminal, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in plain(terminal):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_terminal_shows_details_without_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    progress = Progress(out)
    with progress.step("[bold]not markup[/]"):
        progress.note("Get:1 [arch=amd64] main [/]")
    assert "[bold]not markup[/]" in out.getvalue()
    assert out.getvalue().rstrip().endswith("s")


def test_a_terminal_shows_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    out = Terminal()
    progress = Progress(out)
    with progress.step("pull", total=4_000_000):
        for done in (1, 2, 3):
            progress.count(1_000_000)
            wait_for(out, f"{done}.0/4.0 MB")  # the display is drawn ten times a second
        progress.log("a [line]")
    seen = plain(out)
    assert "━" in seen
    assert re.search(r"[123]\.0/4\.0 MB +[\d.]+ MB/s +0:00:0\d", seen)
    assert "a [line]\n" in seen
    assert re.search(r"pull: \d\.\d s\n$", seen)


def test_a_pseudo_terminal_shows_the_step(tmp_path: Path) -> None:
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


def test_a_terminal_shows_the_last_lines_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "30")
    out = Terminal()
    progress = Progress(out)
    with progress.step("layer mine"):
        for number in range(10):
            progress.output(f"[line] {number}\x1b[2J")
        wait_for(out, "[line] 9")
    assert "\x1b[2J" not in out.getvalue()
    drawn = [frame for frame in plain(out).split("layer mine") if "[line] 9" in frame]
    assert "[line] 4" in drawn[0]
    assert "[line] 3" not in drawn[0]


def test_plain_progress_prints_all_that_a_script_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for out in (io.StringIO(), Terminal()):
        progress = Progress(out, style="plain")
        with progress.step("layer mine"):
            progress.output("Get:1 [arch=amd64]")
            progress.output("")
        assert re.fullmatch(r"layer mine …\n  Get:1 \[arch=amd64\]\n  \nlayer mine: \d+\.\d s\n", out.getvalue())
    quiet = io.StringIO()
    Progress(quiet, quiet=True, style="plain").output("x")
    assert quiet.getvalue() == ""
