"""Write JSQuAD (or any data set in SQuAD's format) as rows: one question a line, with its context and its first answer.

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

import places
import settings as options
from hub import explain
from rows import BadRow, is_hub, tell_bad
from settings import TaskError, option

Items = Iterator[tuple[str, tuple[Any, ...]]]  # (where, (title, context, question, answer, its place))
SPLITS = {"train": "jsquad-train", "valid": "jsquad-valid", "dev": "jsquad-valid", "test": "jsquad-test"}
_SEPARATOR = "[SEP]"


@dataclass(frozen=True)
class Settings:
    output: str = option("data", "folder for the .jsonl files; --output")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options.command("prepare-jsquad", __doc__, Settings, arguments)
    parser.add_argument(
        "place", help="a file in SQuAD's format, a folder with train*.json and valid*.json, or a hub id"
    )
    parser.add_argument("--output", metavar="DIR", help="where the files go (default: data)")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad questions out instead of stopping at them")
    args = parser.parse_args(arguments)
    settings = options.load(Settings, args.config, args.set)
    parts = list_parts(args.place)
    output = places.claim_folder(Path(args.output or settings.output))
    for name, items in parts.items():
        rows, bad = read_questions(items)
        if bad and not args.skip_bad:
            raise TaskError(tell_bad(bad))
        if not rows:
            raise TaskError(f"{args.place}: holds no question" + (f"; {tell_bad(bad)}" if bad else ""))
        file = output / f"{name}.jsonl"
        staged = file.with_name(f".{file.name}.staged-{os.getpid()}")
        try:
            staged.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
            staged.replace(file)
        finally:
            staged.unlink(missing_ok=True)
        articles = len({row["title"] for row in rows})
        print(f"{file}: {len(rows):,} questions on {articles:,} articles, {len(bad)} bad left out", flush=True)
    return 0


def list_parts(place: str) -> dict[str, Items]:
    """Name of the file to write → (where, question with its context). Errors: TaskError where nothing can be read."""
    if is_hub(place):
        return {f"jsquad-{name}": items for name, items in _read_hub(place).items()}
    path = Path(place).expanduser()
    if path.is_file():
        return {path.stem: _read_squad(path)}
    parts: dict[str, Items] = {}
    for start, name in SPLITS.items():
        files = sorted(path.glob(f"{start}*.json"))
        if len(files) > 1:
            raise TaskError(f"{path}: holds {', '.join(file.name for file in files)}; name the one file")
        if files:
            parts[name] = _read_squad(files[0])
    if not parts:
        raise TaskError(f"{path}: holds no train*.json or valid*.json (JGLUE keeps them in datasets/jsquad-v1.3)")
    return parts


def read_questions(items: Items) -> tuple[list[dict[str, Any]], list[BadRow]]:
    """The rows to write, and what is wrong with the others."""
    rows: list[dict[str, Any]] = []
    bad: list[BadRow] = []
    for where, item in items:
        row = _make_row(item)
        if isinstance(row, str):
            bad.append(BadRow(where, row))
        else:
            rows.append(row)
    return rows, bad


def _make_row(item: tuple[Any, ...]) -> dict[str, Any] | str:
    """The row, or what is wrong. A context begins with its title and [SEP], which the answer's place counts, too."""
    title, context, question, text, start = item
    for name, value in (("title", title), ("context", context), ("question", question)):
        if not isinstance(value, str) or not value.strip():
            return f"{name} is {'missing' if value is None else 'empty or no text'}"
    if not isinstance(text, str) or not text:
        return "has no answer"
    body = context.rpartition(_SEPARATOR)[2].lstrip()
    place = start - (len(context) - len(body)) if isinstance(start, int) else -1
    if place < 0 or body[place : place + len(text)] != text:
        place = body.find(text)
    if place < 0:
        return f"the answer {text!r} is not in its context"
    return {"title": title, "context": body, "question": question, "answer": {"text": text, "answer_start": place}}


def _read_squad(file: Path) -> Items:
    """Errors: TaskError for a file of another format."""
    try:
        articles = json.loads(file.read_text(encoding="utf-8-sig"))["data"]
        for number, article in enumerate(articles, 1):
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    answers = question.get("answers") or [{}]
                    where = f"{file} article {number} question {question.get('id', '?')}"
                    first = answers[0]
                    yield where, (
                        article.get("title"), paragraph.get("context"), question.get("question"),
                        first.get("text"), first.get("answer_start"),
                    )  # fmt: skip
    except OSError as error:
        raise TaskError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TaskError(
            f"{file}: is not in SQuAD's format ({type(error).__name__}: {error}); wanted is "
            '{"data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [{"question": ..., "answers": [...]}]}]}]}'
        ) from None


def _read_hub(name: str) -> dict[str, Items]:
    for line in [*places.prepare_caches(os.environ), *places.prefer_cache(os.environ)]:
        print(line, flush=True)
    import datasets  # seconds of import that local files do not need

    try:
        found = datasets.load_dataset(name)
    except Exception as error:
        raise TaskError(explain(error, name, "data set")) from error
    return {
        "valid" if split == "validation" else str(split): _read_table(name, table) for split, table in found.items()
    }


def _read_table(name: str, table: Any) -> Items:
    for number, item in enumerate(table, 1):
        answers = item.get("answers") or {}
        first = {key: values[0] for key, values in answers.items() if values}
        yield f"{name} row {number}", (
            item.get("title"), item.get("context"), item.get("question"), first.get("text"), first.get("answer_start"),
        )  # fmt: skip


if __name__ == "__main__":
    options.run(main)
