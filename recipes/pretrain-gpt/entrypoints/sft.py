"""Fine-tune a converted model on dialogues written as text: all its weights, the loss on the responses.

sft --data openassistant_best_replies_train.jsonl --set train.model=converted --output tuned
sft --set instruction_template='### 指示:' --set response_template='### 応答:' --data rows.jsonl
sft --dry-run
sft --smoke                  every task of the recipe on a tiny model, offline
sft --gpus 4                 on several GPUs of this node; on several nodes, build.py submit starts it
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import texts
from dialogues import Settings, check_form, list_locations, prepare
from ekiben_tasks.distributed import failures
from ekiben_tasks.task import caches, command
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.files import ensure_output_dir
from ekiben_tasks.task.hub import is_hub_model
from ekiben_tasks.training.settings import TrainOptions, check
from ekiben_tasks.training.train import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `sft` and return its exit code; with --gpus above 1, replace this process by the launcher.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        DoesNotFitError: the run needs more memory than there is.
        TaskError: the dialogues, the model or the output cannot be used.
    """
    args = _parse(arguments)
    dry = command.read_dry_run(args)
    if dry is None:
        command.start_processes(__file__, args.gpus, arguments)
    settings = options.load(Settings, args.config, args.set)
    print_once(*caches.prepare_caches(os.environ))
    recipe = command.recipe_folder(args.config, __file__)
    if args.smoke:
        from pretrain_smoke_test import smoke_test

        os.environ["HF_HUB_OFFLINE"] = "1"
        return smoke_test(recipe)
    check_form(settings.train)
    files = texts.find_files(list_locations(args.data or settings.train.data, recipe), recipe)
    if dry:
        with tempfile.TemporaryDirectory(prefix="ekiben-sft-") as scratch:
            tuned = prepare(settings, files, Path(scratch), skip_bad=args.skip_invalid)
            return train(tuned, recipe, args.output, TrainOptions(dry))
    check(settings.train)
    is_hub_model(settings.train.model)
    output = ensure_output_dir(args.output)
    tuned = prepare(settings, files, output, skip_bad=args.skip_invalid)
    return train(tuned, recipe, output, TrainOptions(fresh=args.overwrite))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.command("sft", __doc__, Settings, arguments)
    parser.add_argument(
        "--data",
        action="append",
        metavar="PATH",
        help="instead of the setting train.data: a .jsonl or .parquet file, or a folder of them; repeatable;"
        " 'dialogues': the recipe's",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="one process for each of N GPUs of this node")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("tuned"), help="default: tuned")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and stop")
    command.add_on_option(parser)
    parser.add_argument("--smoke", action="store_true", help="a tiny model through every task, offline, and check it")
    command.add_flag(
        parser, "--skip-invalid", former="--skip-bad", help="leave bad rows out instead of stopping at them"
    )
    command.add_flag(parser, "--overwrite", former="--fresh", help="start again, though --output holds a checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    failures.run(main)
