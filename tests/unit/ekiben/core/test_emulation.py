"""Whether programs of another architecture run here: the kernel's table of interpreters, as files of the test's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ekiben.core import emulation
from ekiben.core.emulation import check_programs, emulation_problem
from ekiben.core.errors import EngineError

AARCH64 = "7f454c460201010000000000000000000200b700"


@pytest.fixture(autouse=True)
def on_amd64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "host_arch", lambda: "amd64")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "status").write_text("enabled\n")
    (tmp_path / "register").write_text("")
    (tmp_path / "python3.11").write_text(
        "enabled\ninterpreter /usr/bin/python3.11\nflags: \noffset 0\nmagic a70d0d0a\n"
    )
    return tmp_path


def register(table: Path, *, flags: str = "PF", state: str = "enabled", magic: str = AARCH64) -> None:
    (table / "qemu-aarch64").write_text(
        f"{state}\ninterpreter /usr/libexec/qemu\nflags: {flags}\noffset 0\nmagic {magic}\nmask ff\n"
    )


def test_programs_of_this_machine_need_no_emulator(tmp_path: Path) -> None:
    assert emulation_problem("amd64", tmp_path / "none") is None


def test_registered_emulator_is_known_by_what_programs_begin_with(table: Path) -> None:
    register(table)
    assert emulation_problem("arm64", table) is None
    check_programs("arm64", table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": "disabled"}, "no emulator for arm64 is registered with the kernel"),
        ({"magic": "7f454c46020101000000000000000000020015"}, "no emulator for arm64"),  # of another processor
        ({"magic": "not hexadecimal"}, "no emulator for arm64"),
        ({"flags": "P"}, "/usr/libexec/qemu is registered without the flag F, so containers do not see it"),
    ],
    ids=str,
)
def test_error_names_what_is_missing(table: Path, change: dict[str, str], message: str) -> None:
    register(table, **change)
    with pytest.raises(EngineError, match=message) as caught:
        check_programs("arm64", table)
    assert str(caught.value).startswith("programs for arm64 do not run on this machine, which is amd64: ")
    assert "apt-get install qemu-user-static binfmt-support" in str(caught.value.hint)


def test_unmounted_table_is_named_with_the_command_that_mounts_it(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="binfmt_misc is not mounted") as caught:
        check_programs("arm64", tmp_path)
    assert "mount -t binfmt_misc none /proc/sys/fs/binfmt_misc" in str(caught.value.hint)
