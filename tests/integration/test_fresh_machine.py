"""A machine with git, make and Python and nothing else, made here and thrown away."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root for chroot"),
    pytest.mark.skipif(not shutil.which("mmdebstrap"), reason="needs mmdebstrap (tests/services.sh install)"),
]


def host_mirrors() -> list[str]:
    """Where the host's own apt takes Debian 12 from."""
    form = "$(ORIGIN) $(CODENAME) $(COMPONENT) $(REPO_URI)"
    command = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    targets = [line.split() for line in subprocess.check_output(command, text=True).splitlines()]
    return [
        f"deb {uri} {codename} {component}"
        for origin, codename, component, uri in targets
        if origin == "Debian" and codename == "bookworm"
    ]


@pytest.fixture(scope="module")
def machine() -> Iterator[Path]:
    mirrors = host_mirrors()
    if not mirrors:
        pytest.skip("apt here has no Debian 12 mirror")
    with tempfile.TemporaryDirectory(prefix="ekiben-fresh-") as folder:
        root = Path(folder) / "root"
        packages = "--include=git,make,python3,ca-certificates"
        subprocess.run(
            ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", packages, "bookworm", root, *mirrors],
            check=True,
        )
        shutil.copy(CA_BUNDLE, f"{root}{CA_BUNDLE}")
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        copy_checkout(root / "src")
        yield root


def copy_checkout(to: Path) -> None:
    """What a clone would hold, with what is not committed yet."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    for name in listed.decode().rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def run_in(machine: Path, script: str) -> subprocess.CompletedProcess[str]:
    """In namespaces of its own: its mounts and processes end with it."""
    # pivot_root, not chroot: containers need a root that is a mount of its own.
    enter = (
        f"mount --rbind {machine} {machine} && cd {machine} && mount -t proc proc proc && mount --rbind /dev dev && "
        'pivot_root . mnt && cd / && umount -l /mnt && exec sh -c "$0"'
    )
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", enter, f"cd /src; {script}"]
    passed = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    trust = {"PIP_CERT": str(CA_BUNDLE), "SSL_CERT_FILE": str(CA_BUNDLE)}
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **passed, **trust}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)


def test_bootstrap_ends_with_an_environment_and_an_engine(machine: Path) -> None:
    bare = run_in(machine, "command -v buildah mmdebstrap newuidmap; python3 -c 'import ensurepip'")
    assert bare.stdout == ""
    assert "No module named 'ensurepip'" in bare.stderr

    made = run_in(machine, "sh builder/bootstrap.sh --engine")
    assert made.returncode == 0, made.stderr
    assert "installing buildah" in made.stderr

    there = run_in(machine, "mmdebstrap --version && .venv/bin/python -c 'import docker, zstandard'")
    assert there.returncode == 0, there.stderr
    # A layer on the machine's own programs: enough to prove that a command runs in a container and is kept.
    layer = run_in(
        machine,
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

    again = run_in(machine, "sh builder/bootstrap.sh --engine")
    assert (again.returncode, again.stderr) == (0, "")
