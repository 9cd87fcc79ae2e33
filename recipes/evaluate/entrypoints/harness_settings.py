"""Define the settings of `evaluate`, and check them before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ekiben_tasks.evaluation import frame
from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.task.settings import option

SAMPLE = "sample"


@dataclass(frozen=True)
class Settings(frame.EvaluationSettings):
    """Define the settings of `evaluate`."""

    tasks: tuple[str, ...] = option(("capitals", "capitals_written"), "names of tasks, groups or tags")
    task_folder: str = option(
        SAMPLE,
        "folder of task files (YAML) and their data, found there first; sample: the recipe's own; empty: none",
    )
    few_shot: int | None = option(None, "examples before each question; empty: as the task says")
    examples: int = option(0, "number of examples of each task, from the first; 0: all")
    chat_template: bool = option(False, "ask by the tokenizer's chat template")
    keep_answers: bool = option(True, "write each answer of the model to samples-TASK.jsonl")
    run_generated_code: bool = option(False, "allow tasks that run the code which the model writes")


def check(settings: Settings) -> None:
    """Check the settings of `evaluate`.

    Raises:
        SettingError: some are wrong; the message has all problems.
    """
    problems = []
    if not settings.tasks or not all(settings.tasks):
        problems.append("setting tasks: names none; `lm-eval ls tasks` lists them")
    if settings.task_folder not in ("", SAMPLE) and not Path(settings.task_folder).expanduser().is_dir():
        problems.append(f"setting task_folder: {Path(settings.task_folder).absolute()}: no such folder")
    problems += [
        f"setting {name}: must be at least 0, not {value}"
        for name, value in (("few_shot", settings.few_shot or 0), ("examples", settings.examples))
        if value < 0
    ]
    if problems:
        raise SettingError("\n".join(problems))
