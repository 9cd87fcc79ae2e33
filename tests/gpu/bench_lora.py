"""Speed of LoRA training on one GPU: our loop against transformers' Trainer with PEFT, the same model and rows.

    python3 tests/gpu/bench_lora.py                              every variant, each in a process of its own
    python3 tests/gpu/bench_lora.py trainer compiled --steps 10  some of them
    python3 tests/gpu/bench_lora.py --here compiled --profile    one, in this process, with its kernels

The model has OpenCALM-3B's shape and random weights made on the GPU. "even" is 8 rows of 1024 tokens a step, all of
them learnt; "mixed" is 32 rows a step as instruction data has them (median about 150 tokens, up to 1024), responses
learnt: the Trainer takes them 4 at a time, padded, and accumulates 8 times. Tokens are real ones, padding never counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "entrypoints"))

VARIANTS = ("trainer", "eager", "compiled", "compiled-16k", "checkpointed", "trainer-mixed", "compiled-mixed")
LORA: dict[str, Any] = {"r": 4, "alpha": 16, "dropout": 0.05, "target_modules": ("query_key_value",), "seed": 0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--here", choices=VARIANTS, help="measure one variant in this process")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--profile", action="store_true", help="print where the time on the GPU goes")
    args = parser.parse_args()
    if args.here:
        print("RESULT " + json.dumps(measure(args.here, args.steps, args.layers, args.profile)), flush=True)
        return 0
    failed = 0
    print(f"{'variant':<16}{'tokens/s':>10}{'MFU':>8}{'peak GiB':>10}{'first loss':>12}{'start s':>9}", flush=True)
    for variant in args.variants or VARIANTS:
        command = [
            sys.executable,
            __file__,
            "--here",
            variant,
            "--steps",
            str(args.steps),
            "--layers",
            str(args.layers),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            failed += 1
            print(f"{variant:<16} failed:\n{(done.stdout + done.stderr)[-3000:]}", flush=True)
            continue
        found = json.loads(lines[0].removeprefix("RESULT "))
        print(
            f"{variant:<16}{found['tokens_per_s']:>10,.0f}{found['mfu']:>8.1%}{found['peak_gib']:>10.1f}"
            f"{found['first_loss']:>12.4f}{found['start_s']:>9.1f}",
            flush=True,
        )
    return 1 if failed else 0


def measure(variant: str, steps: int, layers: int, profile: bool) -> dict[str, Any]:
    import places

    places.prepare_caches(os.environ)
    import torch

    import models

    device = models.choose_device("auto")
    mixed = variant.endswith("mixed")
    examples = make_rows(steps, mixed)
    model = models.add_adapter(make_model(layers, "sdpa" if "trainer" in variant else models.PACKED), **LORA)
    if "trainer" in variant:
        found = run_trainer(model, examples, steps, mixed)
    else:
        found = run_ours(model, device, examples, steps, variant, profile)
    return {**found, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def make_rows(steps: int, mixed: bool) -> list[Any]:
    from prompt import Example

    generator = np.random.default_rng(0)
    lengths = [1024] * 8 * steps
    if mixed:
        lengths = [int(n) for n in np.clip(generator.lognormal(5.0, 0.7, 32 * steps), 48, 1024)]
    ids = [generator.integers(0, 52_000, length, dtype=np.int32) for length in lengths]
    return [Example(row, max(len(row) // 3, 40) if mixed else 0) for row in ids]


def make_model(layers: int, attention: str) -> Any:
    import torch
    import transformers

    import packing

    packing.register()
    config = transformers.GPTNeoXConfig(
        vocab_size=52_224, hidden_size=2560, num_hidden_layers=layers, num_attention_heads=32,
        intermediate_size=10_240, max_position_embeddings=2048, hidden_act="gelu", rotary_pct=1.0,
        use_parallel_residual=False, attention_dropout=0.0, hidden_dropout=0.0, use_cache=False,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
    return model.requires_grad_(False)


def run_ours(model: Any, device: Any, examples: list[Any], steps: int, variant: str, profile: bool) -> dict[str, Any]:
    import loop
    from world import Stop, World

    mixed = variant.endswith("mixed")
    rows_per_step = 32 if mixed else 16 if variant == "compiled-16k" else 8
    plan = loop.Plan(
        epochs=1, max_steps=len(examples) // rows_per_step, batch_size=rows_per_step, max_rows=32, max_tokens=16_384,
        checkpointing=variant == "checkpointed", compile=variant != "eager", learning_rate=3e-4, warmup_steps=0,
        weight_decay=0.0, max_grad_norm=1.0, eval_every=0, save_minutes=60, log_seconds=60, seed=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = loop.Run(
            model=model, base="random", device=device, train=examples, test=[], plan=plan, output=Path(folder),
            fingerprint={}, world=World(), stop=Stop(),
        )  # fmt: skip
        started = time.monotonic()
        if profile:
            profiled(run.fit)
        else:
            run.fit()
        wall = time.monotonic() - started
    speed, mfu = run.speed()
    losses = run.metrics.series("loss")
    return {"tokens_per_s": speed, "mfu": mfu, "first_loss": losses[0][1], "start_s": wall - run.meter.seconds}


def profiled(work: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=90))


def run_trainer(model: Any, examples: list[Any], steps: int, mixed: bool) -> dict[str, Any]:
    import torch
    import transformers

    import models
    import record

    clock = {"begun": time.monotonic(), "started": 0.0}

    def on_step_end(arguments: Any, state: Any, control: Any, **_: Any) -> None:
        """Leaves the first two steps out."""
        if state.global_step == 2:
            torch.cuda.synchronize()
            clock["started"] = time.monotonic()

    callback = transformers.TrainerCallback()
    callback.on_step_end = on_step_end

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for index, row in enumerate(batch):
            size = len(row["input_ids"])
            ids[index, :size] = torch.from_numpy(row["input_ids"]).long()
            labels[index, row["learn_from"] : size] = ids[index, row["learn_from"] : size]
            mask[index, :size] = 1
        return {"input_ids": ids, "labels": labels, **({"attention_mask": mask} if mixed else {})}

    rows = [{"input_ids": example.ids, "learn_from": example.learn_from} for example in examples]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=4 if mixed else 8,
            gradient_accumulation_steps=8 if mixed else 1, max_steps=steps, bf16=True, learning_rate=3e-4,
            logging_steps=1, save_strategy="no", report_to="none", remove_unused_columns=False, disable_tqdm=True,
            dataloader_num_workers=2,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[callback]
        )
        trainer.train()
        torch.cuda.synchronize()
        ended = time.monotonic()
    # The Trainer shuffles: the rows of the timed steps are taken to be as long as all are on average.
    share = (steps - 2) / steps
    tokens, learnt = share * sum(len(row.ids) for row in examples), share * sum(row.learnt for row in examples)
    squares = share * float(sum(len(row.ids) ** 2 for row in examples))
    flops = record.training_flops(**models.shape(model), tokens=tokens, learnt=learnt, squares=squares)
    seconds = ended - clock["started"]
    peak = record.peak_flops(torch.cuda.get_device_name()) or float("nan")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "tokens_per_s": tokens / seconds,
        "mfu": flops / seconds / peak,
        "first_loss": losses[0],
        "start_s": clock["started"] - clock["begun"],
    }


if __name__ == "__main__":
    sys.exit(main())
