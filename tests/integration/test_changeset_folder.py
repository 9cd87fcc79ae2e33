"""A changeset in a folder, as the kernel's overlay leaves it: root alone can make one."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ekiben.formats.changeset import normalize
from ekiben.formats.left_out import LeftOut
from ekiben.formats.upper import Changes
from support.changesets import BASE, EPOCH, XATTRS, Layers, drained, sent

pytestmark = pytest.mark.covers("ekiben/formats")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[Layers]:
    with ExitStack() as stack:
        yield Layers(tmp_path, stack)


@pytest.fixture
def base(layers: Layers) -> Layers:
    layers.push(sent(BASE))
    return layers


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    (tmp_path / "upper").mkdir()
    return tmp_path / "upper"


def test_excluded_entries_are_reported_by_kind_with_the_reason(base: Layers, tmp_path: Path) -> None:
    up = tmp_path / "up"
    for path in ("tmp/a", "tmp/b", "root/.cache/x", "var/log/l", "etc/apt/sources.list", "kept"):
        (up / path).parent.mkdir(parents=True, exist_ok=True)
        (up / path).write_bytes(b"x")
    os.setxattr(up / "kept", "system.posix_acl_access", ACL)
    os.mknod(up / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    left = LeftOut()
    drained(normalize(Changes(up), base.lower, epoch=EPOCH, left_out=left))
    reports = {line.split(" (")[0].removeprefix("left out: "): line for line in left.lines()}
    assert set(reports) == {"/tmp/a, /tmp/b", "/root/.cache/x", "/var/log/l", "/etc/apt/sources.list", "/kept", "/null"}
    assert "access control lists" in reports["/kept"]
    assert all(line.endswith(")") for line in reports.values())


ACL = bytes.fromhex(
    "0200000001000600ffffffff02000400e803000004000400ffffffff10000400ffffffff20000400ffffffff"
)  # user::rw-, user:1000:r--, group::r--, mask::r--, other::r--


def test_attributes_in_a_folder(base: Layers, upper: Path) -> None:
    (upper / "usr").mkdir()
    (upper / "usr/ping").write_bytes(b"x")
    for path in (upper / "usr", upper / "usr/ping"):
        for name, value in XATTRS:
            os.setxattr(path, name, value)
        os.setxattr(path, "user.fuseoverlayfs.origin", b"usr/ping\0")
    entries = {entry.path: entry.xattrs for entry, _ in normalize(Changes(upper), base.lower, epoch=EPOCH)}
    assert entries == {"": (), "usr": XATTRS, "usr/ping": XATTRS}


def test_unit_tests_of_changesets_hold_for_a_folder() -> None:
    """Each changeset of tests/unit gives the same layer when it is read from a folder."""
    tests = ROOT / "tests/unit/ekiben/formats/test_changeset.py"
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "support.folder_shape", tests]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
