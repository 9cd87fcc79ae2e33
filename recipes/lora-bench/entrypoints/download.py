"""Download databricks-dolly-15k as one JSONL file.

download --output raw
HF_TOKEN=hf_... download --model meta-llama/Llama-3.2-1B       the model, too, for nodes without a network
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import dolly
from ekiben_tasks.task import caches, command, files
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.hub import format_hub_error, split_revision


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `download` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        TaskError: the output cannot be written, or the hub cannot provide the data set or the model.
    """
    parser = command.plain_parser("download", __doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("raw"), help="default: raw")
    parser.add_argument("--model", metavar="NAME", help="a model to download into the cache, too")
    args = parser.parse_args(arguments)
    output = files.ensure_output_dir(args.output)
    print_once(*caches.prepare_caches(os.environ), *caches.prefer_cache(os.environ))
    import datasets

    try:
        table = datasets.load_dataset(dolly.NAME, split="train")
    except Exception as error:
        raise TaskError(format_hub_error(error, dolly.NAME, "data set")) from error
    staged = output / f".{dolly.FILE}.staged-{os.getpid()}"
    with staged.open("w", encoding="utf-8") as out:
        for row in table:
            out.write(json.dumps({name: row[name] for name in dolly.COLUMNS}, ensure_ascii=False) + "\n")
    staged.replace(output / dolly.FILE)
    print(f"done        {output / dolly.FILE}: {len(table):,} rows; check-raw --input {output}", flush=True)
    if args.model:
        import huggingface_hub

        name, revision = split_revision(args.model)
        try:
            print(f"model       {huggingface_hub.snapshot_download(name, revision=revision)}", flush=True)
        except Exception as error:
            raise TaskError(format_hub_error(error, args.model, "model")) from error
    return 0


if __name__ == "__main__":
    command.run(main)
