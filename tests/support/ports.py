"""Ports for the servers and launchers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a port where nobody listens, below those that the kernel gives to connections.

    A connection of another test could take one of these before the server of this one does.
    """
    for port in random.sample(range(10000, 20000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no port between 10000 and 20000 is free")
