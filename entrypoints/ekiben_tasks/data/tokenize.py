"""Render examples as text, tokenise them and label them: responses with their end are targets, all else is ignored.

A text is tokenised as a whole, up to each point where the model would be asked and then up to its end. A tokenizer may
put a space before the first word of what it is given, so parts tokenised by themselves would not be what the model is
asked with later: here every prompt's tokens are, token by token, the beginning of what was trained on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ekiben_tasks.data.schema import (
    Conversation,
    DatasetFormat,
    Instruction,
    LabelledText,
    Message,
    PromptCompletion,
    RawExample,
)
from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError

_ALONE = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
_BATCH = 256  # examples tokenised at a time
_LINKS = frozenset({"name", "tool_call_id"})  # between a call and its result: few templates render them
_rendered_roles: set[tuple[str, tuple[str, ...]]] = set()  # (chat template, roles) that were checked
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_HEADING = re.compile(r"### (?=Instruction|Input|Response)")

# The format of chats before tokenizers had templates of their own: <|prompter|> question <end> <|assistant|> answer
# <end>
PROMPTER = (
    "{% if bos_token and bos_token != eos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('it has no role ' + message['role']) }}{% endif %}"
    "{{ {'system': '<|system|>', 'user': '<|prompter|>', 'assistant': '<|assistant|>'}[message['role']] }}"
    "{{ ' ' + message['content'] + ' ' + eos_token + ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Example:
    """Hold the tokens of one example. ids: ``[tokens]``. targets: [start, end) of the tokens that the loss counts.

    Every other token has the label -100, which is ignored. label: the class of a text, which its last token predicts
    and which is then the one target.
    """

    ids: npt.NDArray[np.int32]
    targets: tuple[tuple[int, int], ...] = ()
    label: int | None = None

    @property
    def target_positions(self) -> npt.NDArray[np.int64]:
        """Return the positions of the target tokens, ``[num_target_tokens]``; of a class, that behind the last token.

        The first token of a text is not among them, because nothing predicts it.
        """
        if self.label is not None:
            return np.array([len(self.ids)])
        return np.concatenate([np.arange(max(start, 1), end) for start, end in self.targets])

    @property
    def target_labels(self) -> npt.NDArray[np.int32]:
        """Return the tokens at the target positions, or the class, ``[num_target_tokens]``."""
        if self.label is not None:
            return np.array([self.label], dtype=np.int32)
        return self.ids[self.target_positions]

    @property
    def num_target_tokens(self) -> int:
        """Return how many tokens the loss counts; the first token of a text is never one of them."""
        if self.label is not None:
            return 1
        return sum(max(end - max(start, 1), 0) for start, end in self.targets)


def split_example(example: Example, limit: int) -> list[Example]:
    """Return ``example`` in chunks of at most ``limit`` tokens, without those that have no target."""
    chunks = []
    for first in range(0, len(example.ids), limit):
        last = min(first + limit, len(example.ids))
        inside = ((max(start, first) - first, min(end, last) - first) for start, end in example.targets)
        chunk = Example(example.ids[first:last], tuple((start, end) for start, end in inside if start < end))
        if chunk.num_target_tokens:
            chunks.append(chunk)
    return chunks


def join_texts(texts: Sequence[Example], limit: int) -> list[Example]:
    """Return the tokens of all ``texts``, one after the other, in chunks of ``limit``; all of them are targets.

    These are those of TRL's packing with the strategy "wrapped". Texts in one chunk attend to each other.
    """
    if not texts:
        return []
    ids = np.concatenate([text.ids for text in texts])
    return split_example(Example(ids, ((0, len(ids)),)), limit)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """An example as text. responses: [start, end) of what the model has to write, in characters.

    is_last_only: there are earlier turns, which are no responses because the template changes them. is_marked: the
    template itself marks what is generated, its end included.
    """

    text: str
    responses: tuple[tuple[int, int], ...] = ()
    is_last_only: bool = False
    is_marked: bool = False


def render_prompt(instruction: str, input: str = "") -> str:
    """Return the text before the response, under Alpaca's headings (github.com/tatsu-lab/stanford_alpaca).

    A heading inside ``instruction`` or ``input`` gets a second space, so that it is not a heading.
    """
    instruction, input = escape(instruction), escape(input)
    if input:
        return f"{_WITH_INPUT}\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
    return f"{_ALONE}\n\n### Instruction:\n{instruction}\n\n### Response:\n"


def escape(text: str) -> str:
    """Return ``text`` with a second space in each of the prompt's headings, so that they are ordinary text."""
    return _HEADING.sub("###  ", text)


def apply_format(tokenizer: Any, form: DatasetFormat) -> str:
    """Give ``tokenizer`` the chat template of ``form``, which is then saved with it, and return a description.

    Raises:
        TaskError: the template's file cannot be read.
    """
    if form.kind != "chat":
        return {
            "instruction": "Alpaca's headings",
            "template": "the settings' own template",
            "text": "plain text, joined and cut",
            "classification": "texts with a label",
        }[form.kind]
    if form.chat == "auto" and tokenizer.chat_template:
        return "the tokenizer's chat template"
    if form.chat in ("auto", "prompter"):
        tokenizer.chat_template = PROMPTER
        return "<|prompter|> ... <|assistant|> ..." + (
            " (the tokenizer has no chat template)" if form.chat == "auto" else ""
        )
    advice = "--set form.chat= takes auto, prompter, or a Jinja file"
    tokenizer.chat_template = input_files.read_text(Path(form.chat), advice)
    return f"the chat template {form.chat}"


def encode_prompts(tokenizer: Any, examples: Sequence[RawExample]) -> list[list[int]]:
    """Return the token ids of everything before the (last) response, the beginning of those of ``encode_examples``.

    Raises:
        TaskError: the chat template refuses a conversation.
    """
    return [ids for ids, _, _ in _encode(tokenizer, examples, asks=True)]


def prompt_text(example: RawExample) -> str:
    """Return the prompt as text; of a conversation, the last user message."""
    if isinstance(example, Instruction):
        return render_prompt(example.instruction, example.input)
    if isinstance(example, PromptCompletion):
        return example.prompt
    if isinstance(example, LabelledText):
        return example.text
    return next(message.content for message in reversed(example.messages) if message.role == "user")


def full_text(example: RawExample) -> str:
    """Return prompt and response of an example, or all messages of a conversation, as plain text."""
    if isinstance(example, Conversation):
        return "\n".join(message.content for message in example.messages)
    if isinstance(example, LabelledText):
        return example.text
    return prompt_text(example) + (example.output if isinstance(example, Instruction) else example.completion)


def encode_examples(
    tokenizer: Any,
    examples: Sequence[RawExample],
    *,
    mask_prompt: bool = True,
    last_only: list[RawExample] | None = None,
) -> list[Example]:
    """Return the tokens of every example, with an end token last; targets may come from a template's generation marks.

    mask_prompt: the prompt's tokens are ignored; otherwise all tokens are targets. last_only: gets the conversations
    whose last message alone is a target, because the chat template changes earlier ones.

    Raises:
        TaskError: the chat template refuses a conversation, or renders its last message unlike its prompt.
    """
    ends = _special_ids(tokenizer) if examples and isinstance(examples[0], Conversation) else set()
    encoded = []
    for ids, targets, is_marked in _encode(tokenizer, examples, last_only=last_only):
        if ids[-1] not in ends and not is_marked:
            ids.append(tokenizer.eos_token_id)
            targets[-1] = (targets[-1][0], len(ids))
        encoded.append(Example(np.array(ids, dtype=np.int32), tuple(targets) if mask_prompt else ((0, len(ids)),)))
    return encoded


def encode_labelled(tokenizer: Any, examples: Sequence[RawExample], labels: Sequence[str]) -> list[Example]:
    """Return the tokens that ``tokenizer`` itself gives each text, with the index of its label.

    Padding tokens at the end are left out: transformers' classifiers read the last token that is not padding.
    """
    index, encoded = {label: number for number, label in enumerate(labels)}, []
    for first in range(0, len(examples), _BATCH):
        batch = [each for each in examples[first : first + _BATCH] if isinstance(each, LabelledText)]
        token_ids = tokenizer([each.text for each in batch], split_special_tokens=True)["input_ids"]
        for example, ids in zip(batch, token_ids, strict=True):
            length = next((size for size in range(len(ids), 1, -1) if ids[size - 1] != tokenizer.pad_token_id), 1)
            encoded.append(Example(np.array(ids[:length], dtype=np.int32), label=index[example.label]))
    return encoded


def prepare_padding(tokenizer: Any, config: Any) -> int:
    """Give ``tokenizer`` a padding token, the model's or else the end token, and return its id."""
    if tokenizer.pad_token_id is None:
        number = getattr(config.get_text_config(), "pad_token_id", None)
        is_known = isinstance(number, int) and 0 <= number < len(tokenizer)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(number) if is_known else tokenizer.eos_token
    tokenizer.padding_side = "right"
    return int(tokenizer.pad_token_id)


def describe_unknown(tokenizer: Any, ids: Sequence[int], embeddings: int) -> str:
    """Return a sentence about a token of ``ids`` that a model with so many embeddings has none of, or nothing."""
    number = int(max(ids, default=0))
    if number < embeddings:
        return ""
    return (
        f"has the token {tokenizer.convert_ids_to_tokens(number)!r}, number {number:,} of the tokenizer, and the model"
        f" has embeddings of {embeddings:,} tokens alone; use the tokenizer that belongs to the model, or a model with"
        " that token"
    )


def end_tokens(tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that end an answer: the end of the text and, where it differs, of a turn."""
    ends = {tokenizer.eos_token_id}
    if tokenizer.chat_template:
        (example,) = encode_examples(tokenizer, [Conversation((Message("user", "a"), Message("assistant", "b")))])
        ends |= {int(example.ids[example.target_positions[-1]])} & _special_ids(tokenizer)
    return sorted(ends)


# ------------------------------------------------------------------------------------------------------------ rendering


def _render(tokenizer: Any, example: RawExample, special: Sequence[str], *, asks: bool) -> _Rendered:
    if isinstance(example, Conversation):
        return _render_conversation(tokenizer, example, special, asks=asks)
    prompt = prompt_text(example)
    if asks:
        return _Rendered(prompt)
    response = full_text(example)[len(prompt) :]
    text = prompt + (escape(response) if isinstance(example, Instruction) else response)
    return _Rendered(text, ((len(prompt), len(text)),))


def _render_conversation(tokenizer: Any, example: Conversation, special: Sequence[str], *, asks: bool) -> _Rendered:
    """Every assistant's turn is a response with its end; white space after the end, and all else, is ignored.

    Where the template changes earlier turns when later ones come, the last turn alone is a response.
    """
    _check_template(tokenizer, example)
    messages = [
        {"role": each.role, "content": _defuse(each.content, special), **(each.keys or {})} for each in example.messages
    ]
    if asks and messages[-1]["role"] == "assistant":
        messages.pop()
    if not asks and (marked := _render_marked(tokenizer, example, messages)):
        return marked
    rendered = _render_turns(tokenizer, example, messages, special)
    if asks:
        prompt = _apply_template(tokenizer, messages, example.tools, add_generation_prompt=True)
        is_prefix = rendered is not None and prompt.startswith(rendered.text)
        return _Rendered(prompt, rendered.responses if rendered and is_prefix else ())
    return rendered or _render_last_turn(tokenizer, example, messages, special)


def _render_marked(tokenizer: Any, example: Conversation, messages: Sequence[dict[str, Any]]) -> _Rendered | None:
    """Return the text with what the chat template marks by {% generation %} as responses; None: it has no marks.

    Raises:
        TaskError: it marks nothing of this conversation, or not each turn of one that has turns without a target.
    """
    tools = list(example.tools) or None
    template = tokenizer.get_chat_template(tools=tools)
    if not _GENERATION.search(template):
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    with _explain_template():
        (text,), (spans,) = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    are_targets = [each.is_target for each in example.messages if each.role == "assistant"]
    if not all(are_targets) and len(spans) != len(are_targets):
        raise TaskError(
            f"the chat template marks {len(spans)} parts as generated of {len(are_targets)} messages of the assistant,"
            " so weight 0 or train false cannot be obeyed; use a template that marks each message once"
        )
    if not all(are_targets):
        spans = [span for span, is_target in zip(spans, are_targets, strict=True) if is_target]
    marks = tuple((start, end) for start, end in spans if start < end)
    if not marks:
        raise TaskError("the chat template has generation marks, but none around a message of this conversation")
    return _Rendered(text[: marks[-1][1]], marks, is_marked=True)


def _render_turns(
    tokenizer: Any, example: Conversation, messages: Sequence[dict[str, Any]], special: Sequence[str]
) -> _Rendered | None:
    """Return all turns of the assistant as responses; None: a prompt is not a prefix of the next text."""
    text, responses = "", list[tuple[int, int]]()
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _apply_template(tokenizer, messages[:index], example.tools, add_generation_prompt=True)
        complete = _apply_template(tokenizer, messages[: index + 1], example.tools, add_generation_prompt=False)
        if not prompt.startswith(text) or not complete.startswith(prompt):
            return None
        text = prompt + _cut_after_end(complete[len(prompt) :], tokenizer.eos_token, special)
        if example.messages[index].is_target:
            responses.append((len(prompt), len(text)))
    # Nothing after the last target is used.
    return _Rendered(text[: responses[-1][1]] if responses else text, tuple(responses))


def _render_last_turn(
    tokenizer: Any, example: Conversation, messages: Sequence[dict[str, Any]], special: Sequence[str]
) -> _Rendered:
    """Return the prompt of the last message, and this message as the response.

    Raises:
        TaskError: the message has no weight, or the template does not render it after that text.
    """
    if not example.messages[-1].is_target:
        raise TaskError(
            "the tokenizer's chat template changes earlier turns when later ones come, so only the last message can be"
            " trained on, and that has weight 0 or train false"
        )
    prompt = _apply_template(tokenizer, messages[:-1], example.tools, add_generation_prompt=True)
    complete = _apply_template(tokenizer, messages, example.tools, add_generation_prompt=False)
    before, mark, _ = prompt.rpartition("<think>")
    if complete.startswith(prompt):
        answer = complete[len(prompt) :]
    elif mark and not prompt[len(before) + len(mark) :].strip() and complete.startswith(before):
        # The prompt opens a block of reasoning that the template omits from an answer, or opens differently.
        answer = complete[len(before) :]
        has_mark = answer.startswith(mark)
        answer = answer.removeprefix(mark).lstrip("\n") if has_mark else _reason(messages[-1]["content"]) + answer
    else:
        raise TaskError(
            "the tokenizer's chat template renders an answer that does not begin as its prompt ends, or changes earlier"
            " turns when later ones come, so the model would be trained on another text than its prompts; use another:"
            " --set form.chat=prompter, or a Jinja file of your own"
        )
    text = prompt + _cut_after_end(answer, tokenizer.eos_token, special)
    return _Rendered(text, ((len(prompt), len(text)),), is_last_only=len(messages) > 2)


def _reason(content: str) -> str:
    """Return the reasoning in an answer (possibly empty) with its end mark: the text after a prompt's <think>."""
    reasoning, mark, _ = content.rpartition("</think>")
    return f"{reasoning.removeprefix('<think>').strip()}\n</think>\n\n" if mark else "\n</think>\n\n"


def _check_template(tokenizer: Any, example: Conversation) -> None:
    """Check that the chat template renders the other keys of the messages.

    Raises:
        TaskError: it does not; the message names the key.
    """
    keys = {key for message in example.messages for key in message.keys or ()} | ({"tools"} if example.tools else set())
    roles = tuple(message.role for message in example.messages)
    template = tokenizer.get_chat_template(tools=list(example.tools) or None)
    if (template, roles) not in _rendered_roles:
        _check_roles(tokenizer, example)
        _rendered_roles.add((template, roles))
    if ignored := sorted(key for key in keys - _LINKS if key not in template):
        raise TaskError(
            f"the tokenizer's chat template does not use {', '.join(ignored)}; use one that does (--set form.chat= a"
            " Jinja file), or remove it from the data"
        )


def _check_roles(tokenizer: Any, example: Conversation) -> None:
    """Check that the chat template renders the content of all messages: some omit roles, or do not accept plain text.

    Raises:
        TaskError: it does not, or refuses the conversation.
    """
    marked = [
        {"role": each.role, "content": f"content{index}content", **(each.keys or {})}
        for index, each in enumerate(example.messages)
    ]
    text = _apply_template(tokenizer, marked, example.tools, add_generation_prompt=False)
    for message in marked:
        # Many templates render tool calls without the accompanying text.
        if message["content"] not in text and "tool_calls" not in message:
            raise TaskError(
                f"the tokenizer's chat template leaves out messages by {message['role']}; use one that has them (--set"
                " form.chat= a Jinja file), or remove them from the data"
            )


def _apply_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, add_generation_prompt: bool
) -> str:
    with _explain_template():
        text: str = tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    return text


@contextlib.contextmanager
def _explain_template() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template is a program and may raise any exception
        raise TaskError(
            f"the tokenizer's chat template refuses a conversation: {' '.join(str(error).split())[:300]}"
        ) from error


def _cut_after_end(answer: str, eos_token: str, special: Sequence[str]) -> str:
    """``answer`` with the end of its turn, without white space, or an end of all text, after that."""
    answer = answer.rstrip()
    shorter = answer.removesuffix(eos_token).rstrip()
    return shorter if shorter.endswith(tuple(special)) else answer


def _special_tokens(tokenizer: Any) -> list[str]:
    """Return every token a text cannot hold as text; all_special_tokens lacks those no attribute of a tokenizer
    names.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)


def _special_ids(tokenizer: Any) -> set[int]:
    return set(tokenizer.convert_tokens_to_ids(_special_tokens(tokenizer)))


def _defuse(text: str, special: Sequence[str]) -> str:
    """A special token written by a user gets a space inside, so it cannot pose as the template's."""
    for token in special:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


# ------------------------------------------------------------------------------------------------------------- encoding


def _encode(
    tokenizer: Any, examples: Sequence[RawExample], *, asks: bool = False, last_only: list[RawExample] | None = None
) -> Iterator[tuple[list[int], list[tuple[int, int]], bool]]:
    """Yield (token ids, [start, end) of each response among them, whether the template marks them) of each example.

    No end token is added.
    """
    special = _special_tokens(tokenizer)
    for first in range(0, len(examples), _BATCH):
        batch = examples[first : first + _BATCH]
        # In a conversation special tokens are the template's; elsewhere "<|endoftext|>" is text that a user wrote.
        options = (
            {"add_special_tokens": False} if isinstance(batch[0], Conversation) else {"split_special_tokens": True}
        )
        rendered = [_render(tokenizer, example, special, asks=asks) for example in batch]
        if last_only is not None:
            last_only += [example for example, each in zip(batch, rendered, strict=True) if each.is_last_only]
        prefixes = [each.text[:cut] for each in rendered for cut in _cuts(each)]
        encoded = tokenizer(prefixes, **options)
        offsets = encoded.encodings or [None] * len(prefixes)
        prefix_ids = iter(zip(encoded["input_ids"], offsets, strict=True))
        for each in rendered:
            yield *_join(tokenizer, each, [next(prefix_ids) for _ in _cuts(each)], options), each.is_marked


def _cuts(rendered: _Rendered) -> list[int]:
    """The boundaries of a text's tokenisation: the end of each prompt, and of the text."""
    return [*(start for start, _ in rendered.responses), len(rendered.text)]


def _join(
    tokenizer: Any, rendered: _Rendered, encoded: Sequence[tuple[list[int], Any]], options: dict[str, bool]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ids of the whole text, which begin with those of each shorter one, and its targets."""
    ids: list[int] = []
    targets: list[tuple[int, int]] = []
    begin = 0  # where the response starts that is added next, in characters
    for index, (cut, (new, encoding)) in enumerate(zip(_cuts(rendered), encoded, strict=True)):
        if len(new) > 1 and new[-1] == tokenizer.eos_token_id and "split_special_tokens" in options:
            new = new[:-1]  # some tokenizers end every text
        asked = len(ids)
        if new[:asked] == ids:
            ids = new
        else:  # a token would span the boundary of prompt and response
            encoding = None
            ids = ids + _encode_continuation(tokenizer, rendered.text[begin:cut], options)
        if index:
            end = rendered.responses[index - 1][1]
            if end == cut:
                count = len(ids) - asked
            elif encoding:
                count = sum(first < end for first, _ in encoding.offsets[asked:])
            else:
                count = len(_encode_continuation(tokenizer, rendered.text[begin:end], options))
            targets.append((asked, asked + count))
        begin = cut
    return ids, targets


def _encode_continuation(tokenizer: Any, text: str, options: dict[str, bool]) -> list[int]:
    """Return the ids of ``text`` after other text: without the space that a tokenizer may prepend."""
    options = {**options, "add_special_tokens": False}
    for before in ("\n", "a", "."):
        prefix: list[int] = tokenizer(before, **options)["input_ids"]
        ids: list[int] = tokenizer(before + text, **options)["input_ids"]
        if ids[: len(prefix)] == prefix:
            return ids[len(prefix) :]
    alone: list[int] = tokenizer(text, **options)["input_ids"]
    return alone
