"""Merge an adapter into its base: one ordinary model, for programs without LoRA support.

merge --adapter result/adapter --output merged
merge --base /models/open-calm-3b --set dtype=bfloat16
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ekiben_tasks.task import adapter_folder, caches, command, files, model_card
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class Settings:
    """Define the settings of `merge`."""

    adapter: str = option("result/adapter", "folder of the adapter; --adapter")
    output: str = option("merged", "an empty or new folder; --output")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option(
        "auto", "type to store; auto: as the base is stored"
    )
    device: Literal["auto", "cpu"] = option("cpu", "where to compute, always in fp32: 3B needs 12 GB, 7B 28 GB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `merge` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: a setting is wrong.
        TaskError: the adapter or its base cannot be loaded, the merged logits differ, or the output cannot be written.
    """
    args = _parse(arguments)
    settings = options.load(Settings, args.config, args.set)
    folder = Path(args.adapter or settings.adapter)
    adapter_folder.check_source("", str(folder), args.base)
    output = files.ensure_output_dir(Path(args.output or settings.output), empty=True)
    print_once(*caches.prepare_caches(os.environ), *caches.prefer_cache(os.environ))

    from ekiben_tasks.models.device import choose_device
    from ekiben_tasks.models.merge import merge

    device = choose_device(settings.device)
    print(f"merging     {folder} on {device.name}", flush=True)
    difference = merge(folder, output, device, base=args.base, dtype=settings.dtype)
    model_card.carry_training(folder, output)
    print(f"done        {output}: written and read back, logits differ by {difference:.1e} of the largest", flush=True)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.command("merge", __doc__, Settings, arguments)
    parser.add_argument("--adapter", metavar="DIR", help="folder train wrote (default: result/adapter)")
    parser.add_argument("--base", metavar="DIR", help="the base model's folder, if not that of the adapter's config")
    parser.add_argument("--output", metavar="DIR", help="where the merged model is written (default: merged)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    command.run(main)
