"""Cross-entropy and perplexity of the evaluation examples, with an adapter or without.

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
from ekiben_tasks.task import adapter_folder, caches, command
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class Settings:
    """Define the settings of `evaluate`."""

    data: str = option("processed", "output folder of preprocess")
    batch_tokens: int = option(8192, "tokens at a time, padding included")
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU, bf16 where it has it, else fp16; cpu: fp32")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `evaluate` and return 0.

    arguments: the command line without the program's name; None: that of this process.

    Raises:
        SettingError: a setting is wrong.
        TaskError: the data, the model or the adapter cannot be read.
    """
    parser = command.command("evaluate", __doc__, Settings, arguments)
    parser.add_argument("--adapter", type=Path, metavar="DIR", help="output folder of train; without: the base model")
    args = parser.parse_args(arguments)
    settings = options.load(Settings, args.config, args.set)
    print_once(*caches.prepare_caches(os.environ), *caches.prefer_cache(os.environ))
    result = evaluate(settings, args.adapter)
    print(f"test loss   {result['loss']:.4f} nats per token, {result['nats_per_byte']:.4f} per byte")
    print(f"perplexity  {result['perplexity']:.2f}, of {result['tokens']:,} tokens in {result['rows']:,} rows")
    return 0


def evaluate(settings: Settings, adapter: Path | None) -> dict[str, Any]:
    """Return loss, perplexity, nats per byte and counts of the evaluation examples, with ``adapter`` if one is named.

    The loss, in nats per token, is that of a plain forward pass of padded examples, which shares nothing with the
    training loop. Perplexity is its exponential.

    Raises:
        TaskError: the data, the model or the adapter cannot be read.
    """
    folder = Path(settings.data)
    record = dolly.read_record(folder)
    adapter_folder.check_source(record["model"], str(adapter or ""), record["model"])

    import torch

    from ekiben_tasks.models import load
    from ekiben_tasks.models.adapter import load_adapter
    from ekiben_tasks.models.device import choose_device

    device = choose_device(settings.device)
    if adapter:
        model, _ = load_adapter(adapter, device, base=record["model"])
    else:
        model = load.load_base(record["model"], device)
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
            logits = model(input_ids=ids.to(device.torch_device), attention_mask=mask.to(device.torch_device)).logits
        targets = labels[:, 1:].to(device.torch_device)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), targets, ignore_index=dolly.IGNORED, reduction="sum"
        )
        total, tokens = total + float(loss), tokens + int((targets != dolly.IGNORED).sum())
    mean = total / tokens
    return {
        "loss": mean,
        "perplexity": math.exp(min(mean, 100)),
        "nats_per_byte": total / record["test"]["bytes"],
        "tokens": tokens,
        "rows": record["test"]["rows"],
    }


if __name__ == "__main__":
    command.run(main)
