"""Machines with git, make and Python and nothing else: a root file system in a temporary folder, entered by
namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from workspaces import CA_BUNDLE, copy_files


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


@contextlib.contextmanager
def bare_machine(argv: list[str], mirrors: list[str]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ekiben-fresh-") as folder:
        root = Path(folder) / "root"
        command = [
            "mmdebstrap",
            "--quiet",
            "--mode=root",
            "--variant=minbase",
            "--include=apt,git,make,python3,ca-certificates",
        ]
        subprocess.run([*command, *argv, root, *mirrors], check=True)
        shutil.copy(CA_BUNDLE, f"{root}{CA_BUNDLE}")
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        hosts = f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n"  # as Debian's installer writes them
        (root / "etc/hosts").write_text(hosts)
        copy_files(root / "src")
        yield root


def run_in(
    machine: Path, script: str, *, prefix: Sequence[str] = (), timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run a shell script in the checkout on a machine, in namespaces of its own: its mounts and processes end with it.

    prefix: a command that runs another, such as nsenter.
    """
    # pivot_root, not chroot: containers need a root that is a mount of its own.
    enter = (
        f"mount --rbind {machine} {machine} && cd {machine} && mount -t proc proc proc && mount --rbind /dev dev && "
        "mount --rbind /sys sys && "
        'pivot_root . mnt && cd / && umount -l /mnt && exec sh -c "$0"'
    )
    apart = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
    command = [*prefix, *apart, "sh", "-c", enter, f"cd /src; {script}"]
    passed = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    trust = {"PIP_CERT": str(CA_BUNDLE), "SSL_CERT_FILE": str(CA_BUNDLE)}
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **passed, **trust}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)


@contextlib.contextmanager
def separate_network() -> Iterator[tuple[str, ...]]:
    """Yield the command that runs another in a network of its own, which reaches what this machine reaches."""
    name, subnet = "ekiben-bare", "10.78.0"
    masquerade = ["POSTROUTING", "-s", f"{subnet}.0/24", "-j", "MASQUERADE"]
    forward = [["FORWARD", direction, "ekb0", "-j", "ACCEPT"] for direction in ("-i", "-o")]
    commands = [
        f"ip netns add {name}",
        f"ip link add ekb0 type veth peer name ekb1 netns {name}",
        f"ip address add {subnet}.1/24 dev ekb0",
        "ip link set ekb0 up",
        *(
            f"ip -n {name} {rest}"
            for rest in (
                "link set lo up",
                f"address add {subnet}.2/24 dev ekb1",
                "link set ekb1 up",
                f"route add default via {subnet}.1",
            )
        ),
        "sysctl -q net.ipv4.ip_forward=1",
    ]
    rules = [(("-t", "nat"), masquerade), *(((), rule) for rule in forward)]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        for table, rule in rules:
            subprocess.run(["iptables", *table, "-I", *rule], check=True)
        yield ("nsenter", f"--net=/run/netns/{name}")  # not ip netns exec: its new /sys has no cgroups
    finally:
        for table, rule in rules:
            subprocess.run(["iptables", *table, "-D", *rule], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], check=False)
