"""Measure how likely texts are to a model, or to an adapter on its base: loss, perplexity, bits per byte.

perplexity --model cyberagent/open-calm-3b --data novel.txt --data more.jsonl
perplexity --adapter result/adapter --data rows.jsonl --set counts=responses      as evaluation in training does
perplexity --gpus 4                      the texts are split among them
perplexity --dry-run                     the number of texts
perplexity --smoke                       offline, in seconds, with or without a GPU
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ekiben_tasks.data.sources import check_locations, parse_sources
from ekiben_tasks.distributed import failures
from ekiben_tasks.evaluation import frame
from ekiben_tasks.evaluation.settings import PerplexitySettings, check_perplexity
from ekiben_tasks.task import command
from ekiben_tasks.task.command import print_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `perplexity` and return its exit code; with --gpus above 1, replace this process by the launcher.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        TaskError: the data, the model or the output cannot be used.
    """
    parser = frame.create_parser("perplexity", __doc__, PerplexitySettings, arguments)
    parser.add_argument(
        "--data", action="append", default=[], metavar="DATA", help="instead of the setting data; repeatable"
    )
    parser.add_argument("--skip-invalid", action="store_true", help="leave invalid examples out instead of stopping")
    args = parser.parse_args(arguments)
    if not args.dry_run:
        command.start_processes(__file__, args.gpus, arguments)
    settings = frame.read_settings(PerplexitySettings, args)
    settings = replace(settings, data=args.data) if args.data else settings
    check_perplexity(settings)
    sample = command.recipe_folder(args.config, __file__) / "data" / "sample-texts.jsonl"
    if args.smoke:
        from ekiben_tasks.evaluation import smoke

        return smoke.smoke_perplexity(settings, sample)
    data = settings.data if isinstance(settings.data, list) else [settings.data]
    sources = parse_sources([str(sample) if each == "sample" else each for each in data], 0.0)
    frame.check_model(settings, uses_hub=check_locations(sources))

    from ekiben_tasks.evaluation import perplexity

    if args.dry_run:
        texts = perplexity.read_texts(settings, sources, skip=args.skip_invalid)
        count = len(texts.plain if settings.counts == "texts" else texts.examples)
        print_once(f"data        {count:,} {settings.counts}", f"model       {settings.adapter or settings.model}")
        print_once("dry run     nothing was loaded or written")
        return 0
    return perplexity.evaluate(settings, sources, skip=args.skip_invalid, overwrite=args.overwrite)


if __name__ == "__main__":
    failures.run(main)
