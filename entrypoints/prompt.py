"""The prompt a row becomes, and its tokens: responses learnt, each with its end, and nothing of a prompt.

Prompt and response are tokenised apart and joined, so that no token spans the boundary: what the model sees while
learning is exactly what it sees when asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forms import AnyRow, Dialogue, Filled, Form, Row, Turn
from settings import TaskError

_ALONE = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
_HEADING = re.compile(r"### (?=Instruction|Input|Response)")

# The form of chats before tokenizers had templates of their own: <|prompter|> question <end> <|assistant|> answer <end>
PROMPTER = (
    "{% if bos_token and bos_token != eos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{{ {'system': '<|system|>', 'user': '<|prompter|>', 'assistant': '<|assistant|>'}[message['role']] }}"
    "{{ ' ' + message['content'] + ' ' + eos_token + ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Example:
    """Tokens of one row. Those from ``learn_from`` on are learnt, but for the ``unlearnt`` [first, end) among them."""

    ids: npt.NDArray[np.int32]
    learn_from: int
    unlearnt: tuple[tuple[int, int], ...] = ()

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """Where the learnt tokens are. Nothing predicts the very first token of a text."""
        learnt = np.ones(len(self.ids), dtype=bool)
        learnt[: max(self.learn_from, 1)] = False
        for first, end in self.unlearnt:
            learnt[first:end] = False
        return np.flatnonzero(learnt)

    @property
    def learnt(self) -> int:
        """How many tokens the loss counts."""
        return len(self.ids) - max(self.learn_from, 1) - sum(end - first for first, end in self.unlearnt)


def render_prompt(instruction: str, input: str = "") -> str:
    """Everything before the response. A heading inside a text gets a second space, so it cannot pose as ours."""
    instruction, input = escape(instruction), escape(input)
    if input:
        return f"{_WITH_INPUT}\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
    return f"{_ALONE}\n\n### Instruction:\n{instruction}\n\n### Response:\n"


def escape(text: str) -> str:
    return _HEADING.sub("###  ", text)


def set_form(tokenizer: Any, form: Form) -> str:
    """Give ``tokenizer`` the chat template of ``form``, so that it is saved with it; what to say aloud. Errors: TaskError."""
    if form.kind != "chat":
        return {"instruction": "Alpaca's headings", "template": "the settings' own template"}[form.kind]
    if form.chat == "auto" and tokenizer.chat_template:
        return "the tokenizer's chat template"
    if form.chat in ("auto", "prompter"):
        tokenizer.chat_template = PROMPTER
        return "<|prompter|> ... <|assistant|> ..." + (
            " (the tokenizer has no chat template)" if form.chat == "auto" else ""
        )
    try:
        tokenizer.chat_template = Path(form.chat).read_text(encoding="utf-8")
    except OSError as error:
        raise TaskError(
            f"setting form.chat: {form.chat}: {error.strerror}; write auto, prompter, or a Jinja file"
        ) from None
    return f"the chat template {form.chat}"


def encode_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids, with the tokenizer's own beginning of text where it has one, and never an end of text."""
    # split_special_tokens: "<|endoftext|>" written by a user is text, not the end of the text.
    encoded: list[list[int]] = tokenizer(list(prompts), split_special_tokens=True)["input_ids"]
    end = tokenizer.eos_token_id
    return [ids[:-1] if len(ids) > 1 and ids[-1] == end else ids for ids in encoded]


def encode_questions(tokenizer: Any, rows: Sequence[AnyRow]) -> list[list[int]]:
    """Token ids of everything before the (last) response, as ``encode_rows`` gives them. Errors: TaskError."""
    dialogues = [row for row in rows if isinstance(row, Dialogue)]
    if dialogues:
        texts = [_render(tokenizer, _without_answer(row.turns), asks=True) for row in dialogues]
        return [_encode(tokenizer, text) for text in texts]
    return encode_prompts(tokenizer, [question_of(row) for row in rows])


def question_of(row: AnyRow) -> str:
    """What the model is asked, as text."""
    if isinstance(row, Row):
        return render_prompt(row.instruction, row.input)
    if isinstance(row, Filled):
        return row.prompt
    return next(turn.content for turn in reversed(row.turns) if turn.role == "user")


def text_of(row: AnyRow) -> str:
    """All of a row as plain text: what a tokenizer can be learnt from."""
    if isinstance(row, Dialogue):
        return "\n".join(turn.content for turn in row.turns)
    return question_of(row) + (row.output if isinstance(row, Row) else row.response)


def encode_rows(tokenizer: Any, rows: Sequence[AnyRow], *, mask_prompt: bool = True) -> list[Example]:
    """One example per row. ``mask_prompt=False`` learns the prompt's tokens as well. Errors: TaskError."""
    if not rows:
        return []
    if isinstance(rows[0], Dialogue):
        return [_encode_dialogue(tokenizer, row, mask_prompt) for row in rows if isinstance(row, Dialogue)]
    prompts = encode_prompts(tokenizer, [question_of(row) for row in rows])
    responses = [
        escape(row.output) if isinstance(row, Row) else row.response for row in rows if not isinstance(row, Dialogue)
    ]
    outputs: list[list[int]] = tokenizer(responses, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    end = [tokenizer.eos_token_id]
    return [
        Example(np.array(prompt + output + end, dtype=np.int32), len(prompt) if mask_prompt else 0)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def end_tokens(tokenizer: Any) -> list[int]:
    """The tokens after which an answer is over: the end of the text, and the end of a turn where that is another."""
    ends = {tokenizer.eos_token_id}
    if tokenizer.chat_template:
        example = _encode_dialogue(tokenizer, Dialogue((Turn("user", "a"), Turn("assistant", "b"))), True)
        last = int(example.ids[example.places[-1]])
        if last in tokenizer.all_special_ids:
            ends.add(last)
    return sorted(ends)


# -------------------------------------------------------------------------------------------------------------- dialogues


def _encode_dialogue(tokenizer: Any, row: Dialogue, mask_prompt: bool) -> Example:
    """Every assistant's turn is learnt with its end; white space after the end, and all else, is read only."""
    ids: list[int] = []
    learnt: list[bool] = []

    def add(text: str, learn: bool) -> None:
        new = _encode(tokenizer, text) if text else []
        ids.extend(new)
        learnt.extend([learn] * len(new))

    told = ""
    for index, turn in enumerate(row.turns):
        if turn.role != "assistant":
            continue
        asked = _render(tokenizer, row.turns[:index], asks=True)
        whole = _render(tokenizer, row.turns[: index + 1])
        if not asked.startswith(told) or not whole.startswith(asked):
            raise TaskError(
                "the tokenizer's chat template changes earlier turns when later ones come, so what is learnt would not be "
                "what is asked; take another with --set form.chat=prompter, or a Jinja file of your own"
            )
        answer = whole[len(asked) :].rstrip()
        add(asked[len(told) :], False)
        add(answer, True)
        told = asked + answer
    if ids[-1] not in tokenizer.all_special_ids:
        ids.append(tokenizer.eos_token_id)
        learnt.append(True)
    if not mask_prompt:
        return Example(np.array(ids, dtype=np.int32), 0)
    first = learnt.index(True)
    edges = np.flatnonzero(np.diff(np.array([True, *learnt[first:], True], dtype=np.int8)))
    gaps = tuple((first + int(start), first + int(end)) for start, end in edges.reshape(-1, 2))
    return Example(np.array(ids, dtype=np.int32), first, gaps)


def _without_answer(turns: Sequence[Turn]) -> Sequence[Turn]:
    return turns[:-1] if turns[-1].role == "assistant" else turns


def _render(tokenizer: Any, turns: Sequence[Turn], *, asks: bool = False) -> str:
    messages = [{"role": turn.role, "content": _defuse(tokenizer, turn.content)} for turn in turns]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
    except Exception as error:  # a template is a program and raises what it likes
        raise TaskError(
            f"the tokenizer's chat template refuses a dialogue: {' '.join(str(error).split())[:300]}"
        ) from error
    return text


def _defuse(tokenizer: Any, text: str) -> str:
    """A special token written by a user gets a space inside, so it cannot pose as the template's."""
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
