"""lora-bench: rows, tokens, runs to a target, their logs before MLPerf's own checker."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers", "mlperf_logging"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "lora-bench"
SAMPLE = ROOT / "recipes" / "lora-opencalm" / "data" / "sample.jsonl"
DOLLY = RECIPE / "data" / "sample.jsonl"
sys.path[:0] = [str(ROOT / "entrypoints"), str(RECIPE / "entrypoints")]

import torch

import bench
import bench_runs
import bench_settings
import bench_smoke_test
import check_dataset
import check_raw
import dolly
import evaluate
import mlperf_log
import preprocess
import sanity_check
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training import (
    loop,
    smoke,
    train,
)
from support import forkserver
from support.multiprocess import same_environment  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("base")
    smoke.make_base(folder, SAMPLE)
    return folder


def small(base: Path, **changes: Any) -> train.Settings:
    values: dict[str, Any] = {
        "model": str(base),
        "data": [str(SAMPLE)],
        "validation_split": 0.1,
        "max_length": 512,
        "batch_size": 32,
        "learning_rate": 1e-2,
        "log_seconds": 0.0,
        "eval_every": 2,
        "device": "cpu",
        "epochs": 2,
    }
    return train.Settings(**{**values, **changes})


class Notes(loop.TrainerCallback):
    """Writes down what it is told, and is content after the second test."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, int]] = []

    def on_train_begin(self, run: loop.Run) -> None:
        self.logged.append(("start", run.first_step))

    def on_evaluate_begin(self, run: loop.Run) -> None:
        self.logged.append(("tests", run.step))

    def on_evaluate(self, run: loop.Run) -> bool:
        assert run.last_eval_loss > 0
        self.logged.append(("tested", run.step))
        return len(self.logged) == 5


def test_callback_can_end_the_run(base: Path, tmp_path: Path) -> None:
    notes = Notes()
    assert train.train(small(base), ROOT, tmp_path, callback=notes) == 0
    assert notes.logged == [("start", 0), ("tests", 2), ("tested", 2), ("tests", 4), ("tested", 4)]
    assert (tmp_path / "checkpoints" / "step-000004").is_dir()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_log_that_cannot_be_written_ends_the_run() -> None:
    logger = logging.Logger("mlperf")
    logger.addHandler(mlperf_log._LogFile("/dev/full"))
    with pytest.raises(TaskError, match=r"/dev/full: cannot be written \(No space left on device\)"):
        logger.info("a line")
    with contextlib.suppress(OSError):
        logger.handlers[0].close()


# ---------------------------------------------------------------------- rows and tokens


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the published one's form and counts: 15,011 rows, 10,544 of them without a context."""
    folder = tmp_path_factory.mktemp("raw")
    with (folder / dolly.FILE).open("w") as out:
        for number in range(15_011):
            context = f"about {number}" if number >= 10_544 else "" if number % 2 else None
            row = {
                "instruction": f"What is {number}?",
                "context": context,
                "response": f"It is {number}.",
                "category": "open_qa",
            }
            out.write(json.dumps(row) + "\n")
    return folder


def test_number_of_published_examples(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = dolly.read(published)
    assert dolly.count_empty(rows) == {"instruction": 0, "context": 10_544, "response": 0, "category": 0}
    assert check_raw.main(["--input", str(published)]) == 0
    assert "rows        15,011" in capsys.readouterr().out
    train_rows, test_rows = dolly.split(rows, 0.1, 42)
    assert (len(train_rows), len(test_rows)) == (13_509, 1_502)
    assert dolly.split(rows, 0.1, 42)[1] == test_rows
    assert sorted(row["instruction"] for row in [*train_rows, *test_rows]) == sorted(row["instruction"] for row in rows)


def test_invalid_raw_files_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = {"instruction": "a", "context": "", "response": "b", "category": "c"}
    for line, message in [
        ('{"instruction": "a"}', "line 2: context, response, category is missing"),
        ("{", "line 2: is not JSON"),
    ]:
        file.write_text(json.dumps(good) + "\n" + line + "\n")
        with pytest.raises(TaskError, match=message):
            dolly.read(file)
    file.write_text(json.dumps(good) + "\n")
    with pytest.raises(TaskError, match=r"1 rows, and 15,011 were expected"):
        check_raw.main(["--input", str(file)])
    file.write_text(json.dumps({**good, "response": " "}) + "\n")
    with pytest.raises(TaskError, match="'response': 1"):
        check_raw.main(["--input", str(file), "--expect", "0"])
    with pytest.raises(TaskError, match="no such file; download writes one"):
        dolly.read(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> bench_settings.Settings:
    """A tiny model and its prepared data."""
    torch.set_num_threads(1)
    return bench_smoke_test.tiny(tmp_path_factory.mktemp("ready"), DOLLY, cpu=True)


def test_response_and_end_token_are_targets(ready: bench_settings.Settings) -> None:
    from ekiben_tasks.models import load

    tokenizer = load.load_tokenizer(ready.train.model)
    row = {"instruction": "問い", "context": "文脈", "response": "答え", "category": ""}
    ids, labels = dolly.encode(tokenizer, row, 512)
    asked = tokenizer("問い\n文脈\n")["input_ids"]
    assert ids[: len(asked)] == asked
    assert labels == [dolly.IGNORED] * len(asked) + ids[len(asked) :]
    assert tokenizer.decode(ids[len(asked) :]) == "答え" + tokenizer.eos_token
    assert tokenizer.decode(dolly.encode(tokenizer, {**row, "context": ""}, 512)[0]).startswith("問い\n答え")
    assert len(dolly.encode(tokenizer, row, 3)[0]) == 3


def test_prepared_examples_are_checked(
    ready: bench_settings.Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(str(ready.train.data))
    assert check_dataset.main(["--input", str(folder), "--row", "0"]) == 0
    assert "of them ignored" in capsys.readouterr().out
    about = dolly.read_record(folder)
    rows = dolly.read_split(folder, "train")
    for name in ("train", "test"):
        (tmp_path / f"{name}.parquet").write_bytes((folder / f"{name}.parquet").read_bytes())
    dolly.write_split(tmp_path / "train.parquet", [*rows[:-1], (rows[-1][0], [*rows[-1][1][:-1], 3])])
    with pytest.raises(TaskError, match=f"row {len(rows) - 1}: its labels are not the response's tokens"):
        check_dataset.check(tmp_path, about)
    dolly.write_split(tmp_path / "train.parquet", rows[1:])
    with pytest.raises(TaskError, match="preprocess again"):
        check_dataset.check(tmp_path, about)
    with pytest.raises(TaskError, match="--row 999999"):
        check_dataset.main(["--input", str(folder), "--row", "999999"])


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def reached(ready: bench_settings.Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to a target that is reached."""
    output = tmp_path_factory.mktemp("bench")
    assert bench_runs.run_once(ready, 1, output, config=None) == 0
    return output


def events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]


def test_mlperf_checker_accepts_the_log(reached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = reached / "run-1" / mlperf_log.LOG
    bench_smoke_test.check_log(log)
    told = events(log)
    keys = [event["key"] for event in told]
    order = [
        "cache_clear",
        "init_start",
        "init_stop",
        "run_start",
        "block_start",
        "block_stop",
        "eval_start",
        "eval_stop",
        "run_stop",
    ]
    assert [keys.index(key) for key in order] == sorted(keys.index(key) for key in order)
    assert told[-1]["key"] == "run_stop"
    assert told[-1]["metadata"]["status"] == "success"
    losses = [event["value"] for event in told if event["key"] == "eval_loss"]
    perplexities = [event["value"] for event in told if event["key"] == "eval_perplexity"]
    assert perplexities == pytest.approx([math.exp(loss) for loss in losses])
    target = next(event["value"] for event in told if event["key"] == "target_loss")
    assert losses[-1] <= target < min([math.inf, *losses[:-1]])  # it stopped at the first that was good enough
    result = json.loads((reached / "run-1" / bench_runs.RESULT).read_text())
    assert (result["reached"], result["seed"], result["loss"]) == (True, 42, losses[-1])
    span = (told[-1]["time_ms"] - next(event["time_ms"] for event in told if event["key"] == "run_start")) / 1000
    assert result["seconds"] == pytest.approx(span, abs=0.1)


def test_incomplete_log_is_refused_by_the_checker(reached: Path, tmp_path: Path) -> None:
    lines = (reached / "run-1" / mlperf_log.LOG).read_text().splitlines()
    (tmp_path / mlperf_log.LOG).write_text("\n".join(line for line in lines if '"run_start"' not in line) + "\n")
    with pytest.raises(TaskError, match="MLPerf's checker"):
        bench_smoke_test.check_log(tmp_path / mlperf_log.LOG)


def test_evaluate_agrees_with_the_training_loop(ready: bench_settings.Settings, reached: Path) -> None:
    found = evaluate.evaluate(
        evaluate.Settings(data=str(ready.train.data), device="cpu"), reached / "run-1" / "adapter"
    )
    assert found["loss"] == pytest.approx(
        json.loads((reached / "run-1" / bench_runs.RESULT).read_text())["loss"], rel=1e-4
    )
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_run_without_a_target_uses_all_steps(ready: bench_settings.Settings, tmp_path: Path) -> None:
    training = replace(
        ready.train, max_steps=2, warmup_steps=0.9, lora=Lora(r=2), optimizer="adafactor", min_learning_rate=1e-6
    )
    short = replace(ready, target_loss=None, train=training)
    assert bench_runs.run_once(short, 3, tmp_path, config=None) == 0
    result = json.loads((tmp_path / "run-3" / bench_runs.RESULT).read_text())
    assert (result["reached"], result["seed"], result["samples"]) == (False, 44, 32)
    logged = events(tmp_path / "run-3" / mlperf_log.LOG)
    assert logged[-1]["metadata"]["status"] == "aborted"
    values = {event["key"]: event["value"] for event in logged}
    assert [values[f"opt_{name}"] for name in ("learning_rate_warmup_steps", "name", "end_learning_rate")] == [
        2,
        "adafactor",
        1e-6,
    ]


def test_one_command_starts_all_runs(
    ready: bench_settings.Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "entrypoints"), os.environ.get("PYTHONPATH", "")]))
    values = {"model": ready.train.model, "data": ready.train.data, "device": "cpu", "max_steps": 1, "max_length": 512}
    options = [word for name, value in values.items() for word in ("--set", f"train.{name}={value}")]
    with pytest.raises(TaskError, match="no reference run has set the target yet; train --reference does"):
        bench.main([*options, "--run", "1", "--output", str(tmp_path)])
    for line in ("1 of 1 runs reached 9.0", "run 1       done before"):
        assert bench.main([*options, "--set", "runs=1", "--set", "target_loss=9.0", "--output", str(tmp_path)]) == 0
        assert line in capfd.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["finished"] == 1


def test_error_of_several_processes_is_printed_once(ready: bench_settings.Settings, tmp_path: Path) -> None:
    script = RECIPE / "entrypoints" / "bench.py"
    options = [
        "--set",
        f"train.model={ready.train.model}",
        "--set",
        f"train.data={ready.train.data}",
        "--output",
        str(tmp_path),
    ]
    paths = os.pathsep.join([str(ROOT / "entrypoints"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [forkserver.python(), str(script), "--run", "1", "--gpus", "2", *options],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("no reference run has set the target yet") == 1, done.stderr


def test_a_reference_run_sets_the_target(ready: bench_settings.Settings, reached: Path, tmp_path: Path) -> None:
    """Half way through: what is left shows whether others get there."""
    settings = replace(ready, target_loss="auto", train=replace(ready.train, epochs=2))
    assert bench_runs.run_once(settings, bench_settings.REFERENCE, tmp_path, config=None) == 0
    lines = [json.loads(line) for line in (tmp_path / "reference" / "metrics.jsonl").read_text().splitlines()]
    tests = [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line]
    assert [step for step, _ in tests] == [5, 10]
    result = json.loads((tmp_path / "reference" / bench_runs.RESULT).read_text())
    assert (result["seed"], result["reached"]) == (41, False)
    assert tests[0][1] <= result["sets_target"] < tests[0][1] + 0.001
    assert bench_runs.run_once(settings, 1, tmp_path, config=None) == 0
    first = json.loads((tmp_path / "run-1" / bench_runs.RESULT).read_text())
    assert (first["target_loss"], first["reached"]) == (result["sets_target"], True)
    with pytest.raises(TaskError, match="the reference run used another model"):
        bench_runs.read_target(tmp_path, "another", result["data"])


def test_data_of_another_model_is_refused(ready: bench_settings.Settings, tmp_path: Path) -> None:
    other = replace(ready, train=replace(ready.train, model="EleutherAI/gpt-neo-1.3B"))
    with pytest.raises(TaskError, match=r"was made for .*, not EleutherAI/gpt-neo-1\.3B; preprocess again"):
        bench_runs.run_once(other, 1, tmp_path, config=None)
    with pytest.raises(TaskError, match=r"processed\.json: no such file; preprocess writes such a folder"):
        bench_runs.run_once(
            replace(ready, train=replace(ready.train, data=str(tmp_path))), 1, tmp_path / "out", config=None
        )


def test_olympic_mean_drops_best_and_worst() -> None:
    assert bench_runs.olympic_mean([5.0, 1.0, 3.0, 9.0]) == 4.0
    assert bench_runs.olympic_mean([5.0, 1.0, 3.0, math.inf]) == 4.0  # one that did not converge is the slowest
    assert bench_runs.olympic_mean([5.0, 1.0, 3.0, math.inf, math.inf]) is None
    assert bench_runs.olympic_mean([5.0, 1.0]) is None


def test_summary_has_the_olympic_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, seconds in enumerate((30.0, 10.0, 20.0, 25.0), 1):
        (tmp_path / f"run-{number}").mkdir()
        result = {
            "run": number,
            "seed": number,
            "reached": True,
            "target_loss": 2.0,
            "seconds": seconds,
            "loss": 1.9,
            "perplexity": 6.7,
            "samples": 384,
            "log": mlperf_log.LOG,
        }
        (tmp_path / f"run-{number}" / bench_runs.RESULT).write_text(json.dumps(result))
    assert bench_runs.summarise(tmp_path, 10)["olympic_mean_s"] == 22.5
    assert "olympic mean 22.5 s; 4 of 4 runs reached 2.0" in capsys.readouterr().out
    assert bench.main(["--summary", "--output", str(tmp_path)]) == 0
    with pytest.raises(TaskError, match="no finished run there"):
        bench_runs.summarise(tmp_path / "empty", 10)


def test_the_defaults_are_the_recipes() -> None:
    from ekiben_tasks.task import settings

    made = settings.load(bench_settings.Settings, RECIPE / "configs" / "train.yaml", ["train.lora.r=16"])
    assert (made.runs, made.target_loss, made.train.learning_rate, made.train.batch_size) == (10, "auto", 5e-5, 2)
    assert (made.train.lora.r, made.train.lora.alpha, made.train.eval_every * made.train.batch_size) == (16, 16, 384)
    with pytest.raises(TaskError, match=r"Did you mean 'train\.lora\.r'|Did you mean 'train\.lora"):
        settings.load(bench_settings.Settings, RECIPE / "configs" / "train.yaml", ["train.lora.rr=16"])
    made_for = settings.load(preprocess.Settings, RECIPE / "configs" / "preprocess.yaml")
    assert made_for == preprocess.Settings()


def test_sanity_check_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanity_check.main([]) == 0
    assert "forward     (2, 10)" in capsys.readouterr().out
