"""Define the settings of jsquad and perplexity, and check them before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ekiben_tasks.data.schema import DatasetFormat, check_format, refuse_labels
from ekiben_tasks.evaluation import frame
from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class SquadSettings(frame.EvaluationSettings):
    """Define the settings of `jsquad`."""

    data: str = option("sample", "a file in SQuAD's format; sample: the recipe's own; --data")
    form: DatasetFormat = field(default_factory=DatasetFormat)
    examples: int = option(0, "number of random questions; 0: all")
    max_new_tokens: int = option(64, "tokens of the longest answer")
    first_line: bool = option(True, "score an answer up to its first line end")


@dataclass(frozen=True)
class PerplexitySettings(frame.EvaluationSettings):
    """Define the settings of `perplexity`."""

    data: object = option(
        "sample",
        "hub data sets, folders or files, as of train, or plain texts (.txt); sample: the recipe's own; --data",
    )
    counts: Literal["texts", "responses"] = option(
        "texts",
        "texts: all tokens of a column; responses: those of the form's responses, as eval_loss in training",
    )
    column: str = option("text", "counts=texts: the column with the text")
    form: DatasetFormat = field(default_factory=DatasetFormat)
    examples: int = option(0, "number of examples, from the first; 0: all")
    max_length: int = option(0, "tokens that the model reads at once; 0: as many as it can")


def check_squad(settings: SquadSettings) -> None:
    """Check the settings of `jsquad`.

    Raises:
        SettingError: some are wrong; the message has all problems.
    """
    check_format(settings.form)
    refuse_labels(settings.form)
    limits = (("examples", settings.examples, 0), ("max_new_tokens", settings.max_new_tokens, 1))
    problems = _too_small(*limits)
    if settings.form.kind == "chat":
        problems.append("setting form.kind: questions on a text are no conversations; take template or instruction")
    if problems:
        raise SettingError("\n".join(problems))


def check_perplexity(settings: PerplexitySettings) -> None:
    """Check the settings of `perplexity`.

    Raises:
        SettingError: some are wrong; the message has all problems.
    """
    check_format(settings.form)
    refuse_labels(settings.form)
    limits = (("examples", settings.examples, 0), ("max_length", settings.max_length, 0))
    problems = _too_small(*limits)
    if not settings.column or set(settings.column) & set("{}[]"):
        problems.append(f"setting column: {settings.column!r} names no column")
    if problems:
        raise SettingError("\n".join(problems))


def _too_small(*limits: tuple[str, int, int]) -> list[str]:
    """Return a problem for each (setting, value, minimum) that is below."""
    below = [limit for limit in limits if limit[1] < limit[2]]
    return [f"setting {name}: must be at least {minimum}, not {value}" for name, value, minimum in below]
