"""Ask a fine-tuned model.

chat "半年で15単位しか取れませんでした。除籍されますか?"
chat --context gakusoku.txt "除籍の条件は何ですか?"
chat                     several questions; Ctrl-D ends it
chat --adapter other/adapter --base /models/open-calm-3b --greedy "質問"
chat --model ./result/model --set form.kind=chat        a conversation with its history
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ekiben_tasks.generation.settings import ChatSettings, check_chat
from ekiben_tasks.task import adapter_folder, caches, command, input_files
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.errors import SettingError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `chat` and return its exit code.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: a setting is wrong, or the format is a template, whose columns a question cannot fill.
        TaskError: the context, the model or the adapter cannot be read.
    """
    args = _parse(arguments)
    settings = options.load(ChatSettings, args.config, args.set)
    settings = replace(settings, temperature=0.0) if args.greedy else settings
    settings = replace(settings, model=args.model or "" if args.model or args.adapter else settings.model)
    settings = replace(settings, adapter=args.adapter or settings.adapter)
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
        caches.prepare_caches(os.environ)
        from ekiben_tasks.generation.smoke import smoke_chat

        return smoke_chat(settings, command.recipe_folder(args.config, __file__) / "data" / "sample.jsonl")
    if settings.form.kind in ("template", "text"):
        raise SettingError(
            f"setting form.kind={settings.form.kind}: is not a question; use `generate`, or another kind"
        )
    check_chat(settings)
    context = _read_context(args.context) if args.context else ""
    adapter_folder.check_source(settings.model, "" if settings.model else settings.adapter, args.base)
    for line in [*caches.prepare_caches(os.environ), *caches.prefer_cache(os.environ)]:
        print(line, file=sys.stderr, flush=True)

    import torch

    from ekiben_tasks.data.tokenize import apply_format
    from ekiben_tasks.generation import chat
    from ekiben_tasks.models.adapter import load_ready
    from ekiben_tasks.models.device import choose_device
    from ekiben_tasks.models.placement import free_memory, spread_layers

    device = choose_device(settings.device)
    print(f"loading     {settings.model or settings.adapter} on {device.name}", file=sys.stderr, flush=True)
    adapter = "" if settings.model else settings.adapter
    device_map = None
    if settings.devices == "auto":
        path = adapter_folder.find_model(settings.model, adapter, args.base)
        placement = spread_layers(path, device, free_memory(), settings.bits)
        print("\n".join(placement.format_lines(device.name)), file=sys.stderr, flush=True)
        device_map = placement.device_map
    model, tokenizer = load_ready(
        settings.model, adapter, device, base=args.base, bits=settings.bits, device_map=device_map
    )
    apply_format(tokenizer, settings.form)
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    if args.question:
        chat.print_reply(model, tokenizer, chat.first_question(settings, context, args.question), settings)
        return 0
    return chat.converse(model, tokenizer, context, settings)


def _read_context(file: Path) -> str:
    advice = "--context takes a text in UTF-8, which is bound into the container"
    return input_files.read_text(file, advice, pipe=True).strip()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.command("chat", __doc__, ChatSettings, arguments)
    parser.add_argument("question", nargs="?", help="one question; without it, several from standard input")
    parser.add_argument("--adapter", metavar="DIR", help="folder train wrote (default: result/adapter)")
    parser.add_argument("--model", metavar="MODEL", help="a complete model instead of an adapter")
    parser.add_argument("--base", metavar="DIR", help="the base model's folder, if not that of the adapter's config")
    parser.add_argument("--context", type=Path, metavar="FILE", help="a context for the answer")
    parser.add_argument("--smoke", action="store_true", help="test with a tiny model, offline")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    command.run(main)
