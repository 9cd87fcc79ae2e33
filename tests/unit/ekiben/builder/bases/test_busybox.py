"""A base of busybox alone: its address, and the names that the program has."""

from __future__ import annotations

import pytest

from ekiben.builder.bases.busybox import applets, header_problems


@pytest.mark.parametrize(
    ("url", "is_right"),
    [
        ("https://mirror.example.org/busybox-x86_64", True),
        ("http://127.0.0.1:80/busybox?x=y", True),
        ("", False),
        ("mirror.example.org/busybox", False),
        ("file:///etc/passwd", False),
        ("ftp://mirror.example.org/busybox", False),
        ("https://user:password@mirror.example.org/busybox", False),
        ("https://mirror.example.org/a b", False),
        ("https://mirror.example.org/\n", False),
        ("https://", False),
    ],
)
def test_address_of_the_program(url: str, is_right: bool) -> None:
    assert (header_problems({"bootstrap": "busybox", "mirrorurl": url}) == []) == is_right


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (b"\x7fELF..\0[\0[[\0acpid\0add-shell\0zcat\0\0rest", ["[", "[[", "acpid", "add-shell", "zcat"]),
        (b"\x7fELF..\0[\0[[\0../sh\0", ["[", "[["]),
        (b"\x7fELF..\0[\0[[\0sh", ["[", "[["]),
        (b"\x7fELF", []),
        (b"", []),
    ],
)
def test_names_of_the_program(program: bytes, names: list[str]) -> None:
    assert applets(program) == names
