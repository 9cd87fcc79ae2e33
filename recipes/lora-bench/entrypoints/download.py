"""Download databricks-dolly-15k as one file of rows.

download --output raw
HF_TOKEN=hf_... download --model meta-llama/Llama-3.2-1B       the model, too, for nodes without a network
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

import dolly
import places
import settings as options
from hub import explain
from settings import TaskError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="download", description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("raw"), help="default: raw")
    parser.add_argument("--model", metavar="NAME", help="a model to download into the cache, too")
    args = parser.parse_args(arguments)
    output = places.claim_folder(args.output)
    for line in [*places.prepare_caches(os.environ), *places.prefer_cache(os.environ)]:
        print(line, flush=True)
    import datasets

    try:
        table = datasets.load_dataset(dolly.NAME, split="train")
    except Exception as error:
        raise TaskError(explain(error, dolly.NAME, "data set")) from error
    staged = output / f".{dolly.FILE}.staged-{os.getpid()}"
    with staged.open("w", encoding="utf-8") as out:
        for row in table:
            out.write(json.dumps({name: row[name] for name in dolly.COLUMNS}, ensure_ascii=False) + "\n")
    staged.replace(output / dolly.FILE)
    print(f"done        {output / dolly.FILE}: {len(table):,} rows; check-raw --input {output}", flush=True)
    if args.model:
        import huggingface_hub

        try:
            print(f"model       {huggingface_hub.snapshot_download(args.model)}", flush=True)
        except Exception as error:
            raise TaskError(explain(error, args.model, "model")) from error
    return 0


if __name__ == "__main__":
    options.run(main)
