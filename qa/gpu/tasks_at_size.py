"""Tasks at a real size, as their user runs them: what each took, and whether the results agree.

    python3 qa/gpu/tasks_at_size.py --json FILE [lora] [full] [two-gpus] [sharded] [dialogues] [bench] [pretrain]
        [offload] [align] [evaluate] [serve] [attention] [attention/calm-3b/cudnn …]

The weights are random, the sizes real. With --sif the tasks are those of an image; else this Python runs the
    checkout's.
Each case prints what was expected of the GPU's memory and what was reserved; the exit code is 1 when one did not pass.
lora       OpenCALM-3B: train; train stopped by SIGTERM and resumed, whose losses may differ by a GPU's rounding; on two
           GPUs where there are two; generate, chat, merge
full       Llama-3.2-1B, every weight
two-gpus   the same on two GPUs (DDP): train; stopped on two and resumed on one, and the reverse; generate on both
sharded    fsdp, zero2 or zero3: the same model, shared out between two GPUs, or four: train; stopped and resumed
dialogues  fsdp-llama's settings with Llama-3.2-1B on two GPUs: train, stopped and resumed; merge-weights, chat with
           either model
bench      lora-bench's tasks with Llama-3.2-1B: preprocess, the reference run and one to its target, evaluate; on two
           GPUs, too
pretrain   the 0.125B model at 2048 tokens: tokenizer, data, eight steps, resumed for four more, convert, sft, upload
           --dry-run; on two GPUs, too, where there are two: split by tensors, and resumed as copies on one; on four, by
           tensors and blocks
offload    Llama-2-7B, every weight, with DeepSpeed: --set deepspeed.offload=all, where it does not fit without
align      Llama-3.2-1B: orpo, and stopped and resumed; dpo of an adapter and of every weight, kto, reward, and grpo
           with 64 answers of 64 tokens
evaluate   Llama-3.2-1B: evaluate beside `lm-eval run`, whose scores must be equal; jsquad, perplexity
serve      Llama-3.2-1B: batch with 64 and 256 requests at once, 256 tokens each, greedily, beside generate with 64 rows
attention  MODEL/KERNEL: eight steps of LoRA with --set attention=KERNEL, on examples of 1152 tokens each and of mixed
           lengths; Llama on examples of 4,000 to 7,600 tokens, too, and 24 compiled steps of these
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINTS = ROOT / "entrypoints"
SAMPLE = ROOT / "recipes" / "lora-opencalm" / "data" / "sample.jsonl"
RECIPES_TASKS = {
    **{
        name: ROOT / "recipes" / "align" / "entrypoints" / f"{name}.py"
        for name in ("dpo", "orpo", "kto", "reward", "grpo")
    },
    "evaluate": ROOT / "recipes" / "evaluate" / "entrypoints" / "harness.py",
    "batch": ROOT / "recipes" / "serve" / "entrypoints" / "serve_batch.py",
}
sys.path[:0] = [str(ENTRYPOINTS), str(Path(__file__).parent)]
RESUMED = 75
DOES_NOT_FIT = 3
EXAMPLES = {"calm-3b": 400, "llama-1b": 200, "llama-5b": 60}  # of each kind, by model
LONG_EXAMPLES = {"llama-1b": 40, "llama-5b": 40}
ONE_LENGTH = 1152  # tokens, a multiple of 128: such examples need no variable-length kernel
KERNELS = ("auto", "sdpa", "cudnn", "flash", "varlen", "flash_attn_2", "flash_attn_4")
MAX_DIFFERENCE = 1e-2  # of losses, relative
RECORDED = (
    "expected_memory_bytes",
    "peak_memory_bytes",
    "tokens_per_s",
    "mfu",
    "attention",
    "attention_kernels",
    "compiled",
)


def exec_argv(sif: Path, *argv: object, nv: bool = True, binds: Sequence[Path] = ()) -> list[str]:
    """Return the command that runs ``argv`` in ``sif``, offline, with nothing of this machine's environment or home."""
    options = ["--cleanenv", "--no-home", "--pwd", "/tmp", "--env", "HF_HUB_OFFLINE=1", *(["--nv"] if nv else [])]
    for path in binds:
        options += ["--bind", str(path)]
    return ["apptainer", "--silent", "exec", *options, str(sif), *map(str, argv)]


# -------------------------------------------------------------------------------------------------- models and examples


def make_inputs(model_name: str, folder: Path) -> None:
    """Save a model of bench_train.SHAPES with random weights, and examples: of some 700 tokens, of ONE_LENGTH, and long
    ones.
    """
    import torch
    from bench_train import SHAPES, make_model

    from ekiben_tasks.models import tiny

    samples = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    tokenizer = tiny.learn_tokenizer([" ".join(map(str, sample.values())) for sample in samples], 1000)
    kind, sizes = SHAPES[model_name]
    model = make_model(kind, sizes, torch.device("cuda"), torch.bfloat16, "sdpa")
    model.save_pretrained(folder / model_name)
    tokenizer.save_pretrained(folder / model_name)
    mixed = [make_example(tokenizer, samples, number, 600 + number % 7 * 30) for number in range(EXAMPLES[model_name])]
    uniform = [lengthen_example(tokenizer, example) for example in mixed]
    count = LONG_EXAMPLES.get(model_name, 0)
    long = [make_example(tokenizer, samples, number, 4000 + number % 7 * 600) for number in range(count)]
    for name, examples in {"mixed": mixed, "uniform": uniform, "long": long}.items():
        lines = [json.dumps(example) + "\n" for example in examples]
        (folder / f"{model_name}-{name}.jsonl").write_text("".join(lines))


def make_example(tokenizer: Any, samples: Sequence[dict[str, str]], number: int, min_tokens: int) -> dict[str, str]:
    """Return an example of ``min_tokens`` tokens and a few more: a sample's question, answered with the samples'
    answers.
    """
    text, tokens = str(number), 0
    while tokens < min_tokens:
        answer = samples[(number * 7 + len(text)) % len(samples)]["output"]
        text, tokens = text + answer, tokens + len(tokenizer(answer)["input_ids"])
    return {**samples[number % len(samples)], "output": text}


def lengthen_example(tokenizer: Any, example: dict[str, str]) -> dict[str, str]:
    """Return the example with an answer so long that ``train`` makes ONE_LENGTH tokens of all."""
    from ekiben_tasks.data.schema import INSTRUCTION, parse_example
    from ekiben_tasks.data.tokenize import encode_examples

    while True:
        parsed = parse_example(example, INSTRUCTION)
        if isinstance(parsed, str):
            raise ValueError(parsed)
        missing = ONE_LENGTH - len(encode_examples(tokenizer, [parsed])[0].ids)
        if missing < 0:
            raise ValueError(f"an example has {-missing} tokens more than {ONE_LENGTH}")
        if not missing:
            return example
        example = {**example, "output": example["output"] + "Z" * missing}  # at most one token each


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs tasks for one case, in ``sif`` or with this Python.

    ``inputs`` is kept for the next case, ``folder`` is not.
    """

    sif: Path | None
    inputs: Path
    folder: Path
    device: str = "auto"

    def on_device(self, group: str = "") -> list[str]:
        """Return the option that chooses the device. group: of settings, where a task has its training's in one."""
        return ["--set", f"{group}device={self.device}"]

    def argv(self, task: str) -> list[str]:
        """Return the command of a task."""
        if self.sif is None:
            return [sys.executable, str(RECIPES_TASKS.get(task, ENTRYPOINTS / f"{task}.py"))]
        return exec_argv(self.sif, task, binds=(ROOT, self.inputs, self.folder))

    def has_task(self, task: str) -> bool:
        """Return whether the image has this task."""
        if self.sif is None:
            return True
        argv = exec_argv(self.sif, "sh", "-c", 'command -v "$1"', "sh", task, nv=False)
        return subprocess.run(argv, stdout=subprocess.DEVNULL, check=False).returncode == 0

    def model(self, name: str) -> Path:
        """Return the model's folder; the first time, make it and its examples, in the image where there is one."""
        if not (self.inputs / f"{name}-long.jsonl").exists():
            script = [Path(__file__).resolve(), "--make-inputs", name, "--inputs", self.inputs]
            if self.sif is None:
                argv = [sys.executable, *map(str, script)]
            else:
                argv = exec_argv(self.sif, "python", *script, binds=(ROOT, self.inputs))
            subprocess.run(argv, check=True)
        return self.inputs / name

    def data(self, name: str, lengths: str = "mixed") -> Path:
        """Return the examples for a model. ``lengths``: mixed, uniform or long."""
        return self.inputs / f"{name}-{lengths}.jsonl"

    def run(self, task: str, *options: object, stop_at: Path | None = None) -> tuple[int, str, float]:
        """Run a task; return its exit code, output and seconds. SIGTERM is sent once ``stop_at`` holds four steps."""
        command = [*self.argv(task), *map(str, options)]
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
    return max((abs(a - b) / abs(a) for a, b in zip(one, two, strict=True)), default=math.nan)


def summarize(folder: Path, code: int, text: str, seconds: float) -> dict[str, Any]:
    """Return what run.json, metrics.jsonl and the output of a training in ``folder`` say."""
    record = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else {}
    record |= record.get("device", {})
    return {
        "exit_code": code,
        "seconds": round(seconds, 1),
        "losses": losses(folder) if (folder / "metrics.jsonl").exists() else [],
        **{key: record[key] for key in RECORDED if key in record},
        "output": text.splitlines()[-30:],
    }


def train(
    runner: Runner,
    model: str,
    output: str,
    *options: str,
    lengths: str = "mixed",
    stop: bool = False,
    gpus: int = 1,
    data: Path | None = None,
) -> dict[str, Any]:
    """Train eight steps on ``gpus`` into the folder ``output``; return what run.json and the output say.

    data: for the settings of the image's own recipe; without, for those of lora-opencalm.
    """
    base, folder = runner.model(model), runner.folder / output
    config = [] if data else ["--config", ROOT / "recipes" / "lora-opencalm" / "configs" / "train.yaml"]
    settings = [f"model={base}", "max_steps=8", "warmup_steps=0", "eval_every=0", "log_seconds=0", "validation_split=0"]
    flags = [flag for setting in (*settings, *options) for flag in ("--set", setting)]
    code, text, seconds = runner.run(
        "train",
        *config,
        "--data",
        data or runner.data(model, lengths),
        "--output",
        folder,
        "--gpus",
        gpus,
        *flags,
        *runner.on_device(),
        stop_at=folder / "metrics.jsonl" if stop else None,
    )
    return summarize(folder, code, text, seconds)


# ---------------------------------------------------------------------------------------------------------------- cases


def train_and_resume(runner: Runner, model: str, *options: str, **where: Any) -> dict[str, Any]:
    """Train into ``uninterrupted``, and into ``stopped``, which is stopped by SIGTERM and resumed. where: gpus,
    data.
    """
    uninterrupted = train(runner, model, "uninterrupted", *options, **where)
    stopped = train(runner, model, "stopped", *options, stop=True, **where)
    resumed = train(runner, model, "stopped", *options, **where)
    difference = largest_difference(uninterrupted["losses"], resumed["losses"])
    ends = [item["exit_code"] for item in (uninterrupted, stopped, resumed)]
    return {
        "passed": ends == [0, RESUMED, 0] and difference <= MAX_DIFFERENCE,
        "largest_difference_of_losses": difference,
        "train": uninterrupted,
        "stopped": stopped,
        "resumed": resumed,
    }


def run_lora(runner: Runner) -> dict[str, Any]:
    trained = train_and_resume(runner, "calm-3b")
    passed = trained["passed"]
    adapter, merged = runner.folder / "uninterrupted" / "adapter", runner.folder / "merged"
    results = {"merge": finish(runner, "merge", "--adapter", adapter, "--output", merged, "--set", "device=cpu")}
    if count_gpus() > 1:
        results["two GPUs"] = train(runner, "calm-3b", "two", gpus=2)
        difference = largest_difference(trained["train"]["losses"], results["two GPUs"]["losses"])
        trained["largest_difference_with_two_gpus"] = difference
        passed = passed and difference <= MAX_DIFFERENCE
    if runner.has_task("chat"):
        question = ("--greedy", *runner.on_device(), "一つ目?")
        results["chat"] = finish(runner, "chat", "--adapter", adapter, *question)
        results["chat, merged"] = finish(runner, "chat", "--model", merged, *question)
    if runner.has_task("generate"):
        config = runner.folder / "generate.yaml"  # instead of the recipe's, whose data have other columns
        config.write_text("max_new_tokens: 64\n")
        for name, options in {"adapter": ("--adapter", adapter), "merged": ("--model", merged)}.items():
            output = runner.folder / f"{name}.jsonl"
            results[name] = finish(
                runner,
                "generate",
                "--config",
                config,
                *options,
                "--greedy",
                "--data",
                SAMPLE,
                "--output",
                output,
                *runner.on_device(),
            )
    passed = passed and not any(item["exit_code"] for item in results.values())
    return {**trained, **results, "passed": passed}


def finish(runner: Runner, task: str, *options: object) -> dict[str, Any]:
    """Run a task that says nothing but how it ended."""
    code, text, seconds = runner.run(task, *options)
    return {"exit_code": code, "seconds": round(seconds, 1), "output": text.splitlines()[-5:]}


def run_full(runner: Runner) -> dict[str, Any]:
    result = train(runner, "llama-1b", "full", "method=full", "batch_size=16")
    return {"passed": result["exit_code"] == 0, "train": result}


def run_two_gpus(runner: Runner) -> dict[str, Any]:
    def options(gpus: int) -> tuple[str, ...]:
        return ("method=full", "batch_size=16", f"parallel={'ddp' if gpus > 1 else 'none'}")

    uninterrupted = train(runner, "llama-1b", "uninterrupted", *options(2), gpus=2)
    results: dict[str, Any] = {"train": uninterrupted}
    differences = {}
    for first, then in ((2, 1), (1, 2)):
        name = f"{first}-then-{then}"
        stopped = train(runner, "llama-1b", name, *options(first), gpus=first, stop=True)
        resumed = train(runner, "llama-1b", name, *options(then), gpus=then)
        results[name] = {"stopped": stopped, "resumed": resumed}
        differences[name] = largest_difference(uninterrupted["losses"], resumed["losses"])
    answers = {}
    if runner.has_task("generate"):
        config = runner.folder / "generate.yaml"  # instead of the recipe's, whose data have other columns
        config.write_text("max_new_tokens: 64\n")
        for gpus in (1, 2):
            output = runner.folder / f"answers-{gpus}.jsonl"
            results[f"generate-{gpus}"] = finish(
                runner,
                "generate",
                "--config",
                config,
                "--model",
                runner.folder / "uninterrupted" / "model",
                "--greedy",
                "--data",
                SAMPLE,
                "--output",
                output,
                "--gpus",
                gpus,
                *runner.on_device(),
            )
            answers[gpus] = output.read_text().splitlines() if output.exists() else []
    pairs = list(zip(answers.get(1, []), answers.get(2, []), strict=False))
    stops = [results[name]["stopped"]["exit_code"] for name in differences]
    ends = [result["exit_code"] for name, result in results.items() if name not in differences]
    ends += [results[name]["resumed"]["exit_code"] for name in differences]
    return {
        "passed": (
            not any(ends)
            and stops == [RESUMED] * len(stops)
            and len(answers.get(1, [])) == len(answers.get(2, []))
            and all(difference <= MAX_DIFFERENCE for difference in differences.values())
        ),
        "largest_difference_of_losses": differences,
        "equal_answers": [sum(one == two for one, two in pairs), len(pairs)],
        **results,
    }


def run_sharded(runner: Runner, *, strategy: str) -> dict[str, Any]:
    chosen = {
        "fsdp": ("parallel=fsdp",),
        "zero2": ("parallel=deepspeed", "deepspeed.stage=2"),
        "zero3": ("parallel=deepspeed", "deepspeed.stage=3"),
    }[strategy]
    return train_and_resume(
        runner, "llama-1b", "method=full", "batch_size=8", *chosen, gpus=4 if count_gpus() > 3 else 2
    )


def run_dialogues(runner: Runner) -> dict[str, Any]:
    runner.model("llama-1b")
    dialogues = runner.folder / "dialogues.jsonl"
    examples = [json.loads(line) for line in runner.data("llama-1b").read_text().splitlines()]
    turns = [[("user", example["instruction"]), ("assistant", example["output"])] for example in examples]
    lines = [json.dumps({"messages": [{"role": who, "content": what} for who, what in turn]}) for turn in turns]
    dialogues.write_text("\n".join(lines) + "\n")
    trained = train_and_resume(runner, "llama-1b", data=dialogues, gpus=2)
    merged = runner.folder / "merged"
    question = ("--greedy", "--set", "max_new_tokens=32", *runner.on_device(), "一つ目?")
    results = {"merge-weights": finish(runner, "merge-weights", runner.folder / "uninterrupted", "--output", merged)}
    for name, model in {"chat": runner.folder / "uninterrupted" / "model", "chat, merged": merged}.items():
        results[name] = finish(runner, "chat", "--model", model, *question)
    answers = [results[name]["output"][-1:] for name in ("chat", "chat, merged")]
    passed = trained["passed"] and answers[0] == answers[1] and not any(item["exit_code"] for item in results.values())
    return {**trained, **results, "passed": passed}


def run_bench(runner: Runner) -> dict[str, Any]:
    base, folder = runner.model("llama-1b"), runner.folder
    raw = folder / "raw.jsonl"
    examples = [json.loads(line) for line in runner.data("llama-1b").read_text().splitlines()]
    common = {"context": "", "category": "open_qa"}
    lines = [{**common, "instruction": one["instruction"], "response": one["output"]} for one in examples]
    raw.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = folder / "processed"
    results = {
        "sanity-check": finish(runner, "sanity-check"),
        "check-raw": finish(runner, "check-raw", "--input", raw, "--expect", len(lines)),
        "preprocess": finish(runner, "preprocess", "--input", raw, "--output", data, "--set", f"model={base}"),
        "check-dataset": finish(runner, "check-dataset", "--input", data),
    }
    settings = (f"train.model={base}", f"train.data={data}", "runs=1", "train.eval_every=32", "train.batch_size=8")
    flags = [flag for setting in settings for flag in ("--set", setting)]
    for gpus in range(1, max(1, min(count_gpus(), 2)) + 1):
        output = folder / f"bench-{gpus}"
        options = ("--output", output, "--gpus", gpus, *flags, *runner.on_device("train."))
        results[f"train, {gpus} GPU"] = finish(runner, "train", *options)
        options = ("--adapter", output / "run-1" / "adapter", "--set", f"data={data}", *runner.on_device())
        results[f"evaluate, {gpus} GPU"] = finish(runner, "evaluate", *options)
    return {"passed": not any(result["exit_code"] for result in results.values()), **results}


def run_pretrain(runner: Runner) -> dict[str, Any]:
    folder = runner.folder
    texts = finish(
        runner, "train-tokenizer", "--data", "sample", "--output", folder / "tokenizer", "--set", "vocab_size=1500"
    )
    data = finish(
        runner, "prepare-data", "--data", "sample", "--tokenizer", folder / "tokenizer", "--output", folder / "data"
    )
    results: dict[str, Any] = {"train-tokenizer": texts, "prepare-data": data}
    settings = [
        "batch_size=64",
        "eval_batches=1",
        "split=9,1,0",
        "save_every=4",
        "warmup_tokens=262144",
        "decay_tokens=1572864",
    ]

    def pretrain(name: str, steps: int, gpus: int, *options: str) -> float:
        """Go on to ``steps``; return the last loss."""
        flags = [flag for setting in (*settings, f"max_steps={steps}", *options) for flag in ("--set", setting)]
        result = finish(
            runner, "pretrain", "--data", folder / "data", "--output", folder / name, "--gpus", gpus, *flags
        )
        losses_so_far = losses(folder / name) if (folder / name / "metrics.jsonl").exists() else []
        record = json.loads((folder / name / "run.json").read_text()) if not result["exit_code"] else {}
        results[f"{name}, {gpus} GPU, {steps} steps"] = {
            **result,
            "losses": losses_so_far,
            **{key: record[key] for key in RECORDED if key in record},
        }
        return losses_so_far[-1] if losses_so_far else math.nan

    last = {"one": pretrain("one", 12, 1), "resumed": (pretrain("resumed", 8, 1), pretrain("resumed", 12, 1))[1]}
    if count_gpus() > 1:
        last["two"] = pretrain("two", 12, 2, "tensor_parallel=2")
        last["two-then-one"] = (pretrain("two-then-one", 8, 2), pretrain("two-then-one", 12, 1))[1]
    if count_gpus() > 3:
        last["four"] = pretrain("four", 12, 4, "tensor_parallel=2", "pipeline_parallel=2")
    results["convert"] = finish(runner, "convert", "--input", folder / "one", "--output", folder / "converted")
    for gpus in range(1, max(1, min(count_gpus(), 2)) + 1):
        options = (
            "--set",
            f"train.model={folder / 'converted'}",
            "--set",
            "train.batch_size=2",
            "--set",
            "train.warmup_steps=0",
        )
        results[f"sft, {gpus} GPU"] = finish(
            runner, "sft", "--output", folder / f"sft-{gpus}", "--gpus", gpus, *options
        )
    results["upload"] = finish(
        runner, "upload", "--input", folder / "converted", "--name", "someone/gpt", "--prompt", "a", "--dry-run"
    )
    agree = all(abs(loss - last["one"]) <= MAX_DIFFERENCE * last["one"] for loss in last.values())
    passed = agree and not any(result["exit_code"] for result in results.values())
    return {"passed": passed, "last_losses": last, **results}


def count_gpus() -> int:
    """Return how many GPUs a task sees here: nvidia-smi itself does not read CUDA_VISIBLE_DEVICES."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([number for number in chosen.split(",") if number])
    if not shutil.which("nvidia-smi"):
        return 0
    lines = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()
    return len(lines)


def run_offload(runner: Runner) -> dict[str, Any]:
    common = ("method=full", "batch_size=4", "max_steps=2", "parallel=deepspeed")
    without = train(runner, "llama-5b", "without", *common)
    offloaded = train(runner, "llama-5b", "all", *common, "deepspeed.offload=all")
    passed = without["exit_code"] in (0, DOES_NOT_FIT) and offloaded["exit_code"] == 0
    return {"passed": passed, "without": without, "all": offloaded}


def run_attention(runner: Runner, *, model: str, kernel: str) -> dict[str, Any]:
    """A kernel that the image lacks, or that is not for this model, is refused in one sentence, and that passes,
    too.
    """
    settings = () if model == "calm-3b" else ("lora.target_modules=auto", "batch_size=16", "epochs=3")
    options = (f"attention={kernel}", *settings)
    results = {name: train(runner, model, name, *options, lengths=name) for name in ("uniform", "mixed")}
    if model in LONG_EXAMPLES:
        longer = (*options, "max_length=8192", "batch_size=4")
        results["long"] = train(runner, model, "long", *longer, lengths="long")
        compiled = (*longer, "compile=true", "max_steps=24")  # the first steps compile, and again for other sizes
        results["long, compiled"] = train(runner, model, "long-compiled", *compiled, lengths="long")
    refused = [any("use attention=auto" in line for line in result["output"]) for result in results.values()]
    passed = all(refused) or all(result["exit_code"] == 0 for result in results.values())
    return {"passed": passed, "is_missing": all(refused), **results}


def align(runner: Runner, task: str, output: str, *options: str, data: Path, stop: bool = False) -> dict[str, Any]:
    """Run eight steps of a method of `align` into the folder ``output``; return what run.json and the output say."""
    folder = runner.folder / output
    settings = [f"model={runner.model('llama-1b')}", "max_steps=8", "save_steps=2", *options]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    stop_at = folder / "metrics.jsonl" if stop else None
    arguments = ("--data", data, "--output", folder, *flags, *runner.on_device())
    code, text, seconds = runner.run(task, *arguments, stop_at=stop_at)
    return summarize(folder, code, text, seconds)


def run_align(runner: Runner) -> dict[str, Any]:
    runner.model("llama-1b")
    examples = [json.loads(line) for line in runner.data("llama-1b").read_text().splitlines()]
    pairs, labels = runner.folder / "pairs.jsonl", runner.folder / "labels.jsonl"
    with pairs.open("w") as pair_lines, labels.open("w") as label_lines:
        for number, one in enumerate(examples):
            prompt, other = one["instruction"] + "\n", examples[number - 1]["output"]
            pair_lines.write(json.dumps({"prompt": prompt, "chosen": one["output"], "rejected": other}) + "\n")
            label_lines.write(json.dumps({"prompt": prompt, "completion": other, "label": number % 2 == 0}) + "\n")
    results = {
        "orpo": align(runner, "orpo", "orpo", data=pairs),
        "stopped": align(runner, "orpo", "stopped", data=pairs, stop=True),
        "resumed": align(runner, "orpo", "stopped", data=pairs),
        "dpo": align(runner, "dpo", "dpo", data=pairs),
        "dpo, full": align(runner, "dpo", "full", "method=full", "save_steps=100", data=pairs),
        "kto": align(runner, "kto", "kto", data=labels),
        "reward": align(runner, "reward", "reward", data=pairs),
        "grpo": align(runner, "grpo", "grpo", "max_steps=4", "max_new_tokens=64", data=pairs),
    }
    # dpo's loss is a small difference of large sums: two runs on a GPU differ by more than MAX_DIFFERENCE.
    difference = largest_difference(results["orpo"]["losses"], results["resumed"]["losses"])
    ends = [result["exit_code"] for name, result in results.items() if name != "stopped"]
    passed = not any(ends) and results["stopped"]["exit_code"] == RESUMED and difference <= MAX_DIFFERENCE
    return {"passed": passed, "largest_difference_of_losses": difference, **results}


def run_evaluate(runner: Runner) -> dict[str, Any]:
    base, folder = runner.model("llama-1b"), runner.folder
    tasks = ROOT / "recipes" / "evaluate" / "data" / "tasks"
    common = ("--model", base, *runner.on_device())
    names = "capitals,capitals_text,capitals_written"
    options = ("--set", f"tasks=[{names}]", "--set", f"task_folder={tasks}", "--output", folder / "ours")
    results = {"evaluate": finish(runner, "evaluate", *common, *options)}
    device = "cuda" if runner.device == "auto" else runner.device
    arguments = f"pretrained={base},dtype={'bfloat16' if device == 'cuda' else 'float32'}"
    peer = [sys.executable, "-m", "lm_eval"] if runner.sif is None else runner.argv("lm-eval")
    ours = json.loads((folder / "ours" / "results.json").read_text()) if (folder / "ours").exists() else {}
    size = ours.get("config", {}).get("batch_size", 8)
    peer += ["run", "--model", "hf", "--model_args", arguments, "--tasks", names, "--include_path", str(tasks)]
    peer += ["--output_path", str(folder / "peer"), "--device", device, "--batch_size", str(size), "--seed", "42"]
    done = subprocess.run(peer, capture_output=True, text=True, check=False, cwd=tasks)
    files = list((folder / "peer").rglob("results_*.json"))
    scores = json.loads(files[0].read_text())["results"] if files else {}
    results["lm-eval run"] = {"exit_code": done.returncode, "output": (done.stdout + done.stderr).splitlines()[-5:]}
    text = folder / "text.txt"
    text.write_text("\n".join(json.loads(line)["output"] for line in runner.data("llama-1b").read_text().splitlines()))
    squad = ROOT / "recipes" / "evaluate" / "data" / "sample-squad.json"
    results["jsquad"] = finish(runner, "jsquad", *common, "--data", squad, "--output", folder / "jsquad")
    results["perplexity"] = finish(runner, "perplexity", *common, "--data", text, "--output", folder / "perplexity")
    differences = [
        abs(value - scores.get(task, {}).get(metric, math.nan))
        for task, metrics in ours.get("results", {}).items()
        for metric, value in metrics.items()
        if isinstance(value, float)
    ]
    difference = max(differences, default=math.nan)
    passed = difference == 0 and not any(result["exit_code"] for result in results.values())
    return {"passed": passed, "largest_difference_of_scores": difference, "scores": ours.get("results"), **results}


def run_serve(runner: Runner) -> dict[str, Any]:
    base, folder = runner.model("llama-1b"), runner.folder
    examples = [json.loads(line) for line in runner.data("llama-1b").read_text().splitlines()]
    prompts = [examples[number % len(examples)]["instruction"] for number in range(256)]
    common = ("--model", base, *runner.on_device())
    results: dict[str, Any] = {}
    answers: dict[int, list[str]] = {}
    for count in (64, 256):
        bodies = [{"prompt": prompt, "max_tokens": 256, "temperature": 0} for prompt in prompts[:count]]
        lines = [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)]
        data, output = folder / f"requests-{count}.jsonl", folder / f"served-{count}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        options = ("--input", data, "--output", output, "--set", f"max_requests={count}")
        results[f"batch, {count} requests"] = finish(runner, "batch", *common, *options)
        if output.exists():
            served = [json.loads(line)["response"]["body"]["choices"][0] for line in output.read_text().splitlines()]
            answers[count] = [choice["text"] for choice in served]
            record = json.loads(output.with_name(f"{output.name}.run.json").read_text())
            results[f"batch, {count} requests"]["tokens_per_s"] = record["tokens_per_s"]
    data, output = folder / "prompts.jsonl", folder / "generated.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt, "complete": ""}) + "\n" for prompt in prompts[:64]))
    form = ("form.kind=template", "form.prompt={prompt}", "form.response={complete}")
    same = (*form, "max_new_tokens=256", "batch_size=64", "temperature=0", "examples=0", "repetition_penalty=1")
    flags = [flag for setting in same for flag in ("--set", setting)]
    results["generate"] = finish(runner, "generate", *common, "--data", data, "--output", output, *flags)
    generated = [json.loads(line)["complete"] for line in output.read_text().splitlines()] if output.exists() else []
    equal = sum(one == two for one, two in zip(answers.get(64, []), generated, strict=False))
    alike = sum(one == two for one, two in zip(answers.get(64, []), answers.get(256, []), strict=False))
    passed = not any(result["exit_code"] for result in results.values()) and len(answers.get(256, [])) == 256
    return {"passed": passed, "equal_to_generate": equal, "equal_among_more": alike, **results}


CASES: dict[str, Callable[[Runner], dict[str, Any]]] = {
    "lora": run_lora,
    "full": run_full,
    "two-gpus": run_two_gpus,
    **{f"sharded/{name}": functools.partial(run_sharded, strategy=name) for name in ("fsdp", "zero2", "zero3")},
    "dialogues": run_dialogues,
    "bench": run_bench,
    "pretrain": run_pretrain,
    "offload": run_offload,
    "align": run_align,
    "evaluate": run_evaluate,
    "serve": run_serve,
    **{
        f"attention/{model}/{kernel}": functools.partial(run_attention, model=model, kernel=kernel)
        for model in ("calm-3b", "llama-1b", "llama-5b")
        for kernel in KERNELS
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="lora, full, two-gpus, sharded, dialogues, bench, pretrain, offload, align, evaluate, serve, attention, or"
        " one of its cases",
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--sif", type=Path, help="run the tasks of this image under Apptainer")
    parser.add_argument("--device", default="auto", help="auto, or cpu to try the cases with small models in --inputs")
    parser.add_argument("--inputs", type=Path, help="keep models and examples in this folder, for the next time")
    parser.add_argument("--make-inputs", choices=EXAMPLES, help="make those of one model with this Python, and stop")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.make_inputs:
        make_inputs(args.make_inputs, args.inputs)
        return 0
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        inputs = (args.inputs or Path(scratch)).resolve()
        inputs.mkdir(parents=True, exist_ok=True)
        for name in CASES:
            if args.cases and name not in args.cases and name.split("/")[0] not in args.cases:
                continue
            with tempfile.TemporaryDirectory() as folder:
                results[name] = CASES[name](Runner(args.sif, inputs, Path(folder), args.device))
            print(json.dumps({name: results[name]}, indent=1, ensure_ascii=False), flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return 0 if results and all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
