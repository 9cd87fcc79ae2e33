"""Parse dialogues written as text into turns, and write the chat template of that text."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import texts
from ekiben_tasks.data.schema import DatasetFormat
from ekiben_tasks.data.sources import InvalidExample
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.task.settings import option
from ekiben_tasks.training.settings import SAMPLE
from ekiben_tasks.training.settings import Settings as Training

BUILT_IN = ("dialogues", SAMPLE)  # values of the setting train.data


@dataclass(frozen=True)
class Settings:
    """Define the settings of `sft`; the group ``train`` has those of the training."""

    instruction_template: str = option("### Human:", "prefix of an instruction in the text of a row")
    response_template: str = option("### Assistant:", "prefix of a response, which is trained to its end")
    column: str = option("text", "where a row of .jsonl or .parquet has its text")
    train: Training = field(default_factory=Training)


def prepare(settings: Settings, files: Sequence[Path], output: Path, *, skip_bad: bool = False) -> Training:
    """Write the rows as turns, and their chat template, into ``output``; return settings that train on them.

    skip_bad: leave out rows that are no dialogue, and print how many.

    Raises:
        SettingError: one of the two templates holds the other, or ``train.form`` is set.
        TaskError: a file cannot be read, a row is not a dialogue (unless ``skip_bad``), or there is none.
    """
    check_form(settings.train)
    turns = []
    skipped: list[InvalidExample] = []
    unanswered = 0
    for where, text in texts.read_documents(files, settings.column, skipped if skip_bad else None):
        messages = split_turns(text, settings.instruction_template, settings.response_template)
        if isinstance(messages, str):
            if not skip_bad:
                raise TaskError(f"{where}: {messages}; correct it, or leave such rows out with --skip-invalid")
            skipped.append(InvalidExample(where, messages))
            continue
        unanswered += text.count(settings.instruction_template) > sum(each["role"] == "user" for each in messages)
        turns.append(messages)
    print_once(*texts.format_skipped(skipped))
    if unanswered:
        print_once(f"left out    the last turn of {unanswered:,} dialogues, which nobody answered")
    if not turns:
        raise TaskError(f"data {', '.join(map(str, files))}: holds no dialogue")
    lines = "".join(json.dumps({"messages": row}, ensure_ascii=False) + "\n" for row in turns)
    # Named by its content: every process of a run writes the same bytes, atomically.
    name = hashlib.sha256(lines.encode()).hexdigest()[:12]
    for file, content in ((f"dialogues-{name}.jsonl", lines), ("chat.jinja", chat_template(settings))):
        if (output / file).is_file() and (output / file).read_text(encoding="utf-8") == content:
            continue  # a requeued job would take a new file for progress
        staged = output / f".{file}.staged-{os.getpid()}"
        staged.write_text(content, encoding="utf-8")
        staged.replace(output / file)
    form = DatasetFormat(kind="chat", chat=str(output / "chat.jinja"))
    return replace(settings.train, data=[str(output / f"dialogues-{name}.jsonl")], form=form)


def check_form(training: Training) -> None:
    """Raise SettingError where ``train.form`` is set: rows are dialogues as text."""
    if training.form != DatasetFormat():
        raise SettingError(
            "setting train.form: sft reads dialogues written as text, and writes their chat template itself; set"
            " instruction_template and response_template"
        )


def list_locations(data: object, recipe: Path) -> list[str]:
    """Return the files and folders that the setting ``train.data`` names. ``sample`` is the recipe's dialogues.

    Raises:
        SettingError: an item is not a file or folder.
    """
    locations: list[str] = []
    for item in data if isinstance(data, list) else [data]:
        if not isinstance(item, str) or not item:
            raise SettingError(
                f"setting train.data: {item!r} is not a file or folder; sft takes .txt, .jsonl and .parquet files, and"
                " folders of them"
            )
        locations.append(str(recipe / "data" / "dialogues.jsonl") if item in BUILT_IN else item)
    return locations


def split_turns(text: str, instruction: str, response: str) -> list[dict[str, str]] | str:
    """Return [{role, content}] of a text like '### Human: ...### Assistant: ...', or what is wrong with it.

    A last turn of the user, which nobody answered, is left out.

    Raises:
        SettingError: ``instruction`` or ``response`` holds the other.
    """
    if instruction in response or response in instruction:
        raise SettingError("settings instruction_template and response_template: neither may hold the other")
    parts = re.split(f"({re.escape(instruction)}|{re.escape(response)})", text.strip())
    if parts[0].strip():
        return f"does not begin with {instruction!r}"
    turns = [
        {"role": "user" if mark == instruction else "assistant", "content": content.strip()}
        for mark, content in zip(parts[1::2], parts[2::2], strict=True)
    ]
    if turns and turns[-1]["role"] == "user":
        turns.pop()  # it has no answer
    if not turns or [turn["role"] for turn in turns] != ["user", "assistant"] * (len(turns) // 2):
        return f"{instruction!r} and {response!r} do not take turns in it"
    empty = next((number for number, turn in enumerate(turns, 1) if not turn["content"]), None)
    return f"turn {empty} is empty" if empty else turns


def chat_template(settings: Settings) -> str:
    """Return the Jinja template that renders turns as in the text; a response ends with the end of text.

    It is saved with the tokenizer.
    """
    asks, answers = json.dumps(settings.instruction_template + " "), json.dumps(settings.response_template)
    return (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ "
        + asks
        + " + message['content'] }}{% else %}{{ "
        + answers
        + " + ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "
        + answers
        + " }}{% endif %}"
    )
