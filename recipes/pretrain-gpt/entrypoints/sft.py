"""Fine-tune a converted model on dialogues written as text: all its weights, the loss on the responses.

sft --data openassistant_best_replies_train.jsonl --set train.model=converted --output tuned
sft --set instruction_template='### 指示:' --set response_template='### 応答:' --data rows.jsonl
sft --dry-run
sft --smoke                  every task of the recipe on a tiny model, offline
sft --gpus 4                 on several GPUs of this node; on several nodes, build.py submit starts it
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import places
import settings as options
import texts
import train as training
from forms import Form
from settings import SettingError, TaskError, option
from train_settings import Settings as Training


@dataclass(frozen=True)
class Settings:
    instruction_template: str = option("### Human:", "what an instruction begins with, in the text of a row")
    response_template: str = option("### Assistant:", "what a response begins with; it is learnt, to its end")
    column: str = option("text", "where a row of .jsonl or .parquet has its text")
    train: Training = field(default_factory=Training)


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    options.start_processes(__file__, args.gpus, arguments)
    settings = options.load(Settings, args.config, args.set)
    if os.environ.get("RANK", "0") == "0":
        print("".join(f"{line}\n" for line in places.prepare_caches(os.environ)), end="", flush=True)
    recipe = options.recipe_folder(args.config, __file__)
    if args.smoke:
        import prove

        os.environ["HF_HUB_OFFLINE"] = "1"
        return prove.prove(recipe)
    rows = args.data or ["dialogues"]
    files = texts.find_files(
        [str(recipe / "data" / "dialogues.jsonl") if row == "dialogues" else row for row in rows], recipe
    )
    output = places.claim_folder(args.output)
    tuned = prepare(settings, files, output, skip_bad=args.skip_bad)
    return training.train(tuned, recipe, output, dry=args.dry_run, fresh=args.fresh)


def prepare(settings: Settings, files: Sequence[Path], output: Path, *, skip_bad: bool = False) -> Training:
    """Write the rows as turns, and the chat template they came from, into ``output``; settings that train on them."""
    turns = []
    for where, text in texts.read_documents(files, settings.column, skip_bad=skip_bad):
        found = split_turns(text, settings.instruction_template, settings.response_template)
        if isinstance(found, str):
            if skip_bad:
                continue
            raise TaskError(f"{where}: {found}; correct it, or leave such rows out with --skip-bad")
        turns.append(found)
    if not turns:
        raise TaskError(f"data {', '.join(map(str, files))}: holds no dialogue")
    lines = "".join(json.dumps({"messages": row}, ensure_ascii=False) + "\n" for row in turns)
    # Named by its content: every process of a run writes the same, and another's is never half of it.
    name = hashlib.sha256(lines.encode()).hexdigest()[:12]
    for file, content in ((f"dialogues-{name}.jsonl", lines), ("chat.jinja", chat_template(settings))):
        staged = output / f".{file}.staged-{os.getpid()}"
        staged.write_text(content, encoding="utf-8")
        staged.replace(output / file)
    form = Form(kind="chat", chat=str(output / "chat.jinja"))
    return replace(settings.train, data=[str(output / f"dialogues-{name}.jsonl")], form=form)


def split_turns(text: str, instruction: str, response: str) -> list[dict[str, str]] | str:
    """[{role, content}] of a text like '### Human: ...### Assistant: ...', or what is wrong with it."""
    if instruction in response or response in instruction:
        raise SettingError("settings instruction_template and response_template: neither may hold the other")
    parts = re.split(f"({re.escape(instruction)}|{re.escape(response)})", text.strip())
    if parts[0].strip():
        return f"does not begin with {instruction!r}"
    turns = [
        {"role": "user" if mark == instruction else "assistant", "content": said.strip()}
        for mark, said in zip(parts[1::2], parts[2::2], strict=True)
    ]
    if turns and turns[-1]["role"] == "user":
        turns.pop()  # nobody answered it
    if not turns or [turn["role"] for turn in turns] != ["user", "assistant"] * (len(turns) // 2):
        return f"{instruction!r} and {response!r} do not take turns in it"
    empty = next((number for number, turn in enumerate(turns, 1) if not turn["content"]), None)
    return f"turn {empty} is empty" if empty else turns


def chat_template(settings: Settings) -> str:
    """The same form in Jinja, as it is saved with the tokenizer: a response ends with the end of text."""
    asks, answers = json.dumps(settings.instruction_template + " "), json.dumps(settings.response_template)
    return (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ " + asks + " + message['content'] }}"
        "{% else %}{{ " + answers + " + ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ " + answers + " }}{% endif %}"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options.command("sft", __doc__, Settings, arguments)
    parser.add_argument(
        "--data", action="append", metavar="PLACE",
        help="a .jsonl or .parquet file, or a folder of them; repeatable; default: the recipe's own dialogues",
    )  # fmt: skip
    parser.add_argument("--gpus", type=int, metavar="N", help="one process for each of N GPUs of this node")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("tuned"), help="default: tuned")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and stop")
    parser.add_argument("--smoke", action="store_true", help="a tiny model through every task, offline, and check it")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad rows out instead of stopping at them")
    parser.add_argument("--fresh", action="store_true", help="start again, though --output holds a checkpoint")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options.run(main)
