"""Speed of pretraining: the 0.125B model at 2048 tokens, a step of 64 rows, with a table as large as a real
vocabulary's.

    python3 qa/gpu/bench_pretrain.py                    one GPU
    python3 qa/gpu/bench_pretrain.py --profile          and its kernels
    python3 qa/gpu/bench_pretrain.py --set size=1.3B --set micro_batch=4

The sample data have a vocabulary of some 1,500; the table gets --vocabulary rows all the same, which costs what it
costs in a real run. The first step is left out of the numbers, as in every run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "recipes" / "pretrain-gpt" / "entrypoints"
sys.path[:0] = [str(ROOT / "entrypoints"), str(SCRIPTS)]
from bench_train import PROFILED, profiled


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of pretrain")
    parser.add_argument("--profile", action="store_true", help="print where the time on the GPU goes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        measure(args)
    return 0


def measure(args: Any) -> None:
    paths = os.pathsep.join([str(ROOT / "entrypoints"), str(SCRIPTS), os.environ.get("PYTHONPATH", "")])
    for script, *options in (
        ("train_tokenizer.py", "--set", "vocab_size=1500"),
        ("prepare_data.py", "--set", "workers=2"),
    ):
        command = [sys.executable, str(SCRIPTS / script), "--data", "sample", *options]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True, stdout=subprocess.DEVNULL)
    import model_configs
    import pretrain

    model_configs.pad_vocabulary = lambda size: int(args.vocabulary)
    if args.profile:
        import steps

        fit = steps.Run.fit

        def fit_and_profile(self: steps.Run) -> int | None:
            code = fit(self)
            profiled(lambda: [self._step() for _ in range(PROFILED)])
            return code

        steps.Run.fit = fit_and_profile  # type: ignore[method-assign]
    settings = {
        "batch_size": 64,
        "max_steps": args.steps,
        "eval_every": 0,
        "eval_batches": 0,
        "save_every": 0,
        "split": "9,1,0",
        "warmup_tokens": 65_536,
        "decay_tokens": 1_000_000,
    }
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    pretrain.main(["--data", "prepared", *options, *(word for setting in args.set for word in ("--set", setting))])
    result = json.loads(Path("pretrained/run.json").read_text())
    print(
        f"{result['device']['name']}: {result['tokens_per_s']:,.0f} tokens/s, MFU {result['mfu'] or 0:.1%}, "
        f"{result['peak_memory_bytes'] / 2**30:.1f} GiB, {result['device']['micro_batch']} at a time"
    )


if __name__ == "__main__":
    sys.exit(main())
