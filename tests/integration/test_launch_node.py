"""The launcher of a job's processes, where processes, nodes and networks fail, hang, or get signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from support.launchers import LAUNCHER, NODES, Job, is_alive, wait_for

pytestmark = pytest.mark.covers("entrypoints/launch_node.py")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for launcher in made.launchers:
        with launcher:
            launcher.kill()


def test_killed_process_is_named_with_its_signal(job: Job) -> None:
    job.start("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(600)", nodes=["localhost"], processes=2)
    ((code, stderr),) = job.end()
    assert code == 128 + 9
    assert "rank 1 on localhost was killed by SIGKILL; that is how a system that runs out of memory ends" in stderr


@pytest.mark.parametrize(("dies", "named"), [(1, "127.0.0.1 (ranks 2 to 3)"), (0, "localhost (ranks 0 to 1)")])
def test_dying_node_is_named_and_its_processes_end(dies: int, named: str, job: Job) -> None:
    launchers = [job.start("time.sleep(600)", node=node, processes=2) for node in (0, 1)]
    pids = [int(job.worker(rank)["pid"]) for rank in range(4)]
    launchers[dies].kill()
    code, stderr = job.end()[1 - dies]
    assert code == 1
    assert f"error: node {named}: " in stderr
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def test_hanging_node_times_out(job: Job) -> None:
    """A machine that lost its power closes no connection."""
    first = job.start("time.sleep(600)", "--patience", "2", node=0)
    second = job.start("time.sleep(600)", "--patience", "2", node=1)
    job.worker(1)
    second.send_signal(signal.SIGSTOP)
    stderr = first.communicate(timeout=60)[1]
    assert first.returncode == 1
    assert "error: node 127.0.0.1 (rank 1): no sign of life for 2 s" in stderr


def test_stopped_process_ends_the_job_and_is_named(job: Job) -> None:
    """Nothing else would end it: the others wait for the one that is stopped."""
    job.start("time.sleep(600)", "--patience", "1", nodes=["localhost"], processes=2)
    pids = [int(job.worker(rank)["pid"]) for rank in (0, 1)]
    os.kill(pids[1], signal.SIGSTOP)
    ((code, stderr),) = job.end()
    assert code == 1
    assert "error: rank 1 on localhost is stopped (SIGSTOP), and the others wait for it" in stderr
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def test_process_that_is_stopped_for_a_moment_goes_on(job: Job) -> None:
    launcher = job.start("time.sleep(3)", "--patience", "4", nodes=["localhost"], processes=2)
    pid = int(job.worker(1)["pid"])
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(pid, signal.SIGCONT)
    assert launcher.wait(timeout=60) == 0


# Reports its position, as ekiben_tasks/distributed/heartbeat.py does.
BEAT = """
def beat(limit, step, order, where, **more):
    text = json.dumps({"limit": limit, "at": [step, order, 0], "where": where, **more})
    pathlib.Path(os.environ["EKIBEN_FAILURE_DIR"], f"beat-{rank}").write_text(text.ljust(256))
"""


def test_hanging_process_ends_the_job_and_is_named_with_its_position(job: Job) -> None:
    hangs = (
        'beat(1, 56, 3 - 2 * (rank == 1), "at step 56 (reading its data)" if rank == 1 else "waiting"); time.sleep(600)'
    )
    job.start(BEAT + hangs, "--patience", "1", nodes=["localhost"], processes=3)
    pids = [int(job.worker(rank)["pid"]) for rank in range(3)]
    ((code, stderr),) = job.end()
    assert code == 1
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: rank 1 on localhost: no progress for 1 s at step 56 (reading its data), and the others wait (setting"
        " hang_minutes)"
    ]
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.parametrize("hanging", [0, 1, 2, 3])
def test_hanging_process_of_any_node_is_named(hanging: int, job: Job) -> None:
    """The one that hangs was the slowest before, too: the others have waited for longer than it hangs."""
    late = (
        f"time.sleep(2 * (rank == {hanging})); beat(1.5, 7, 3 * (rank != {hanging}), f'at step 7, {{rank}}');"
        " time.sleep(600)"
    )
    for node in (1, 0):
        job.start(BEAT + f"beat(9, 7, 0, 'at step 7, {{rank}}'); {late}", "--patience", "4", node=node, processes=2)
    for code, stderr in job.end():
        assert code == 1
        assert (
            f"error: rank {hanging} on {NODES[hanging // 2]}: no progress for 2 s at step 7, {hanging}, and" in stderr
        )


def test_hanging_processes_at_one_position_are_all_named(job: Job) -> None:
    job.start(BEAT + "beat(1, 3, 2, 'at step 3'); time.sleep(600)", "--patience", "1", nodes=["localhost"], processes=2)
    ((code, stderr),) = job.end()
    assert code == 1 and "error: ranks 0, 1 on localhost: no progress for 1 s at step 3, and" in stderr


@pytest.mark.parametrize("hanging", [0, 1])
def test_hanging_process_is_named_where_positions_differ(hanging: int, job: Job) -> None:
    """As those of generate: the other one, of another node, is behind it and works, or waits for it without a limit."""
    hangs = f"beat(1, 9, 2, 'at batch 9', lockstep=False); time.sleep((rank != {hanging}) or 600);"
    works = "[(beat(60, step, 2, 'at batch', lockstep=False), time.sleep(0.2)) for step in range(5)];"
    waits = "beat(math.inf, 5, 3, 'waiting', lockstep=False); time.sleep(600)"
    for node in (1, 0):
        job.start(f"import math{BEAT}{hangs} {works} {waits}", "--patience", "4", node=node)
    for code, stderr in job.end():
        assert code == 1
        assert (
            f"error: rank {hanging} on {NODES[hanging]}: no progress for 1 s at batch 9 (setting hang_minutes)"
            in stderr
        )


@pytest.mark.parametrize(
    "does",
    [
        "beat(60, 1, 2, 'compiling'); time.sleep(4)",  # longer than the others' limit, as it reports
        "[(beat(1, step, 2, 'step'), time.sleep(0.2)) for step in range(20)]",
        (
            "pathlib.Path(os.environ['EKIBEN_FAILURE_DIR'], f'beat-{rank}').write_text('{\"limit\": 1, \"at\"');"
            " time.sleep(4)"
        ),
        "time.sleep(4)",  # another task, which reports nothing
    ],
)
def test_process_that_makes_progress_or_is_in_a_long_phase_goes_on(does: str, job: Job) -> None:
    job.start(BEAT + does, "--patience", "1", nodes=["localhost"], processes=2)
    ((code, stderr),) = job.end()
    assert (code, stderr) == (0, "")


def test_suspended_job_goes_on(job: Job) -> None:
    """A scheduler that suspends a job stops its launchers too: to them, the others were silent for as long."""
    launchers = [job.start("time.sleep(9)", "--patience", "4", node=node) for node in (0, 1)]
    job.worker(0), job.worker(1)
    for number, seconds in ((signal.SIGSTOP, 5), (signal.SIGCONT, 0)):
        for launcher in launchers:
            launcher.send_signal(number)
        time.sleep(seconds)
    assert [code for code, _ in job.end()] == [0, 0]


def test_missing_node_is_named(job: Job) -> None:
    job.start("pass", "--start-patience", "1", node=0)
    ((code, stderr),) = job.end()
    assert code == 1
    assert "error: no launcher on 127.0.0.1 (rank 1) within 1 s" in stderr


def test_missing_first_node_is_named(job: Job) -> None:
    job.start("pass", "--start-patience", "1", node=1)
    ((code, stderr),) = job.end()
    assert code == 1
    assert f"127.0.0.1 does not reach localhost, port {job.port}" in stderr


@pytest.mark.parametrize(
    ("number", "arrives"), [("SIGUSR1", "SIGUSR1"), ("SIGUSR2", "SIGUSR1"), ("SIGTERM", "SIGTERM")]
)
def test_a_signal_to_one_node_reaches_every_process(number: str, arrives: str, job: Job) -> None:
    launchers = [job.start("'save'; time.sleep(600)", node=node, processes=2) for node in (0, 1)]
    for rank in range(4):
        job.worker(rank)
    launchers[1].send_signal(signal.Signals[number])
    assert [code for code, _ in job.end()] == [75, 75]
    assert {(job.folder / f"saved-{rank}").read_text() for rank in range(4)} == {arrives}


def test_stopped_process_answers_a_signal(job: Job) -> None:
    launcher = job.start("'save'; time.sleep(600)", nodes=["localhost"], processes=2)
    os.kill(int(job.worker(1)["pid"]), signal.SIGSTOP)
    job.worker(0)
    launcher.send_signal(signal.SIGTERM)
    assert job.end()[0][0] == 75
    assert (job.folder / "saved-1").read_text() == "SIGTERM"


def test_process_that_lost_one_with_nothing_to_save_is_no_failure(job: Job) -> None:
    """Rank 0 gets the signal before it has something to save, and rank 1 waits for it; the job starts again."""
    does = """'save'
if rank == 0:
    time.sleep(600)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("ready").touch()
while not pathlib.Path("saved-0").exists():
    time.sleep(0.05)
failure = pathlib.Path(os.environ["EKIBEN_FAILURE_DIR"], "rank-1")
failure.write_text("rank 1 on c1: another process of the run is gone (Connection closed by peer)")
sys.exit(1)
"""
    launcher = job.start(does, nodes=["localhost"], processes=2)
    job.worker(0)
    wait_for((job.folder / "ready").exists)
    launcher.send_signal(signal.SIGTERM)
    ((code, stderr),) = job.end()
    assert code == 75
    assert "error:" not in stderr


@pytest.mark.parametrize(("code", "signalled"), [(75, False), (130, False), (130, True)])
def test_process_that_ends_after_a_signal_is_no_failure(code: int, signalled: bool, job: Job) -> None:
    """Its own exit code is the job's: rank 1 had the signal; rank 0 voted with it, or has lost it before it could
    vote.
    """
    does = f"""'work'
meet(2)
if rank == 1:
    signal.signal(signal.SIGINT, lambda *_: sys.exit({code}))
    time.sleep(600 if {signalled} else 0.2)
    sys.exit({code})
signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(1)
if {signalled}:
    sys.exit(75)
message = "rank 0: another process of the run is gone (0 bytes)"
pathlib.Path(os.environ["EKIBEN_FAILURE_DIR"], "rank-0").write_text(message)
sys.exit(1)
"""
    launcher = job.start(does, nodes=["localhost"], processes=2)
    job.worker(1)
    if signalled:
        job.worker(0)
        time.sleep(0.3)
        launcher.send_signal(signal.SIGINT)
    ((ended, stderr),) = job.end()
    assert ended == code
    assert "error:" not in stderr


def test_notice_file_of_the_job_script_signals_the_processes(job: Job) -> None:
    for node in (0, 1):
        job.start("'save'; time.sleep(600)", "--notice", "notice", node=node)
    for rank in (0, 1):
        job.worker(rank)
    (job.folder / "notice").touch()
    assert [code for code, _ in job.end()] == [75, 75]
    assert (job.folder / "saved-1").read_text() == "SIGUSR1"


def test_process_without_handler_is_ended_and_requeued(job: Job) -> None:
    launcher = job.start("time.sleep(600)", nodes=["localhost"])
    job.worker(0)
    launcher.send_signal(signal.SIGUSR1)
    assert job.end()[0][0] == 75


def test_signal_before_all_nodes_have_connected(job: Job) -> None:
    launcher = job.start("pass", node=0)
    wait_for(job.is_met)
    launcher.send_signal(signal.SIGUSR1)
    assert job.end()[0][0] == 75
    assert not (job.folder / "worker-0").exists()


TWO_HOSTS = """
set -e
mount -t tmpfs none /run
mkdir /run/netns
for host in a b; do
    ip netns add $host
    ip -n $host link set lo up
done
# Two networks between them, and the interfaces have other names on each side; eth0 points nowhere.
ip link add slow0 netns a type veth peer name enp1s0 netns b
ip link add fast0 netns a type veth peer name hsn7 netns b
ip -n a link add eth0 type veth peer name away
ip -n b link add eth0 type veth peer name away
ip -n a address add 10.9.0.1/24 dev eth0; ip -n b address add 10.9.1.1/24 dev eth0
ip -n a address add 10.7.0.1/24 dev slow0; ip -n b address add 10.7.0.2/24 dev enp1s0
ip -n a address add 10.8.0.1/24 dev fast0; ip -n b address add 10.8.0.2/24 dev hsn7
for name in slow0 fast0 eth0; do ip -n a link set $name up; done
for name in enp1s0 hsn7 eth0; do ip -n b link set $name up; done
"$@"
"""


@pytest.fixture
def two_hosts() -> Iterator[Callable[[str, Sequence[str]], list[str]]]:
    """Words that start a program on one of two hosts with two networks between them: network namespaces."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    keeper = subprocess.Popen(
        ["unshare", "--mount", "--net", "sh", "-c", TWO_HOSTS, "sh", "sh", "-c", "echo made; read stop"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with keeper:
        assert keeper.stdin and keeper.stdout
        assert keeper.stdout.readline() == "made\n"
        pid = str(keeper.pid)
        yield lambda host, argv: ["nsenter", "-t", pid, "-m", "-n", "ip", "netns", "exec", host, *argv]
        keeper.stdin.write("stop\n")


@pytest.mark.parametrize(
    ("names", "interfaces"), [("10.8.0.1,10.8.0.2", ["fast0", "hsn7"]), ("10.7.0.1,10.7.0.2", ["slow0", "enp1s0"])]
)
def test_network_interface_follows_the_routes(
    names: str, interfaces: list[str], two_hosts: Callable[[str, Sequence[str]], list[str]], job: Job
) -> None:
    show = (
        'import os; print(os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"],'
        ' os.environ["MASTER_ADDR"])'
    )
    started = []
    for node, host in enumerate("ab"):
        argv = [
            sys.executable,
            str(LAUNCHER),
            "--node",
            str(node),
            "--nodes",
            names,
            "--port",
            "29400",
            "--key",
            str(job.folder / "key"),
            "--start-patience",
            "30",
            "--",
            sys.executable,
            "-c",
            show,
        ]
        started.append(subprocess.Popen(two_hosts(host, argv), cwd=job.folder, stdout=subprocess.PIPE, text=True))
    addresses = [process.communicate(timeout=60)[0].split() for process in started]
    address = names.partition(",")[0]
    assert addresses == [[f"={interface}", interface, address] for interface in interfaces]
