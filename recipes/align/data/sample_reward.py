"""Reward completions that hold many characters of Japanese: an example to replace."""

from __future__ import annotations

from typing import Any


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Return the share of Japanese characters of each completion, from 0 to 1; TRL also passes the prompts' columns."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [sum("\u3040" <= letter <= "\u9fff" for letter in text) / max(len(text), 1) for text in texts]
