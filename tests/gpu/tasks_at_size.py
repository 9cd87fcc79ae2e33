"""Tasks at a real size on one GPU, as their user runs them: what each took, and whether the results agree.

    python3 tests/gpu/tasks_at_size.py --json FILE [lora] [full] [offload]

The weights are random, the sizes real. Each case prints what was expected of the GPU's memory and what was reserved.
lora     OpenCALM-3B: train; train stopped by SIGTERM and resumed, whose losses may differ by a GPU's rounding; generate; merge
full     Llama-3.2-1B, every weight
offload  Llama-2-7B, every weight, with DeepSpeed: --set deepspeed.offload=all, where it does not fit without
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINTS = ROOT / "entrypoints"
SAMPLE = ROOT / "recipes" / "lora-opencalm" / "data" / "sample.jsonl"
sys.path[:0] = [str(ENTRYPOINTS), str(Path(__file__).parent)]
RESUMED = 75


def make_inputs(model_name: str, folder: Path, examples: int) -> tuple[Path, Path]:
    """Save a model of bench_train.SHAPES with random weights, and ``examples`` examples of some 700 tokens each."""
    import torch
    from bench_train import SHAPES, make_model

    from ekiben_tasks.models import tiny

    samples = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    answers = [sample["output"] for sample in samples]
    tokenizer = tiny.learn_tokenizer([" ".join(map(str, sample.values())) for sample in samples], 1000)
    base = folder / model_name
    kind, sizes = SHAPES[model_name]
    model = make_model(kind, sizes, torch.device("cuda"), torch.bfloat16, "sdpa")
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    data = folder / "rows.jsonl"
    with data.open("w") as out:
        for number in range(examples):
            text = str(number)
            while len(tokenizer(text)["input_ids"]) < 600 + number % 7 * 30:
                text += answers[(number * 7 + len(text)) % len(answers)]
            out.write(json.dumps({**samples[number % len(samples)], "output": text}) + "\n")
    return base, data


def run_task(name: str, *options: object, stop_at: Path | None = None) -> tuple[int, str, float]:
    """Run an entrypoint; return its exit code, output and seconds. SIGTERM is sent once ``stop_at`` holds four steps."""
    command = [sys.executable, str(ENTRYPOINTS / f"{name}.py"), *map(str, options)]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        while stop_at is not None and child.poll() is None:
            if stop_at.exists() and len(losses(stop_at.parent)) >= 4:
                child.send_signal(signal.SIGTERM)
                break
            time.sleep(0.05)
        output = child.communicate()[0]
    return child.returncode, output, time.monotonic() - started


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines if line.endswith("}")]
    return [line["loss"] for line in results if "loss" in line]


def largest_difference(one: list[float], two: list[float]) -> float:
    """Return the largest relative difference; NaN where the numbers of steps differ."""
    if len(one) != len(two):
        return math.nan
    return max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))


def train(base: Path, data: Path, output: Path, *options: str, stop: bool = False) -> dict[str, Any]:
    """Train eight steps; return what run.json and the output say."""
    config = ROOT / "recipes" / "lora-opencalm" / "configs" / "train.yaml"
    settings = [f"model={base}", "max_steps=8", "warmup_steps=0", "eval_every=0", "log_seconds=0", "validation_split=0"]
    flags = [flag for setting in (*settings, *options) for flag in ("--set", setting)]
    code, text, seconds = run_task(
        "train", "--config", config, "--data", data, "--output", output, *flags,
        stop_at=output / "metrics.jsonl" if stop else None,
    )  # fmt: skip
    record = json.loads((output / "run.json").read_text()) if (output / "run.json").exists() else {}
    keys = ("expected_memory_bytes", "peak_memory_bytes", "tokens_per_s", "mfu", "attention")
    return {
        "exit_code": code,
        "seconds": round(seconds, 1),
        "losses": losses(output) if (output / "metrics.jsonl").exists() else [],
        **{key: record[key] for key in keys if key in record},
        "output": text.splitlines()[-30:],
    }


def run_lora(folder: Path) -> dict[str, Any]:
    base, data = make_inputs("calm-3b", folder, 400)
    uninterrupted = train(base, data, folder / "uninterrupted")
    stopped = train(base, data, folder / "stopped", stop=True)
    resumed = train(base, data, folder / "stopped")
    generated: dict[str, Any] = {}
    for name, options in {"adapter": ["--adapter", folder / "uninterrupted" / "adapter"], "merged": []}.items():
        if name == "merged":
            code, text, seconds = run_task(
                "merge",
                "--adapter",
                folder / "uninterrupted" / "adapter",
                "--output",
                folder / "merged",
                "--set",
                "device=cpu",
            )
            generated["merge"] = {"exit_code": code, "seconds": round(seconds, 1), "output": text.splitlines()[-5:]}
            options = ["--model", folder / "merged"]
        out = folder / f"{name}.jsonl"
        code, text, seconds = run_task(
            "generate", *options, "--greedy", "--data", SAMPLE, "--output", out, "--set", "max_new_tokens=64"
        )
        generated[name] = {"exit_code": code, "seconds": round(seconds, 1), "output": text.splitlines()[-5:]}
    return {
        "train": uninterrupted,
        "stopped": stopped,
        "resumed": resumed,
        "was_stopped": stopped["exit_code"] == RESUMED,
        "largest_difference_of_losses": largest_difference(uninterrupted["losses"], resumed["losses"]),
        **generated,
    }


def run_full(folder: Path) -> dict[str, Any]:
    base, data = make_inputs("llama-1b", folder, 200)
    return {"train": train(base, data, folder / "full", "method=full", "batch_size=16")}


def run_offload(folder: Path) -> dict[str, Any]:
    base, data = make_inputs("llama-7b", folder, 60)
    common = ("method=full", "batch_size=4", "max_steps=2", "parallel=deepspeed")
    return {
        "without": train(base, data, folder / "without", *common),
        "all": train(base, data, folder / "all", *common, "deepspeed.offload=all"),
    }


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {"lora": run_lora, "full": run_full, "offload": run_offload}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    results: dict[str, Any] = {}
    for name in args.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = CASES[name](Path(folder))
        print(json.dumps({name: results[name]}, indent=1, ensure_ascii=False), flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
