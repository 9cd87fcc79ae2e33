"""Count the rows, and their missing values.

check-raw --input raw
check-raw --input my_rows.jsonl --expect 0           any number of rows
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import dolly
from ekiben_tasks.task import command
from ekiben_tasks.task.errors import TaskError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `check-raw` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        TaskError: the file cannot be read, has another number of rows, or a row lacks more than its context.
    """
    parser = command.plain_parser("check-raw", __doc__)
    parser.add_argument("--input", type=Path, metavar="FOLDER", default=Path("raw"), help="default: raw")
    parser.add_argument(
        "--expect", type=int, metavar="N", default=dolly.ROWS, help=f"rows; default {dolly.ROWS}, 0: any"
    )
    args = parser.parse_args(arguments)
    rows = dolly.read(args.input)
    print(f"rows        {len(rows):,}")
    for name, count in dolly.count_empty(rows).items():
        print(f"{name:<12}{count:,} null or empty")
    for number, row in enumerate(rows[:3]):
        print(
            f"[{number}] instruction: {row['instruction']}\n    context: {row['context']}\n    response:"
            f" {row['response']}"
        )
    if args.expect and len(rows) != args.expect:
        raise TaskError(f"{args.input}: {len(rows):,} rows, and {args.expect:,} were expected (--expect 0: any number)")
    empty = {name: count for name, count in dolly.count_empty(rows).items() if count and name != "context"}
    if empty:
        raise TaskError(f"{args.input}: {empty} null or empty, and only context may be")
    return 0


if __name__ == "__main__":
    command.run(main)
