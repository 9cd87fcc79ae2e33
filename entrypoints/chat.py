"""Ask a fine-tuned model.

chat "半年で15単位しか取れませんでした。除籍されますか?"
chat --context gakusoku.txt "除籍の条件は何ですか?"
chat                     a conversation of single questions; Ctrl-D ends it
chat --adapter other/adapter --base /models/open-calm-3b --greedy "質問"
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import places
import settings as options
from prompt import encode_prompts, render_prompt
from settings import TaskError, option


@dataclass(frozen=True)
class Settings:
    adapter: str = option("result/adapter", "folder of the adapter; --adapter")
    max_new_tokens: int = option(256, "an answer ends here at the latest")
    temperature: float = option(0.7, "0: always the likeliest token, as --greedy")
    top_p: float = option(1.0, "sample from the likeliest tokens that together have this probability")
    repetition_penalty: float = option(1.05, "above 1: less of what was already said")
    seed: int | None = option(None, "the same seed gives the same answer; empty: another each time")
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU; cpu: without one, slowly")


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    settings = options.load(Settings, args.config, args.set)
    settings = replace(settings, temperature=0.0) if args.greedy else settings
    context = _read_context(args.context) if args.context else ""
    for line in [*places.prepare_caches(os.environ), *places.prefer_cache(os.environ)]:
        print(line, file=sys.stderr, flush=True)

    import torch

    import models

    device = models.choose_device(settings.device)
    folder = Path(args.adapter or settings.adapter)
    print(f"loading     {folder} on {device.name}", file=sys.stderr, flush=True)
    model, base = models.load_adapter(folder, device, base=args.base)
    tokenizer = models.load_tokenizer(str(folder) if (folder / "tokenizer_config.json").is_file() else base)
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    if args.question:
        print(answer(model, tokenizer, args.question, context, settings), flush=True)
        return 0
    return _converse(model, tokenizer, context, settings)


def answer(model: Any, tokenizer: Any, question: str, context: str, settings: Settings) -> str:
    """The response alone. Errors: TaskError where question and context leave no room for one."""
    import torch

    ids = encode_prompts(tokenizer, [render_prompt(question, context)])[0]
    limit = getattr(model.config, "max_position_embeddings", None) or len(ids) + settings.max_new_tokens
    room = min(settings.max_new_tokens, limit - len(ids))
    if room < 1:
        raise TaskError(f"question and context are {len(ids):,} tokens, the model takes {limit:,}: shorten the context")
    # Without do_sample a temperature does nothing at all.
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
    if settings.temperature > 0:
        sampling = {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
    prompt = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=room,
            repetition_penalty=settings.repetition_penalty,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **sampling,
        )
    text: str = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    return text.strip()


def _converse(model: Any, tokenizer: Any, context: str, settings: Settings) -> int:
    prompt = "質問> " if sys.stdin.isatty() else ""
    while True:
        try:
            question = input(prompt).strip()
        except EOFError:
            return 0
        if question:
            try:
                print(answer(model, tokenizer, question, context, settings), flush=True)
            except TaskError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)


def _read_context(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError:
        raise TaskError(f"{file}: is not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise TaskError(f"{file}: cannot be read: {error.strerror}; is it bound into the container?") from None


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options.command("chat", __doc__, Settings, arguments)
    parser.add_argument("question", nargs="?", help="one question; without it, a conversation")
    parser.add_argument("--adapter", metavar="DIR", help="folder train wrote (default: result/adapter)")
    parser.add_argument("--base", metavar="DIR", help="the base model's folder, if it is not where the adapter says")
    parser.add_argument("--context", type=Path, metavar="FILE", help="a text to answer from")
    parser.add_argument("--greedy", action="store_true", help="no chance: always the likeliest token")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options.run(main)
