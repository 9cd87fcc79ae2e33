"""Fine-tune a base model on instruction rows: an adapter (LoRA), the last layer, or every weight; on one GPU or many.

train --data my_rows.jsonl --output result
train --set epochs=3 --set lora.r=8
train --dry-run          what would be trained on what, and whether it fits
train --dry-run --gpus 8 --on H100       the same for other GPUs, on any machine; exit code 3: it will not fit
train --fetch-only       fetch the model, with its hashes, for nodes without a network
train --smoke            check in seconds, offline, that this image trains
train --gpus 4           on several GPUs of this node; on several nodes, build.py submit starts it
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ekiben_tasks.distributed import failures
from ekiben_tasks.task import caches, command, fetch
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.training.settings import Settings, TrainOptions
from ekiben_tasks.training.train import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `train` and return its exit code; with --gpus above 1, replace this process by the launcher.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        DoesNotFitError: the run needs more memory than there is.
        TaskError: the data, the model or the output cannot be used.
    """
    args = _parse(arguments)
    dry = command.read_dry_run(args)
    if dry is None and args.fetch_only is None:
        command.start_processes(__file__, args.gpus, arguments)
    settings = options.load(Settings, args.config, _assignments(args))
    recipe = command.recipe_folder(args.config, __file__)
    print_once(*caches.prepare_caches(os.environ))
    if args.fetch_only is not None:
        fetch.fetch_model(settings.model, Path(args.fetch_only) if args.fetch_only else None)
        return 0
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small only waits for a second thread
        from ekiben_tasks.training import smoke

        return smoke.smoke_test(settings, recipe / "data" / "sample.jsonl", args.output)
    return train(settings, recipe, args.output or Path("result"), TrainOptions(dry, args.skip_invalid, args.overwrite))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.command("train", __doc__, Settings, arguments)
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="SOURCE",
        help="instead of the setting data; repeatable; 'sample': the recipe's own rows",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="one process for each of N GPUs of this node")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results go (default: result)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and stop")
    command.add_on_option(parser)
    command.add_fetch_option(parser)
    parser.add_argument(
        "--smoke", action="store_true", help="train a tiny model on the sample rows, offline, and check everything"
    )
    command.add_flag(
        parser, "--skip-invalid", former="--skip-bad", help="leave bad rows out instead of stopping at them"
    )
    command.add_flag(parser, "--overwrite", former="--fresh", help="start again, though --output holds a checkpoint")
    return parser.parse_args(arguments)


def _assignments(args: argparse.Namespace) -> list[str]:
    import json

    data = [f"data={json.dumps(args.data, ensure_ascii=False)}"] if args.data else []
    return [*args.set, *data]


if __name__ == "__main__":
    failures.run(main)
