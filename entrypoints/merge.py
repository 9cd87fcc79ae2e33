"""Write an adapter into its base: one ordinary model, for programs that know no adapters.

merge --adapter result/adapter --output merged
merge --base /models/open-calm-3b --set dtype=bfloat16
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import places
import settings as options
from settings import TaskError, option

if TYPE_CHECKING:
    import torch

    import models

# How far logits may move, as a share of the largest: rounding the merged weights to the type they are stored in.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Settings:
    adapter: str = option("result/adapter", "folder of the adapter; --adapter")
    output: str = option("merged", "an empty or new folder; --output")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option(
        "auto", "type to store; auto: as the base is stored"
    )
    device: Literal["auto", "cpu"] = option("cpu", "where to compute, in fp32 either way: 3B needs 12 GB, 7B 28 GB")


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    settings = options.load(Settings, args.config, args.set)
    output = places.claim_folder(Path(args.output or settings.output), empty=True)
    for line in [*places.prepare_caches(os.environ), *places.prefer_cache(os.environ)]:
        print(line, flush=True)

    import models

    folder = Path(args.adapter or settings.adapter)
    device = models.choose_device(settings.device)
    print(f"merging     {folder} on {device.name}", flush=True)
    difference = merge(folder, output, device, base=args.base, dtype=settings.dtype)
    print(f"done        {output}: written, read again, logits differ by {difference:.1e} of the largest", flush=True)
    return 0


def merge(folder: Path, output: Path, device: models.Device, *, base: str | None = None, dtype: str = "auto") -> float:
    """Merge, write to ``output``, read it back; the difference in logits. Errors: TaskError: nothing is left in output."""
    import torch
    from safetensors import SafetensorError

    import models

    exact = replace(device, dtype=torch.float32)
    torch.set_float32_matmul_precision("highest")  # TF32 would round the merge and the comparison to three digits
    adapted, name = models.load_adapter(folder, exact, base=base)
    stored = models.stored_dtype(name) if dtype == "auto" else getattr(torch, dtype)
    ids = torch.arange(100, 116, device=exact.place)[None] % adapted.config.vocab_size
    before = logits(adapted, ids)
    if not before.isfinite().all():
        raise TaskError(f"{folder} on {name} gives logits that are no numbers (NaN or infinite): one of them is broken")
    # merge_and_unload works on a copy of the structure: only the model it returns is the merged one.
    merged = adapted.merge_and_unload()
    staged = output.absolute().with_name(f".{output.name}.staged-{os.getpid()}")
    try:
        merged.to(stored).save_pretrained(staged)
        tokenizer = folder if (folder / "tokenizer_config.json").is_file() else name
        models.load_tokenizer(str(tokenizer)).save_pretrained(staged)
        del adapted, merged
        after = logits(models.load_base(str(staged), exact), ids)
        difference = float((after - before).abs().max() / before.abs().max())
        allowed = TOLERANCE[str(stored).removeprefix("torch.")]
        if not difference <= allowed:
            raise TaskError(
                f"merged logits differ by {difference:.1e} of the largest, more than {allowed}: nothing written"
            )
        models.replace_folder(staged, output)
    except (OSError, SafetensorError) as error:  # the second is what safetensors makes of a full disk
        raise TaskError(f"{output}: cannot be written ({error}); make room, or give another --output") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return difference


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """In fp32, [tokens, vocabulary]."""
    import torch

    model.eval()
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids).logits[0].float()
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = options.command("merge", __doc__, Settings, arguments)
    parser.add_argument("--adapter", metavar="DIR", help="folder train wrote (default: result/adapter)")
    parser.add_argument("--base", metavar="DIR", help="the base model's folder, if it is not where the adapter says")
    parser.add_argument("--output", metavar="DIR", help="where the merged model goes (default: merged)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options.run(main)
