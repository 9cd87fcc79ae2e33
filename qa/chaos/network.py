"""push and pull with a real registry, through a proxy on loopback that cuts, stalls, garbles, truncates and answers
5xx.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from chaos.lab import KEPT, Lab, children
from ekiben.registry import session
from support.registries import real_registry

FAULTS = ("cut up", "cut down", "stall", "garbage", "truncate", "5xx")
_registries: dict[int, str] = {}
_pushed: set[tuple[str, int]] = set()


@dataclass
class Fault:
    """``after`` so many bytes in its direction, the fault comes, ``times`` times in all."""

    kind: str
    after: int
    times: int


@contextlib.contextmanager
def registry(lab: Lab) -> Iterator[str]:
    """A docker-registry with its data in the lab."""
    folder = lab.path("registry/x").parent
    with real_registry(folder) as host:
        KEPT.update(children())
        _registries[id(lab)] = host
        yield host


def host_of(lab: Lab) -> str:
    """Return the host of the lab's registry."""
    return _registries[id(lab)]


def pushed(lab: Lab, version: int, host: str = "", kind: str = "sif") -> str:
    """The reference of a version that is in the registry, as reached through ``host``."""
    upstream = _registries[id(lab)]
    if (upstream, version) not in _pushed:
        with lab.case() as case:
            for known in ("sif", "docker"):
                to = f"{upstream}/lab/own:{version}-{known}"
                recipe = str(lab.recipes[version].path)
                case.run(["--store", str(case.store), "push", recipe, to, "--format", known])
            assert not case.problems, case.problems
        _pushed.add((upstream, version))
    return f"{host or upstream}/lab/own:{version}-{kind}"


def impatient() -> None:
    """In the command's own process: faults come often, and nobody waits two minutes for each."""
    session.TIMEOUT, session.PAUSES = (2, 2), (0.05, 0.1, 0.2, 0.3)


def break_network(lab: Lab, action: str) -> list[str]:
    """The command succeeds with the right bytes, or with an error of its own; without faults it then works, and leaves
    nothing.
    """
    dice, version = lab.dice, lab.dice.randrange(len(lab.recipes))
    kind = dice.choice(("sif", "docker"))
    fault = Fault(dice.choice(FAULTS), int(10 ** dice.uniform(1, 6.5)), dice.choice((1, 1, 2, 3, 99)))
    with lab.case() as case, proxy(_registries[id(lab)], fault, dice.random()) as host:
        target = (
            pushed(lab, version, host, kind)
            if action == "pull"
            else f"{host}/lab/pushed-{dice.randrange(3)}:{dice.randrange(10**6)}"
        )
        argv = {
            "pull": ["--store", str(case.store), "pull", target, "-o", str(case.out)],
            "push": ["--store", str(case.store), "push", str(lab.recipes[version].path), target, "--format", kind],
        }[action]
        running = case.start(argv, impatient)
        code = running.wait()
        if code not in (0, 7) or "Traceback" in running.output:
            case.problem(f"{fault}: {action} ended with {code}: {running.output[-600:]}")
        case.check_quiet()
        if action == "pull" and code == 0:
            case.check_output(version)
        clean = [word.replace(host, _registries[id(lab)]) for word in argv]
        case.run(clean)
        if action == "push":
            case.run(
                ["--store", str(case.store), "pull", target.replace(host, _registries[id(lab)]), "-o", str(case.out)]
            )
        case.check_output(version)
        case.check_tidy()
        return case.problems


@contextlib.contextmanager
def proxy(target: str, fault: Fault, seed: float) -> Iterator[str]:
    """A proxy to ``target`` in a process of its own: its host."""
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if not pid:
        try:
            _serve(listener, target, fault, random.Random(seed))
        finally:
            os._exit(0)
    KEPT.add(pid)
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        KEPT.discard(pid)


def _serve(listener: socket.socket, target: str, fault: Fault, dice: random.Random) -> None:
    host, _, port = target.partition(":")
    while True:
        client, _ = listener.accept()
        server = socket.create_connection((host, int(port)))
        for way, source, sink in (("up", client, server), ("down", server, client)):
            threading.Thread(target=_pass, args=(way, source, sink, fault, dice), daemon=True).start()


def _pass(way: str, source: socket.socket, sink: socket.socket, fault: Fault, dice: random.Random) -> None:
    """Pass bytes on until the fault's turn comes.

    The counts are shared by all connections, unlocked: chance may as well have it.
    """
    passed, here = 0, "up" if fault.kind == "cut up" else "down"
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            passed += len(data)
            if way == here and passed > fault.after and fault.times > 0:
                fault.times -= 1
                changed = _break(fault.kind, data, sink, dice)
                if changed is None:
                    break
                data = changed
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _break(kind: str, data: bytes, sink: socket.socket, dice: random.Random) -> bytes | None:
    """What is sent in the upstream of ``data``; None: the connection ends."""
    if kind == "stall":
        time.sleep(dice.choice((0.5, 3.0)))
        return data
    if kind == "garbage":
        position = dice.randrange(len(data))
        return data[:position] + dice.randbytes(min(64, len(data) - position)) + data[position + 64 :]
    if kind == "truncate":
        sink.sendall(data[: dice.randrange(len(data))])
    if kind == "5xx":
        body = b"<html>busy</html>"
        code = dice.choice((500, 502, 503, 504, 429))
        sink.sendall(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (code, len(body)) + body)
    return None


KINDS: dict[str, Callable[[Lab], list[str]]] = {
    "network pull": lambda lab: break_network(lab, "pull"),
    "network push": lambda lab: break_network(lab, "push"),
}
