"""Write a sharded checkpoint, as a run on many GPUs leaves it, as an ordinary model.

merge-weights result --output merged                    the last checkpoint of a run that was never finished
merge-weights result/checkpoints/step-000250 --output merged --base meta-llama/Llama-2-7b-hf
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ekiben_tasks.models.checkpoint_folder import find_checkpoint
from ekiben_tasks.task import caches, command, files, model_card
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.task.hub import is_hub_model
from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class Settings:
    """Define the settings of `merge-weights`."""

    output: str = option("merged", "an empty or new folder; --output")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option(
        "auto", "type to store; auto: as the base is stored"
    )
    max_shard_gb: float = option(4.0, "size of one file of weights, and about the memory needed", old="file_gb")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `merge-weights` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: a setting is wrong.
        TaskError: there is no sharded checkpoint, it does not name its base model, or the output cannot be written.
    """
    parser = command.command("merge-weights", __doc__, Settings, arguments)
    parser.add_argument("--smoke", action="store_true", help="shard, merge and compare a tiny model, offline")
    parser.add_argument(
        "run", nargs="?", default="result", help="a run's output folder, or one of its checkpoints (default: result)"
    )
    parser.add_argument("--base", metavar="MODEL", help="its base model, if the checkpoint does not name one")
    parser.add_argument("--output", metavar="DIR", help="where the model is written (default: merged)")
    args = parser.parse_args(arguments)
    settings = options.load(Settings, args.config, args.set)
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
    elif not settings.max_shard_gb > 0:
        raise SettingError(f"setting max_shard_gb: must be above 0, not {settings.max_shard_gb}")
    print_once(*caches.prepare_caches(os.environ))
    checkpoint = None if args.smoke else find_checkpoint(Path(args.run))
    if args.base:
        is_hub_model(args.base)

    from ekiben_tasks.models import merge_checkpoint

    if checkpoint is None:
        return merge_checkpoint.smoke_test()
    output = files.ensure_output_dir(Path(args.output or settings.output), empty=True)
    base = args.base or merge_checkpoint.read_fingerprint(checkpoint).get("model")
    if not base:
        raise TaskError(f"{checkpoint}: does not say which model it was trained from; name it with --base")
    if is_hub_model(base):
        print_once(*caches.prefer_cache(os.environ))
    print(f"merging     {checkpoint}, trained from {base}", flush=True)
    count, weights = merge_checkpoint.merge(
        checkpoint, base, output, dtype=settings.dtype, max_shard_gb=settings.max_shard_gb
    )
    model_card.carry_training(Path(args.run), output)
    print(f"done        {output}: {weights:,} weights in {count} files", flush=True)
    return 0


if __name__ == "__main__":
    command.run(main)
