"""Ask a GGUF file on the CPU.

chat "半年で15単位しか取れませんでした。除籍されますか?"
chat                     several questions, a line each; Ctrl-D ends it
chat --model gguf/Q8_0.gguf --greedy --set prompt=text "昔々"
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ekiben_tasks.task import command
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.errors import SettingError, TaskError, print_frames
from gguf_settings import ChatSettings, check_chat

TEMPLATE = "tokenizer.chat_template"  # in the file's metadata


class Chat:
    """Answer questions with a loaded file; with a chat template they form one conversation."""

    def __init__(self, settings: ChatSettings) -> None:
        """Load the file.

        Raises:
            TaskError: it cannot be loaded, or has no chat template.
        """
        from gguf_load import load_file  # a second of import that a wrong setting need not wait for

        file = Path(settings.model)
        metadata = load_file(file, vocab_only=True).metadata
        trained = int(metadata.get(f"{metadata['general.architecture']}.context_length", 0)) or settings.context
        self.model: Any = load_file(
            file,
            n_ctx=min(settings.context or trained, trained),
            n_threads=settings.threads or len(os.sched_getaffinity(0)),
            **({} if settings.seed is None else {"seed": settings.seed}),
        )
        self.kind = settings.prompt
        if self.kind == "auto":
            self.kind = "chat" if TEMPLATE in self.model.metadata else "instruction"
        if self.kind == "chat" and TEMPLATE not in self.model.metadata:
            raise TaskError(f"{settings.model}: has no chat template; use --set prompt=instruction, or text")
        if self.kind != "chat" and settings.system:
            raise SettingError(f"setting system: {settings.model} has no chat template, and so no system message")
        self.settings, self.history = settings, list[dict[str, str]]()

    def answer(self, question: str) -> Iterator[str]:
        """Yield the pieces of an answer while it is generated.

        Raises:
            TaskError: the question leaves no tokens for an answer, or the chat template refuses the conversation.
        """
        from jinja2 import TemplateError

        settings = self.settings
        arguments = {
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repeat_penalty": settings.repetition_penalty,
            "stream": True,
        }
        try:
            if self.kind == "chat":
                system = [{"role": "system", "content": settings.system}] if settings.system else []
                self.history = [*(self.history or system), {"role": "user", "content": question}]
                chunks = self.model.create_chat_completion(self.history, **arguments)
                pieces = (chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
            else:
                from ekiben_tasks.data.tokenize import render_prompt

                text = render_prompt(question) if self.kind == "instruction" else question
                tokens = self.model.tokenize(text.encode(), special=False)
                chunks = self.model.create_completion(tokens, **arguments)
                pieces = (chunk["choices"][0]["text"] for chunk in chunks)
            answer = ""
            for piece in pieces:
                answer += piece
                yield piece
        except TemplateError as error:
            self.history = []
            raise TaskError(f"{settings.model}: its chat template refuses the conversation: {error}") from None
        except ValueError as error:
            if "context window" not in str(error):
                raise
            self.history = []
            raise TaskError(
                f"the question does not fit the {self.model.n_ctx():,} tokens of the context; ask a shorter one, or set"
                " context higher (a conversation starts over)"
            ) from None
        if self.kind == "chat":
            self.history.append({"role": "assistant", "content": answer})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `chat` and return its exit code.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: a setting is wrong.
        TaskError: the file cannot be loaded, or a single question does not fit it.
    """
    parser = command.command("chat", __doc__, ChatSettings, arguments)
    parser.add_argument("question", nargs="?", help="one question; without it, several from standard input")
    parser.add_argument("--model", metavar="FILE", help="instead of the setting model")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    args = parser.parse_args(arguments)
    settings = options.load(ChatSettings, args.config, args.set)
    settings = replace(settings, model=args.model or settings.model)
    settings = replace(settings, temperature=0.0) if args.greedy else settings
    check_chat(settings)
    print(f"loading     {settings.model} on the CPU", file=sys.stderr, flush=True)
    chat = Chat(settings)
    if args.question:
        return _print(chat, args.question)
    while True:
        try:
            question = input("質問> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        try:
            _ = _print(chat, question) if question else 0
        except TaskError as error:
            print_frames(error)
            print(f"error: {error}", file=sys.stderr, flush=True)


def _print(chat: Chat, question: str) -> int:
    for piece in chat.answer(question):
        print(piece, end="", flush=True)
    print(flush=True)
    return 0


if __name__ == "__main__":
    command.run(main)
