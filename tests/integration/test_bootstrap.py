"""ekiben/bootstrap.sh, run for real in small checkouts of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.programs import write_program

pytestmark = pytest.mark.covers("ekiben/bootstrap.sh", "requirements.lock")

ROOT = Path(__file__).parents[2]
TOOLS = ["sh", "basename", "cat", "dirname", "env", "grep", "id", "mktemp", "mv", "readlink", "rm", "sed", "sha256sum"]
TOOLS += ["true", "uname", "unshare"]
NOBODY = [shutil.which("setpriv") or "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def run(checkout: Path, *options: str, as_nobody: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
    """As root no engine of this machine is reachable but through ``PATH``: no docker daemon is asked."""
    prefix = NOBODY if as_nobody and os.getuid() == 0 else []
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "EKIBEN_NO_INSTALL", "VIRTUAL_ENV")}
    return subprocess.run(
        [*prefix, "sh", f"{checkout}/ekiben/bootstrap.sh", *options],
        env={**clean, "DOCKER_HOST": "unix:///nonexistent/docker.sock", **env},
        capture_output=True,
        text=True,
        cwd="/",
        timeout=300,
        check=False,
    )


def make_checkout(at: Path) -> Path:
    """A checkout whose lock holds one package without dependencies, as locked in the real one."""
    (at / "ekiben").mkdir(parents=True)
    shutil.copy(ROOT / "ekiben/bootstrap.sh", at / "ekiben")
    [click] = re.findall(r"^click==.*(?:\n    .*)+", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)
    (at / "requirements.lock").write_text(f"{click}\n")
    return at


def leftovers(checkout: Path) -> list[str]:
    return [path.name for path in checkout.iterdir() if path.name.startswith(".venv.")]


@pytest.fixture(scope="module")
def real() -> Iterator[Path]:
    """The real lock, installed once; readable by every user, which pytest's own folders are not."""
    with tempfile.TemporaryDirectory(prefix="ekiben-bootstrap-") as folder:
        checkout = Path(folder)
        checkout.chmod(0o755)
        (checkout / "ekiben").mkdir()
        shutil.copy(ROOT / "ekiben/bootstrap.sh", checkout / "ekiben")
        shutil.copy(ROOT / "requirements.lock", checkout)
        made = run(checkout)
        assert made.returncode == 0, made.stderr
        yield checkout


@pytest.fixture
def bare_path(tmp_path: Path) -> Iterator[Path]:
    """A PATH with everyday tools and neither an engine nor a package manager."""
    with tempfile.TemporaryDirectory(prefix="ekiben-path-") as folder:
        path = Path(folder)
        path.chmod(0o755)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"{tool} is not on PATH"
            (path / tool).symlink_to(found)
        yield path


def test_a_fresh_checkout_gets_the_locked_requirements(real: Path) -> None:
    python = real / ".venv/bin/python"
    subprocess.run([python, "-c", "import click, docker, requests, rich, yaml, zstandard"], check=True)
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    pins = re.findall(r"^[\w.-]+==.+(?= \\$)", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)
    locked = {_pin(one) for one in map(Requirement, pins) if one.marker is None or one.marker.evaluate()}
    assert len(locked) > 10
    assert locked == {_pin(Requirement(line)) for line in frozen.splitlines()}
    assert leftovers(real) == []


def _pin(requirement: Requirement) -> str:
    return f"{canonicalize_name(requirement.name)}{requirement.specifier}"


def test_scripts_of_the_environment_name_its_final_path(real: Path) -> None:
    pip = subprocess.run([real / ".venv/bin/pip", "--version"], capture_output=True, text=True, check=True)
    assert f"{real}/.venv/lib/" in pip.stdout
    activated = ["sh", "-c", '. "$0" && command -v pip', f"{real}/.venv/bin/activate"]
    found = subprocess.run(activated, capture_output=True, text=True, check=True).stdout.strip()
    assert found == f"{real}/.venv/bin/pip"


def test_the_second_run_does_nothing(real: Path) -> None:
    def state() -> tuple[int, int, int]:
        venv, stamp = (real / ".venv").stat(), (real / ".venv/.requirements").stat()
        return venv.st_ino, stamp.st_ino, stamp.st_mtime_ns

    before = state()
    again = run(real)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert state() == before


def test_changed_lock_recreates_the_environment(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    assert run(checkout).returncode == 0
    (checkout / ".venv/old").touch()
    with (checkout / "requirements.lock").open("a") as lock:
        lock.write("# another version\n")
    again = run(checkout)
    assert again.returncode == 0, again.stderr
    assert "installing requirements.lock" in again.stderr
    assert not (checkout / ".venv/old").exists()
    assert leftovers(checkout) == []


def test_an_environment_of_someone_elses_is_kept(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/mine").touch()
    made = run(checkout)
    assert made.returncode == 0, made.stderr
    assert ".venv.before" in made.stderr
    assert (checkout / ".venv.before/mine").exists()
    assert (checkout / ".venv/bin/python").exists()


def test_concurrent_bootstraps_leave_one_complete_environment(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    both = [subprocess.Popen(["sh", checkout / "ekiben/bootstrap.sh"], stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    subprocess.run([checkout / ".venv/bin/python", "-c", "import click"], check=True)
    assert leftovers(checkout) == []
    assert run(checkout).stderr == ""


def test_a_package_with_other_bytes_is_refused(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    lock = checkout / "requirements.lock"
    lock.write_text(re.sub(r"sha256:\w{8}", "sha256:00000000", lock.read_text()))
    refused = run(checkout)
    assert refused.returncode == 7
    assert "HASHES" in refused.stderr
    assert not (checkout / ".venv").exists()
    assert leftovers(checkout) == []


def test_a_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    old = tmp_path / "python3"
    write_program(old, '#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.18"\nexit 1\n')
    refused = run(checkout, PYTHON=str(old))
    assert refused.returncode == 4
    assert f"PYTHON={old} is not Python 3.11 or newer (Python 3.9.18)" in refused.stderr
    assert not (checkout / ".venv").exists()


def test_python_can_be_chosen_by_variable(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    made = run(checkout, PYTHON=sys.executable)
    assert made.returncode == 0, made.stderr
    assert (checkout / ".venv/bin/python").resolve() == Path(sys.executable).resolve()


def test_without_an_engine_or_root_the_administrators_commands_are_printed(real: Path, bare_path: Path) -> None:
    refused = run(real, "--engine", as_nobody=True, PATH=str(bare_path))
    assert refused.returncode == 4
    assert "nothing here can run a layer" in refused.stderr
    assert "apt-get install -y --no-install-recommends buildah crun uidmap fuse-overlayfs" in refused.stderr
    assert "dnf install -y buildah crun shadow-utils fuse-overlayfs" in refused.stderr


def test_singularityce_is_no_engine_without_root(real: Path, bare_path: Path) -> None:
    """Apptainer under its old name is one."""
    program = bare_path / "singularity"
    for version, refused in (("singularity-ce version 4.1.1", True), ("apptainer version 1.4.5", False)):
        write_program(program, f"#!/bin/sh\necho {version}\n")
        done = run(real, "--engine", as_nobody=True, PATH=str(bare_path))
        assert (done.returncode == 4) == refused, done.stderr
        assert ("SingularityCE is here, which builds as root only" in done.stderr) == refused


def test_an_outdated_environment_of_another_user_is_left_to_its_owner(real: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root: a second user looks at the first one's checkout")
    refused = run(real, "--dev", as_nobody=True)
    assert refused.returncode == 4
    assert "ask its owner" in refused.stderr


def test_no_install_leaves_the_package_manager_alone(real: Path, bare_path: Path) -> None:
    called = bare_path / "called"
    for name in ("apt-get", "dnf", "sudo"):
        write_program(bare_path / name, f'#!/bin/sh\necho "$0 $*" >>{called}\n')
    refused = run(real, "--engine", PATH=str(bare_path), EKIBEN_NO_INSTALL="1")
    assert refused.returncode == 4
    assert "EKIBEN_NO_INSTALL is set" in refused.stderr
    assert "apt-get install -y --no-install-recommends buildah" in refused.stderr
    assert not called.exists()


def test_missing_mmdebstrap_is_a_warning(real: Path, bare_path: Path) -> None:
    engine = next(filter(None, map(shutil.which, ("apptainer", "singularity", "buildah"))), None)
    if not engine:
        pytest.skip("no engine on PATH (tests/services.sh install buildah)")
    (bare_path / Path(engine).name).symlink_to(engine)
    output = run(real, "--engine", PATH=str(bare_path), EKIBEN_NO_INSTALL="1")
    assert output.returncode == 0, output.stderr
    assert "apt-get install -y --no-install-recommends mmdebstrap" in output.stderr


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    refused = run(make_checkout(tmp_path), "--engines")
    assert refused.returncode == 2
    assert "--dev --engine" in refused.stderr
