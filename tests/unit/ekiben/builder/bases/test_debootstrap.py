"""Which mirror a Debian base comes from."""

from __future__ import annotations

import pytest

from ekiben.builder.bases.debootstrap import key_inputs, source_lines

MACHINE = "deb http://here.example.org/debian bookworm main\n"
FILE = "http://file.example.org/debian"


@pytest.mark.parametrize(
    ("suite", "mirror", "machine", "lines"),
    [
        ("bookworm", "", MACHINE, MACHINE),
        ("bookworm", FILE, MACHINE, MACHINE),
        ("bookworm", FILE, "", f"deb {FILE} bookworm main\n"),
        ("jammy", FILE, MACHINE, f"deb {FILE} jammy main\n"),
        ("jammy", "", MACHINE, MACHINE),
        ("bookworm", "deb [trusted=yes] file:/a ./", MACHINE, MACHINE),
    ],
)
def test_machine_s_mirror_comes_first(suite: str, mirror: str, machine: str, lines: str) -> None:
    header = {"bootstrap": "debootstrap", "osversion": suite, "mirrorurl": mirror}
    assert source_lines(header, machine) == lines
    assert key_inputs(header) == key_inputs({**header, "mirrorurl": "http://other.example.org/"})
