"""Convert JSQuAD (or any data set in SQuAD's format) to JSONL: one question per line, with its context and first
answer.

git clone https://github.com/yahoojapan/JGLUE
prepare-jsquad JGLUE/datasets/jsquad-v1.3 --output data      writes data/jsquad-train.jsonl and data/jsquad-valid.jsonl
prepare-jsquad my-squad.json --output data                   one file, one split: data/my-squad.jsonl
prepare-jsquad OWNER/DATA_SET --output data                  from the hub, where its columns are SQuAD's
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ekiben_tasks.data.sources import InvalidExample, format_invalid, is_hub
from ekiben_tasks.data.squad import context_body, read_squad
from ekiben_tasks.task import caches, command
from ekiben_tasks.task import files as files_module
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.hub import format_hub_error
from ekiben_tasks.task.settings import option

Items = Iterator[tuple[str, tuple[Any, ...]]]  # (position, (title, context, question, answer, offset of the answer))
SPLITS = {"train": "jsquad-train", "valid": "jsquad-valid", "dev": "jsquad-valid", "test": "jsquad-test"}


@dataclass(frozen=True)
class Settings:
    """Define the settings of `prepare-jsquad`."""

    output: str = option("data", "folder for the .jsonl files; --output")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `prepare-jsquad` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: a setting is wrong.
        TaskError: the source cannot be read, holds no question, or, without --skip-invalid, holds an invalid one.
    """
    parser = command.command("prepare-jsquad", __doc__, Settings, arguments)
    parser.add_argument(
        "source", help="a file in SQuAD's format, a folder with train*.json and valid*.json, or a hub id"
    )
    parser.add_argument("--output", metavar="DIR", help="where the files are written (default: data)")
    command.add_flag(
        parser, "--skip-invalid", former="--skip-bad", help="leave invalid questions out instead of stopping at them"
    )
    args = parser.parse_args(arguments)
    settings = options.load(Settings, args.config, args.set)
    parts = list_splits(args.source)
    output = files_module.ensure_output_dir(Path(args.output or settings.output))
    for name, items in parts.items():
        questions, bad = read_questions(items)
        if bad and not args.skip_invalid:
            raise TaskError(format_invalid(bad))
        if not questions:
            raise TaskError(f"{args.source}: holds no question" + (f"; {format_invalid(bad)}" if bad else ""))
        file = output / f"{name}.jsonl"
        staged = file.with_name(f".{file.name}.staged-{os.getpid()}")
        try:
            staged.write_text(
                "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in questions), encoding="utf-8"
            )
            staged.replace(file)
        finally:
            staged.unlink(missing_ok=True)
        articles = len({each["title"] for each in questions})
        print(f"{file}: {len(questions):,} questions on {articles:,} articles, {len(bad)} invalid left out", flush=True)
    return 0


def list_splits(location: str) -> dict[str, Items]:
    """Return the output file's name → its questions, each with its position and context.

    location: a file in SQuAD's format, a folder of them, or a hub id.

    Raises:
        TaskError: nothing can be read there.
    """
    if is_hub(location):
        return {f"jsquad-{name}": items for name, items in _read_hub(location).items()}
    path = Path(location).expanduser()
    if path.is_file():
        return {path.stem: _read_file(path)}
    parts: dict[str, Items] = {}
    for start, name in SPLITS.items():
        files = sorted(path.glob(f"{start}*.json"))
        if len(files) > 1:
            raise TaskError(f"{path}: holds {', '.join(file.name for file in files)}; name the one file")
        if files:
            parts[name] = _read_file(files[0])
    if not parts:
        raise TaskError(f"{path}: holds no train*.json or valid*.json (JGLUE keeps them in datasets/jsquad-v1.3)")
    return parts


def read_questions(items: Items) -> tuple[list[dict[str, Any]], list[InvalidExample]]:
    """Return (rows to write, invalid questions)."""
    rows: list[dict[str, Any]] = []
    bad: list[InvalidExample] = []
    for where, item in items:
        row = _make_row(item)
        if isinstance(row, str):
            bad.append(InvalidExample(where, row))
        else:
            rows.append(row)
    return rows, bad


def _make_row(item: tuple[Any, ...]) -> dict[str, Any] | str:
    """Return the row, or a description of the problem.

    A context begins with its title and [SEP], which the answer's offset counts, too.
    """
    title, context, question, text, start = item
    for name, value in (("title", title), ("context", context), ("question", question)):
        if not isinstance(value, str) or not value.strip():
            return f"{name} is {'missing' if value is None else 'empty or no text'}"
    if not isinstance(text, str) or not text:
        return "has no answer"
    body = context_body(context)
    offset = start - (len(context) - len(body)) if isinstance(start, int) else -1
    if offset < 0 or body[offset : offset + len(text)] != text:
        offset = body.find(text)
    if offset < 0:
        return f"the answer {text!r} is not in its context"
    return {"title": title, "context": body, "question": question, "answer": {"text": text, "answer_start": offset}}


def _read_file(file: Path) -> Items:
    for where, title, context, question, answers in read_squad(file):
        first = answers[0] if answers else {}
        yield where, (title, context, question, first.get("text"), first.get("answer_start"))


def _read_hub(name: str) -> dict[str, Items]:
    print_once(*caches.prepare_caches(os.environ), *caches.prefer_cache(os.environ))
    import datasets  # seconds of import that local files do not need

    try:
        splits = datasets.load_dataset(name)
    except Exception as error:
        raise TaskError(format_hub_error(error, name, "data set")) from error
    return {
        "valid" if split == "validation" else str(split): _read_table(name, table) for split, table in splits.items()
    }


def _read_table(name: str, table: Any) -> Items:
    for number, item in enumerate(table, 1):
        answers = item.get("answers") or {}
        first = {key: values[0] for key, values in answers.items() if values}
        yield (
            f"{name} row {number}",
            (
                item.get("title"),
                item.get("context"),
                item.get("question"),
                first.get("text"),
                first.get("answer_start"),
            ),
        )


if __name__ == "__main__":
    command.run(main)
