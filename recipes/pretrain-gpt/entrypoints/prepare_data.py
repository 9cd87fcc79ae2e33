"""Tokenise texts with several processes into the memory-mapped files that pretraining reads.

prepare-data --data arxiv.jsonl --tokenizer tokenizer --output prepared
prepare-data --data corpus/ --set workers=16
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import texts
from ekiben_tasks.data.sources import InvalidExample
from ekiben_tasks.task import command, input_files
from ekiben_tasks.task import files as files_module
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.settings import option

PREFIX = "text_document"  # text_document.bin and .idx, as Megatron's own tool names them
RECORD = "prepared.json"
_FIELDS = {"vocab_size": int, "end_of_document": int, "documents": int, "tokens": int, "tokenizer": str, "data": str}
_CHUNK = 256  # texts per task of a worker


@dataclass(frozen=True)
class Settings:
    """Define the settings of `prepare-data`."""

    column: str = option("text", "where a row of .jsonl or .parquet has its text")
    append_eod: bool = option(True, "end every document with <EOD>")
    workers: int = option(0, "processes that tokenise; 0: as many as there are CPUs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `prepare-data` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: a setting is wrong.
        TaskError: the texts or the tokenizer cannot be read, or the output cannot be written or is not empty.
    """
    args = _parse(arguments)
    settings = options.load(Settings, args.config, args.set)
    recipe = command.recipe_folder(args.config, __file__)
    texts.find_files(args.data, recipe)
    output = files_module.ensure_output_dir(args.output, empty=True)
    prepare(settings, args.data, recipe, args.tokenizer, output, skip_bad=args.skip_invalid)
    return 0


def prepare(
    settings: Settings, data: Sequence[str], recipe: Path, tokenizer: Path, output: Path, *, skip_bad: bool = False
) -> None:
    """Write text_document.bin and .idx, the tokenizer, and prepared.json last.

    skip_bad: leave out rows without text.

    Raises:
        TaskError: the texts or the tokenizer cannot be read, or the disk is full; ``output`` stays empty.
    """
    import pieces
    from ekiben_tasks.task.files import write_json

    processor = pieces.load(tokenizer)
    files = texts.find_files(data, recipe)
    workers = settings.workers or len(os.sched_getaffinity(0))
    print(f"tokenising  {len(files)} files in {workers} processes", flush=True)
    began = time.monotonic()
    skipped: list[InvalidExample] = []
    documents = texts.read_documents(files, settings.column, skipped if skip_bad else None)
    try:
        counted, tokens = _write(settings, tokenizer, processor, documents, workers, output)
        if not counted:
            raise TaskError(f"data {', '.join(data)}: holds no text")
        file = tokenizer / pieces.MODEL if tokenizer.is_dir() else tokenizer
        shutil.copyfile(file, output / pieces.MODEL)
        record = {
            "documents": counted,
            "tokens": tokens,
            "vocab_size": processor.vocab_size(),
            "end_of_document": processor.piece_to_id(pieces.END),
            "tokenizer": pieces.fingerprint(file),
            "data": texts.digest(files),
        }
        write_json(output / RECORD, record)
    except BaseException as error:
        for file in output.iterdir():
            file.unlink()
        if isinstance(error, OSError):
            raise TaskError(f"{output}: cannot be written: {error.strerror or error}") from error
        raise
    seconds = time.monotonic() - began
    print_once(*texts.format_skipped(skipped))
    print(
        f"done        {output}: {counted:,} documents, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s", flush=True
    )


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record that prepare() wrote into ``folder``.

    Raises:
        TaskError: it cannot be read, or lacks a field.
    """
    file, advice = folder.absolute() / RECORD, "prepare-data writes such a folder"
    record = input_files.read_object(file, advice)
    if damaged := [name for name, kind in _FIELDS.items() if not isinstance(record.get(name), kind)]:
        raise TaskError(f"{file}: has no valid {', '.join(damaged)}; {advice}")
    return record


def _write(
    settings: Settings,
    tokenizer: Path,
    processor: Any,
    documents: Iterator[tuple[str, str]],
    workers: int,
    output: Path,
) -> tuple[int, int]:
    """(documents, tokens). The order is that of the data, however many processes work."""
    import numpy

    kind = numpy.dtype(numpy.uint16 if processor.vocab_size() < 65_500 else numpy.int32)
    ahead = threading.Semaphore(4 * workers)  # or the pool would read all texts into memory
    lengths = [numpy.zeros(0, dtype=numpy.int32)]
    # Not forked: a process with threads may not survive that.
    context = multiprocessing.get_context("spawn")
    with (
        (output / f"{PREFIX}.bin").open("wb") as file,
        context.Pool(workers, _start_worker, (str(tokenizer), settings.append_eod)) as pool,
    ):
        for chunk_lengths, ids in pool.imap(_encode, _chunks(documents, ahead)):
            ahead.release()
            lengths.append(chunk_lengths)
            file.write(ids.astype(kind).tobytes())
    all_lengths = numpy.concatenate(lengths)
    write_index(output / f"{PREFIX}.idx", all_lengths, kind)
    return len(all_lengths), int(all_lengths.sum(dtype=numpy.int64))


def write_index(file: Path, lengths: Any, kind: Any) -> None:
    """Write where each document lies in the .bin file, in the format of Megatron-Core's IndexedDataset.

    Magic, version 1, code of the tokens' type, counts of sequences and of document bounds; then each sequence's length
    (int32), its first byte (int64), and the bounds (int64). A document is one sequence here. lengths: tokens of each
    document. kind: numpy's dtype of a token, int32 or uint16.
    """
    import numpy

    starts = numpy.zeros(len(lengths), dtype=numpy.int64)
    numpy.cumsum(lengths[:-1], out=starts[1:])
    code = {"int32": 4, "uint16": 8}[kind.name]
    with file.open("wb") as out:
        out.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1))
        out.write(lengths.astype(numpy.int32).tobytes())
        out.write((starts * kind.itemsize).tobytes())
        out.write(numpy.arange(len(lengths) + 1, dtype=numpy.int64).tobytes())


def _chunks(documents: Iterator[tuple[str, str]], ahead: threading.Semaphore) -> Iterator[list[str]]:
    while texts := [text for _, text in islice(documents, _CHUNK)]:
        ahead.acquire()
        yield texts


_worker: dict[str, Any] = {}


def _start_worker(tokenizer: str, append_eod: bool) -> None:
    import pieces

    processor = pieces.load(Path(tokenizer))
    _worker.update(processor=processor, end=[processor.piece_to_id(pieces.END)] if append_eod else [])


def _encode(texts: list[str]) -> tuple[Any, Any]:
    """(tokens of each text, all tokens)."""
    import numpy

    encoded = [ids + _worker["end"] for ids in _worker["processor"].encode(texts)]
    lengths = numpy.array([len(ids) for ids in encoded], dtype=numpy.int32)
    return lengths, numpy.fromiter((token for ids in encoded for token in ids), dtype=numpy.int32, count=lengths.sum())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command.command("prepare-data", __doc__, Settings, arguments)
    parser.add_argument(
        "--data",
        action="append",
        metavar="PATH",
        required=True,
        help="a .txt, .jsonl or .parquet file, or a folder of them; repeatable; 'sample': the recipe's own texts",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", default=Path("tokenizer"), help="output folder of train-tokenizer"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("prepared"), help="default: prepared")
    command.add_flag(
        parser, "--skip-invalid", former="--skip-bad", help="leave bad rows out instead of stopping at them"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    command.run(main)
