"""NCCL through the launcher of jobs: one node, and two "nodes" of half the GPUs each. Needs torch and two GPUs or four.

python -m pytest -m gpu qa/gpu/test_launch_node_gpu.py
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

LAUNCHER = Path(__file__).resolve().parents[2] / "entrypoints/launch_node.py"
ADD_UP = """
import os, torch
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
vector = torch.full((1 << 20,), float(rank + 1), device="cuda")
torch.distributed.all_reduce(vector)
assert vector.eq(size * (size + 1) / 2).all()
print(f"rank {rank} of {size} on {os.environ['NODE_RANK']}: added up", flush=True)
torch.distributed.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("gpus", [2, 4])
def test_all_reduce_over_every_gpu(gpus: int, nodes: int, tmp_path: Path) -> None:
    assert torch.cuda.device_count() or not Path("/dev/nvidiactl").exists(), "there is a driver, and torch sees no GPU"
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    (tmp_path / "key").write_text("a secret")
    each, port, names = gpus // nodes, free_port(), ",".join(["localhost", "127.0.0.1"][:nodes])
    started = []
    for node in range(nodes):
        argv = [
            "--node",
            str(node),
            "--nodes",
            names,
            "--processes",
            str(each),
            "--port",
            str(port),
            "--key",
            str(tmp_path / "key"),
            "--",
            sys.executable,
            "-c",
            ADD_UP,
        ]
        visible = ",".join(str(gpu) for gpu in range(node * each, (node + 1) * each))
        started.append(
            subprocess.Popen(
                [sys.executable, LAUNCHER, *argv],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * nodes, "\n".join(outputs)
    assert len(re.findall(r"added up", "".join(outputs))) == gpus
