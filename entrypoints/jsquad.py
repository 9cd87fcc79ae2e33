"""Answer the questions of JSQuAD, or of a file in SQuAD's format, greedily; exact match and F1 as JGLUE counts them.

jsquad --data JGLUE/datasets/jsquad-v1.3/valid-v1.3.json --adapter result/adapter
jsquad --gpus 4                          the questions are split among them
jsquad --dry-run                         the number of questions, and the first prompt
jsquad --smoke                           offline, in seconds, with or without a GPU
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ekiben_tasks.distributed import failures
from ekiben_tasks.evaluation import frame, squad
from ekiben_tasks.evaluation.settings import SquadSettings, check_squad


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `jsquad` and return its exit code; with --gpus above 1, replace this process by the launcher.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        TaskError: the data, the model or the output cannot be used.
    """
    scorer = frame.Scorer(
        prog="jsquad",
        doc=__doc__,
        settings=SquadSettings,
        data_option={"metavar": "FILE", "help": "instead of the setting data"},
        invalid_help="count questions that are too long for the model as wrong",
        sample="sample-squad.json",
        check=check_squad,
        find_data=_find_data,
        describe=_describe,
        smoke=_smoke,
        evaluate=_evaluate,
    )
    return scorer.run(__file__, arguments)


def _find_data(settings: SquadSettings, sample: Path) -> tuple[Path, bool]:
    return (sample if settings.data == "sample" else Path(settings.data).expanduser()), False


def _describe(settings: SquadSettings, file: Path, skip: bool) -> str:
    questions = squad.read_questions(file)
    return f"{file}: {len(questions):,} questions; the first: {questions[0].question}"


def _smoke(settings: SquadSettings, sample: Path) -> int:
    from ekiben_tasks.evaluation import smoke

    return smoke.smoke_squad(settings, sample)


def _evaluate(settings: SquadSettings, file: Path, skip: bool, overwrite: bool) -> int:
    return squad.evaluate(settings, file, skip=skip, overwrite=overwrite)


if __name__ == "__main__":
    failures.run(main)
