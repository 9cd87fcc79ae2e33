"""A name of a process says whether it has ended, and of which nothing is known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from ekiben.core.process_name import has_ended, is_of_this_boot, process_name

ASK = "from ekiben.core.process_name import process_name; print(process_name(), flush=True); input()"


def test_this_process_lives() -> None:
    assert not has_ended(process_name())
    assert is_of_this_boot(process_name())
    assert process_name() == process_name()


def test_other_process_lives_until_its_end_also_as_a_zombie() -> None:
    argv = [sys.executable, "-c", ASK]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin and other.stdout
        name = other.stdout.readline().strip()
        assert name != process_name()
        assert not has_ended(name)
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(name)
    assert has_ended(name)


def test_process_id_that_another_process_has_by_now_is_not_the_same() -> None:
    *first, start = process_name().split(".")
    assert has_ended(".".join([*first, str(int(start) - 1)]))


CHANGES: dict[str, tuple[Callable[[list[str]], list[str]], bool]] = {
    "another machine": (lambda parts: ["0" * 8, *parts[1:]], False),
    "an earlier boot": (lambda parts: [parts[0], "0" * 12, *parts[2:]], True),
    "another PID namespace": (lambda parts: [*parts[:2], "1", *parts[3:]], False),
    "another user": (lambda parts: [*parts[:3], str(os.getuid() + 1), *parts[4:]], False),
    "another user before the boot": (
        lambda parts: [parts[0], "0" * 12, parts[2], str(os.getuid() + 1), *parts[4:]],
        False,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_only_what_is_known_has_ended(change: str) -> None:
    changed, ended = CHANGES[change]
    parts = process_name().split(".")
    parts[4] = "4194304"  # above the largest that Linux gives
    assert has_ended(".".join(parts))
    assert has_ended(".".join(changed(parts))) is ended


@pytest.mark.parametrize("name", ["", "vm:123-0a1b2c3d", "x" * 9999, "9" * 9999, ".....", "{0}\n", "{0}.1"])
def test_foreign_text_is_no_name(name: str) -> None:
    name = name.format(process_name())
    assert not has_ended(name)
    assert not is_of_this_boot(name)


def test_where_proc_is_hidden_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    *first, _ = process_name().split(".")
    name = ".".join([*first, "1"])
    assert has_ended(name)
    monkeypatch.setattr("ekiben.core.process_name._start", lambda process: None)
    assert not has_ended(name)
