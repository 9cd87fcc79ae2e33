"""Test the benchmark: sample examples through every task, a tiny model to its target, MLPerf's checker on its log."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import bench_runs
import check_dataset
import check_raw
import dolly
import evaluate
import preprocess
from bench_settings import Settings
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task.command import check_smoke
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training.settings import Settings as Training
from mlperf_log import LOG


def smoke_test(recipe: Path) -> int:
    """Run every task on a tiny model, check the results, and return 0.

    Raises:
        TaskError: a check failed; the message names it.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small only waits for a second thread
    started = time.monotonic()
    import torch

    from ekiben_tasks.distributed.context import continue_alone
    from ekiben_tasks.models.load import silence_warnings

    continue_alone()
    silence_warnings()
    sample = recipe / "data" / "sample.jsonl"
    check_raw.main(["--input", str(sample), "--expect", "0"])
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as scratch:
        folder = Path(scratch)
        settings = tiny(folder, sample, cpu=not torch.cuda.is_available())
        first = evaluate.evaluate(evaluate.Settings(data=str(folder / "processed"), device=settings.train.device), None)
        for number in (1, 2):
            if bench_runs.run_once(settings, number, folder / "bench", config=None, temporary=True):
                raise TaskError("smoke: interrupted")
        summary = bench_runs.summarise(folder / "bench", 2)
        check_smoke(
            "the target is reached", summary["reached"] == 2, f"{settings.target_loss:.3f} from {first['loss']:.3f}"
        )
        check_log(folder / "bench" / "run-1" / LOG)
        adapter = folder / "bench" / "run-1" / "adapter"
        again = evaluate.evaluate(
            evaluate.Settings(data=str(folder / "processed"), device=settings.train.device), adapter
        )
        logged = summary["runs"][0]["loss"]
        check_smoke(
            "evaluate and train report the same loss",
            abs(again["loss"] - logged) < 0.02 * logged,
            f"{again['loss']:.4f}",
        )
    print(f"smoke       all passed in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def tiny(folder: Path, sample: Path, *, cpu: bool) -> Settings:
    """Make a random GPT-NeoX, and its data in ``folder``/processed, and return settings that train it.

    The data are few examples, each several times, so that those of the evaluation are memorised. The target is what
    MLPerf's checker requires: less than 1, in nats per byte.
    """
    from ekiben_tasks.models import tiny as tiny_models

    rows = dolly.read(sample)[:12] * 8
    tiny_models.make_model(folder / "base", [f"{row['instruction']}\n{row['response']}" for row in rows], "gpt_neox")
    (folder / "processed").mkdir()
    preprocess.preprocess(
        preprocess.Settings(model=str(folder / "base"), validation_split=0.2), rows, folder / "processed"
    )
    check_dataset.check(folder / "processed", dolly.read_record(folder / "processed"))
    record = dolly.read_record(folder / "processed")["test"]
    training = replace(
        Training(),
        model=str(folder / "base"),
        data=str(folder / "processed"),
        max_length=512,
        epochs=40,
        batch_size=16,
        learning_rate=2e-2,
        warmup_steps=2,
        eval_every=5,
        log_seconds=2.0,
        compile=False,
        lora=Lora(
            r=32, alpha=32, dropout=0.0, target_modules=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
        ),
        device="cpu" if cpu else "auto",
    )
    return Settings(target_loss=0.95 * record["bytes"] / record["num_target_tokens"], runs=2, train=training)


def check_log(file: Path) -> None:
    """Run MLPerf's checker on the log ``file``.

    Raises:
        TaskError: it does not accept the log; the message ends with its output.
    """
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "6.1.0"]
    done = subprocess.run(
        [*command, "--log_output", os.devnull, str(file)], capture_output=True, text=True, cwd=file.parent
    )
    output = (done.stdout + done.stderr).strip()
    check_smoke("MLPerf's checker accepts the log", done.returncode == 0 and "SUCCESS" in output, output[-3000:])
