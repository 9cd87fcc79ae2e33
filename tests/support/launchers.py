"""Launchers of several nodes on this machine, and processes that do what a test says."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "entrypoints" / "launch_node.py"
NODES = ("localhost", "127.0.0.1")
# Says where it is, then does what it is told: a line of Python with `rank`.
WORKER = """
import json, os, pathlib, signal, sys, time
rank = int(os.environ.get("RANK", "0"))
def save(number, frame):
    pathlib.Path(f"saved-{rank}").write_text(signal.Signals(number).name)
    sys.exit(75)
if "save" in sys.argv[1]:
    signal.signal(signal.SIGUSR1, save)
    signal.signal(signal.SIGTERM, save)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
         "GLOO_SOCKET_IFNAME")
about = {name: os.environ.get(name) for name in names}
pathlib.Path(f"part-{rank}").write_text(json.dumps({**about, "pid": os.getpid()}))
os.rename(f"part-{rank}", f"worker-{rank}")
def meet(size):
    while len(list(pathlib.Path().glob("worker-*"))) < size:
        time.sleep(0.05)
exec(sys.argv[1])
"""


class Job:
    """Launchers in ``folder``, started as a job script starts them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.launchers: list[subprocess.Popen[str]] = []
        (folder / "key").write_text("a secret\n")

    def start(
        self, does: str, *more: str, node: int = 0, nodes: Sequence[str] = NODES, processes: int = 1
    ) -> subprocess.Popen[str]:
        argv = [
            "--node",
            str(node),
            "--nodes",
            ",".join(nodes),
            "--processes",
            str(processes),
            "--port",
            str(self.port),
            "--key",
            "key",
            *more,
            "--",
            sys.executable,
            "-c",
            WORKER,
            does,
        ]
        started = subprocess.Popen(
            [sys.executable, LAUNCHER, *argv],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.launchers.append(started)
        return started

    def end(self) -> list[tuple[int, str]]:
        """Return (exit code, stderr) of every launcher."""
        stderrs = [launcher.communicate(timeout=60)[1] for launcher in self.launchers]
        return [(launcher.returncode, text) for launcher, text in zip(self.launchers, stderrs, strict=True)]

    def is_met(self) -> bool:
        """Whether the first node listens."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def worker(self, rank: int) -> dict[str, str]:
        path = self.folder / f"worker-{rank}"
        wait_for(path.exists)
        about = json.loads(path.read_text())
        assert isinstance(about, dict)
        return about


def wait_for(true: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
