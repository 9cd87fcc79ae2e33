"""Speed of training: our loop against transformers' Trainer and TRL's SFTTrainer, the same model, rows and batch.

    python3 qa/gpu/bench_train.py                         every case that this machine has the GPUs for
    python3 qa/gpu/bench_train.py lora full --steps 10    some groups of them
    python3 qa/gpu/bench_train.py lora/ours full/trainer  single cases
    python3 qa/gpu/bench_train.py --here lora/ours --profile    one, in this process, with its kernels
    python3 qa/gpu/bench_train.py --tiny lora full        shrunken, on the CPU: only to see that the cases run

Each takes about a minute, nearly all of it imports, the model and compiling, so within ten minutes on one GPU:
lora/trainer lora/sft lora/ours lora/trainer-mixed lora/ours-mixed full/trainer full/ours

Each case is a process (or torchrun) of its own; --runs 3 takes them in turn, three times, and ends with the medians.
Weights are random, shapes are real: lora   OpenCALM-3B, 8 rows of 1024 tokens a step, all learnt; "mixed": 32 rows as
instruction data has them full   Llama-3.2-1B, every weight, 16 rows of 2048 tokens fsdp   Llama-2-7B, every weight,
4096 tokens, on 1, 2 and 4 GPUs; and Llama-2-70B with LoRA on 4 "varlen" forbids the way for rows of one length, so that
rows of mixed length can be judged by it. MFU is flops.py's: what a model needs, frozen weights' own gradients not
counted, nor what checkpointing computes twice. Padding never counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "entrypoints"))

LLAMA = {"max_position_embeddings": 8192, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "calm-3b": (
        "gpt_neox",
        {
            "vocab_size": 52_224,
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 10_240,
            "max_position_embeddings": 2048,
            "hidden_act": "gelu",
            "rotary_pct": 1.0,
            "use_parallel_residual": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "llama-1b": (
        "llama",
        {
            **LLAMA,
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "llama-7b": (
        "llama",
        {
            **LLAMA,
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 11_008,
        },
    ),
    # Llama-2-7B's shape with 24 of its 32 blocks: too large for 80 GB with AdamW, and offloaded it fits 128 GiB of the
    # host.
    "llama-5b": (
        "llama",
        {
            **LLAMA,
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "intermediate_size": 11_008,
        },
    ),
    "llama-70b": (
        "llama",
        {
            **LLAMA,
            "vocab_size": 32_000,
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28_672,
        },
    ),
}
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 500,
    "head_dim": 16,
}
PROFILED = 3  # steps, after those that are timed
# case → (shape, method, GPUs, rows a step, tokens a row; 0: of mixed length)
CASES: dict[str, tuple[str, Literal["lora", "full"], int, int, int]] = {
    "lora/trainer": ("calm-3b", "lora", 1, 8, 1024),
    "lora/sft": ("calm-3b", "lora", 1, 8, 1024),
    "lora/eager": ("calm-3b", "lora", 1, 8, 1024),
    "lora/ours": ("calm-3b", "lora", 1, 8, 1024),
    "lora/ours-16k": ("calm-3b", "lora", 1, 16, 1024),
    "lora/ours-varlen": ("calm-3b", "lora", 1, 8, 1024),
    "lora/trainer-mixed": ("calm-3b", "lora", 1, 32, 0),
    "lora/ours-mixed": ("calm-3b", "lora", 1, 32, 0),
    "full/trainer": ("llama-1b", "full", 1, 16, 2048),
    "full/eager": ("llama-1b", "full", 1, 16, 2048),
    "full/ours": ("llama-1b", "full", 1, 16, 2048),
    "fsdp/one": ("llama-7b", "full", 1, 4, 4096),
    "fsdp/two": ("llama-7b", "full", 2, 8, 4096),
    "fsdp/four": ("llama-7b", "full", 4, 16, 4096),
    "fsdp/70b-lora": ("llama-70b", "lora", 4, 8, 4096),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--here", choices=CASES, help="measure one case in this process")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=int, default=1, help="of every case, in turn; the medians come last")
    parser.add_argument("--layers", type=int, help="fewer blocks than the shape has, to try it out")
    parser.add_argument("--checkpointed", type=int, default=-1, help="blocks; -1: as the memory asks")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with shapes to match: numbers without meaning")
    parser.add_argument("--profile", action="store_true", help="print where the time on the GPU goes")
    args = parser.parse_args()
    if args.here:
        result = measure(args.here, args)
        if os.environ.get("RANK", "0") == "0":
            print("RESULT " + json.dumps(result), flush=True)
        return 0
    import torch

    wanted = [case for case in CASES if not args.cases or case in args.cases or case.split("/")[0] in args.cases]
    able = [case for case in wanted if CASES[case][2] <= torch.cuda.device_count() or args.tiny]
    for case in wanted:
        if case not in able:
            print(f"{case:<20} needs {CASES[case][2]} GPUs, and {torch.cuda.device_count()} are here", flush=True)
    print(
        f"{'case':<20}{'tokens/s':>10}{'MFU':>8}{'peak GiB':>10}{'first loss':>12}{'start s':>9}{'host GiB':>16}",
        flush=True,
    )
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in able}
    for case in able * args.runs:
        if one := run_one(case, args):
            found[case].append(one)
            host = " ".join(f"{size:.1f}" for size in one["host_gib"])
            print(
                f"{case:<20}{one['tokens_per_s']:>10,.0f}{one['mfu']:>8.1%}{one['peak_gib']:>10.1f}"
                f"{one['first_loss']:>12.4f}{one['start_s']:>9.1f}{host:>16}",
                flush=True,
            )
    for case, runs in found.items():
        if len(runs) > 1:
            middle = [statistics.median(one[name] for one in runs) for name in ("tokens_per_s", "mfu", "peak_gib")]
            print(
                f"{case:<20}{middle[0]:>10,.0f}{middle[1]:>8.1%}{middle[2]:>10.1f}   median of {len(runs)}", flush=True
            )
    return 0 if all(len(runs) == args.runs for runs in found.values()) else 1


def run_one(case: str, args: Any) -> dict[str, Any] | None:
    """A case in processes of its own."""
    gpus = CASES[case][2]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"] if gpus > 1 else []
    options = ["--here", case, "--steps", str(args.steps), "--checkpointed", str(args.checkpointed)]
    options += ["--layers", str(args.layers)] if args.layers else []
    options += ["--tiny"] if args.tiny else []
    done = subprocess.run([sys.executable, *launcher, __file__, *options], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"{case:<20} failed:\n{(done.stdout + done.stderr)[-3000:]}", flush=True)
        return None
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def measure(case: str, args: Any) -> dict[str, Any]:
    from ekiben_tasks.task import caches

    caches.prepare_caches(os.environ)
    import torch

    from ekiben_tasks.distributed import context
    from ekiben_tasks.models import attention as attention_module
    from ekiben_tasks.models import attention_choice
    from ekiben_tasks.models.device import choose_device

    here = context.init_distributed("cpu" if args.tiny else "auto")
    device = choose_device("cpu" if args.tiny else "auto", here.local_rank)
    attention_module.register()
    attention_choice.prefer_kernels(device.torch_device, device.dtype)
    kind, sizes = SHAPES[CASES[case][0]]
    if args.layers:
        sizes = {**sizes, "num_hidden_layers": args.layers}
    if args.tiny:
        sizes = {**sizes, **TINY, "num_key_value_heads": min(sizes.get("num_key_value_heads", 4), 2)}
    examples = make_rows(
        case, args.steps + (PROFILED if args.profile else 0), sizes["vocab_size"], shrink=16 if args.tiny else 1
    )
    if "trainer" in case or "sft" in case:
        found = run_peer(case, make_model(kind, sizes, device.torch_device, device.dtype, "sdpa"), examples, args.steps)
    else:
        found = run_ours(case, kind, sizes, device, examples, args, here)
    host = [0.0] * here.size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if here.size > 1:
        torch.distributed.all_gather_object(host, peak)
    here.destroy()
    return {
        **found,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "host_gib": host if here.size > 1 else [peak],
    }


def make_rows(case: str, steps: int, vocabulary: int, *, shrink: int) -> list[Any]:
    from ekiben_tasks.data.tokenize import Example

    _, _, _, rows, length = CASES[case]
    generator = np.random.default_rng(0)
    lengths = [length] * rows * steps
    if not length:
        lengths = [int(n) for n in np.clip(generator.lognormal(5.0, 0.7, rows * steps), 48, 1024)]
    ids = [generator.integers(0, vocabulary, max(size // shrink, 8), dtype=np.int32) for size in lengths]
    return [Example(row, ((0 if length else max(len(row) // 3, 40 // shrink), len(row)),)) for row in ids]


def make_model(kind: str, sizes: dict[str, Any], device: Any, dtype: Any, attention: str) -> Any:
    """Random weights, on the CPU by repeating a few: real ones would take longer to make than to train."""
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    config = transformers.AutoConfig.for_model(kind, use_cache=False, **sizes)
    with torch.device(device), no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    some = torch.randn(1 << 20, device=device, dtype=dtype) * 0.02
    for name, part in model.named_parameters():
        values = part.data.view(-1)
        if part.ndim == 1:
            values.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            for start in range(0, len(values), len(some)):
                values[start : start + len(some)] = some[: len(values) - start]
    return model


def run_ours(
    case: str, kind: str, sizes: dict[str, Any], device: Any, examples: list[Any], args: Any, here: Any
) -> dict[str, Any]:
    import torch
    import transformers

    from ekiben_tasks.data import packing
    from ekiben_tasks.data.sources import SplitExamples
    from ekiben_tasks.distributed import sharded, strategy
    from ekiben_tasks.distributed.context import Stop
    from ekiben_tasks.distributed.replicated import ReplicatedStrategy
    from ekiben_tasks.models import attention as attention_module
    from ekiben_tasks.models import attention_choice, flops, memory
    from ekiben_tasks.models import tuning as learners
    from ekiben_tasks.models.lora import Lora
    from ekiben_tasks.training import loop
    from ekiben_tasks.training.batches import Batches
    from ekiben_tasks.training.checkpoint import Checkpoints
    from ekiben_tasks.training.plan import make_plan, memory_choices
    from ekiben_tasks.training.prepare import Prepared
    from ekiben_tasks.training.progress import Progress
    from ekiben_tasks.training.settings import Settings

    _, method, gpus, rows, _ = CASES[case]
    if "varlen" in case:
        packing.PackedBatch.is_uniform = property(lambda _: False)  # type: ignore[assignment, method-assign]
    settings = Settings(
        method=method,
        batch_size=rows,
        max_steps=args.steps,
        compile="eager" not in case and not args.tiny,
        learning_rate=3e-4,
        epochs=1,
        warmup_steps=0,
        eval_every=0,
        save_minutes=600,
        log_seconds=60,
        parallel="fsdp" if gpus > 1 else "none",
        lora=Lora(r=4, alpha=16, dropout=0.05),
    )
    shape_config = transformers.AutoConfig.for_model(kind, use_cache=False, **sizes)
    with torch.device("meta"):
        shape = learners.apply_tuning_method(
            transformers.AutoModelForCausalLM.from_config(shape_config, dtype=device.dtype), settings
        )
    longest = max(len(row.ids) for row in examples)
    data = Prepared(examples, [], SplitExamples(), 0)
    choices = memory_choices(strategy.find(settings.parallel), settings, device, here.size, data.tokens, None)
    profile = memory.profile_model(shape, longest=longest, **choices)
    plan = make_plan(settings, device, memory.expect_memory(profile), profile, data)
    if args.checkpointed >= 0:
        plan = dataclasses.replace(plan, checkpointed=args.checkpointed)
    if here.size == 1:
        model = make_model(kind, sizes, device.torch_device, device.dtype, attention_module.ATTENTION)
    elif here.is_main_process:
        model = make_model(kind, sizes, torch.device("cpu"), device.dtype, attention_module.ATTENTION)
    else:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                shape_config, dtype=device.dtype, attn_implementation=attention_module.ATTENTION
            )
    loss_module = learners.LossModule(learners.apply_tuning_method(model, settings), device.dtype)
    if plan.checkpointed:
        loss_module.checkpoint_activations(plan.checkpointed)
    if plan.compile:
        loss_module.compile_blocks()
    started = time.monotonic()
    if gpus > 1:
        sharded.shard(loss_module, device.torch_device, here, trained=method == "full")
    trained: Any = (
        sharded.ShardedStrategy(loss_module, plan.optimizer, here, device.torch_device)
        if gpus > 1 and method == "full"
        else ReplicatedStrategy(loss_module, plan.optimizer, here, collective=gpus > 1)
    )
    loaded = time.monotonic() - started
    if here.is_main_process:
        print(
            f"{case}: packs of {plan.max_tokens:,}, {plan.checkpointed} blocks checkpointed, shared in {loaded:.0f} s"
        )
    with tempfile.TemporaryDirectory() as folder:
        output, torch_device = Path(folder), device.torch_device
        batches = Batches(
            data, plan, here, layout=loss_module.layout, collective=trained.collective, device=torch_device
        )
        progress = Progress(plan, here, device, flops.training_costs(shape), output, len(examples))
        run = loop.Run(trained, batches, progress, Checkpoints(output, {}, "random", here), device, Stop())
        run._save = lambda: None  # type: ignore[method-assign]  # 80 GB of checkpoint are not what is measured
        started_at = time.monotonic()
        with attention_choice.uniform_kernels(device.torch_device):
            run.fit()
        wall = time.monotonic() - started_at
        speed, mfu = progress.speed()
        if args.profile:
            with attention_choice.uniform_kernels(device.torch_device):
                profiled(lambda: [run._step() for _ in range(PROFILED)])
        losses = progress.metrics.series("loss") if progress.metrics else [(0, 0.0)]
    return {
        "tokens_per_s": speed,
        "mfu": float("nan") if mfu is None else mfu,
        "first_loss": losses[0][1],
        "start_s": wall - progress.meter.seconds,
    }


def profiled(work: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        began = time.monotonic()
        work()
        _wait()
        print(f"{time.monotonic() - began:.3f} s with the profiler on")
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=90))


def run_peer(case: str, model: Any, examples: list[Any], steps: int) -> dict[str, Any]:
    """Trainer (with PEFT), or SFTTrainer, at their defaults."""
    import torch
    import transformers

    from ekiben_tasks.models import flops
    from ekiben_tasks.models import tuning as learners
    from ekiben_tasks.models.lora import Lora
    from ekiben_tasks.training.settings import Settings

    _, method, _, rows, length = CASES[case]
    model = learners.apply_tuning_method(model, Settings(method=method, lora=Lora(r=4, alpha=16, dropout=0.05)))
    costs = flops.training_costs(model)
    clock = {"start": time.monotonic(), "started": 0.0}

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            """Leaves the first two steps out."""
            if state.global_step == 2:
                _wait()
                clock["started"] = time.monotonic()

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for index, row in enumerate(batch):
            size = len(row["input_ids"])
            ids[index, :size] = torch.as_tensor(row["input_ids"]).long()
            labels[index, row["learn_from"] : size] = ids[index, row["learn_from"] : size]
            mask[index, :size] = 1
        return {"input_ids": ids, "labels": labels, **({} if length else {"attention_mask": mask})}

    at_once = 4 if not length else rows if method == "lora" else 8
    common: dict[str, Any] = {
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": rows // at_once,
        "max_steps": steps,
        "bf16": torch.cuda.is_available(),
        "learning_rate": 3e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        if "sft" in case:
            import datasets
            import trl

            table = datasets.Dataset.from_list([{"input_ids": example.ids.tolist()} for example in examples])
            trainer: Any = trl.SFTTrainer(
                model=model,
                args=trl.SFTConfig(output_dir=folder, max_length=length, **common),
                train_dataset=table,
                processing_class=_tokenizer(),
                callbacks=[Clock()],
            )
        else:
            table_ = [{"input_ids": example.ids, "learn_from": example.targets[0][0]} for example in examples]
            arguments = transformers.TrainingArguments(
                output_dir=folder, remove_unused_columns=False, dataloader_num_workers=2, **common
            )
            trainer = transformers.Trainer(
                model=model, args=arguments, train_dataset=table_, data_collator=collate, callbacks=[Clock()]
            )
        trainer.train()
        _wait()
        ended = time.monotonic()
    # The Trainer shuffles: the rows of the timed steps are taken to be as long as all are on average.
    share, lengths = (steps - 2) / steps, [len(row.ids) for row in examples]
    seconds = ended - clock["started"]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = flops.peak_flops(name) or float("nan")
    needed = share * costs.of_examples(lengths, sum(row.num_target_tokens for row in examples))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "tokens_per_s": share * sum(lengths) / seconds,
        "mfu": needed / seconds / peak,
        "first_loss": losses[0],
        "start_s": clock["started"] - clock["start"],
    }


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _tokenizer() -> Any:
    from ekiben_tasks.models import tiny

    tokenizer = tiny.learn_tokenizer(["rows are tokens already"], 300)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())
