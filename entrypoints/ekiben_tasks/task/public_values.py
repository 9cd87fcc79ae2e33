"""Choose the values of a run's record that may leave the machine: on a model card, or to a tracker.

These are numbers, switches and single words: no path, no text of users, nothing that looks like a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_WORD = re.compile(r"[\w.+-]{1,40}", re.ASCII)
_SECRET = re.compile(r"hf_\w{8,}|sk-[\w-]{8,}|[0-9a-fA-F]{32,}|\w{36,}", re.ASCII)  # as tokens of services look
_DIGEST = re.compile("[0-9a-f]{64}")
_MAX_TEXT = 120  # characters
_PRIVATE = ("model", "adapter", "data", "output", "task_folder")  # settings that may name folders


def as_mapping(value: object) -> dict[str, Any]:
    """Return ``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def as_number(value: object) -> int | float | None:
    """Return ``value`` if it is a number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_public(value: object) -> bool:
    """Return whether a value is a number, a switch, or a line of text in which there is neither a path nor a secret."""
    if isinstance(value, bool) or as_number(value) is not None:
        return True
    if not isinstance(value, str) or not value or len(value) > _MAX_TEXT or not value.isprintable():
        return False
    return bool(_DIGEST.fullmatch(value)) or not (_SECRET.search(value) or value.startswith(("/", "~", ".")))


def flatten_settings(settings: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield (name, value) of the settings that are numbers, switches or single words; of a group as GROUP.NAME."""
    for name, value in settings.items():
        is_word = not isinstance(value, str) or (_WORD.fullmatch(value) is not None and name not in _PRIVATE)
        if isinstance(value, dict) and not group and name != "form":
            yield from flatten_settings(value, f"{name}.")
        elif is_word and is_public(value):
            yield group + name, value
