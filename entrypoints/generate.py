"""Generate answers to many prompts: one line of JSON per example, in batches, on every GPU there is.

generate --model databricks/dolly-v2-12b --data data/jsquad-valid.jsonl
generate --adapter result/adapter --set examples=0            0: every example
generate --greedy --output answers.jsonl                      greedy
generate --gpus 4                                             the examples are split among them
generate --set devices=auto                                   one model spread over all GPUs
generate --set devices=auto --dry-run --gpus 4 --on H100      where its layers would be, on any machine
generate --smoke                                              offline, in seconds, with or without a GPU
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ekiben_tasks.data.sources import check_locations, parse_sources
from ekiben_tasks.distributed import failures
from ekiben_tasks.generation.settings import GenerateSettings, check, check_processes
from ekiben_tasks.task import adapter_folder, caches, command, fetch, files
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import SettingError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `generate` and return its exit code; with --gpus above 1, replace this process by the launcher.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        TaskError: the data, the model or the output cannot be used.
    """
    parser = command.command("generate", __doc__, GenerateSettings, arguments)
    parser.add_argument("--model", metavar="MODEL", help="instead of the setting model")
    parser.add_argument("--adapter", metavar="DIR", help="instead of the setting adapter")
    parser.add_argument("--data", metavar="DATA", help="instead of the setting data")
    parser.add_argument("--output", metavar="FILE", help="instead of the setting output")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument("--gpus", type=int, metavar="N", help="one process for each of N GPUs of this node")
    command.add_flag(
        parser, "--skip-invalid", former="--skip-bad", help="leave invalid examples out instead of stopping at them"
    )
    command.add_flag(parser, "--overwrite", former="--fresh", help="overwrite the output, partial or finished")
    parser.add_argument("--dry-run", action="store_true", help="print where the model would be, and stop")
    command.add_on_option(parser)
    command.add_fetch_option(parser)
    parser.add_argument("--smoke", action="store_true", help="test with a tiny model, offline")
    args = parser.parse_args(arguments)
    dry = command.read_dry_run(args)
    overrides = {name: getattr(args, name) for name in ("model", "adapter", "data", "output") if getattr(args, name)}
    settings = replace(options.load(GenerateSettings, args.config, args.set), **overrides)
    settings = replace(settings, temperature=0.0) if args.greedy else settings
    if args.model and settings.adapter:
        raise SettingError(
            f"--model {args.model}: the adapter {settings.adapter} names its own base model; leave --model out, or the"
            " adapter (--set adapter=)"
        )
    if dry is None and args.fetch_only is None:
        check_processes(settings.devices, args.gpus)
        command.start_processes(__file__, args.gpus, arguments)
    recipe = command.recipe_folder(args.config, __file__)
    print_once(*caches.prepare_caches(os.environ))
    if args.fetch_only is not None:
        model = adapter_folder.find_model(settings.model, settings.adapter)
        fetch.fetch_model(model, Path(args.fetch_only) if args.fetch_only else None)
        return 0
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small only waits for a second thread
        from ekiben_tasks.generation.smoke import smoke_generate

        check(settings)
        return smoke_generate(settings, recipe / "data" / "sample.jsonl")
    if dry:
        check(settings)
        adapter_folder.check_source(settings.model, settings.adapter)

        from ekiben_tasks.generation import batch

        return batch.plan(settings, dry)
    return generate(settings, recipe, skip_bad=args.skip_invalid, fresh=args.overwrite)


def generate(settings: GenerateSettings, recipe: Path, *, skip_bad: bool = False, fresh: bool = False) -> int:
    """Answer the examples of ``settings.data`` and return the exit code: 0, or 75 or 130 after a signal.

    recipe: the folder whose data/sample.jsonl is the data ``sample``. skip_bad: leave invalid examples out. fresh:
    overwrite the output.

    Raises:
        TaskError: a setting, the data, the model or the output cannot be used.
    """
    # Find errors before seconds of imports and minutes of downloads.
    check(settings)
    data: object = str(recipe / "data" / "sample.jsonl") if settings.data == "sample" else settings.data
    (source,) = parse_sources(data, 0.0)
    if check_locations([source]) | adapter_folder.check_source(settings.model, settings.adapter):
        print_once(*caches.prefer_cache(os.environ))
    files.ensure_output_dir(Path(settings.output).absolute().parent)

    from ekiben_tasks.generation import batch

    return batch.generate(settings, source, skip_bad=skip_bad, fresh=fresh)


if __name__ == "__main__":
    failures.run(main)
