"""Finds the network between the nodes of a job, for launch_node.py: NCCL and gloo guess, and often wrongly.

Like the launcher, it imports the standard library alone, and is copied beside it.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

SIOCGIFCONF = 0x8912


def network(name: str, nodes: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return (variables for NCCL and gloo, lines to print). Variables that the user has set stay as they are.

    name: of this node. nodes: the names of all.
    """
    peers = [node for node in nodes if node != name]
    # Every other node connects to the first, and the first to every other; unresolved names are not waited
    # for.
    names = list(dict.fromkeys(interface for peer in peers if (interface := interface_to(peer))))
    chosen, lines = {}, []
    if names and "NCCL_SOCKET_IFNAME" not in environment:
        chosen["NCCL_SOCKET_IFNAME"] = "=" + ",".join(names)  # "=": this name, not all that begin with it
        lines.append(f"network     {name}: {', '.join(names)} is the way to {' '.join(peers)}")
    if names and "GLOO_SOCKET_IFNAME" not in environment:
        chosen["GLOO_SOCKET_IFNAME"] = names[0]
    ports = infiniband()
    if ports:
        lines.append(f"network     {name}: {', '.join(ports)}")
        if missing := verbs_missing():
            lines.append(
                warning(
                    f"{name} has InfiniBand and this container cannot use it: {missing}.",
                    "NCCL will fall back to TCP, which is several times slower.",
                )
            )
    return chosen, lines


def interface_to(host: str) -> str | None:
    """Return the interface that the routing table chooses for ``host``, or None. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return interface_of(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """Return the name of the local interface with this IP address, or None."""
    if ":" in address:
        hexadecimal = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((row[5] for row in rows if row[0] == hexadecimal), None)
    return next((name for name, local in addresses() if local == address), None)


def addresses() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address) pairs, by SIOCGIFCONF: netdevice(7). An interface may have several."""
    room = array.array("B", bytes(64 * 1024))
    start, length = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFCONF, struct.pack("iL", length, start))
    filled = struct.unpack("iL", answer)[0]
    entry = 16 + 24  # struct ifreq where pointers have 64 bits: name, then a union as long as its longest member
    rows = [room.tobytes()[at : at + entry] for at in range(0, filled, entry)]
    # An alias is shown as eth0:1; NCCL knows interfaces only.
    return [(row[:16].split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(row[20:24])) for row in rows]


def infiniband(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return ``InfiniBand mlx5_0:1 (200 Gb/sec …)`` for every active port, those of RoCE included."""
    ports = []
    for port in sorted(root.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in (port / "state").read_text():
                kind = "RoCE" if (port / "link_layer").read_text().strip() == "Ethernet" else "InfiniBand"
                rate = (port / "rate").read_text().strip()
                ports.append(f"{kind} {port.parent.parent.name}:{port.name} ({rate})")
    return ports


def verbs_missing() -> str | None:
    """Return why this container cannot use InfiniBand, or None."""
    if not list(Path("/dev/infiniband").glob("uverbs*")):
        return "there is no /dev/infiniband/uverbs* in it"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "the image has no libibverbs.so.1"
    return None


def nccl_network(folder: Path) -> str | None:
    """Return the network that NCCL logged (``IB``, ``Socket``, a plugin's name), or None before it did."""
    lines = (line for log in sorted(folder.glob("*.log")) for line in log.read_text(errors="replace").splitlines())
    return next((line.partition("Using network ")[2].strip() for line in lines if "Using network " in line), None)


def warning(*lines: str) -> str:
    width = max(map(len, lines))
    return "\n".join(["!" * (width + 8), *(f"!!! {line:<{width}} !!!" for line in lines), "!" * (width + 8)])
