"""Define the kinds of examples: an instruction and its response, columns for a template, a conversation, a text.

Examples are checked here, one by one, and every problem is a sentence; tokenize.py makes tokens of the valid ones.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import SettingError, nearest
from ekiben_tasks.task.settings import option

# The first name is the field's, the others are those of well-known data sets.
_COLUMNS = {
    "instruction": ("instruction", "prompt", "question"),
    "input": ("input", "context"),
    "output": ("output", "response", "completion", "answer"),
}
_CONVERSATION = ("messages", "conversations", "content", "text")
_ROLES = {
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_MARKED = re.compile(r"<\|(system|prompter|assistant)\|>(.*?)(?=<\|(?:system|prompter|assistant)\|>|\Z)", re.DOTALL)
# Keys of a message besides its content that a chat template may render.
_TEMPLATE_KEYS = ("tool_calls", "reasoning_content", "reasoning", "thinking", "name", "tool_call_id")
_MESSAGE_KEYS = {"role", "from", "content", "value", "weight", "train", *_TEMPLATE_KEYS}
_PREFERENCES = ("chosen", "rejected")
_FIELD = re.compile(r"[^\[\].!:]+(\[[^\[\]]+\])*")


@dataclass(frozen=True)
class DatasetFormat:
    """Define the settings ``form``: which kind of examples the data holds, and how they become text."""

    kind: Literal["instruction", "template", "chat", "text", "classification"] = option(
        "instruction",
        "instruction, input and output under Alpaca's headings, or prompt and completion without; template: as below;"
        " chat: conversations; text: plain texts, joined and cut into rows of max_length tokens; classification: texts"
        " with a label, which train a classification head in place of the output layer",
    )
    prompt: str = option(
        "", "template: the prompt, with columns in braces; {answer[text]} reaches inside one, {{ is a brace"
    )
    response: str = option("{output}", "template: the response, in the same way")
    chat: str = option("auto", "chat: auto (the tokenizer's own template, else prompter), prompter, or a Jinja file")
    column: str = option("text", "text, classification: the column that has the text; a .txt file is one text")
    label: str = option("label", "classification: the column that has the label, text or a whole number")
    labels: tuple[str, ...] = option(
        (), "classification: all labels, in the order of the head's outputs; empty: those of the data, sorted"
    )


INSTRUCTION = DatasetFormat()


@dataclass(frozen=True, slots=True)
class Instruction:
    """Hold an example of kind ``instruction``, which is rendered under Alpaca's headings."""

    instruction: str
    output: str
    input: str = ""


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """Hold an example of kind ``template``, its columns filled in, or of columns ``prompt`` and ``completion``."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Message:
    """Hold a message of a conversation.

    is_target: whether the loss counts it, if it is the assistant's. keys: further ones that a chat template renders,
    such as tool_calls.
    """

    role: str  # system, developer, user, assistant or tool
    content: str
    is_target: bool = True
    keys: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Hold an example of kind ``chat``: system or developer messages, then user and assistant alternating.

    An assistant that calls tools is followed by their messages. tools: as JSON schemas, for the chat template.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class LabelledText:
    """Hold an example of kind ``classification``."""

    text: str
    label: str


RawExample = Instruction | PromptCompletion | Conversation | LabelledText


def check_format(form: DatasetFormat) -> None:
    """Raise SettingError for a template that names no column or is no format string, and for labels that are wrong."""
    if form.kind == "template":
        if not form.prompt and not _fields(form.response, "form.response"):
            raise SettingError("setting form.response: names no column, so every example would be the same")
        _fields(form.prompt, "form.prompt")
    if form.labels and (len(form.labels) < 2 or len(set(form.labels)) < len(form.labels)):
        raise SettingError("setting form.labels: must be at least two different labels, or empty")


def refuse_labels(form: DatasetFormat) -> None:
    """Raise SettingError for texts with labels, where a task needs prompts."""
    if form.kind == "classification":
        raise SettingError(
            "setting form.kind=classification: is for `train`; load the classifier with transformers'"
            ' pipeline("text-classification"), or use another kind'
        )


def parse_example(item: Any, form: DatasetFormat, *, asked: bool = False) -> RawExample | str:
    """Return ``item`` as an example, or a sentence about its error.

    asked: only the prompt is needed; a response is left out.
    """
    if isinstance(item, ValueError):
        return str(item)
    if form.kind == "text" and isinstance(item, str | dict):
        return _text(item, form.column, asked)
    if not isinstance(item, dict):
        return (
            "is not an object like "
            + {
                "instruction": '{"instruction": ..., "output": ...}',
                "template": "{" + ", ".join(f'"{name}": ...' for name in column_names(form, asked=asked)) + "}",
                "chat": '{"messages": [{"role": "user", "content": ...}, ...]}',
                "text": f'{{"{form.column}": ...}}',
                "classification": f'{{"{form.column}": ..., "{form.label}": ...}}',
            }[form.kind]
        )
    if form.kind == "classification":
        return _labelled(item, form)
    if form.kind == "template":
        return _fill(item, form, asked)
    if all(item.get(name) is not None for name in _PREFERENCES):
        return (
            "chosen and rejected are preference data, which supervised fine-tuning does not use; train on them with"
            " TRL's DPOTrainer, or on the chosen answer by --set form.kind=template --set form.response={chosen}"
        )
    return _conversation(item, asked) if form.kind == "chat" else _instruction(item, asked)


def list_unused(item: Any, form: DatasetFormat, *, asked: bool = False) -> list[str]:
    """Return the columns of a valid ``item`` that nothing reads, and keys of its messages as ``messages[].key``.

    Columns without a value are not among them.
    """
    if not isinstance(item, Mapping):
        return []
    columns = _conversation_columns(item) if form.kind == "chat" else ()
    if form.kind == "template":
        known = _template_columns(form, asked)
    elif form.kind == "chat":
        known = frozenset((*columns, "tools"))
    elif form.kind == "text":
        known = frozenset((form.column,))
    elif form.kind == "classification":
        known = frozenset((form.column, form.label))
    else:
        known = frozenset(
            next((name for name in names if item.get(name) is not None), "") for names in _COLUMNS.values()
        )
    unused = [str(key) for key, value in item.items() if key not in known and value is not None]
    for column in columns:
        messages = item[column] if isinstance(item.get(column), list) else []
        keys = {key for each in messages if isinstance(each, Mapping) for key in each if each[key] is not None}
        unused += [f"{column}[].{key}" for key in sorted(map(str, keys - _MESSAGE_KEYS))]
    return unused


@functools.cache
def _template_columns(form: DatasetFormat, asked: bool) -> frozenset[str]:
    return frozenset(column_names(form, asked=asked))


def column_names(form: DatasetFormat, *, asked: bool = False) -> list[str]:
    """Return the columns that a template names, in its order. asked: those of the prompt alone."""
    texts = [("form.prompt", form.prompt)] + ([] if asked else [("form.response", form.response)])
    paths = [path for name, text in texts for path in _fields(text, name)]
    return list(dict.fromkeys(path.partition("[")[0] for path in paths))


def _text(item: str | Mapping[str, Any], column: str, asked: bool) -> PromptCompletion | str:
    text = item if isinstance(item, str) else item.get(column)
    if not isinstance(text, str):
        missing = text is None and isinstance(item, Mapping)
        return (
            f"{column} is missing.{nearest(column, map(str, item))}".rstrip(".")
            if missing
            else f"{column} is {text!r}, not text"
        )
    if not text.strip():
        return f"{column} is empty"
    return PromptCompletion(text, "") if asked else PromptCompletion("", text)


def _labelled(item: Mapping[str, Any], form: DatasetFormat) -> LabelledText | str:
    text = _text(item, form.column, asked=True)
    if isinstance(text, str):
        return text
    label = item.get(form.label)
    if label is None:
        return f"{form.label} is missing.{nearest(form.label, map(str, item))}".rstrip(".")
    if isinstance(label, bool) or not isinstance(label, str | int) or not str(label).strip():
        return f"{form.label} is {label!r}; a label is a text or a whole number"
    if form.labels and str(label) not in form.labels:
        return f"{form.label} is {str(label)!r}, which is not one of form.labels.{nearest(str(label), form.labels)}"
    return LabelledText(text.prompt, str(label))


def _instruction(item: Mapping[str, Any], asked: bool) -> Instruction | PromptCompletion | str:
    if isinstance(item.get("prompt"), list):
        return "prompt is a list of messages; use --set form.kind=chat"
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
    if _is_prompt_completion(item, asked) and not values["input"].strip():
        return PromptCompletion(values["instruction"], values["output"])
    return Instruction(values["instruction"], values["output"], values["input"] if values["input"].strip() else "")


def _is_prompt_completion(item: Mapping[str, Any], asked: bool) -> bool:
    """Return whether an item has TRL's columns prompt and completion, which are one text, without headings."""
    has_completion = item.get("completion") is not None or asked
    instructions = ("instruction", "output", "response", "answer")
    return item.get("prompt") is not None and has_completion and all(item.get(name) is None for name in instructions)


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


def _conversation_columns(item: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that hold the messages: one, or prompt and completion; none where they are missing."""
    if column := next((name for name in _CONVERSATION if item.get(name)), None):
        return (column,)
    return ("prompt", "completion") if isinstance(item.get("prompt"), list) else ()


def _conversation(item: Mapping[str, Any], asked: bool) -> Conversation | str:
    columns = _conversation_columns(item)
    if not columns:
        return f"messages is missing.{nearest('messages', map(str, item))}".removesuffix(".")
    messages: list[Message] = []
    for column in columns:
        value = item.get(column)
        if value is None and asked:
            continue
        new = _split_marked(value) if isinstance(value, str) else _messages(value)
        if isinstance(new, str):
            return f"{column}: {new}"
        # The loss counts only the completion, as TRL does with messages in prompt and completion.
        messages += [replace(each, is_target=False) for each in new] if column == "prompt" else new
    column = " and ".join(columns)
    if asked and messages and messages[-1].role == "assistant":
        messages = messages[:-1]
    if problem := _turn_problem(messages, asked):
        return f"{column}: {problem}"
    if not asked and not any(each.is_target for each in messages if each.role == "assistant"):
        return f"{column}: every message of the assistant has weight 0 or train false"
    tools = _parse_tools(item.get("tools"))
    return tools if isinstance(tools, str) else Conversation(tuple(messages), tools)


def _turn_problem(messages: Sequence[Message], asked: bool) -> str:
    """Return the error in the order of ``messages``, or nothing."""
    before = ""
    for number, message in enumerate(messages, 1):
        role, calls = message.role, number > 1 and "tool_calls" in (messages[number - 2].keys or {})
        allowed: tuple[str, ...] = {
            "": ("system", "developer", "user"),
            "system": ("developer", "user"),
            "developer": ("developer", "user"),
            "user": ("assistant",),
            "assistant": ("tool",) if calls else ("user",),
            "tool": ("tool", "assistant"),
        }[before]
        if role not in allowed:
            rule = "user and assistant alternate, user first"
            if role == "tool" or calls:
                rule = "a tool answers a message of the assistant with tool_calls"
            return f"message {number} is by {role}; {rule}"
        before = role
    if asked and before not in ("user", "tool"):
        return "the last message must be by user"
    return "" if asked or before == "assistant" else "the last message must be by assistant"


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
        keys = {key: drop_empty(item[key]) for key in _TEMPLATE_KEYS if item.get(key) not in (None, [], "")}
        if content is None and "tool_calls" in keys:
            content = ""
        if not isinstance(content, str) or not (content.strip() or "tool_calls" in keys):
            return f"message {number}: content is {content!r}, not text"
        is_target = _is_target(item, _ROLES[role])
        if isinstance(is_target, str):
            return f"message {number}: {is_target}"
        messages.append(Message(_ROLES[role], content, is_target, keys or None))
    return messages


def _is_target(item: Mapping[str, Any], role: str) -> bool | str:
    """Return whether the loss counts a message, by its weight (OpenAI's key) and train (Axolotl's)."""
    result = True
    known: dict[str, dict[Any, bool]] = {"weight": {0: False, 1: True}, "train": {False: False, True: True}}
    for key, meanings in known.items():
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in meanings:
            return f"{key} is {value!r}, and only {' and '.join(json.dumps(each) for each in meanings)} have a meaning"
        if role != "assistant" and meanings[value]:
            return f"{key} is {json.dumps(value)}, but the loss counts messages of the assistant alone"
        result = result and meanings[value]
    return result


def _parse_tools(value: Any) -> tuple[Any, ...] | str:
    """Return the column ``tools``, a list or its JSON text, without keys that have no value."""
    if isinstance(value, str) and value.strip():
        try:
            value = input_files.parse_json(value)
        except ValueError as error:
            return f"tools: {error}"
    if not isinstance(value, list):
        return f"tools is {value!r}, not a list of JSON schemas" if value else ()
    return tuple(drop_empty(value))


def drop_empty(value: Any) -> Any:
    """Return ``value`` without keys that have no value, which tables of rows with unequal keys add."""
    if isinstance(value, Mapping):
        return {key: drop_empty(inner) for key, inner in value.items() if inner is not None}
    return [drop_empty(inner) for inner in value] if isinstance(value, list) else value


def _split_marked(text: str) -> list[Message] | str:
    """<|system|> ... <|endoftext|> <|prompter|> ... <|endoftext|> <|assistant|> ... <|endoftext|>."""
    if not _MARKED.match(text.lstrip()):
        return "is text without <|prompter|> and <|assistant|>"
    messages = [
        Message(_ROLES[role], content.replace("<|endoftext|>", "").strip()) for role, content in _MARKED.findall(text)
    ]
    empty = next((number for number, message in enumerate(messages, 1) if not message.content), None)
    return f"message {empty}: is empty" if empty else messages
