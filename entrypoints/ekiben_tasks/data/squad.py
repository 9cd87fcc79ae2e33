"""Read files in SQuAD's format, such as JSQuAD's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError

_SEPARATOR = "[SEP]"
_FORMAT = 'wanted is {"data": [{"title", "paragraphs": [{"context", "qas": [{"question", "answers": [...]}]}]}]}'


def read_squad(file: Path) -> Iterator[tuple[str, Any, Any, Any, list[dict[str, Any]]]]:
    """Yield (where, title, context, question, answers) of each question; the values are as the file has them.

    Raises:
        TaskError: the file cannot be read, or has another format.
    """
    try:
        articles = input_files.read_json(file, _FORMAT, max_size=input_files.MAX_JSON)["data"]
        for number, article in enumerate(articles, 1):
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    answers = [dict(answer) for answer in question.get("answers") or ()]
                    where = f"{file} article {number} question {question.get('id', '?')}"
                    yield where, article.get("title"), paragraph.get("context"), question.get("question"), answers
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TaskError(f"{file}: is not in SQuAD's format ({type(error).__name__}: {error}); {_FORMAT}") from None


def context_body(context: str) -> str:
    """Return a context without the title and [SEP] that it begins with in JSQuAD."""
    return context.rpartition(_SEPARATOR)[2].lstrip()
