"""Answer the questions of JSQuAD, or of a file in SQuAD's format, greedily; exact match and F1 as JGLUE counts them.

jsquad --data JGLUE/datasets/jsquad-v1.3/valid-v1.3.json --adapter result/adapter
jsquad --gpus 4                          the questions are split among them
jsquad --dry-run                         the number of questions, and the first prompt
jsquad --smoke                           offline, in seconds, with or without a GPU
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ekiben_tasks.distributed import failures
from ekiben_tasks.evaluation import frame, squad
from ekiben_tasks.evaluation.settings import SquadSettings, check_squad
from ekiben_tasks.task import command
from ekiben_tasks.task.command import print_once


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `jsquad` and return its exit code; with --gpus above 1, replace this process by the launcher.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        TaskError: the data, the model or the output cannot be used.
    """
    parser = frame.create_parser("jsquad", __doc__, SquadSettings, arguments)
    parser.add_argument("--data", metavar="FILE", help="instead of the setting data")
    parser.add_argument(
        "--skip-invalid", action="store_true", help="count questions that are too long for the model as wrong"
    )
    args = parser.parse_args(arguments)
    if not args.dry_run:
        command.start_processes(__file__, args.gpus, arguments)
    settings = frame.read_settings(SquadSettings, args)
    settings = replace(settings, data=args.data) if args.data else settings
    check_squad(settings)
    sample = command.recipe_folder(args.config, __file__) / "data" / "sample-squad.json"
    if args.smoke:
        from ekiben_tasks.evaluation import smoke

        return smoke.smoke_squad(settings, sample)
    file = sample if settings.data == "sample" else Path(settings.data).expanduser()
    if args.dry_run:
        questions = squad.read_questions(file)
        print_once(f"data        {file}: {len(questions):,} questions; the first: {questions[0].question}")
    frame.check_model(settings)
    if args.dry_run:
        print_once(f"model       {settings.adapter or settings.model}", "dry run     nothing was loaded or written")
        return 0
    return squad.evaluate(settings, file, skip=args.skip_invalid, overwrite=args.overwrite)


if __name__ == "__main__":
    failures.run(main)
