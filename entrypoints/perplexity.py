"""Measure how likely texts are to a model, or to an adapter on its base: loss, perplexity, bits per byte.

perplexity --model cyberagent/open-calm-3b --data novel.txt --data more.jsonl
perplexity --adapter result/adapter --data rows.jsonl --set counts=responses      as evaluation in training does
perplexity --gpus 4                      the texts are split among them
perplexity --dry-run                     the number of texts
perplexity --smoke                       offline, in seconds, with or without a GPU
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ekiben_tasks.data.sources import Source, check_locations, parse_sources
from ekiben_tasks.distributed import failures
from ekiben_tasks.evaluation import frame
from ekiben_tasks.evaluation.settings import PerplexitySettings, check_perplexity


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `perplexity` and return its exit code; with --gpus above 1, replace this process by the launcher.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        TaskError: the data, the model or the output cannot be used.
    """
    scorer = frame.Scorer(
        prog="perplexity",
        doc=__doc__,
        settings=PerplexitySettings,
        data_option={
            "action": "append",
            "default": [],
            "metavar": "DATA",
            "help": "instead of the setting data; repeatable",
        },
        invalid_help="leave invalid examples out instead of stopping",
        sample="sample-texts.jsonl",
        check=check_perplexity,
        find_data=_find_data,
        describe=_describe,
        smoke=_smoke,
        evaluate=_evaluate,
    )
    return scorer.run(__file__, arguments)


def _find_data(settings: PerplexitySettings, sample: Path) -> tuple[list[Source], bool]:
    data = settings.data if isinstance(settings.data, list) else [settings.data]
    sources = parse_sources([str(sample) if each == "sample" else each for each in data], 0.0)
    return sources, check_locations(sources)


def _describe(settings: PerplexitySettings, sources: list[Source], skip: bool) -> str:
    from ekiben_tasks.evaluation import perplexity

    texts = perplexity.read_texts(settings, sources, skip=skip)
    return f"{len(texts.plain if settings.counts == 'texts' else texts.examples):,} {settings.counts}"


def _smoke(settings: PerplexitySettings, sample: Path) -> int:
    from ekiben_tasks.evaluation import smoke

    return smoke.smoke_perplexity(settings, sample)


def _evaluate(settings: PerplexitySettings, sources: list[Source], skip: bool, overwrite: bool) -> int:
    from ekiben_tasks.evaluation import perplexity

    return perplexity.evaluate(settings, sources, skip=skip, overwrite=overwrite)


if __name__ == "__main__":
    failures.run(main)
