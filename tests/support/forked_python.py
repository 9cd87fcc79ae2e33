"""A stand-in for a Python interpreter: it lets the fork server beside it (forkserver.py) run the script.

The fork server copies this file, with a #! line, into its folder. It imports little, because each process of a launcher
starts it. It passes on its arguments, environment, folder and streams, then signals, and ends as the script ends. If
the server refuses the request or is gone, it becomes a real interpreter. The server kills the script when this process
dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
    signal.SIGALRM,
    signal.SIGCONT,
)


def connect(folder: str) -> socket.socket | None:
    """Connect to the fork server in ``folder``; None if it is gone."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.path.join(folder, "socket"))  # noqa: PTH118  # pathlib would triple the time of the start
    except OSError:
        connection.close()
        return None
    return connection


def send_request(
    connection: socket.socket, arguments: Sequence[str], env: Mapping[str, str], cwd: str, streams: Iterable[int]
) -> int | None:
    """Request a process and return its number; None if the server refuses. arguments: those of an interpreter."""
    umask = os.umask(0o22)
    os.umask(umask)
    request = json.dumps({"arguments": list(arguments), "env": dict(env), "cwd": cwd, "umask": umask}).encode()
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], list(streams))
    connection.sendall(request)
    pid = receive(connection)
    return pid if pid else None


def receive(connection: socket.socket) -> int | None:
    """Read the server's next number; None if it has closed the connection."""
    data = b""
    while len(data) < 4:
        with contextlib.suppress(ConnectionError):
            if more := connection.recv(4 - len(data)):
                data += more
                continue
        return None
    return int.from_bytes(data, "big")


def note_signals() -> socket.socket:
    """Return a socket that can be read once this process has got a signal."""
    noted, notes = socket.socketpair()
    notes.setblocking(False)
    signal.set_wakeup_fd(notes.detach(), warn_on_full_buffer=False)
    return noted


def wait_for_data(connection: socket.socket, noted: socket.socket) -> None:
    """Wait until ``connection`` can be read, and run the handlers of signals meanwhile.

    A handler runs between two instructions of Python. After a signal just before a call that blocks, it would run when
    the call returns: at the end of the script.
    """
    while connection not in (ready := select.select([connection, noted], [], [])[0]):
        if noted in ready:
            noted.recv(64)


def has_other_files() -> bool:
    """Return whether this process has inherited more than its three streams, which the server would not pass on."""
    # The listing's own descriptor is gone by the time of the check.
    return any(int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))  # noqa: PTH110, PTH208


def end_as(status: int) -> None:
    """End this process with the exit code or the signal of a wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)


def main() -> None:
    """Have the server run the script; without a server, run it in a real interpreter."""
    real, folder = sys.executable, os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    connection = None if has_other_files() else connect(folder)
    child: int | None = None
    early: list[int] = []

    def forward(number: int, _frame: object) -> None:
        if child is None:
            early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    if connection is not None:
        noted = note_signals()
        before = [(number, signal.signal(number, forward)) for number in FORWARDED]
        child = send_request(connection, sys.argv[1:], os.environ, os.getcwd(), (0, 1, 2))  # noqa: PTH109
        if child is None:
            for changed, handler in before:
                signal.signal(changed, handler)
    if connection is None or child is None:
        os.execv(real, [real, *sys.argv[1:]])
    for number in early:
        forward(number, None)
    for stream in (0, 1, 2):  # a pipe to the script ends with the script
        os.close(stream)
    wait_for_data(connection, noted)
    status = receive(connection)
    end_as(status if status is not None else signal.SIGKILL)


if __name__ == "__main__":
    main()
