"""No name or message of others reaches a terminal with control characters."""

from __future__ import annotations

import io
import sys
import unicodedata
from pathlib import Path

from ekiben.core.printable import printable
from ekiben.core.progress import Progress
from support.sample_recipe import RunCli


def test_of_all_characters_only_controls_are_escaped() -> None:
    # Unicode's names of what turns text around
    turning = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for letter in map(chr, range(sys.maxunicode + 1)):
        is_control = unicodedata.category(letter) == "Cc" or unicodedata.bidirectional(letter) in turning
        assert (printable(letter) != letter) == (is_control and letter not in "\n\t"), hex(ord(letter))
    assert printable(printable("\x1b[2J")) == printable("\x1b[2J")


def test_letters_stay_as_they_are() -> None:
    assert printable("学習\tñ 🙂\n\udcff") == "学習\tñ 🙂\n\udcff"
    assert printable("\x1b[2J\r\u202e\x9b") == r"\x1b[2J\r\u202e\x9b"


def test_progress_shows_control_characters_as_text() -> None:
    stream = io.StringIO()
    Progress(stream).log("\x1b]0;title\x07")
    assert stream.getvalue() == "\\x1b]0;title\\x07\n"


def test_errors_show_control_characters_as_text(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "\x1b[2J.sif").write_bytes(b"no image")
    done = run_cli("verify", tmp_path / "\x1b[2J.sif", code=6)
    assert "\x1b" not in done.stdout + done.stderr
    assert r"\x1b[2J.sif" in done.stderr
