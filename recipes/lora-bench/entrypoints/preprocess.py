"""Split the examples and tokenise them; the responses alone are targets.

preprocess --input raw --output processed
preprocess --set model=EleutherAI/gpt-neo-1.3B
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import dolly
from ekiben_tasks.task import caches, command, errors, files
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.hub import is_hub_model, locate_model
from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class Settings:
    """Define the settings of `preprocess`."""

    model: str = option("meta-llama/Llama-3.2-1B", "model with the tokenizer: a hub id or a local folder")
    validation_split: float = option(0.1, "share of the examples kept for evaluation", old="test_share")
    max_length: int = option(2048, "longer examples are truncated to this number of tokens")
    seed: int = option(42, "of the split")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `preprocess` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: a setting is wrong.
        TaskError: the rows cannot be read, the tokenizer cannot be loaded, or the output is not empty.
    """
    parser = command.command("preprocess", __doc__, Settings, arguments)
    parser.add_argument("--input", type=Path, metavar="FOLDER", default=Path("raw"), help="default: raw")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("processed"), help="default: processed")
    args: argparse.Namespace = parser.parse_args(arguments)
    settings = options.load(Settings, args.config, args.set)
    if not 0 < settings.validation_split < 1:
        raise errors.SettingError(
            f"setting validation_split: must be above 0 and below 1, not {settings.validation_split}"
        )
    rows = dolly.read(args.input)
    is_hub_model(settings.model)
    output = files.ensure_output_dir(args.output, empty=True)
    print_once(*caches.prepare_caches(os.environ), *caches.prefer_cache(os.environ))
    preprocess(settings, rows, output)
    return 0


def preprocess(settings: Settings, rows: Sequence[dolly.Row], output: Path) -> None:
    """Write train.parquet, test.parquet, and processed.json last.

    Raises:
        TaskError: no response of a split fits max_length, or the tokenizer cannot be loaded.
    """
    from ekiben_tasks.models import load

    tokenizer = load.load_tokenizer(locate_model(settings.model))
    record: dict[str, object] = {"model": settings.model, "vocabulary": len(tokenizer), "data": dolly.digest(rows)}
    for name, examples in zip(
        ("train", "test"), dolly.split(rows, settings.validation_split, settings.seed), strict=True
    ):
        encoded = [dolly.encode(tokenizer, row, settings.max_length) for row in examples]
        usable = [(ids, labels) for ids, labels in encoded if any(label >= 0 for label in labels)]
        if not usable:
            raise TaskError(
                f"setting max_length: no response of the {name} examples begins within {settings.max_length} tokens"
            )
        dolly.write_split(output / f"{name}.parquet", usable)
        num_target_tokens = sum(label >= 0 for _, labels in usable for label in labels)
        responses = [
            tokenizer.decode([label for label in labels if label >= 0], skip_special_tokens=True)
            for _, labels in usable
        ]
        record[name] = {
            "rows": len(usable),
            "tokens": sum(len(ids) for ids, _ in usable),
            "num_target_tokens": num_target_tokens,
            "bytes": sum(len(text.encode()) for text in responses),
            "without_response": len(encoded) - len(usable),
        }
        print(f"{name:<12}{len(usable):,} examples, {num_target_tokens:,} target tokens", flush=True)
    files.write_json(output / dolly.RECORD, record)
    print(f"done        {output}; check-dataset --input {output}", flush=True)


if __name__ == "__main__":
    command.run(main)
