"""The launcher of a job's processes where all is well. tests/integration/test_launch_node.py has what fails, hangs or
is signalled.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "entrypoints"))

import launch_network
from support.launchers import LAUNCHER, NODES, Job, is_alive, wait_for


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for launcher in made.launchers:
        with launcher:
            launcher.kill()


# -------------------------------------------------------------------------------------------------------- places


def test_every_process_gets_its_rank_variables(job: Job) -> None:
    for node in (1, 0):
        job.start("pass", node=node, processes=2)
    assert [code for code, _ in job.end()] == [0, 0]
    about = [job.worker(rank) for rank in range(4)]
    assert [one["LOCAL_RANK"] for one in about] == ["0", "1", "0", "1"]
    assert [one["NODE_RANK"] for one in about] == ["0", "0", "1", "1"]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in about} == {("4", "2")}
    assert len({one["MASTER_PORT"] for one in about}) == 1
    assert {one["MASTER_ADDR"] for one in about} <= {"127.0.0.1", "::1"}
    assert {one["GLOO_SOCKET_IFNAME"] for one in about} == {"lo"}


def test_single_process_gets_no_rank_variables(job: Job) -> None:
    """A task that knows nothing of ranks runs as it does without a launcher."""
    job.start("pass", nodes=["localhost"])
    assert job.end() == [(0, "")]
    assert job.worker(0)["WORLD_SIZE"] is None


# ------------------------------------------------------------------------------------------------------------ failures


def test_output_of_each_process_is_in_its_log_and_the_jobs(job: Job) -> None:
    does = "meet(4); print('out of', rank, flush=True); os.write(2, b'x' * 20_000 + b'\\nend of %d' % rank)"
    for start in (1, 2):
        job.launchers.clear()
        for node in (0, 1):
            job.start(does, "--logs", "logs", node=node, processes=2)
        outputs = [launcher.communicate(timeout=60)[0] for launcher in job.launchers]
        assert [launcher.returncode for launcher in job.launchers] == [0, 0]
        for rank in range(4):
            text = f"out of {rank}\n{'x' * 20_000}\nend of {rank}"
            assert (job.folder / f"logs/{rank}.log").read_text() == text * start
            assert f"out of {rank}\n" in outputs[rank // 2]
            assert f"end of {rank}" in outputs[rank // 2]
        for path in job.folder.glob("worker-*"):
            path.unlink()


def test_unwritable_log_of_a_process_ends_nothing(job: Job) -> None:
    (job.folder / "logs").touch()
    launcher = job.start("print('here', rank)", "--logs", "logs", nodes=["localhost"], processes=2)
    assert sorted(launcher.communicate(timeout=60)[0].split()) == ["0", "1", "here", "here"]
    assert launcher.returncode == 0


def test_failing_process_ends_all_and_is_named(job: Job) -> None:
    for node in (0, 1):
        job.start("meet(4); sys.exit(3) if rank == 3 else time.sleep(600)", node=node, processes=2)
    for code, stderr in job.end():
        assert code == 3
        assert "error: rank 3 on 127.0.0.1 ended with exit code 3" in stderr
    wait_for(lambda: not any(is_alive(int(job.worker(rank)["pid"])) for rank in range(4)))


def test_message_without_the_key_is_ignored(job: Job) -> None:
    (job.folder / "guess").write_text("a guess\n")
    job.start("pass", "--start-patience", "3", node=0)
    job.start("pass", "--start-patience", "3", "--key", "guess", node=1)
    (code, stderr), (_, refused) = job.end()
    assert code == 1
    assert "no launcher on 127.0.0.1 (rank 1)" in stderr
    assert "is gone before the start" in refused


def test_task_missing_from_the_image(job: Job) -> None:
    argv = [sys.executable, LAUNCHER, "--", "trian", "--smoke"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 127
    assert "error: localhost: trian: No such file or directory; is it a task of this image?" in done.stderr


# ------------------------------------------------------------------------------------------------------- being told


# ------------------------------------------------------------------------------------------------------------ network


def test_network_variables_of_the_user_are_kept() -> None:
    chosen, _ = launch_network.network(NODES[0], NODES, {"NCCL_SOCKET_IFNAME": "mine", "GLOO_SOCKET_IFNAME": "mine"})
    assert chosen == {}


def test_unresolvable_host_selects_no_interface() -> None:
    assert launch_network.interface_to("no-such-host.invalid") is None


def test_addresses_of_this_machine() -> None:
    assert ("lo", "127.0.0.1") in launch_network.addresses()
    assert launch_network.interface_of("127.0.0.1") == "lo"
    assert launch_network.interface_of("192.0.2.1") is None


def write_port(root: Path, name: str, state: str, layer: str) -> None:
    port = root / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{layer}\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")


def test_active_infiniband_ports(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", "4: ACTIVE", "InfiniBand")
    write_port(tmp_path, "mlx5_1", "1: DOWN", "InfiniBand")
    write_port(tmp_path, "mlx5_2", "4: ACTIVE", "Ethernet")
    assert launch_network.infiniband(tmp_path) == [
        "InfiniBand mlx5_0:1 (400 Gb/sec (4X NDR))",
        "RoCE mlx5_2:1 (400 Gb/sec (4X NDR))",
    ]
    assert launch_network.infiniband(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("c1:1:1 [0] NCCL INFO Using network Socket", "Socket"),
        ("c1:1:1 [0] NCCL INFO Using network IB", "IB"),
        ("c1:1:1 [0] NCCL INFO NET/IB : No device found.", None),
    ],
)
def test_nccl_network_from_its_log(line: str, taken: str | None, tmp_path: Path) -> None:
    assert launch_network.nccl_network(tmp_path) is None
    (tmp_path / "c1.1.log").write_text(f"c1:1:1 [0] NCCL INFO Bootstrap: Using eno1\n{line}\n")
    assert launch_network.nccl_network(tmp_path) == taken


def test_warning_is_printed_in_a_box() -> None:
    lines = launch_network.warning("NCCL fell back to TCP.", "Slow.").splitlines()
    assert len({len(line) for line in lines}) == 1
    assert set(lines[0]) == {"!"}
