"""Ask a fine-tuned model.

chat "半年で15単位しか取れませんでした。除籍されますか?"
chat --context gakusoku.txt "除籍の条件は何ですか?"
chat                     one question after the other; Ctrl-D ends it
chat --adapter other/adapter --base /models/open-calm-3b --greedy "質問"
chat --model ./result/model --set form.kind=chat        a conversation: what was said before is remembered
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import places
import settings as options
from forms import Dialogue, Form, Row, Turn
from settings import SettingError, TaskError, option


@dataclass(frozen=True)
class Settings:
    adapter: str = option("result/adapter", "folder of the adapter; --adapter")
    model: str = option("", "a whole model instead of an adapter: a folder or a hub id; --model")
    form: Form = field(default_factory=Form)
    system: str = option("", "form chat: what the model is told before the first question")
    max_new_tokens: int = option(256, "an answer ends here at the latest")
    temperature: float = option(0.7, "0: always the likeliest token, as --greedy")
    top_p: float = option(1.0, "sample from the likeliest tokens that together have this probability")
    repetition_penalty: float = option(1.05, "above 1: less of what was already said")
    seed: int | None = option(None, "the same seed gives the same answer; empty: another each time")
    bits: Literal[16, 8, 4] = option(16, "of the weights: 8 and 4 need a GPU and save memory")
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU; cpu: without one, slowly")


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    settings = options.load(Settings, args.config, args.set)
    settings = replace(settings, temperature=0.0) if args.greedy else settings
    settings = replace(settings, model=args.model or "" if args.model or args.adapter else settings.model)
    settings = replace(settings, adapter=args.adapter or settings.adapter)
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
        places.prepare_caches(os.environ)
        return prove(settings, options.recipe_folder(args.config, __file__))
    if settings.form.kind == "template":
        raise SettingError("setting form.kind: a template asks about columns; `generate` does that, chat cannot")
    context = _read_context(args.context) if args.context else ""
    for line in [*places.prepare_caches(os.environ), *places.prefer_cache(os.environ)]:
        print(line, file=sys.stderr, flush=True)

    import torch

    import models
    from prompt import set_form

    device = models.choose_device(settings.device)
    print(f"loading     {settings.model or settings.adapter} on {device.name}", file=sys.stderr, flush=True)
    model, tokenizer = models.load_ready(
        settings.model, "" if settings.model else settings.adapter, device, base=args.base, bits=settings.bits
    )
    set_form(tokenizer, settings.form)
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    if args.question:
        _say(model, tokenizer, _begin(settings, context, args.question), settings)
        return 0
    return _converse(model, tokenizer, context, settings)


def answer(model: Any, tokenizer: Any, question: str, context: str, settings: Settings, *, stream: bool = False) -> str:
    """The response alone. Errors: TaskError where question and context leave no room for one."""
    return reply(model, tokenizer, _begin(settings, context, question), settings, stream=stream)


def reply(model: Any, tokenizer: Any, asked: Row | Dialogue, settings: Settings, *, stream: bool = False) -> str:
    """The response to ``asked``; with ``stream`` it is printed while it comes. Errors: as ``answer``."""
    import torch

    import models
    from prompt import encode_questions
    from sampling import Printer, Sampling, sample

    (ids,) = encode_questions(tokenizer, [asked])
    limit = models.longest_context(model.config)
    room = min(settings.max_new_tokens, limit - len(ids))
    if room < 1:
        raise TaskError(f"question and context are {len(ids):,} tokens, the model takes {limit:,}: shorten the context")
    chance = int(torch.randint(1 << 31, (1,)))
    how = Sampling(settings.temperature, settings.top_p, settings.repetition_penalty, chance)
    printer = Printer(tokenizer) if stream else None
    ((found, _),) = sample(model, tokenizer, [ids], [0], room, how, streamer=printer)
    text: str = tokenizer.decode(found, skip_special_tokens=True)
    return text.strip()


def prove(settings: Settings, recipe: Path) -> int:
    """Ask a tiny random model, and check what a user relies on. Errors: TaskError, naming the check."""
    import torch

    import models
    import tiny
    from prompt import set_form, text_of
    from rows import Source, read_all

    models.quieten()
    rows = read_all(
        [Source(str(recipe / "data" / "sample.jsonl"), 0.0)], seed=0, skip_bad=False, form=settings.form
    ).train
    device = models.choose_device("auto" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as scratch:
        tiny.make_model(Path(scratch), [text_of(row) for row in rows], "llama")
        model, tokenizer = models.load_ready(scratch, "", device)
    form = set_form(tokenizer, settings.form)
    greedy = replace(settings, temperature=0.0, max_new_tokens=16)
    first = answer(model, tokenizer, "日本で一番高い山は?", "", greedy)
    checks = {
        f"it answers ({form})": bool(first),
        "the likeliest answer is the same again": answer(model, tokenizer, "日本で一番高い山は?", "", greedy) == first,
        "another question has another": answer(model, tokenizer, "名物は何ですか。", "", greedy) != first,
        "sampling is on": len(
            {answer(model, tokenizer, "山は?", "", replace(greedy, temperature=1.0)) for _ in range(4)}
        )
        > 1,
    }
    for what, passed in checks.items():
        if not passed:
            raise TaskError(f"smoke: failed: {what}")
        print(f"smoke       {what}", flush=True)
    return 0


def _begin(settings: Settings, context: str, question: str) -> Row | Dialogue:
    if settings.form.kind == "instruction":
        return Row(question, "", context)
    told = "\n\n".join(text for text in (settings.system, context) if text)
    return Dialogue((*([Turn("system", told)] if told else []), Turn("user", question)))


def _say(model: Any, tokenizer: Any, asked: Row | Dialogue, settings: Settings) -> str:
    """Print the response, on a terminal while it comes."""
    stream = sys.stdout.isatty()
    said = reply(model, tokenizer, asked, settings, stream=stream)
    if not stream:
        print(said, flush=True)
    return said


def _converse(model: Any, tokenizer: Any, context: str, settings: Settings) -> int:
    """Single questions, or one dialogue, as the form is; the end of input ends it."""
    prompt = "質問> " if sys.stdin.isatty() else ""
    before: Dialogue | None = None
    while True:
        try:
            question = input(prompt).strip()
        except EOFError:
            return 0
        if not question:
            continue
        asked = Dialogue((*before.turns, Turn("user", question))) if before else _begin(settings, context, question)
        try:
            said = _say(model, tokenizer, asked, settings)
        except TaskError as error:
            again = "; what was said before is forgotten now: ask again" if before else ""
            print(f"error: {error}{again}", file=sys.stderr, flush=True)
            before = None
            continue
        if isinstance(asked, Dialogue):
            before = Dialogue((*asked.turns, Turn("assistant", said or " ")))


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
    parser.add_argument("--model", metavar="PLACE", help="a whole model instead of an adapter")
    parser.add_argument("--base", metavar="DIR", help="the base model's folder, if it is not where the adapter says")
    parser.add_argument("--context", type=Path, metavar="FILE", help="a text to answer from")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, offline; checks what a user relies on")
    parser.add_argument("--greedy", action="store_true", help="no chance: always the likeliest token")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options.run(main)
