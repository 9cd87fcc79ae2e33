"""The proof that an image measures: sample rows through every task, a tiny model to its target, the checker's word."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import bench
import check_dataset
import check_raw
import dolly
import evaluate
import preprocess
from settings import TaskError
from train_settings import Lora
from train_settings import Settings as Training


def prove(recipe: Path) -> int:
    """Errors: TaskError, naming the check that failed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a model this small only waits for a second thread
    started = time.monotonic()
    import torch

    import models

    models.quieten()
    sample = recipe / "data" / "sample.jsonl"
    check_raw.main(["--input", str(sample), "--expect", "0"])
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as scratch:
        place = Path(scratch)
        settings = tiny(place, sample, cpu=not torch.cuda.is_available())
        first = evaluate.evaluate(evaluate.Settings(data=str(place / "processed"), device=settings.train.device), None)
        for number in (1, 2):
            if bench.run_once(settings, number, place / "bench", config=None):
                raise TaskError("smoke: interrupted")
        summary = bench.summarise(place / "bench", 2)
        _passed(
            "the target is reached", summary["reached"] == 2, f"{settings.target_loss:.3f} from {first['loss']:.3f}"
        )
        check_log(place / "bench" / "run-1" / bench.LOG)
        adapter = place / "bench" / "run-1" / "adapter"
        again = evaluate.evaluate(
            evaluate.Settings(data=str(place / "processed"), device=settings.train.device), adapter
        )
        logged = summary["runs"][0]["loss"]
        _passed("evaluate says what train said", abs(again["loss"] - logged) < 0.02 * logged, f"{again['loss']:.4f}")
    print(f"smoke       all passed in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def tiny(place: Path, sample: Path, *, cpu: bool) -> bench.Settings:
    """A random GPT-NeoX, its data in ``place``/processed: few rows, each several times, so that it knows the test's by heart.

    Its target is what MLPerf's checker asks for: less than 1, in nats per byte.
    """
    import tiny as models_made_here

    rows = dolly.read(sample)[:12] * 8
    models_made_here.make_model(
        place / "base", [f"{row['instruction']}\n{row['response']}" for row in rows], "gpt_neox"
    )
    (place / "processed").mkdir()
    preprocess.preprocess(preprocess.Settings(model=str(place / "base"), test_share=0.2), rows, place / "processed")
    check_dataset.check(place / "processed", dolly.read_record(place / "processed"))
    about = dolly.read_record(place / "processed")["test"]
    training = replace(
        Training(), model=str(place / "base"), data=str(place / "processed"), max_length=512, epochs=40, batch_size=16,
        learning_rate=2e-2, warmup_steps=2, eval_every=5, log_seconds=2.0, compile=False,
        lora=Lora(r=32, alpha=32, dropout=0.0, target_modules=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
        device="cpu" if cpu else "auto",
    )  # fmt: skip
    return bench.Settings(target_loss=0.95 * about["bytes"] / about["learnt"], runs=2, train=training)


def check_log(file: Path) -> None:
    """By MLPerf's own checker. Errors: TaskError with what it says."""
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "6.1.0"]
    done = subprocess.run(
        [*command, "--log_output", os.devnull, str(file)], capture_output=True, text=True, cwd=file.parent
    )
    said = (done.stdout + done.stderr).strip()
    _passed("MLPerf's checker accepts the log", done.returncode == 0 and "SUCCESS" in said, said[-3000:])


def _passed(what: str, passed: bool, detail: str) -> None:
    if not passed:
        raise TaskError(f"smoke: failed: {what} ({detail})")
    print(f"smoke       {what}: {detail}", flush=True)
