"""Look at one prepared row, and check all of them.

check-dataset --input processed --row 2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import dolly
import places
import settings as options
from hub import locate_model
from settings import TaskError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="check-dataset", description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path, metavar="DIR", default=Path("processed"), help="default: processed")
    parser.add_argument("--row", type=int, metavar="N", default=2, help="of the training rows, from 0; default 2")
    args = parser.parse_args(arguments)
    about = dolly.read_record(args.input)
    for line in places.prepare_caches(os.environ):
        print(line, flush=True)
    check(args.input, about)
    rows = dolly.read_split(args.input, "train")
    if not 0 <= args.row < len(rows):
        raise TaskError(f"--row {args.row}: there are {len(rows):,} rows, from 0")
    import models

    ids, labels = rows[args.row]
    print(f"row {args.row}       {len(ids)} tokens, {labels.count(dolly.IGNORED)} of them not learnt")
    print(f"input_ids   {ids}\nlabels      {labels}")
    print(f"text        {models.load_tokenizer(locate_model(about['model'])).decode(ids)!r}")
    return 0


def check(folder: Path, about: dict[str, object]) -> None:
    """Errors: TaskError: a row whose labels are not its own tokens, counts that are not the record's."""
    for name in ("train", "test"):
        rows = dolly.read_split(folder, name)
        for number, (ids, labels) in enumerate(rows):
            learnt = [(token, label) for token, label in zip(ids, labels, strict=True) if label != dolly.IGNORED]
            if not learnt or any(token != label for token, label in learnt) or labels[0] != dolly.IGNORED:
                raise TaskError(f"{folder}/{name}.parquet row {number}: its labels are not the response's tokens")
        counted = {"rows": len(rows), "tokens": sum(len(ids) for ids, _ in rows)}
        recorded = about[name]
        assert isinstance(recorded, dict)
        if any(recorded[key] != value for key, value in counted.items()):
            raise TaskError(
                f"{folder}/{name}.parquet: holds {counted}, and the record says {recorded}; preprocess again"
            )
        print(f"{name:<12}{len(rows):,} rows, {counted['tokens']:,} tokens: as they should be")


if __name__ == "__main__":
    options.run(main)
