"""Pretrain a GPT on Megatron-Core: one GPU, or many with tensor, pipeline and data parallelism.

pretrain --data prepared --output pretrained
pretrain --set size=1.3B --dry-run                 whether it fits, how many tokens, how long a warm-up
pretrain --dry-run --gpus 8 --on H100              the same for other GPUs, on any machine; exit code 3: it will not fit
pretrain --smoke                                   tokenizer to converted model in a minute, offline
pretrain --gpus 4 --set tensor_parallel=2 --set pipeline_parallel=2      on several nodes, build.py submit starts it
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ekiben_tasks.distributed import failures
from ekiben_tasks.task import caches, command
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from pretraining import Settings, pretrain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `pretrain` and return its exit code; with --gpus above 1, replace this process by the launcher.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        DoesNotFitError: no micro-batch fits the memory.
        TaskError: the data or the output cannot be used.
    """
    args = _parse(arguments)
    dry = command.read_dry_run(args)
    if dry is None:
        command.start_processes(__file__, args.gpus, arguments)
    settings = options.load(Settings, args.config, args.set)
    if args.data:
        settings = replace(settings, data=args.data)
    print_once(*caches.prepare_caches(os.environ))
    if args.smoke:
        from pretrain_smoke_test import smoke_test

        os.environ["HF_HUB_OFFLINE"] = "1"
        return smoke_test(command.recipe_folder(args.config, __file__))
    code = pretrain(settings, args.output, dry=dry, fresh=args.overwrite)
    if code == 0 and dry is None:
        print_once(f"try         convert --input {args.output} --output converted")
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.command("pretrain", __doc__, Settings, arguments)
    parser.add_argument("--data", metavar="DIR", help="output folder of prepare-data")
    parser.add_argument("--gpus", type=int, metavar="N", help="one process for each of N GPUs of this node")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("pretrained"), help="default: pretrained")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and stop")
    command.add_on_option(parser)
    parser.add_argument("--smoke", action="store_true", help="a tiny model through every task, offline, and check it")
    command.add_flag(parser, "--overwrite", former="--fresh", help="start again, though --output holds a checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    failures.run(main)
