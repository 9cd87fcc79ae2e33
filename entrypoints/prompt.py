"""The prompt a row becomes, and its tokens: the Alpaca form, response learnt, end of text appended.

Prompt and response are tokenised apart and joined, so that no token spans the boundary: what the model sees while
learning is exactly what it sees when asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_ALONE = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
_HEADING = re.compile(r"### (?=Instruction|Input|Response)")


@dataclass(frozen=True, slots=True)
class Row:
    instruction: str
    output: str
    input: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of one row; those from ``learn_from`` on are learnt, those before are read only."""

    ids: npt.NDArray[np.int32]
    learn_from: int

    @property
    def learnt(self) -> int:
        """How many tokens the loss counts. Nothing predicts the very first token of a text."""
        return len(self.ids) - max(self.learn_from, 1)


def render_prompt(instruction: str, input: str = "") -> str:
    """Everything before the response. A heading inside a text gets a second space, so it cannot pose as ours."""
    instruction, input = escape(instruction), escape(input)
    if input:
        return f"{_WITH_INPUT}\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
    return f"{_ALONE}\n\n### Instruction:\n{instruction}\n\n### Response:\n"


def escape(text: str) -> str:
    return _HEADING.sub("###  ", text)


def encode_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids, with the tokenizer's own beginning of text where it has one, and never an end of text."""
    # split_special_tokens: "<|endoftext|>" written by a user is text, not the end of the text.
    encoded: list[list[int]] = tokenizer(list(prompts), split_special_tokens=True)["input_ids"]
    end = tokenizer.eos_token_id
    return [ids[:-1] if len(ids) > 1 and ids[-1] == end else ids for ids in encoded]


def encode_rows(tokenizer: Any, rows: Sequence[Row], *, mask_prompt: bool = True) -> list[Example]:
    """One example per row. ``mask_prompt=False`` learns the prompt's tokens as well."""
    if not rows:
        return []
    prompts = encode_prompts(tokenizer, [render_prompt(row.instruction, row.input) for row in rows])
    outputs: list[list[int]] = tokenizer(
        [escape(row.output) for row in rows], add_special_tokens=False, split_special_tokens=True
    )["input_ids"]
    end = [tokenizer.eos_token_id]
    return [
        Example(np.array(prompt + output + end, dtype=np.int32), len(prompt) if mask_prompt else 0)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
