"""What an image holds, read out of its layers: made here of a few files, so that what should be found is known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.core.errors import VerifyError
from ekiben.inspect._records import StoredImage
from ekiben.inspect.image_reader import broken_packages, debian_packages, python_packages
from ekiben.packages.installed import installed_packages
from support.layered_images import SITE, STATUS, Files, dist_info, image, record, status


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


def test_installed_packages() -> None:
    status = (
        "Package: a\nStatus: install ok installed\nVersion: 1:2.0-1\nDescription: x\n Version: not this\n\nPackage:"
        " b\nVersion: 3\n\nPackage: c\n"
    )
    assert installed_packages(status) == {"a": "1:2.0-1", "b": "3"}
    assert installed_packages("") == {}


def test_debian_packages_by_layer(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    below = status(record("libc6", "1"), record("bash", "5"))
    above = status(
        record(
            "libc6",
            "2",
            "Source: glibc",
            "Maintainer: GNU Libc <x@y>",
            "Depends: libgcc-s1, mawk (>= 1) | gawk:any",
            "Pre-Depends: dpkg",
            "Description: one",
            " Depends: not this",
            " .",
        ),
        record("bash", "5"),
        record("gone", "1", status="deinstall ok config-files"),
        record("new", "1", "Source: newer (7:1.2)", "Provides: awk (= 1), editor"),
    )
    one = image(tmp_path, stack, "a", below, {"etc/x": b""}, above)
    found = {package.name: package for package in debian_packages(one)}
    assert {name: package.layer for name, package in found.items()} == {"bash": 0, "libc6": 2, "new": 2}
    assert (found["libc6"].source, found["libc6"].maintainer) == (("glibc", "2"), "GNU Libc")
    assert found["libc6"].depends == (("dpkg",), ("libgcc-s1",), ("mawk", "gawk"))
    assert (found["new"].source, found["new"].provides) == (("newer", "7:1.2"), ("awk", "editor"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({STATUS: b"Package: a\nStatus: install ok installed\nArchitecture: amd64\n\n"}, "a has no Version"),
        ({STATUS: b"Version: 1\nStatus: install ok installed\n\n"}, "a record has no Package"),
        ({STATUS: record("a", "1").encode() + bytes(40)}, r"line 6 is not a field: '\\x00"),
        (status(record("a", "1")), "there is no record of b, whose files are listed in var/lib/dpkg/info/b:amd64.list"),
    ],
)
def test_bad_database_named(tmp_path: Path, stack: contextlib.ExitStack, files: Files, message: str) -> None:
    below = {
        **status(record("b", "1")),
        "var/lib/dpkg/info/b:amd64.list": b"/.\n",
        "var/lib/dpkg/info/b:amd64.md5sums": b"",
    }
    one = image(tmp_path, stack, "a", below, files)
    with pytest.raises(VerifyError, match=rf"layer layer1: dpkg's database is broken: {STATUS}: .*{message}"):
        debian_packages(one)


def test_removed_but_unpurged_packages_are_accepted(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    files = {
        **status(record("a", "1"), record("b", "1", status="deinstall ok config-files")),
        "var/lib/dpkg/info/b.list": b"/.\n",
    }
    one = image(tmp_path, stack, "a", files)
    assert [package.name for package in debian_packages(one)] == ["a"]


def test_python_packages_by_layer(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    old = f"{SITE}/torch-1.dist-info"
    one = image(
        tmp_path,
        stack,
        "a",
        {**dist_info("Some.Thing", "2", "License: MIT"), **dist_info("torch", "1")},
        {**dist_info("torch", "2"), old: None, f"{SITE}/setuptools/_vendor/x-1.dist-info/METADATA": b"Name: x"},
    )
    found = python_packages(one)
    assert [(item.name, item.version, item.layer) for item in found] == [("Some.Thing", "2", 0), ("torch", "2", 1)]
    assert found[0].metadata["License"] == "MIT"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({f"{SITE}/torch-2.dist-info/RECORD": b""}, "is not there"),
        ({f"{SITE}/torch-2.dist-info/METADATA": b"\0\0\0"}, "has no Name and Version"),
    ],
)
def test_a_half_installed_python_package_is_named(
    tmp_path: Path, stack: contextlib.ExitStack, files: Files, message: str
) -> None:
    one = image(tmp_path, stack, "a", {"etc/x": b""}, files)
    with pytest.raises(VerifyError, match=rf"layer layer1: .*torch-2\.dist-info/METADATA {message}"):
        python_packages(one)


def test_a_half_installed_package_of_a_base_is_left_out_and_named(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    """No build here can mend what a base of others brought."""
    base = {"opt/ekiben/base.json": b"{}", f"{SITE}/torch-2.dist-info/RECORD": b"", **dist_info("a", "1")}
    one = image(tmp_path, stack, "a", base, {"etc/x": b""})
    assert [item.name for item in python_packages(one)] == ["a"]
    assert broken_packages(one) == [f"{SITE}/torch-2.dist-info/METADATA is not there"]


def test_a_file_is_read_through_links(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    links = {
        "usr/share/doc/g++": "g++-12",
        "usr/share/doc/g++-12": "/usr/share/doc/gcc",
        "etc/release": "../usr/release",
        "round": "about",
        "about": "round",
        "usr/share/doc/away": "nowhere",
    }
    one = image(tmp_path, stack, "a", {"usr/share/doc/gcc/copyright": b"GPL", "usr/release": b"12"}, links=links)
    assert one.read_through_links("usr/share/doc/g++/copyright") == b"GPL"
    assert one.read_through_links("etc/release") == b"12"
    assert [one.read_through_links(path) for path in ("round", "usr/share/doc/away/copyright", "usr")] == [None] * 3


@pytest.mark.parametrize(
    ("name", "stack", "arch", "label", "expected"),
    [
        ("hello", "cu130", "amd64", "", "hello"),
        ("hello-cu124", "cu124", "amd64", "", "hello --stack cu124"),
        ("hello-apex-deepspeed", "cu130", "amd64", "apex deepspeed", "hello --layer apex --layer deepspeed"),
        ("hello-apex-cu132-arm64", "cu132", "arm64", "apex", "hello --layer apex --stack cu132 --arch arm64"),
    ],
)
def test_arguments_that_build_a_stored_image(name: str, stack: str, arch: str, label: str, expected: str) -> None:
    labels = {"org.ekiben.layer": label} if label else {}
    image = StoredImage(
        recipe="hello",
        stack=stack,
        manifest="",
        config="",
        created="",
        architecture=arch,
        environment=(),
        labels=labels,
        tasks={},
        layers=(),
    )
    assert image.cli_args(name) == expected
