"""Seconds that checkpoints of `pretrain` hold the steps up, and until they are complete, on the CPU.

    PYTHON bench/pretrain_save.py [--processes 2] [--layers 24] [--width 1024] [--steps 4] [--keep FOLDER]

PYTHON: with the packages of the recipe pretrain-gpt. Two sequences a step, each step saved, in fp32. The default is a
model of 303 million parameters, whose folder takes 11 GB; its seconds mean something on a machine with nothing else to
do. To see that it works: --layers 4 --width 256, a minute. Nothing of it is about GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import socket
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "pretrain-gpt"
sys.path[:0] = [str(ROOT / "entrypoints"), str(RECIPE / "entrypoints")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work there, and leave it")
    args = parser.parse_args()
    os.environ["EKIBEN_RECIPE"] = str(RECIPE)
    with tempfile.TemporaryDirectory() as scratch:
        return measure(args.keep or Path(scratch), args.processes, args.layers, args.width, args.steps)


def measure(folder: Path, processes: int, layers: int, width: int, count: int) -> int:
    """Train ``count`` steps in ``processes`` processes below ``folder``, print what their checkpoints cost, and return
    the exit code.
    """
    import torch

    torch.set_num_threads(1)
    import pretraining
    import without_gpu

    with warnings.catch_warnings(action="ignore"):
        without_gpu.pretend()
        import steps
    import background_save
    import prepare_data
    import train_tokenizer

    for name in ("tokenizer", "data"):
        (folder / name).mkdir(parents=True)
    train_tokenizer.train(train_tokenizer.Settings(vocab_size=1500), ["sample"], RECIPE, folder / "tokenizer")
    prepare_data.prepare(prepare_data.Settings(workers=1), ["sample"], RECIPE, folder / "tokenizer", folder / "data")
    settings = dataclasses.replace(
        pretraining.Settings(),
        layers=layers,
        width=width,
        heads=width // 64,
        sequence=64,
        data=str(folder / "data"),
        batch_size=2,
        micro_batch=1,
        max_steps=count,
        save_every=1,
        eval_every=0,
        eval_batches=1,
        log_seconds=0.0,
        device="cpu",
        train_tokens=1e9,
        warmup_tokens=1,
        precision="fp32",
    )
    save = steps.Run._save

    def timed(run: Any) -> None:
        started = time.monotonic()
        save(run)
        if run.world.is_main_process:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(
                f"held up     {time.monotonic() - started:.1f} s after step {run.step}; peak {peak:.1f} GiB", flush=True
            )

    steps.Run._save = timed  # type: ignore[method-assign, assignment]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    children = []
    for rank in range(processes):
        children.append(os.fork())
        if children[-1] == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
            os._exit(pretraining.pretrain(settings, folder / "run"))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for metadata in sorted((folder / "run" / background_save.CHECKPOINTS).glob(f"*/{background_save.METADATA_FILE}")):
        size = sum(file.stat().st_size for file in metadata.parent.rglob("*")) / 2**30
        seconds = json.loads(metadata.read_text(encoding="utf-8")).get("save_seconds", "?")
        print(f"complete    {metadata.parent.name}: {size:.1f} GiB after {seconds} s", flush=True)
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main())
