"""Cross-entropy and perplexity of the test rows, with an adapter or without.

evaluate                                             the base model: where training starts from
evaluate --adapter bench/run-1/adapter
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import dolly
import places
import settings as options
from settings import option


@dataclass(frozen=True)
class Settings:
    data: str = option("processed", "what preprocess wrote")
    batch_tokens: int = option(8192, "tokens at a time, filling included")
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU, bf16 where it has it, else fp16; cpu: fp32")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options.command("evaluate", __doc__, Settings, arguments)
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="what train wrote; without: the base model")
    args = parser.parse_args(arguments)
    settings = options.load(Settings, args.config, args.set)
    for line in [*places.prepare_caches(os.environ), *places.prefer_cache(os.environ)]:
        print(line, flush=True)
    found = evaluate(settings, args.adapter)
    print(f"test loss   {found['loss']:.4f} nats per token, {found['nats_per_byte']:.4f} per byte")
    print(f"perplexity  {found['perplexity']:.2f}, of {found['tokens']:,} tokens in {found['rows']:,} rows")
    return 0


def evaluate(settings: Settings, adapter: Path | None) -> dict[str, Any]:
    """By a plain forward pass of filled-up rows: nothing here is shared with the training loop. Errors: TaskError."""
    import torch

    import models

    folder = Path(settings.data)
    about = dolly.read_record(folder)
    device = models.choose_device(settings.device)
    if adapter:
        model, _ = models.load_adapter(adapter, device, base=about["model"])
    else:
        model = models.load_base(about["model"], device)
    model.eval()
    rows = sorted(dolly.read_split(folder, "test"), key=lambda row: len(row[0]))
    total, tokens = 0.0, 0
    while rows:
        count = max(1, settings.batch_tokens // len(rows[-1][0]))
        batch, rows = rows[-count:], rows[:-count]
        longest = len(batch[-1][0])
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in batch])
        labels = torch.tensor([labels + [dolly.IGNORED] * (longest - len(labels)) for _, labels in batch])
        with torch.no_grad():
            logits = model(input_ids=ids.to(device.place), attention_mask=mask.to(device.place)).logits
        wanted = labels[:, 1:].to(device.place)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), wanted, ignore_index=dolly.IGNORED, reduction="sum"
        )
        total, tokens = total + float(loss), tokens + int((wanted != dolly.IGNORED).sum())
    mean = total / tokens
    return {
        "loss": mean, "perplexity": math.exp(min(mean, 100)), "nats_per_byte": total / about["test"]["bytes"],
        "tokens": tokens, "rows": about["test"]["rows"],
    }  # fmt: skip


if __name__ == "__main__":
    options.run(main)
