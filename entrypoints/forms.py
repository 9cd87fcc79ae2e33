"""What a row of data is: an instruction and its response, columns for a template, or the turns of a dialogue.

Rows are checked here, one by one, and every problem is a sentence; prompt.py makes tokens of the good ones.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from settings import SettingError, nearest, option

# The first name is ours, the others are what well-known data sets call the same thing.
_COLUMNS = {"instruction": ("instruction",), "input": ("input", "context"), "output": ("output", "response")}
_TURNS = ("messages", "conversations", "content", "text")
_ROLES = {
    "system": "system", "user": "user", "human": "user", "prompter": "user", "assistant": "assistant", "gpt": "assistant",
}  # fmt: skip
_MARKED = re.compile(r"<\|(system|prompter|assistant)\|>(.*?)(?=<\|(?:system|prompter|assistant)\|>|\Z)", re.DOTALL)
_FIELD = re.compile(r"[^\[\].!:]+(\[[^\[\]]+\])*")


@dataclass(frozen=True)
class Form:
    kind: Literal["instruction", "template", "chat"] = option(
        "instruction",
        "instruction, input and output under Alpaca's headings; template: as below; chat: turns of a dialogue",
    )
    prompt: str = option(
        "", "template: what is read, with columns in braces; {answer[text]} reaches inside one, {{ is a brace"
    )
    response: str = option("{output}", "template: what is learnt, in the same way")
    chat: str = option("auto", "chat: auto (the tokenizer's own template, else prompter), prompter, or a Jinja file")


INSTRUCTION = Form()


@dataclass(frozen=True, slots=True)
class Row:
    """kind instruction."""

    instruction: str
    output: str
    input: str = ""


@dataclass(frozen=True, slots=True)
class Filled:
    """kind template, its columns filled in."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Turn:
    role: str  # system, user or assistant
    content: str


@dataclass(frozen=True, slots=True)
class Dialogue:
    """kind chat: perhaps a system turn, then user and assistant by turns."""

    turns: tuple[Turn, ...]


AnyRow = Row | Filled | Dialogue


def check_form(form: Form) -> None:
    """Errors: SettingError for a template that cannot be filled, whatever the row."""
    if form.kind == "template":
        if not form.prompt and not _fields(form.response, "form.response"):
            raise SettingError("setting form.response: names no column, so every row would be the same")
        _fields(form.prompt, "form.prompt")


def read_row(item: Any, form: Form, *, asked: bool = False) -> AnyRow | str:
    """The row, or what is wrong with it. ``asked``: it is a question, its response may be missing and is left out."""
    if isinstance(item, ValueError):
        return str(item)
    if not isinstance(item, dict):
        return (
            "is not an object like "
            + {
                "instruction": '{"instruction": ..., "output": ...}',
                "template": "{" + ", ".join(f'"{name}": ...' for name in column_names(form, asked=asked)) + "}",
                "chat": '{"messages": [{"role": "user", "content": ...}, ...]}',
            }[form.kind]
        )
    if form.kind == "template":
        return _fill(item, form, asked)
    return _dialogue(item, asked) if form.kind == "chat" else _instruction(item, asked)


def column_names(form: Form, *, asked: bool = False) -> list[str]:
    """The columns a template names, in its order."""
    texts = [("form.prompt", form.prompt)] + ([] if asked else [("form.response", form.response)])
    paths = [path for name, text in texts for path in _fields(text, name)]
    return list(dict.fromkeys(path.partition("[")[0] for path in paths))


def _instruction(item: Mapping[str, Any], asked: bool) -> Row | str:
    values = {}
    for column, names in _COLUMNS.items():
        present = [name for name in names if item.get(name) is not None]
        value = item[present[0]] if present else ""
        if asked and column == "output":
            value = ""
        if not isinstance(value, str):
            return f"{present[0]} is {value!r}, not text"
        if column != "input" and not value.strip() and not (asked and column == "output"):
            hint = "" if present or any(name in item for name in names) else nearest(column, map(str, item))
            return f"{column} is {'empty' if present else 'missing'}.{hint}".removesuffix(".")
        values[column] = value
    return Row(values["instruction"], values["output"], values["input"] if values["input"].strip() else "")


# ------------------------------------------------------------------------------------------------------------ templates


def _fields(text: str, setting: str) -> list[str]:
    """The columns ``text`` names, as paths: answer[text]. Errors: SettingError."""
    try:
        parsed = [
            (name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(text) if name is not None
        ]
    except ValueError as error:
        raise SettingError(f"setting {setting}: {error}; a brace that is text is written twice: {{{{ }}}}") from None
    for name, spec, conversion in parsed:
        if not _FIELD.fullmatch(name) or spec or conversion:
            raise SettingError(f"setting {setting}: {{{name}}} names no column; write {{column}} or {{column[inner]}}")
    return [name for name, _, _ in parsed]


def _fill(item: Mapping[str, Any], form: Form, asked: bool) -> Filled | str:
    texts = {"form.prompt": form.prompt} | ({} if asked else {"form.response": form.response})
    filled = {"form.response": ""}
    for setting, text in texts.items():
        parts = []
        for literal, path, _, _ in string.Formatter().parse(text):
            parts.append(literal)
            if path is not None:
                value = _look_up(item, path)
                if isinstance(value, ValueError):
                    return str(value)
                parts.append(value)
        filled[setting] = "".join(parts)
    if not asked and not filled["form.response"].strip():
        return "the response is empty"
    return Filled(filled["form.prompt"], filled["form.response"])


def _look_up(item: Mapping[str, Any], path: str) -> str | ValueError:
    column, *inner = path.replace("]", "").split("[")
    value: Any = item
    for depth, name in enumerate([column, *inner]):
        where = f"in {column}" if depth else ""
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and value.get(name) is not None:
            value = value[name]
        else:
            known = [str(key) for key in value] if isinstance(value, Mapping) else []
            hint = "" if name in known else nearest(name, known)
            return ValueError(f"{name} is missing {where}".strip() + (f".{hint}" if hint else ""))
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ValueError(f"{path} is {value!r}, not text")
    return str(value)


# -------------------------------------------------------------------------------------------------------------- dialogues


def _dialogue(item: Mapping[str, Any], asked: bool) -> Dialogue | str:
    column = next((name for name in _TURNS if item.get(name)), None)
    if column is None:
        return f"messages is missing.{nearest('messages', map(str, item))}".removesuffix(".")
    turns = _split_marked(item[column]) if isinstance(item[column], str) else _turns(item[column])
    if isinstance(turns, str):
        return f"{column}: {turns}"
    if asked and turns and turns[-1].role == "assistant":
        turns = turns[:-1]
    rest = turns[1:] if turns and turns[0].role == "system" else turns
    for number, turn in enumerate(rest):
        if turn.role != ("user", "assistant")[number % 2]:
            return f"{column}: turn {number + 1} is by {turn.role}; user and assistant speak by turns, user first"
    wanted = "user" if asked else "assistant"
    if not rest or rest[-1].role != wanted:
        return f"{column}: the last turn must be by {wanted}"
    return Dialogue(tuple(turns))


def _turns(items: Any) -> list[Turn] | str:
    """[{role, content}] or [{from, value}]."""
    if not isinstance(items, list):
        return f"is {items!r}, not a list of turns"
    turns = []
    for number, item in enumerate(items, 1):
        if not isinstance(item, Mapping):
            return f"turn {number} is {item!r}, not an object with role and content"
        role = item.get("role", item.get("from"))
        content = item.get("content", item.get("value"))
        if role not in _ROLES:
            return f"turn {number}: role is {role!r}.{nearest(str(role), _ROLES)}"
        if not isinstance(content, str) or not content.strip():
            return f"turn {number}: content is {content!r}, and text is needed"
        turns.append(Turn(_ROLES[role], content))
    return turns


def _split_marked(text: str) -> list[Turn] | str:
    """<|system|> ... <|endoftext|> <|prompter|> ... <|endoftext|> <|assistant|> ... <|endoftext|>."""
    if not _MARKED.match(text.lstrip()):
        return "is text without <|prompter|> and <|assistant|>"
    turns = [Turn(_ROLES[role], said.replace("<|endoftext|>", "").strip()) for role, said in _MARKED.findall(text)]
    empty = next((number for number, turn in enumerate(turns, 1) if not turn.content), None)
    return f"turn {empty}: is empty" if empty else turns
