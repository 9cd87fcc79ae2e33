"""README's two commands on a bare Debian 12: `make image recipe=hello` runs the main job, `make test` passes the tests.

Takes as long as `make test`, so only `make test-all` runs it; the inner run leaves it out.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from machines import bare_machine, host_mirrors, run_in, separate_network

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="needs root to enter another root file system"),
    pytest.mark.skipif(not shutil.which("mmdebstrap"), reason="needs mmdebstrap (tests/services.sh install)"),
]

COMMIT = "git init -q && git add -A && git -c user.name=t -c user.email=t@example.org commit -qm all"


@pytest.fixture
def debian() -> Iterator[Path]:
    with bare_machine(["bookworm"], host_mirrors()) as root:
        assert run_in(root, COMMIT).returncode == 0
        yield root


def test_root_builds_runs_and_tests(debian: Path) -> None:
    image = run_in(debian, "make --no-print-directory image recipe=hello")
    assert image.returncode == 0, image.stderr
    assert "tested  under" in image.stdout  # an engine that it has installed; Debian 12 has no Apptainer
    options = "--ignore=qa/test_two_commands.py --reruns 1 -rR"
    with separate_network() as prefix:
        tests = run_in(debian, f'make --no-print-directory test options="{options}"', prefix=prefix, timeout=3600)
    assert tests.returncode == 0, tests.stdout[-20000:] + tests.stderr[-5000:]
    assert re.search(r"^tests: unit tests: \d+ s$", tests.stderr, re.MULTILINE)
    assert "selected tests" in tests.stdout


def test_an_ordinary_user_runs_the_unit_tests_and_reads_what_is_left_out(debian: Path) -> None:
    prepared = run_in(
        debian,
        "apt-get -qq update && apt-get -qq install -y --no-install-recommends python3-venv >/dev/null && "
        "useradd --create-home somebody && chown -R somebody /src",
    )
    assert prepared.returncode == 0, prepared.stderr
    as_user = "setpriv --reuid somebody --regid somebody --clear-groups env HOME=/home/somebody "
    tests = run_in(debian, f"{as_user} make --no-print-directory test", timeout=3600)
    assert tests.returncode == 0, tests.stdout[-20000:] + tests.stderr[-5000:]
    assert re.search(r"\d+ passed", tests.stdout)
    assert "skipped" not in tests.stdout.splitlines()[-1]
    assert "left out, because they need root and apt-get:\n" in tests.stderr
    assert "tests/integration/test_slurm.py" in tests.stderr
