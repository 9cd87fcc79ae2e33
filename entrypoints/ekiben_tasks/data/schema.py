"""Define what an example is: an instruction and its response, columns for a template, or a conversation.

Examples are checked here, one by one, and every problem is a sentence; tokenize.py makes tokens of the valid ones.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ekiben_tasks.task.errors import SettingError, nearest
from ekiben_tasks.task.settings import option

# The first name is the field's, the others are what well-known data sets call it.
_COLUMNS = {
    "instruction": ("instruction", "prompt", "question"),
    "input": ("input", "context"),
    "output": ("output", "response", "completion", "answer"),
}
_CONVERSATION = ("messages", "conversations", "content", "text")
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_MARKED = re.compile(r"<\|(system|prompter|assistant)\|>(.*?)(?=<\|(?:system|prompter|assistant)\|>|\Z)", re.DOTALL)
_FIELD = re.compile(r"[^\[\].!:]+(\[[^\[\]]+\])*")


@dataclass(frozen=True)
class DatasetFormat:
    """Define the settings ``form``: which kind of examples the data holds, and how they become text."""

    kind: Literal["instruction", "template", "chat"] = option(
        "instruction",
        "instruction, input and output under Alpaca's headings; template: as below; chat: conversations",
    )
    prompt: str = option(
        "", "template: the prompt, with columns in braces; {answer[text]} reaches inside one, {{ is a brace"
    )
    response: str = option("{output}", "template: the response, in the same way")
    chat: str = option("auto", "chat: auto (the tokenizer's own template, else prompter), prompter, or a Jinja file")


INSTRUCTION = DatasetFormat()


@dataclass(frozen=True, slots=True)
class Instruction:
    """Hold an example of kind ``instruction``, which is rendered under Alpaca's headings."""

    instruction: str
    output: str
    input: str = ""


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """Hold an example of kind ``template``, its columns filled in."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Message:
    """Hold a message of a conversation."""

    role: str  # system, user or assistant
    content: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Hold an example of kind ``chat``: an optional system message, then user and assistant alternating."""

    messages: tuple[Message, ...]


RawExample = Instruction | PromptCompletion | Conversation


def check_format(form: DatasetFormat) -> None:
    """Raise SettingError for a template that names no column, or is not a valid format string."""
    if form.kind == "template":
        if not form.prompt and not _fields(form.response, "form.response"):
            raise SettingError("setting form.response: names no column, so every example would be the same")
        _fields(form.prompt, "form.prompt")


def parse_example(item: Any, form: DatasetFormat, *, asked: bool = False) -> RawExample | str:
    """Return ``item`` as an example, or a sentence that says what is wrong with it.

    asked: only the prompt is needed; a response is left out.
    """
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
    return _conversation(item, asked) if form.kind == "chat" else _instruction(item, asked)


def column_names(form: DatasetFormat, *, asked: bool = False) -> list[str]:
    """Return the columns that a template names, in its order. asked: those of the prompt alone."""
    texts = [("form.prompt", form.prompt)] + ([] if asked else [("form.response", form.response)])
    paths = [path for name, text in texts for path in _fields(text, name)]
    return list(dict.fromkeys(path.partition("[")[0] for path in paths))


def _instruction(item: Mapping[str, Any], asked: bool) -> Instruction | str:
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
    return Instruction(values["instruction"], values["output"], values["input"] if values["input"].strip() else "")


# ------------------------------------------------------------------------------------------------------------ templates


def _fields(text: str, setting: str) -> list[str]:
    """Return the columns ``text`` names, as paths: answer[text]. Raises SettingError for anything else in braces."""
    try:
        parsed = [
            (name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(text) if name is not None
        ]
    except ValueError as error:
        raise SettingError(f"setting {setting}: {error}; write a literal brace twice: {{{{ }}}}") from None
    for name, spec, conversion in parsed:
        if not _FIELD.fullmatch(name) or spec or conversion:
            raise SettingError(f"setting {setting}: {{{name}}} names no column; write {{column}} or {{column[inner]}}")
    return [name for name, _, _ in parsed]


def _fill(item: Mapping[str, Any], form: DatasetFormat, asked: bool) -> PromptCompletion | str:
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
    return PromptCompletion(filled["form.prompt"], filled["form.response"])


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


# -------------------------------------------------------------------------------------------------------- conversations


def _conversation(item: Mapping[str, Any], asked: bool) -> Conversation | str:
    column = next((name for name in _CONVERSATION if item.get(name)), None)
    if column is None:
        return f"messages is missing.{nearest('messages', map(str, item))}".removesuffix(".")
    messages = _split_marked(item[column]) if isinstance(item[column], str) else _messages(item[column])
    if isinstance(messages, str):
        return f"{column}: {messages}"
    if asked and messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    rest = messages[1:] if messages and messages[0].role == "system" else messages
    for number, message in enumerate(rest):
        if message.role != ("user", "assistant")[number % 2]:
            return f"{column}: message {number + 1} is by {message.role}; user and assistant alternate, user first"
    last_role = "user" if asked else "assistant"
    if not rest or rest[-1].role != last_role:
        return f"{column}: the last message must be by {last_role}"
    return Conversation(tuple(messages))


def _messages(items: Any) -> list[Message] | str:
    """[{role, content}] or [{from, value}]."""
    if not isinstance(items, list):
        return f"is {items!r}, not a list of messages"
    messages = []
    for number, item in enumerate(items, 1):
        if not isinstance(item, Mapping):
            return f"message {number} is {item!r}, not an object with role and content"
        role = item.get("role", item.get("from"))
        content = item.get("content", item.get("value"))
        if role not in _ROLES:
            return f"message {number}: role is {role!r}.{nearest(str(role), _ROLES)}"
        if not isinstance(content, str) or not content.strip():
            return f"message {number}: content is {content!r}, not text"
        messages.append(Message(_ROLES[role], content))
    return messages


def _split_marked(text: str) -> list[Message] | str:
    """<|system|> ... <|endoftext|> <|prompter|> ... <|endoftext|> <|assistant|> ... <|endoftext|>."""
    if not _MARKED.match(text.lstrip()):
        return "is text without <|prompter|> and <|assistant|>"
    messages = [
        Message(_ROLES[role], content.replace("<|endoftext|>", "").strip()) for role, content in _MARKED.findall(text)
    ]
    empty = next((number for number, message in enumerate(messages, 1) if not message.content), None)
    return f"message {empty}: is empty" if empty else messages
