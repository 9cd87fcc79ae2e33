"""Run the command line of dpo, orpo, kto, reward and grpo: each of their scripts calls main() here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import align_settings
from ekiben_tasks.data.sources import check_locations, parse_sources
from ekiben_tasks.task import adapter_folder, caches, command
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.hub import is_hub_model


def main(script: str, doc: str | None, kind: type[align_settings.Settings], arguments: Sequence[str] | None) -> int:
    """Run a task and return its exit code; with --gpus above 1, replace this process by the launcher.

    script: of the task. doc: its docstring. arguments: the command line without the program's name; None: that of this
    process.

    Raises:
        SettingError: an option or a setting is wrong.
        TaskError: the data, the model or the output cannot be used.
    """
    parser = command.command(kind.NAME, doc, kind, arguments)
    parser.add_argument("--model", metavar="MODEL", help="instead of the setting model")
    parser.add_argument(
        "--data", action="append", default=[], metavar="DATA", help="instead of the setting data; repeatable"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="one process for each of N GPUs of this node")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("result"), help="(default: result)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be trained on what, and stop")
    parser.add_argument("--smoke", action="store_true", help="train a tiny model on the sample, offline, and check it")
    parser.add_argument("--skip-invalid", action="store_true", help="leave invalid examples out instead of stopping")
    parser.add_argument("--overwrite", action="store_true", help="start again, though --output holds a checkpoint")
    args = parser.parse_args(arguments)
    if not args.dry_run:
        command.start_processes(script, args.gpus, arguments)
    settings = options.load(kind, args.config, args.set)
    settings = replace(settings, **({"model": args.model} if args.model else {}))
    settings = replace(settings, **({"data": args.data} if args.data else {}))
    recipe = command.recipe_folder(args.config, script) / "data"
    if isinstance(settings, align_settings.GrpoSettings):
        names = (f"{recipe / 'sample_reward.py'}:reward" if each == "sample" else each for each in settings.rewards)
        settings = replace(settings, rewards=tuple(names))
    align_settings.check(settings, int(os.environ.get("WORLD_SIZE", "1")))
    print_once(*caches.prepare_caches(os.environ))
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    sample = recipe / ("sample-labels.jsonl" if kind.DATA == "labels" else "sample-pairs.jsonl")
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small only waits for a second thread
        import align_smoke_test

        return align_smoke_test.smoke_test(settings, sample)
    data = settings.data if isinstance(settings.data, list) else [settings.data]
    sources = parse_sources([str(sample) if each == "sample" else each for each in data], 0.0)
    of_hub = [_is_on_hub(each) for each in getattr(settings, "rewards", ())]
    if check_locations(sources) | is_hub_model(settings.model) | any(of_hub):
        print_once(*caches.prefer_cache(os.environ))

    import align_run  # seconds of import that a wrong setting need not wait for

    request = align_run.Request(
        settings, sources, args.output, is_dry=args.dry_run, skip=args.skip_invalid, overwrite=args.overwrite
    )
    return align_run.run(request)


def _is_on_hub(reward: str) -> bool:
    """Return whether a reward is a model of the hub. Raises TaskError for a folder without a model or adapter."""
    if align_settings.is_function(reward):
        return False
    if (Path(reward) / "adapter_config.json").is_file():
        return adapter_folder.check_source("", reward)
    return is_hub_model(reward)
