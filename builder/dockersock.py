"""What the Docker daemon says at its Unix socket. Importing the SDK takes longer than an invocation with little to do."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable


def place() -> str | None:
    """The daemon's Unix socket, unless DOCKER_HOST names something else, which is the SDK's business."""
    scheme, _, path = (os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock").partition("://")
    return path if scheme == "unix" else None


def ask(path: str, *, send: Iterable[bytes] | None = None) -> tuple[int, bytes] | None:
    """Status and body of a GET (of a POST of ``send``, a tar); None when nothing answers there."""
    if (where := place()) is None:
        return None
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10 if send is None else 3600)
            connection.connect(where)
            if send is None:
                connection.sendall(f"GET {path} HTTP/1.0\r\nHost: docker\r\n\r\n".encode())
            else:
                connection.sendall(f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n"
                                   "Content-Type: application/x-tar\r\nTransfer-Encoding: chunked\r\n\r\n".encode())  # fmt: skip
                for chunk in filter(None, send):
                    connection.sendall(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                connection.sendall(b"0\r\n\r\n")
            head, _, body = b"".join(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        return int(head.split()[1]), body
    except (OSError, ValueError, IndexError):
        return None


def answers() -> bool:
    return (answer := ask("/_ping")) is not None and answer[0] == 200


def image_id(name: str) -> str | None:
    """The id of the image of that name; None when there is none."""
    import json

    answer = ask(f"/images/{name}/json")
    return str(json.loads(answer[1])["Id"]) if answer and answer[0] == 200 else None
