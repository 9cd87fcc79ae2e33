"""Machines with git, make and Python and nothing else, made here and thrown away: Debian 12, Ubuntu 24.04."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiben.packages.apt import apt_sources
from machines import bare_machine, host_mirrors, run_in

pytestmark = [
    pytest.mark.covers("ekiben/bootstrap.sh", "Makefile", "build.py"),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root for chroot"),
    pytest.mark.skipif(not shutil.which("mmdebstrap"), reason="needs mmdebstrap (tests/services.sh install)"),
]


UBUNTU_KEYS = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
UBUNTU_KEYS_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"


@pytest.fixture
def debian(tmp_path: Path) -> Iterator[Path]:
    mirrors = host_mirrors()
    if not mirrors:
        pytest.skip("apt here has no Debian 12 mirror")
    with bare_machine(["bookworm"], mirrors) as root:
        yield root


@pytest.fixture
def ubuntu(tmp_path: Path) -> Iterator[Path]:
    archive = next(
        word for word in apt_sources("noble", None).split() if word.startswith("http")
    )  # mmdebstrap knows it
    try:
        with urllib.request.urlopen(f"{archive}/{UBUNTU_KEYS}", timeout=30) as answer:
            package = answer.read()
    except OSError as error:
        pytest.skip(f"Ubuntu's archive does not answer: {error}")
    assert hashlib.sha256(package).hexdigest() == UBUNTU_KEYS_SHA256
    (tmp_path / "keys.deb").write_bytes(package)
    subprocess.run(["dpkg-deb", "-x", tmp_path / "keys.deb", tmp_path / "keys"], check=True)
    keyring = f"--keyring={tmp_path}/keys/usr/share/keyrings/ubuntu-archive-keyring.gpg"
    with bare_machine([keyring, "noble"], [f"deb {archive} noble main universe"]) as root:
        yield root


def test_bootstrap_ends_with_an_environment_and_an_engine(debian: Path) -> None:
    bare = run_in(debian, "command -v buildah mmdebstrap newuidmap; python3 -c 'import ensurepip'")
    assert bare.stdout == ""
    assert "No module named 'ensurepip'" in bare.stderr

    made = run_in(debian, "sh ekiben/bootstrap.sh --engine")
    assert made.returncode == 0, made.stderr
    assert "installing buildah" in made.stderr

    there = run_in(debian, "mmdebstrap --version && .venv/bin/python -c 'import docker, zstandard'")
    assert there.returncode == 0, there.stderr
    # A layer on the machine's own programs: enough to prove that a command runs in a container and is kept.
    layer = run_in(
        debian,
        """set -e
        cd /
        tar -cf /tmp/usr.tar bin lib lib64 usr/lib64 usr/bin/touch usr/lib/*/libc.so.6 usr/lib/*/ld-linux-*
        container=$(buildah from scratch)
        buildah add --quiet "$container" /tmp/usr.tar >/dev/null
        buildah run --isolation chroot "$container" -- touch /made-inside
        ls "$(buildah mount "$container")"
        """,
    )
    assert "made-inside" in layer.stdout, layer.stderr

    again = run_in(debian, "sh ekiben/bootstrap.sh --engine")
    assert (again.returncode, again.stderr) == (0, "")


# As tests/services.sh does for Apptainer: where root has not every capability, SingularityCE must not ask for all.
SINGULARITY = """set -e
apt-get -qq install -y --no-install-recommends singularity-container >/dev/null
useradd --create-home --uid 3456 somebody
if ! grep -qi '^CapEff:.*000001ffffffffff' /proc/self/status; then
    sed -i 's/^root default capabilities = .*/root default capabilities = file/' /etc/singularity/singularity.conf
    singularity capability add --user root "$(singularity capability avail | grep -o '^CAP_[A-Z_]*' |
        grep -vx CAP_SYS_RESOURCE | paste -sd,)" 2>/dev/null
fi
cp hello.sif /home/somebody
singularity --version
"""
AS_SOMEBODY = "cd /home/somebody && setpriv --reuid 3456 --regid 3456 --clear-groups env HOME=/home/somebody "


def test_ubuntu_makes_an_image_and_singularityce_runs_it(ubuntu: Path) -> None:
    """Packages of Debian, whose archive Ubuntu's apt does not know; and the runtime that takes no zstd, setuid as
    packaged.
    """
    made = run_in(ubuntu, "make --no-print-directory image recipe=hello")
    assert made.returncode == 0, made.stderr
    for message in ("installing python3.12-venv", "installing buildah", "installing mmdebstrap debian-archive-keyring"):
        assert message in made.stderr
    assert "tested  under buildah" in made.stdout
    installed = run_in(ubuntu, SINGULARITY)
    assert installed.stdout.strip() == "singularity-ce version 4.1.1", installed.stderr
    for prefix, who in (("", "root (0)"), (AS_SOMEBODY, "somebody (3456)")):
        for command_line in ("exec --nv hello.sif hello", "test hello.sif"):
            done = run_in(ubuntu, f"{prefix} singularity {command_line}")
            assert done.returncode == 0, done.stderr
            assert who in done.stdout
            assert "hello, run by singularity" in done.stdout
        assert "Tasks (each takes --help):" in run_in(ubuntu, f"{prefix} singularity run hello.sif").stdout
        assert "org.ekiben.stack: cu130" in run_in(ubuntu, f"{prefix} singularity inspect hello.sif").stdout
    verified = run_in(ubuntu, ".venv/bin/python build.py verify hello")
    assert "singularity" in verified.stdout, verified.stderr
    alone = run_in(
        ubuntu,
        "chmod 755 /src && "
        + AS_SOMEBODY.replace("/home/somebody &&", "/src &&", 1)
        + "EKIBEN_STORE=/home/somebody/store .venv/bin/python build.py build hello --engine apptainer",
    )
    assert "SingularityCE is here, which builds as root only" in alone.stderr
    judged = run_in(ubuntu, ".venv/bin/python build.py doctor hello")
    assert "singularity-ce 4.1.1, 3 layers in the SIF" in judged.stdout, judged.stderr
