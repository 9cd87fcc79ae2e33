"""Learn a SentencePiece tokenizer from texts.

train-tokenizer --data botchan.txt --set vocab_size=2000
train-tokenizer --data corpus/ --output tokenizer --set vocab_size=32000
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import texts
from ekiben_tasks.data.sources import InvalidExample
from ekiben_tasks.task import command, errors
from ekiben_tasks.task import files as files_module
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class Settings:
    """Define the settings of `train-tokenizer`."""

    vocab_size: int = option(2000, "pieces, the symbols and the 256 bytes among them")
    character_coverage: float = option(0.9995, "share of characters covered by pieces; the rest become bytes")
    model_type: Literal["unigram", "bpe"] = option("unigram", "only unigram can be converted later")
    num_threads: int = option(16, "threads, at most as many as there are CPUs")
    column: str = option("text", "where a row of .jsonl or .parquet has its text")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `train-tokenizer` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: a setting is wrong.
        TaskError: the texts cannot be read or do not suit the settings, or the output cannot be written.
    """
    args = _parse(arguments)
    settings = options.load(Settings, args.config, args.set)
    if not 0 < settings.character_coverage <= 1:
        raise errors.SettingError("setting character_coverage: must be above 0 and at most 1")
    recipe = command.recipe_folder(args.config, __file__)
    texts.find_files(args.data, recipe)
    output = files_module.ensure_output_dir(args.output)
    train(settings, args.data, recipe, output, skip_bad=args.skip_invalid)
    return 0


def train(settings: Settings, data: Sequence[str], recipe: Path, output: Path, *, skip_bad: bool = False) -> None:
    """Write tokenizer.model, tokenizer.vocab and tokenizer.run.json into ``output``.

    Raises:
        TaskError: the data cannot be read, holds no text, or does not suit the settings.
    """
    import pieces
    from ekiben_tasks.task.files import write_json
    from ekiben_tasks.task.run_metadata import versions

    files = texts.find_files(data, recipe)
    skipped: list[InvalidExample] = []
    read = texts.read_documents(files, settings.column, skipped if skip_bad else None)
    documents = [text for _, text in read]
    print_once(*texts.format_skipped(skipped))
    lines = [line for text in documents for line in text.splitlines() if line.strip()]
    if not lines:
        raise TaskError(f"data {', '.join(data)}: holds no text")
    print(
        f"learning    {settings.vocab_size:,} pieces from {len(lines):,} lines of {len(documents):,} texts", flush=True
    )
    model = pieces.learn(
        lines,
        vocabulary=settings.vocab_size,
        coverage=settings.character_coverage,
        kind=settings.model_type,
        threads=min(settings.num_threads, len(os.sched_getaffinity(0))),
    )
    _write(output / pieces.MODEL, model)
    processor = pieces.load(output)
    # SentencePiece's second output file: a line per piece with its log probability.
    listed = [f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n" for i in range(processor.vocab_size())]
    _write(output / "tokenizer.vocab", "".join(listed).encode())

    tokens = [processor.encode(text) for text in documents]
    returned = [processor.decode(ids) for ids in tokens]
    if [processor.encode(text) for text in returned] != tokens:
        raise TaskError(f"{output}: decoding a text's tokens changed it; this should be impossible with byte pieces")
    same = sum(text == back for text, back in zip(documents, returned, strict=True))
    per_token = sum(map(len, documents)) / sum(map(len, tokens))
    write_json(
        output / "tokenizer.run.json",
        {
            "vocab_size": processor.vocab_size(),
            "sha256": pieces.fingerprint(output),
            "data": texts.digest(files),
            "texts": len(documents),
            "lines": len(lines),
            "characters_per_token": round(per_token, 3),
            "settings": dict(vars(settings)),
            "versions": versions(),
        },
    )
    print(
        f"round trip  {same:,} of {len(documents):,} texts to the letter, the others but for NFKC's changes", flush=True
    )
    print(f"done        {output / pieces.MODEL}: {per_token:.2f} characters per token", flush=True)


def _write(file: Path, content: bytes) -> None:
    staged = file.with_name(f".{file.name}.staged-{os.getpid()}")
    staged.write_bytes(content)
    staged.replace(file)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.command("train-tokenizer", __doc__, Settings, arguments)
    parser.add_argument(
        "--data",
        action="append",
        metavar="PATH",
        required=True,
        help="a .txt, .jsonl or .parquet file, or a folder of them; repeatable; 'sample': the recipe's own texts",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("tokenizer"), help="default: tokenizer")
    command.add_flag(
        parser, "--skip-invalid", former="--skip-bad", help="leave bad rows out instead of stopping at them"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    command.run(main)
