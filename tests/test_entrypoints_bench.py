"""lora-bench: rows, tokens, runs to a target, their logs before MLPerf's own checker."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers", "mlperf_logging"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "lora-bench"
SAMPLE = ROOT / "recipes" / "lora-opencalm" / "data" / "sample.jsonl"
DOLLY = RECIPE / "data" / "sample.jsonl"
sys.path[:0] = [str(ROOT / "entrypoints"), str(RECIPE / "entrypoints")]

import torch  # noqa: E402

import bench  # noqa: E402
import check_dataset  # noqa: E402
import check_raw  # noqa: E402
import dolly  # noqa: E402
import evaluate  # noqa: E402
import loop  # noqa: E402
import preprocess  # noqa: E402
import prove_bench  # noqa: E402
import sanity_check  # noqa: E402
import smoke  # noqa: E402
import train  # noqa: E402
from settings import TaskError  # noqa: E402
from together import same_environment  # noqa: E402, F401
from train_settings import Lora  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("base")
    smoke.make_base(folder, SAMPLE)
    return folder


def small(base: Path, **changes: Any) -> train.Settings:
    values: dict[str, Any] = {
        "model": str(base), "data": [str(SAMPLE)], "test_share": 0.1, "max_length": 512, "batch_size": 32,
        "learning_rate": 1e-2, "log_seconds": 0.0, "eval_every": 2, "device": "cpu", "epochs": 2,
    }  # fmt: skip
    return train.Settings(**{**values, **changes})


class Notes(loop.Watch):
    """Writes down what it is told, and is content after the second test."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def starts(self, run: loop.Run) -> None:
        self.said.append(("start", run.first_step))

    def tests(self, run: loop.Run) -> None:
        self.said.append(("tests", run.step))

    def tested(self, run: loop.Run) -> bool:
        assert run.last_test_loss > 0
        self.said.append(("tested", run.step))
        return len(self.said) == 5


def test_a_watched_run_ends_when_its_watch_is_content(base: Path, tmp_path: Path) -> None:
    notes = Notes()
    assert train.train(small(base), ROOT, tmp_path, watch=notes) == 0
    assert notes.said == [("start", 0), ("tests", 2), ("tested", 2), ("tests", 4), ("tested", 4)]
    assert (tmp_path / "checkpoints" / "step-000004").is_dir()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


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


def test_the_published_rows_are_counted(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = dolly.read(published)
    assert dolly.count_empty(rows) == {"instruction": 0, "context": 10_544, "response": 0, "category": 0}
    assert check_raw.main(["--input", str(published)]) == 0
    assert "rows        15,011" in capsys.readouterr().out
    train_rows, test_rows = dolly.split(rows, 0.1, 42)
    assert (len(train_rows), len(test_rows)) == (13_509, 1_502)
    assert dolly.split(rows, 0.1, 42)[1] == test_rows
    assert sorted(row["instruction"] for row in [*train_rows, *test_rows]) == sorted(row["instruction"] for row in rows)


def test_what_is_wrong_with_a_raw_file_is_said(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = {"instruction": "a", "context": "", "response": "b", "category": "c"}
    for line, said in [
        ('{"instruction": "a"}', "line 2: context, response, category is missing"),
        ("{", "line 2: is not JSON"),
    ]:
        file.write_text(json.dumps(good) + "\n" + line + "\n")
        with pytest.raises(TaskError, match=said):
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
def ready(tmp_path_factory: pytest.TempPathFactory) -> bench.Settings:
    """A tiny model and its prepared data."""
    torch.set_num_threads(1)
    return prove_bench.tiny(tmp_path_factory.mktemp("ready"), DOLLY, cpu=True)


def test_the_response_is_learnt_and_its_end(ready: bench.Settings) -> None:
    import models

    tokenizer = models.load_tokenizer(ready.train.model)
    row = {"instruction": "問い", "context": "文脈", "response": "答え", "category": ""}
    ids, labels = dolly.encode(tokenizer, row, 512)
    asked = tokenizer("問い\n文脈\n")["input_ids"]
    assert ids[: len(asked)] == asked
    assert labels == [dolly.IGNORED] * len(asked) + ids[len(asked) :]
    assert tokenizer.decode(ids[len(asked) :]) == "答え" + tokenizer.eos_token
    assert tokenizer.decode(dolly.encode(tokenizer, {**row, "context": ""}, 512)[0]).startswith("問い\n答え")
    assert len(dolly.encode(tokenizer, row, 3)[0]) == 3


def test_prepared_rows_are_checked(ready: bench.Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(str(ready.train.data))
    assert check_dataset.main(["--input", str(folder), "--row", "0"]) == 0
    assert "not learnt" in capsys.readouterr().out
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
def reached(ready: bench.Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to a target that is reached."""
    output = tmp_path_factory.mktemp("bench")
    assert bench.run_once(ready, 1, output, config=None) == 0
    return output


def events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]


def test_mlperfs_checker_accepts_the_log(reached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = reached / "run-1" / bench.LOG
    prove_bench.check_log(log)
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
    result = json.loads((reached / "run-1" / bench.RESULT).read_text())
    assert (result["reached"], result["seed"], result["loss"]) == (True, 42, losses[-1])
    span = (told[-1]["time_ms"] - next(event["time_ms"] for event in told if event["key"] == "run_start")) / 1000
    assert result["seconds"] == pytest.approx(span, abs=0.1)


def test_a_log_that_lacks_something_is_not_accepted(reached: Path, tmp_path: Path) -> None:
    lines = (reached / "run-1" / bench.LOG).read_text().splitlines()
    (tmp_path / bench.LOG).write_text("\n".join(line for line in lines if '"run_start"' not in line) + "\n")
    with pytest.raises(TaskError, match="MLPerf's checker"):
        prove_bench.check_log(tmp_path / bench.LOG)


def test_evaluate_agrees_with_the_training_loop(ready: bench.Settings, reached: Path) -> None:
    found = evaluate.evaluate(
        evaluate.Settings(data=str(ready.train.data), device="cpu"), reached / "run-1" / "adapter"
    )
    assert found["loss"] == pytest.approx(json.loads((reached / "run-1" / bench.RESULT).read_text())["loss"], rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


def test_a_run_without_a_target_goes_to_its_end(ready: bench.Settings, tmp_path: Path) -> None:
    short = replace(ready, target_loss=None, train=replace(ready.train, max_steps=2, lora=Lora(r=2)))
    assert bench.run_once(short, 3, tmp_path, config=None) == 0
    result = json.loads((tmp_path / "run-3" / bench.RESULT).read_text())
    assert (result["reached"], result["seed"], result["samples"]) == (False, 44, 32)
    assert events(tmp_path / "run-3" / bench.LOG)[-1]["metadata"]["status"] == "aborted"


def test_one_command_makes_all_runs(
    ready: bench.Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "entrypoints"), os.environ.get("PYTHONPATH", "")]))
    values = {"model": ready.train.model, "data": ready.train.data, "device": "cpu", "max_steps": 1, "max_length": 512}
    given = [word for name, value in values.items() for word in ("--set", f"train.{name}={value}")]
    with pytest.raises(TaskError, match="no reference run has set the target yet; train --reference does"):
        bench.main([*given, "--run", "1", "--output", str(tmp_path)])
    for said in ("1 of 1 runs reached 9.0", "run 1       done before"):
        assert bench.main([*given, "--set", "runs=1", "--set", "target_loss=9.0", "--output", str(tmp_path)]) == 0
        assert said in capfd.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["finished"] == 1


def test_a_reference_run_sets_the_target(ready: bench.Settings, reached: Path, tmp_path: Path) -> None:
    """Half way through: what is left shows whether others get there."""
    settings = replace(ready, target_loss="auto", train=replace(ready.train, epochs=2))
    assert bench.run_once(settings, bench.REFERENCE, tmp_path, config=None) == 0
    lines = [json.loads(line) for line in (tmp_path / "reference" / "metrics.jsonl").read_text().splitlines()]
    tests = [(line["step"], line["test_loss"]) for line in lines if "test_loss" in line]
    assert [step for step, _ in tests] == [5, 10]
    result = json.loads((tmp_path / "reference" / bench.RESULT).read_text())
    assert (result["seed"], result["reached"]) == (41, False)
    assert tests[0][1] <= result["sets_target"] < tests[0][1] + 0.001
    assert bench.run_once(settings, 1, tmp_path, config=None) == 0
    first = json.loads((tmp_path / "run-1" / bench.RESULT).read_text())
    assert (first["target_loss"], first["reached"]) == (result["sets_target"], True)
    with pytest.raises(TaskError, match="the reference run was of another model"):
        bench.read_target(tmp_path, "another", result["data"])


def test_data_of_another_model_is_refused(ready: bench.Settings, tmp_path: Path) -> None:
    other = replace(ready, train=replace(ready.train, model="EleutherAI/gpt-neo-1.3B"))
    with pytest.raises(TaskError, match=r"was made for .*, not EleutherAI/gpt-neo-1\.3B; preprocess again"):
        bench.run_once(other, 1, tmp_path, config=None)
    with pytest.raises(TaskError, match=r"no processed\.json there; preprocess writes such a folder"):
        bench.run_once(replace(ready, train=replace(ready.train, data=str(tmp_path))), 1, tmp_path / "out", config=None)


def test_the_olympic_mean() -> None:
    assert bench.olympic_mean([5.0, 1.0, 3.0, 9.0]) == 4.0
    assert bench.olympic_mean([5.0, 1.0, 3.0, math.inf]) == 4.0  # one that did not converge is the slowest
    assert bench.olympic_mean([5.0, 1.0, 3.0, math.inf, math.inf]) is None
    assert bench.olympic_mean([5.0, 1.0]) is None


def test_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, seconds in enumerate((30.0, 10.0, 20.0, 25.0), 1):
        (tmp_path / f"run-{number}").mkdir()
        result = {"run": number, "seed": number, "reached": True, "target_loss": 2.0, "seconds": seconds, "loss": 1.9,
                  "perplexity": 6.7, "samples": 384, "log": bench.LOG}  # fmt: skip
        (tmp_path / f"run-{number}" / bench.RESULT).write_text(json.dumps(result))
    assert bench.summarise(tmp_path, 10)["olympic_mean_s"] == 22.5
    assert "olympic mean 22.5 s; 4 of 4 runs reached 2.0" in capsys.readouterr().out
    assert bench.main(["--summary", "--output", str(tmp_path)]) == 0
    with pytest.raises(TaskError, match="no finished run there"):
        bench.summarise(tmp_path / "empty", 10)


def test_the_defaults_are_the_recipes() -> None:
    import settings

    made = settings.load(bench.Settings, RECIPE / "configs" / "train.yaml", ["train.lora.r=16"])
    assert (made.runs, made.target_loss, made.train.learning_rate, made.train.batch_size) == (10, "auto", 5e-5, 2)
    assert (made.train.lora.r, made.train.lora.alpha, made.train.eval_every * made.train.batch_size) == (16, 16, 384)
    with pytest.raises(TaskError, match=r"Did you mean 'train\.lora\.r'|Did you mean 'train\.lora"):
        settings.load(bench.Settings, RECIPE / "configs" / "train.yaml", ["train.lora.rr=16"])
    made_for = settings.load(preprocess.Settings, RECIPE / "configs" / "preprocess.yaml")
    assert made_for == preprocess.Settings()


def test_the_sanity_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanity_check.main([]) == 0
    assert "forward     (2, 10)" in capsys.readouterr().out
