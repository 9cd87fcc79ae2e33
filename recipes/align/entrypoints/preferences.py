"""Read the data of dpo, orpo, kto, reward and grpo, and check it example by example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ekiben_tasks.data.sources import InvalidExample, Source, format_invalid, list_items
from ekiben_tasks.task.errors import TaskError, nearest

# What each kind of data has. Of pairs, the prompt may be the part that both answers begin with.
COLUMNS = {
    "pairs": (("prompt", False), ("chosen", True), ("rejected", True)),
    "labels": (("prompt", True), ("completion", True)),
    "prompts": (("prompt", True),),
}
_SHAPES = {
    "pairs": '{"prompt": ..., "chosen": ..., "rejected": ...}',
    "labels": '{"prompt": ..., "completion": ..., "label": true}',
    "prompts": '{"prompt": ...}',
}
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(slots=True)
class Examples:
    """Hold the valid examples of the data. unused: column that nothing reads → number of examples."""

    items: list[dict[str, Any]] = field(default_factory=list)
    invalid: list[InvalidExample] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)
    is_chat: bool = False


def read(sources: Sequence[Source], kind: str, *, skip: bool) -> Examples:
    """Return the examples of ``sources``. kind: pairs, labels or prompts. skip: leave invalid ones out.

    Raises:
        TaskError: a file cannot be read, an example is invalid, or none is left.
    """
    examples = Examples()
    shapes: dict[bool, str] = {}
    for where, item in (pair for source in sources for pair in list_items(source)):
        example = parse(item, kind)
        if isinstance(example, str):
            examples.invalid.append(InvalidExample(where, example))
            continue
        shapes.setdefault(isinstance(example[COLUMNS[kind][-1][0]], list), where)
        examples.items.append(example)
        examples.unused.update(name for name in item if name not in example and item[name] is not None)
    if examples.invalid and not skip:
        raise TaskError(format_invalid(examples.invalid))
    if not examples.items:
        raise TaskError(f"setting data: holds no valid example like {_SHAPES[kind]}")
    if len(shapes) > 1:
        raise TaskError(f"{shapes[True]}: has messages, and {shapes[False]} has text; make all examples of one kind")
    examples.is_chat = True in shapes
    return examples


def parse(item: Any, kind: str) -> dict[str, Any] | str:
    """Return the columns of ``item`` that training reads, or a sentence that says what is wrong with it."""
    if isinstance(item, ValueError):
        return str(item)
    if not isinstance(item, dict):
        return f"is not an object like {_SHAPES[kind]}"
    columns = [name for name, is_needed in COLUMNS[kind] if is_needed or item.get(name) is not None]
    for name in columns:
        if problem := _problem(item, name):
            return problem
    if len({isinstance(item[name], list) for name in columns}) > 1:
        return f"{columns[0]} and {columns[-1]} are not both text, or both messages"
    example = {name: item[name] for name in columns}
    if kind == "pairs" and item["chosen"] == item["rejected"]:
        return "chosen and rejected are the same"
    if kind == "labels":
        if not isinstance(item.get("label"), bool):
            return f"label is {item.get('label')!r}, not true or false"
        example["label"] = item["label"]
    if kind == "prompts":  # a reward's function gets the others
        return {**{name: value for name, value in item.items() if value is not None}, **example}
    return example


def _problem(item: Mapping[str, Any], name: str) -> str | None:
    value = item.get(name)
    if value is None:
        hint = "" if name in item else nearest(name, map(str, item))
        return f"{name} is missing.{hint}".removesuffix(".")
    if isinstance(value, str):
        return None if value.strip() else f"{name} is empty"
    if not isinstance(value, list):
        return f"{name} is {value!r}, neither text nor a list of messages"
    if not value:
        return f"{name} has no messages"
    return next(_message_problems(value, name), None)


def _message_problems(messages: Sequence[Any], name: str) -> Iterator[str]:
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            yield f'{name}: message {number} is not like {{"role": "user", "content": ...}}'
        elif message.get("role") not in _ROLES:
            role = message.get("role")
            yield f"{name}: message {number} has the role {role!r}.{nearest(str(role), _ROLES)}"
