"""Time how long LoRA training takes to a quality target: several runs with seeds of their own, their logs, the olympic
mean.

train                                                a reference run, which sets the target, and all runs, one after the
                                                     other; started again, it resumes
train --set target_loss=1.9                          all runs, to a target of your own
train --reference                                    the reference run alone, as a job of a cluster
train --run 3                                        the third run alone, likewise
train --gpus 4                                       each run on several GPUs of this node
train --summary                                      summarise the finished runs
train --dry-run
train --smoke                                        every task on a tiny model and sample rows, offline
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import dolly
from bench_runs import RESULT, run_folder, run_label, run_once, summarise
from bench_settings import REFERENCE, Settings, check_settings
from ekiben_tasks.distributed import failures
from ekiben_tasks.task import command
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.task.files import ensure_output_dir
from ekiben_tasks.training.settings import check


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark's command `train` and return its exit code.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        TaskError: the data, the model or the output cannot be used, or this is one of several processes without --run.
    """
    args = _parse(arguments)
    settings = options.load(Settings, args.config, args.set)
    check_settings(settings)
    if settings.runs < 1 or (args.run is not None and args.run < 1):
        raise SettingError("setting runs: must be at least 1, and --run counts from 1")
    if args.smoke:
        if os.environ.get("RANK", "0") != "0":
            return 0  # the checks are made by one process, also in a job of several
        from bench_smoke_test import smoke_test

        return smoke_test(command.recipe_folder(args.config, __file__))
    if args.summary:
        summarise(args.output, settings.runs)
        return 0
    single = REFERENCE if args.reference else args.run
    if dry := command.read_dry_run(args):
        return run_once(settings, single or REFERENCE, args.output, config=args.config, dry=dry)
    if single is not None:
        command.start_processes(__file__, args.gpus, arguments)
        return run_once(settings, single, args.output, config=args.config)
    if "RANK" in os.environ:
        raise TaskError(
            "as one of several processes each run is started by itself: give --reference, --run 1, --run 2 ..."
        )
    check(settings.train)
    dolly.read_record(Path(str(settings.train.data)))
    ensure_output_dir(args.output)
    for number in range(REFERENCE if settings.target_loss == "auto" else 1, settings.runs + 1):
        if (run_folder(args.output, number) / RESULT).is_file():
            print(f"{run_label(number):<12}done before", flush=True)
            continue
        # Each in its own process: no run benefits from caches of another.
        argv = list(sys.argv[1:] if arguments is None else arguments)
        which = ["--reference"] if number == REFERENCE else ["--run", str(number)]
        code = subprocess.run([sys.executable, str(Path(__file__).resolve()), *argv, *which]).returncode
        if code:
            return code
    summarise(args.output, settings.runs)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.command("train", __doc__, Settings, arguments)
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("bench"), help="default: bench")
    parser.add_argument("--run", type=int, metavar="N", help="only this run, from 1; its seed is train.seed + N - 1")
    parser.add_argument(
        "--reference", action="store_true", help="only the reference run, which sets the target (target_loss auto)"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="each run on N GPUs of this node")
    parser.add_argument("--summary", action="store_true", help="summarise the finished runs")
    parser.add_argument("--dry-run", action="store_true", help="print the plan of a run, and stop")
    command.add_on_option(parser)
    parser.add_argument("--smoke", action="store_true", help="a tiny model through every task, offline, and check it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    failures.run(main)
