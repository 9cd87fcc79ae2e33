"""A task for tests of jobs: it writes where it runs, saves on a signal, and ends once it was started often enough.

fake --until 3 --folder DIR [--fail-rank 1]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("fake"))
    parser.add_argument("--until", type=int, default=1)
    parser.add_argument("--fail-rank", type=int, default=-1)
    parser.add_argument("--set")
    parser.add_argument("--output")
    args = parser.parse_args()

    def save(number: int, _: FrameType | None) -> None:
        (folder / f"saved-{start}-{rank}").write_text(signal.Signals(number).name)
        sys.exit(75)

    signal.signal(signal.SIGUSR1, save)
    signal.signal(signal.SIGTERM, save)
    rank, size, folder = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1")), args.folder
    folder.mkdir(parents=True, exist_ok=True)
    start = len(list(folder.glob(f"start-*-{rank}"))) + 1
    print(f"this is rank {rank} of {size}, start {start}", flush=True)
    ranks = ("NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_NODEID")
    names = (*ranks, "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "HF_HOME", "HF_TOKEN")
    about = {"pid": os.getpid(), "argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
    (folder / f"start-{start}-{rank}").write_text(json.dumps(about))
    end = time.monotonic() + 300
    while len(list(folder.glob(f"start-{start}-*"))) < size:
        assert time.monotonic() < end, "the others did not come"
        time.sleep(0.1)
    if args.fail_rank == int(rank):
        return 3
    while start < args.until or args.fail_rank >= 0:
        assert time.monotonic() < end, "nobody told it to stop"
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
