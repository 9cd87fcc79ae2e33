"""Write a model, or an adapter merged into its base, as GGUF files of llama.cpp.

gguf --model merged --type Q4_K_M
gguf --adapter result/adapter --output gguf --type F16 --type Q8_0
gguf --dry-run          what would be written; the tokenizer is tried, no weights are loaded
gguf --smoke            offline, in seconds
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from ekiben_tasks.task import adapter_folder, caches, command
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import SettingError
from gguf_settings import TYPES, GgufSettings, check_gguf


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `gguf` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: an option or a setting is wrong.
        TaskError: the model, its tokenizer or the output cannot be used.
    """
    parser = command.command("gguf", __doc__, GgufSettings, arguments)
    parser.add_argument("--model", metavar="MODEL", help="instead of the setting model")
    parser.add_argument("--adapter", metavar="DIR", help="instead of the setting adapter")
    parser.add_argument("--base", metavar="DIR", help="the base model's folder, if not that of the adapter's config")
    parser.add_argument("--output", metavar="DIR", help="instead of the setting output")
    parser.add_argument("--type", action="append", metavar="TYPE", help=f"{', '.join(TYPES)}; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and stop")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an earlier run")
    parser.add_argument("--smoke", action="store_true", help="test with a tiny model, offline")
    args = parser.parse_args(arguments)
    settings = options.load(GgufSettings, args.config, args.set)
    named = {
        "model": args.model,
        "adapter": args.adapter,
        "output": args.output,
        "types": args.type and tuple(args.type),
    }
    settings = replace(settings, **{name: value for name, value in named.items() if value})
    check_gguf(settings)
    if args.model and settings.adapter:
        raise SettingError(f"--model {args.model}: the adapter {settings.adapter} names its base; --base replaces that")
    sample = command.recipe_folder(args.config, __file__) / "data" / "sample.txt"
    print_once(*caches.prepare_caches(os.environ))
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # where each update of a bar is a line
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import gguf_smoke_test

        return gguf_smoke_test.smoke_test(sample)
    if adapter_folder.check_source(settings.model, settings.adapter, args.base):
        print_once(*caches.prefer_cache(os.environ))

    import gguf_write  # seconds of import that a wrong setting need not wait for

    job = gguf_write.Request(settings, sample, base=args.base, is_dry=args.dry_run, overwrite=args.overwrite)
    return gguf_write.run(job)


if __name__ == "__main__":
    command.run(main)
