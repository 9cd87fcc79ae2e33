"""Show one prepared example, and check all of them.

check-dataset --input processed --row 2
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import dolly
from ekiben_tasks.task import caches, command
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.hub import locate_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `check-dataset` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        TaskError: the folder cannot be read, an example is invalid, or there is no such row.
    """
    parser = command.plain_parser("check-dataset", __doc__)
    parser.add_argument("--input", type=Path, metavar="DIR", default=Path("processed"), help="default: processed")
    parser.add_argument("--row", type=int, metavar="N", default=2, help="of the training rows, from 0; default 2")
    args = parser.parse_args(arguments)
    record = dolly.read_record(args.input)
    print_once(*caches.prepare_caches(os.environ))
    check(args.input, record)
    rows = dolly.read_split(args.input, "train")
    if not 0 <= args.row < len(rows):
        raise TaskError(f"--row {args.row}: there are {len(rows):,} rows, from 0")
    from ekiben_tasks.models import load

    ids, labels = rows[args.row]
    print(f"row {args.row}       {len(ids)} tokens, {labels.count(dolly.IGNORED)} of them ignored")
    print(f"input_ids   {ids}\nlabels      {labels}")
    print(f"text        {load.load_tokenizer(locate_model(record['model'])).decode(ids)!r}")
    return 0


def check(folder: Path, record: dict[str, object]) -> None:
    """Check every example in ``folder``. record: the record that preprocess wrote.

    Raises:
        TaskError: an example's labels are not its own tokens, or the counts are not the record's.
    """
    for name in ("train", "test"):
        rows = dolly.read_split(folder, name)
        for number, (ids, labels) in enumerate(rows):
            targets = [(token, label) for token, label in zip(ids, labels, strict=True) if label != dolly.IGNORED]
            if not targets or any(token != label for token, label in targets) or labels[0] != dolly.IGNORED:
                raise TaskError(f"{folder}/{name}.parquet row {number}: its labels are not the response's tokens")
        counted = {"rows": len(rows), "tokens": sum(len(ids) for ids, _ in rows)}
        recorded = record[name]
        assert isinstance(recorded, dict)
        if any(recorded[key] != value for key, value in counted.items()):
            raise TaskError(
                f"{folder}/{name}.parquet: holds {counted}, and the record says {recorded}; preprocess again"
            )
        print(f"{name:<12}{len(rows):,} rows, {counted['tokens']:,} tokens: valid")


if __name__ == "__main__":
    command.run(main)
