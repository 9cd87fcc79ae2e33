"""Split the rows and make tokens of them, the response alone to be learnt.

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
import places
import settings as options
from hub import locate_model
from settings import TaskError, option


@dataclass(frozen=True)
class Settings:
    model: str = option("meta-llama/Llama-3.2-1B", "whose tokenizer: a hub id or a local folder")
    test_share: float = option(0.1, "share of the rows kept for testing")
    max_length: int = option(2048, "longer rows are cut to so many tokens")
    seed: int = option(42, "of the split")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options.command("preprocess", __doc__, Settings, arguments)
    parser.add_argument("--input", type=Path, metavar="PLACE", default=Path("raw"), help="default: raw")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("processed"), help="default: processed")
    args: argparse.Namespace = parser.parse_args(arguments)
    settings = options.load(Settings, args.config, args.set)
    rows = dolly.read(args.input)
    output = places.claim_folder(args.output, empty=True)
    for line in [*places.prepare_caches(os.environ), *places.prefer_cache(os.environ)]:
        print(line, flush=True)
    preprocess(settings, rows, output)
    return 0


def preprocess(settings: Settings, rows: Sequence[dolly.Row], output: Path) -> None:
    """Write train.parquet, test.parquet, and processed.json last. Errors: TaskError."""
    import models
    from record import write_json

    if not 0 < settings.test_share < 1:
        raise options.SettingError(f"setting test_share: must be above 0 and below 1, not {settings.test_share}")
    tokenizer = models.load_tokenizer(locate_model(settings.model))
    about: dict[str, object] = {"model": settings.model, "vocabulary": len(tokenizer), "data": dolly.digest(rows)}
    for name, part in zip(("train", "test"), dolly.split(rows, settings.test_share, settings.seed), strict=True):
        encoded = [dolly.encode(tokenizer, row, settings.max_length) for row in part]
        learnable = [(ids, labels) for ids, labels in encoded if any(label >= 0 for label in labels)]
        if not learnable:
            raise TaskError(
                f"setting max_length: no response of the {name} rows begins within {settings.max_length} tokens"
            )
        dolly.write_split(output / f"{name}.parquet", learnable)
        learnt = sum(label >= 0 for _, labels in learnable for label in labels)
        responses = [
            tokenizer.decode([label for label in labels if label >= 0], skip_special_tokens=True)
            for _, labels in learnable
        ]
        about[name] = {
            "rows": len(learnable), "tokens": sum(len(ids) for ids, _ in learnable), "learnt": learnt,
            "bytes": sum(len(text.encode()) for text in responses), "without_response": len(encoded) - len(learnable),
        }  # fmt: skip
        print(f"{name:<12}{len(learnable):,} rows, {learnt:,} tokens to learn", flush=True)
    write_json(output / dolly.RECORD, about)
    print(f"done        {output}; check-dataset --input {output}", flush=True)


if __name__ == "__main__":
    options.run(main)
