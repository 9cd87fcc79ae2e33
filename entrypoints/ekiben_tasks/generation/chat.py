"""Ask a model single questions, or hold a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ekiben_tasks.data.schema import Conversation, Instruction, Message
from ekiben_tasks.data.tokenize import describe_unknown, encode_prompts
from ekiben_tasks.generation.sampling import Sampling, StrippingStreamer, sample
from ekiben_tasks.generation.settings import ChatSettings
from ekiben_tasks.models import load
from ekiben_tasks.task.errors import TaskError, print_frames


def answer(
    model: Any, tokenizer: Any, question: str, context: str, settings: ChatSettings, *, stream: bool = False
) -> str:
    """Return the response to a single question. stream: print it while it is generated.

    Raises:
        TaskError: question and context leave no tokens for a response.
    """
    return reply(model, tokenizer, first_question(settings, context, question), settings, stream=stream)


def reply(
    model: Any, tokenizer: Any, asked: Instruction | Conversation, settings: ChatSettings, *, stream: bool = False
) -> str:
    """Return the response to ``asked``. stream: print it while it is generated.

    Raises:
        TaskError: what is asked leaves no tokens for a response, or has a token without an embedding.
    """
    (ids,) = encode_prompts(tokenizer, [asked])
    if problem := describe_unknown(tokenizer, ids, len(model.get_input_embeddings().weight)):
        raise TaskError(f"the question {problem}")
    limit = load.longest_context(model.config)
    max_new_tokens = min(settings.max_new_tokens, limit - len(ids))
    if max_new_tokens < 1:
        raise TaskError(f"question and context are {len(ids):,} tokens, the model takes {limit:,}: shorten the context")
    seed = int(torch.randint(1 << 31, (1,)))
    streamer = StrippingStreamer(tokenizer) if stream else None
    params = Sampling(settings.temperature, settings.top_p, settings.repetition_penalty, seed, streamer)
    ((response, _),) = sample(model, tokenizer, [ids], [0], max_new_tokens, params)
    text: str = tokenizer.decode(response, skip_special_tokens=True)
    return text.strip()


def first_question(settings: ChatSettings, context: str, question: str) -> Instruction | Conversation:
    """Return a first question as the format has it: an instruction, or a system message (if any) and a user message."""
    if settings.form.kind == "instruction":
        return Instruction(question, "", context)
    system = "\n\n".join(text for text in (settings.system, context) if text)
    return Conversation((*([Message("system", system)] if system else []), Message("user", question)))


def print_reply(model: Any, tokenizer: Any, asked: Instruction | Conversation, settings: ChatSettings) -> str:
    """Print the response, on a terminal while it is generated, and return it."""
    stream = sys.stdout.isatty()
    response = reply(model, tokenizer, asked, settings, stream=stream)
    if not stream:
        print(response, flush=True)
    return response


def converse(model: Any, tokenizer: Any, context: str, settings: ChatSettings) -> int:
    """Answer questions from standard input until it ends, and return 0.

    With the format ``chat`` they form one conversation.
    """
    prompt = "質問> " if sys.stdin.isatty() else ""
    history: Conversation | None = None
    while True:
        try:
            question = input(prompt).strip()
        except EOFError:
            return 0
        if not question:
            continue
        asked = first_question(settings, context, question)
        if history:
            asked = Conversation((*history.messages, Message("user", question)))
        try:
            response = print_reply(model, tokenizer, asked, settings)
        except TaskError as error:
            print_frames(error)
            hint = "; the conversation starts over: ask again" if history else ""
            print(f"error: {error}{hint}", file=sys.stderr, flush=True)
            history = None
            continue
        if isinstance(asked, Conversation):
            history = Conversation((*asked.messages, Message("assistant", response or " ")))
