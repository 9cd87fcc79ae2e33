"""Score a model, or an adapter on its base, on the tasks of lm-evaluation-harness or on task files of your own.

evaluate --model cyberagent/open-calm-3b --set tasks=[hellaswag]
evaluate --adapter result/adapter --set tasks=[mine] --set task_folder=tasks      offline: files and data in tasks/
evaluate --gpus 4                        the examples are split among them
evaluate --dry-run                       the tasks and the number of their examples
evaluate --smoke                         offline, in seconds, with or without a GPU
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ekiben_tasks.distributed import failures
from ekiben_tasks.evaluation import frame
from ekiben_tasks.task import command
from harness_settings import SAMPLE, Settings, check


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `evaluate` and return its exit code; with --gpus above 1, replace this process by the launcher.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        TaskError: a task, its data, the model or the output cannot be used.
    """
    args = frame.create_parser("evaluate", __doc__, Settings, arguments).parse_args(arguments)
    if not args.dry_run:
        command.start_processes(__file__, args.gpus, arguments)
    settings = frame.read_settings(Settings, args)
    check(settings)
    samples = command.recipe_folder(args.config, __file__) / "data" / "tasks"
    if args.smoke:
        import harness_smoke_test

        return harness_smoke_test.smoke_test(settings, samples)
    frame.check_model(settings, uses_hub=not settings.task_folder)
    folder = samples if settings.task_folder == SAMPLE else Path(settings.task_folder).expanduser().absolute()

    import harness_run  # seconds of import that a wrong setting need not wait for

    return harness_run.evaluate(
        settings, folder if settings.task_folder else None, is_dry=args.dry_run, overwrite=args.overwrite
    )


if __name__ == "__main__":
    failures.run(main)
