"""Start and watch several processes of a task on one node of a job, with the launchers of its other nodes.

Each process gets torchrun's variables. Launchers connect to the first node's, so a signal to one reaches every process;
when a process or a node fails, or a process hangs, all end and name it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from launch_alone import (
    ENDINGS,
    FAILURE_DIR,
    INTERRUPTED,
    NO_PROGRAM,
    REQUEUE,
    describe_end,
    die_with_parent,
    forwarded,
    print_line,
)
from launch_network import infiniband, nccl_network, network, warning

BEAT = 5.0  # seconds between signs of life
GRACE = 2.0  # seconds from SIGTERM to SIGKILL for the others after a failure; they cannot save without the failed one
STOP_GRACE = 120.0  # seconds for the others to end after one that got a signal has ended
PEER_LOST = "another process of the run is gone"  # the same value as there


@dataclass(frozen=True)
class NodeRank:
    """Identify this node among the nodes of the job, each of which runs ``processes`` processes."""

    node: int
    nodes: tuple[str, ...]
    processes: int

    @property
    def size(self) -> int:
        return len(self.nodes) * self.processes

    @property
    def name(self) -> str:
        return self.nodes[self.node]

    def ranks(self, node: int) -> str:
        """Return the host name and ranks of a node for messages: ``c2 (ranks 4 to 7)``."""
        first, last = node * self.processes, (node + 1) * self.processes - 1
        return f"{self.nodes[node]} ({f'rank {first}' if first == last else f'ranks {first} to {last}'})"

    def environment(self, local: int, address: str, port: int) -> dict[str, str]:
        """Return torchrun's variables for the local rank ``local``; address, port: MASTER_ADDR and MASTER_PORT."""
        rank = self.node * self.processes + local
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "NODE_RANK": str(self.node),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


@dataclass(frozen=True)
class Outcome:
    """Record how a node's processes ended: the exit code and, after a failure, the reason."""

    code: int
    reason: str = ""


class Lost(Exception):
    """Report a node that cannot be reached, or no longer can."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher of one node and return the job's exit code; 2 for a wrong --node."""
    args = _parse(arguments)
    node_rank = NodeRank(args.node, tuple(args.nodes.split(",")), args.processes)
    if not 0 <= node_rank.node < len(node_rank.nodes):
        print_line(f"error: node {node_rank.node} of {len(node_rank.nodes)}: {args.nodes}")
        return 2
    launcher = Launcher(
        node_rank,
        args.command,
        port=args.port,
        key=args.key.read_text().strip() if args.key else "",
        patience=args.patience,
        start_patience=args.start_patience,
    )
    return asyncio.run(launcher.run(notice=args.notice, logs=args.logs))


class Launcher:
    """Start this node's processes, watch them, and agree with the other nodes' launchers on the job's outcome."""

    def __init__(
        self,
        node_rank: NodeRank,
        command: Sequence[str],
        *,
        port: int,
        key: str,
        patience: float,
        start_patience: float,
    ) -> None:
        self.node_rank, self.command, self.port, self.key = node_rank, command, port, key
        self.patience, self.start_patience = patience, start_patience
        self.logs: Path | None = None  # folder of one log for each process
        self.copies: list[threading.Thread] = []  # from a process to its log and the job's
        self.workers: list[asyncio.subprocess.Process] = []
        self.stopping, self.stopped = False, REQUEUE  # stopped: the exit code after a signal to a launcher
        self.leaving = False  # whether a process has ended after a signal, perhaps sent only to it
        self.reports: dict[int, Outcome] = {}  # of the nodes, at the first one
        self.peers: dict[int, asyncio.StreamWriter] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.failures: Path | None = None  # folder in which processes write why they fail
        self.slowest: dict[int, list[Any]] = {}  # node → its slowest process, and that one's position
        self.abandoned = False  # whether processes that ignore the signal are killed
        self.scratch: Path | None = None  # for NCCL's log; kept if it has relevant lines

    async def run(self, *, notice: Path | None = None, logs: Path | None = None) -> int:
        """Run until the outcome of the job is decided, end the remaining processes, and return the exit code.

        notice: the file on whose appearance the first node's launcher stops the job. logs: the folder of each process's
        log.
        """
        self.logs = logs if self.node_rank.size > 1 else None
        loop = asyncio.get_running_loop()
        self.decided: asyncio.Future[Outcome] = loop.create_future()
        for number in ENDINGS:
            loop.add_signal_handler(number, self._stop, number, self.node_rank.node)
        beginning = loop.create_task(self._begin())
        if notice and self.node_rank.node == 0:
            self._keep(self._watch_notice(notice))
        outcome = await self.decided
        beginning.cancel()
        if outcome.reason:
            print_line(f"error: {outcome.reason}")
        await self._end_workers()
        end = loop.time() + 2  # a process of a process may have the pipe open
        for copy in self.copies:
            copy.join(max(end - loop.time(), 0))
        await self._hang_up(outcome)
        return outcome.code

    async def _begin(self) -> None:
        try:
            await self._start(*await self._meet())
        except Lost as lost:
            self._decide(Outcome(1, str(lost)))

    async def _meet(self) -> tuple[str, int]:
        """Wait for all nodes' launchers and return (MASTER_ADDR, MASTER_PORT). Raises Lost when one does not come."""
        if len(self.node_rank.nodes) == 1:
            return "127.0.0.1", free_port()
        return await (self._gather_nodes() if self.node_rank.node == 0 else self._join_first())

    async def _gather_nodes(self) -> tuple[str, int]:
        everyone = asyncio.Event()
        addresses: list[str] = []

        async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Accept a launcher of this job, which knows the key, and ignore anything else that finds the port."""
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TimeoutError):
                hello = json.loads(await asyncio.wait_for(reader.readline(), self.patience))
                node = int(hello["node"])
                if secrets.compare_digest(str(hello["key"]), self.key) and 0 < node < len(self.node_rank.nodes):
                    addresses.append(writer.get_extra_info("sockname")[0])
                    self.peers[node] = writer
                    if len(self.peers) == len(self.node_rank.nodes) - 1:
                        everyone.set()
                    await self._listen(reader, node)
                    return
            writer.close()

        try:
            self.server = await asyncio.start_server(lambda *ends: self._keep(receive(*ends)), None, self.port)
        except OSError as error:
            raise Lost(f"{self.node_rank.name}: port {self.port}, where the nodes meet: {error.strerror}") from error
        try:
            await asyncio.wait_for(everyone.wait(), self.start_patience)
        except TimeoutError:
            missing = [self.node_rank.ranks(at) for at in range(1, len(self.node_rank.nodes)) if at not in self.peers]
            raise Lost(f"no launcher on {', '.join(missing)} within {self.start_patience:.0f} s") from None
        port = free_port()
        for node in self.peers:
            self._send(node, {"start": port})
        self._keep(self._beat())
        return addresses[0], port

    async def _join_first(self) -> tuple[str, int]:
        first = self.node_rank.nodes[0]
        deadline = asyncio.get_running_loop().time() + self.start_patience
        while True:
            try:
                reader, writer = await asyncio.open_connection(first, self.port)
                break
            except OSError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise Lost(
                        f"{self.node_rank.name} does not reach {first}, port {self.port}: {error.strerror or error}"
                    ) from None
                await asyncio.sleep(0.5)
        self.peers[0] = writer
        self._send(0, {"node": self.node_rank.node, "key": self.key})
        with contextlib.suppress(TimeoutError, OSError, ValueError):  # the first node waits for the slowest
            if line := await asyncio.wait_for(reader.readline(), self.start_patience + self.patience):
                message = json.loads(line)
                if "finish" in message:
                    raise Lost(message["why"])
                self._keep(self._listen(reader, 0))
                self._keep(self._beat())
                return writer.get_extra_info("peername")[0], int(message["start"])
        raise Lost(f"{self.node_rank.ranks(0)} is gone before the start")

    async def _listen(self, reader: asyncio.StreamReader, node: int) -> None:
        """Handle another node's messages until it closes the connection, or sends none for ``patience`` seconds."""
        try:
            while line := await self._next_line(reader):
                message = json.loads(line)
                if "stop" in message:
                    self._stop(message["stop"], source=node)
                elif "ended" in message:
                    self._report(node, Outcome(message["ended"], message["why"]))
                elif "finish" in message:
                    self._decide(Outcome(message["finish"], message["why"]))
                elif "slowest" in message:
                    self.slowest[node] = message["slowest"]
                elif "hangs" in message:
                    self._report_hang(message["hangs"])
            cause = "its launcher is gone"
        except TimeoutError:
            cause = f"no sign of life for {self.patience:.0f} s"
        except (OSError, ValueError) as error:
            cause = str(error)
        if node == 0 or node not in self.reports:
            self._decide(Outcome(1, f"node {self.node_rank.ranks(node)}: {cause}"))

    async def _next_line(self, reader: asyncio.StreamReader) -> bytes:
        """Wait in short turns: only one turn of a suspension by the scheduler counts."""
        for _ in range(8):
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(reader.readline(), self.patience / 8)
        raise TimeoutError

    async def _beat(self) -> None:
        while True:
            for node in self.peers:
                self._send(node, {"slowest": self.slowest.get(self.node_rank.node, [])})
            await asyncio.sleep(min(BEAT, self.patience / 4))

    def _send(self, node: int, message: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the receiver notices a lost connection
            self.peers[node].write(json.dumps(message).encode() + b"\n")

    async def _hang_up(self, outcome: Outcome) -> None:
        for node, writer in self.peers.items():
            if self.node_rank.node == 0:
                self._send(node, {"finish": outcome.code, "why": outcome.reason})
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(writer.drain(), 5)
            writer.close()
        for task in self.tasks:
            task.cancel()
        for folder in filter(None, (self.failures, self.scratch)):
            shutil.rmtree(folder, ignore_errors=True)

    async def _start(self, address: str, port: int) -> None:
        self.failures = Path(tempfile.mkdtemp(prefix="ekiben-failures-"))
        settings = {**os.environ, FAILURE_DIR: str(self.failures)}
        if self.node_rank.size > 1:
            # When a process dies, PyTorch in the others would print pages of C++ frames after the cause.
            settings.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            self._keep(self._watch_workers())
        if len(self.node_rank.nodes) > 1:
            chosen, lines = network(self.node_rank.name, self.node_rank.nodes, settings)
            settings |= chosen
            for line in lines:
                print_line(line)
            if "NCCL_DEBUG" not in settings and Path("/dev/nvidiactl").exists():
                self.scratch = Path(tempfile.mkdtemp(prefix="ekiben-nccl-"))
                self._keep(self._watch_nccl(self.scratch))
                settings |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
                settings["NCCL_DEBUG_FILE"] = f"{self.scratch}/%h.%p.log"
        pipes: list[tuple[int, int]] = []
        for local in range(self.node_rank.processes):
            rank_settings = self.node_rank.environment(local, address, port) if self.node_rank.size > 1 else {}
            if self.logs:
                pipes.append(os.pipe())
            output = pipes[-1][1] if self.logs else None
            try:
                worker = await asyncio.create_subprocess_exec(
                    *self.command,
                    env={**settings, **rank_settings},
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                    stdout=output,
                    stderr=output,
                )
            except OSError as error:
                reason = f"{self.node_rank.name}: {self.command[0]}: {error.strerror}; is it a task of this image?"
                self._report(self.node_rank.node, Outcome(NO_PROGRAM, reason))
                return
            self.workers.append(worker)
        self._copy_output(pipes)
        self._keep(self._wait_for_workers())

    def _rank(self, local: int) -> int:
        return self.node_rank.node * self.node_rank.processes + local

    def _copy_output(self, pipes: Sequence[tuple[int, int]]) -> None:
        """Copy the output of each process to the job's log and to its own log.

        In threads: a slow disk must not stop the beat.
        """
        for local, (source, output) in enumerate(pipes):
            os.close(output)
            self.copies.append(
                threading.Thread(target=copy_lines, args=(source, self.logs, self._rank(local)), daemon=True)
            )
            self.copies[-1].start()

    async def _wait_for_workers(self) -> None:
        codes = await asyncio.gather(*(self._wait_for(local, worker) for local, worker in enumerate(self.workers)))
        self._report(self.node_rank.node, Outcome(max(codes)))

    async def _wait_for(self, local: int, worker: asyncio.subprocess.Process) -> int:
        code = await worker.wait()
        if not self.leaving and (code in (REQUEUE, INTERRUPTED) or (self.stopping and -code in ENDINGS)):
            self.leaving = True
            self._keep(self._end_stragglers())
        ended = code < 0 if self.abandoned else self.stopping and -code in ENDINGS
        if ended or ((self.stopping or self.leaving) and PEER_LOST in self._reason(local)):
            return self.stopped  # it got a signal before there was anything to save; or it waited for such a process
        if code not in (0, REQUEUE, INTERRUPTED):
            description = describe_end(self._rank(local), self.node_rank.name, code)
            self._report(
                self.node_rank.node, Outcome(128 - code if code < 0 else code, self._reason(local) or description)
            )
        return code

    def _reason(self, local: int) -> str:
        """Return the reason that the process itself has written, or nothing."""
        file = (self.failures or Path()) / f"rank-{self._rank(local)}"
        return file.read_text(encoding="utf-8").strip() if file.is_file() else ""

    async def _watch_workers(self) -> None:
        """End the job when a process is stopped (SIGSTOP), or hangs: the others wait for it."""
        pause, node = min(BEAT, self.patience / 4), self.node_rank.node
        # Successive checks, not seconds: they stop while the job is suspended.
        stopped, silent = Counter[int](), Counter[int]()
        positions: dict[int, dict[str, Any]] = {}
        while True:
            await asyncio.sleep(pause)
            pids = {self._rank(at): worker.pid for at, worker in enumerate(self.workers) if worker.returncode is None}
            before, positions = positions, {rank: position for rank in pids if (position := self._read_position(rank))}
            for rank, pid in pids.items():
                stopped[rank] = stopped[rank] + 1 if process_state(pid) == "T" else 0
                silent[rank] = silent[rank] + 1 if rank in positions and positions[rank] == before.get(rank) else 0
                if stopped[rank] * pause >= self.patience:
                    reason = f"rank {rank} on {self.node_rank.name} is stopped (SIGSTOP), and the others wait for it"
                    self._report(node, Outcome(1, reason))
                    return
            self.slowest[node] = self._find_slowest(positions, pids)
            for rank, position in positions.items():
                if (seconds := silent[rank] * pause) >= position["limit"]:
                    if not position["lockstep"]:  # the others do not wait for it, or report that
                        reason = (
                            f"rank {rank} on {self.node_rank.name}: no progress for {format_seconds(seconds)}"
                            f" {position['where']}"
                        )
                        self._report(node, Outcome(1, f"{reason} (setting hang_minutes)"))
                        return
                    await asyncio.sleep(2 * pause)  # until the first node knows the positions of the others' processes
                    self._report_hang(seconds)
                    return

    def _find_slowest(self, positions: Mapping[int, dict[str, Any]], pids: Mapping[int, int]) -> list[Any]:
        """Return [position, ranks and host, position in words] of the processes that others may wait for; [] where none
        reports any.

        Every process goes through the same positions, so it is the one that has come least far. Of several at one
        position it is the one in the kernel's uninterruptible wait (D), for a disk or a file system.
        """
        keys = {rank: [*position["at"], process_state(pids[rank]) != "D"] for rank, position in positions.items()}
        lowest = min(keys.values(), default=[])
        ranks = [rank for rank in keys if keys[rank] == lowest]
        return [lowest, f"{rank_names(ranks)} on {self.node_rank.name}", positions[ranks[0]]["where"]] if ranks else []

    def _report_hang(self, seconds: float) -> None:
        """End the job, whose processes have not moved for ``seconds``.

        The first node alone knows which one is behind all others.
        """
        if self.node_rank.node != 0:
            self._send(0, {"hangs": seconds})
            return
        nodes = [entry for _, entry in sorted(self.slowest.items()) if entry]
        lowest = min(position for position, _, _ in nodes)
        (_, first, where), *more = (entry for entry in nodes if entry[0] == lowest)
        who = " and ".join([first, *(ranks for _, ranks, _ in more)])
        reason = f"{who}: no progress for {format_seconds(seconds)} {where}, and the others wait (setting hang_minutes)"
        self._decide(Outcome(1, reason))

    def _read_position(self, rank: int) -> dict[str, Any] | None:
        """Return the position that a process reports (ekiben_tasks/distributed/heartbeat.py), or None."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            position = json.loads(((self.failures or Path()) / f"beat-{rank}").read_bytes())
            at = [int(number) for number in position["at"]]
            lockstep = position.get("lockstep", True) is not False
            return {"limit": float(position["limit"]), "at": at, "where": str(position["where"]), "lockstep": lockstep}
        return None

    async def _end_stragglers(self) -> None:
        """End processes that wait for one that has ended before it had anything to save."""
        await asyncio.sleep(STOP_GRACE)
        self.abandoned = True
        await self._end_workers()

    def _report(self, node: int, outcome: Outcome) -> None:
        """Send the outcome of this node to the first one. A failure ends the job; else all nodes have to be done."""
        if self.node_rank.node != 0:
            self._send(0, {"ended": outcome.code, "why": outcome.reason})
            return
        self.reports[node] = outcome
        codes = [report.code for report in self.reports.values()]
        if outcome.reason:
            self._decide(outcome)
        elif len(codes) == len(self.node_rank.nodes):
            self._decide(Outcome(max(codes)))

    def _decide(self, outcome: Outcome) -> None:
        if not self.decided.done():
            self.decided.set_result(outcome)

    def _stop(self, number: int, source: int) -> None:
        """Tell every process of the job to save and end."""
        if not self.stopping:
            print_line(
                f"{self.node_rank.nodes[source]} received {signal.Signals(number).name}: the processes save and end"
            )
        self.stopping, self.stopped = True, INTERRUPTED if number == signal.SIGINT else REQUEUE
        for worker in self.workers:
            # Not send_signal(): it asks first whether the process has ended, and then asyncio never learns how.
            if worker.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, forwarded(number))
                    os.kill(worker.pid, signal.SIGCONT)  # a stopped process would never answer
        if not self.workers:
            self._decide(Outcome(self.stopped))
        for node in self.peers:
            if node != source:
                self._send(node, {"stop": number})

    async def _watch_notice(self, path: Path) -> None:
        """Wait for the job script's file: a signal to all of a job would also end what serves the image's files."""
        while not path.exists():
            await asyncio.sleep(1)
        self._stop(signal.SIGUSR1, source=self.node_rank.node)

    async def _end_workers(self) -> None:
        left = [worker for worker in self.workers if worker.returncode is None]
        for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 5.0)):
            for worker in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, number)
            if left:
                await asyncio.wait([asyncio.ensure_future(worker.wait()) for worker in left], timeout=seconds)
            left = [worker for worker in left if worker.returncode is None]

    async def _watch_nccl(self, folder: Path) -> None:
        """Print which network NCCL chose, from its log."""
        while True:
            await asyncio.sleep(1)
            if (network_name := nccl_network(folder)) is not None:
                if network_name == "Socket" and (fast := infiniband()):
                    print_line(
                        warning(
                            f"NCCL on {self.node_rank.name} fell back to TCP, though there is {', '.join(fast)}.",
                            f"Its log: {folder}. Training will be several times slower.",
                        )
                    )
                    self.scratch = None
                elif self.node_rank.node == 0:
                    print_line(f"network     NCCL uses {network_name}")
                return

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


def copy_lines(source: int, logs: Path, rank: int) -> None:
    """Copy lines from descriptor ``source`` to stdout and to ``logs``/RANK.log, until every writer has closed it."""
    sinks: list[BinaryIO] = [sys.stdout.buffer]
    with contextlib.suppress(OSError):  # without a log of its own, the job's remains
        logs.mkdir(exist_ok=True)
        sinks.append((logs / f"{rank}.log").open("ab"))
    with os.fdopen(source, "rb") as stream:
        while line := stream.readline(1 << 16):
            for sink in sinks:
                with contextlib.suppress(OSError):  # a full disk does not end the job
                    sink.write(line)
                    sink.flush()


def process_state(pid: int) -> str:
    """Return the letter of a process's state (proc(5)): T waits for SIGCONT (a debugger's are t), D for a device."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def rank_names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def format_seconds(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def free_port() -> int:
    """Return an unused port.

    It lies below those that the kernel gives to connections: one of these could take it before the first process does.
    """
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise Lost("no port below 32000 is free, where the processes could meet")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch_node.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--node", type=int, default=0, help="which of the nodes this is, from 0")
    parser.add_argument("--nodes", default="localhost", help="names of all nodes, with commas, the first one first")
    parser.add_argument("--processes", type=int, default=1, help="processes on each node")
    parser.add_argument("--port", type=int, default=29400, help="where the launchers meet, on the first node")
    parser.add_argument("--key", type=Path, metavar="FILE", help="a secret that they all can read")
    parser.add_argument("--notice", type=Path, metavar="FILE", help="when it appears: save and end; on the first node")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="copy the output of each process to DIR/RANK.log")
    parser.add_argument("--patience", type=float, default=60, help="seconds that a node may be silent")
    parser.add_argument("--start-patience", type=float, default=600, help="seconds to wait for the slowest node")
    parser.add_argument("command", nargs="+", help="the task and its arguments, after --")
    return parser.parse_args(arguments)
