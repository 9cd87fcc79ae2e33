"""evaluate: the scores of lm-evaluation-harness, for models and adapters, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "evaluate"
TASKS = RECIPE / "data" / "tasks"
sys.path[:0] = [str(ROOT / "entrypoints"), str(RECIPE / "entrypoints")]

import peft
import torch
from lm_eval import evaluator
from lm_eval.tasks import TaskManager

import harness_run
import harness_settings
from ekiben_tasks.data.sources import Source
from ekiben_tasks.evaluation import frame, perplexity
from ekiben_tasks.evaluation.settings import PerplexitySettings
from ekiben_tasks.models import load, tiny
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.errors import SettingError, TaskError
from harness_settings import Settings
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
NAMES = ("capitals", "capitals_written", "capitals_text")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    lines = (TASKS / "capitals.jsonl").read_text(encoding="utf-8").splitlines()
    tiny.make_model(folder, [json.loads(line)["question"] for line in lines], vocabulary=300)
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(r=4, target_modules=["query_key_value"], task_type="CAUSAL_LM", init_lora_weights=False)
    peft.get_peft_model(load.load_base(str(model), choose_device("cpu")), config).save_pretrained(folder)
    return folder


def settings(model: Path, output: Path, **changes: Any) -> Settings:
    values = {"tasks": NAMES, "device": "cpu", "batch_size": 4, **changes}
    return replace(Settings(), model=str(model), output=str(output), **values)


def scores_of(output: Path) -> dict[str, Any]:
    record = json.loads((output / frame.RECORD).read_text(encoding="utf-8"))
    assert record["status"] == "finished"
    return dict(record["scores"])


def test_processes_share_the_examples(model: Path, tmp_path: Path) -> None:
    # First of all tests here: after a fork, the threads of Arrow are gone that other tests have started.
    multiprocess.run(2, tmp_path / "log", harness_run.evaluate, settings(model, tmp_path / "two"), TASKS)
    harness_run.evaluate(settings(model, tmp_path / "one"), TASKS)
    one, two = scores_of(tmp_path / "one"), scores_of(tmp_path / "two")
    for task in NAMES:
        assert two[task] == pytest.approx(one[task], rel=1e-6), task


def test_scores_are_those_of_lm_eval(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {}
    for name, changes, by_hand in (
        ("model", {}, {}),
        ("adapter", {"adapter": str(adapter), "few_shot": 2}, {"peft": str(adapter)}),
    ):
        assert harness_run.evaluate(settings(model, tmp_path / name, **changes), TASKS) == 0
        monkeypatch.chdir(TASKS)
        results = evaluator.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(model), "dtype": "float32", **by_hand},
            tasks=list(NAMES),
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            num_fewshot=changes.get("few_shot"),
            batch_size=4,
            device="cpu",
        )
        assert results is not None
        scores[name] = scores_of(tmp_path / name)
        assert scores[name] == harness_run.read_scores(results)
        samples = (tmp_path / name / "samples-capitals.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(samples) == 10
    assert scores["model"] != scores["adapter"]


def test_perplexity_is_that_of_lm_eval(model: Path, tmp_path: Path) -> None:
    items = [json.loads(line) for line in (TASKS / "capitals.jsonl").read_text(encoding="utf-8").splitlines()]
    text = "".join(item["question"] for item in items)  # of more tokens than the model reads at once
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"question": question}) + "\n" for question in (text * 30, text)), encoding="utf-8"
    )
    shutil.copy(TASKS / "capitals_text.yaml", tmp_path)
    task = tmp_path / "capitals_text.yaml"
    content = task.read_text(encoding="utf-8").replace("capitals.jsonl", "data.jsonl")
    # A number of so many digits that lm-eval's own has no room for it.
    task.write_text(content.replace("  - metric: word_perplexity\n", ""), encoding="utf-8")
    harness_run.evaluate(settings(model, tmp_path / "a", tasks=("capitals_text",)), tmp_path)
    measured = PerplexitySettings(model=str(model), column="question", device="cpu", output=str(tmp_path / "b"))
    perplexity.evaluate(measured, [Source(str(tmp_path / "data.jsonl"))])
    theirs, ours = scores_of(tmp_path / "a")["capitals_text"], scores_of(tmp_path / "b")["texts"]
    assert ours["tokens"] > 1024
    for metric in ("bits_per_byte", "byte_perplexity"):
        assert ours[metric] == pytest.approx(theirs[f"{metric},none"], rel=1e-5)


def test_interrupted_run_continues(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness_run.evaluate(settings(model, tmp_path / "complete"), TASKS)
    counts: list[int] = []
    beat = harness_run.HarnessModel._beat

    def count(self: harness_run.HarnessModel) -> None:
        beat(self)
        counts.append(self.batches)
        if len(counts) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(harness_run.HarnessModel, "_beat", count)
    output = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        harness_run.evaluate(settings(model, output), TASKS)
    with pytest.raises(TaskError, match="has answers of other settings"):
        harness_run.evaluate(settings(model, output, few_shot=1), TASKS)
    harness_run.evaluate(settings(model, output), TASKS)
    resumed = len(counts) - 6
    assert scores_of(output) == scores_of(tmp_path / "complete")
    counts[:] = [0] * 6
    harness_run.evaluate(settings(model, tmp_path / "again"), TASKS)
    assert resumed < len(counts) - 6
    assert [file.name for file in output.glob(".*")] == [".lock"]
    with pytest.raises(TaskError, match="holds a finished evaluation"):
        harness_run.evaluate(settings(model, output), TASKS)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("capitals.jsonl", '{"question": "フランス', '{"question": フランス', r"capitals.jsonl line 2: is not JSON"),
        ("capitals.jsonl", '"choices": ["リ', '"options": ["リ', r"task capitals: example 2: .*; correct it"),
        (
            "capitals.yaml",
            "multiple_choice",
            "nonsense",
            r"capitals.yaml: ValueError: Got invalid output_type 'nonsense'",
        ),
        ("capitals.yaml", "multiple_choice", "[", r"capitals.yaml: is not valid YAML.*line 9"),
        ("capitals.yaml", "capitals.jsonl", "none.jsonl", r"none.jsonl: no such file"),
    ],
)
def test_bad_task_files_are_named(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    folder = tmp_path / "tasks"
    shutil.copytree(TASKS, folder)
    text = (folder / file).read_text(encoding="utf-8")
    assert old in text
    (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(TaskError, match=message):
        harness_run.load_tasks(replace(Settings(), tasks=("capitals",)), folder)


def test_bad_settings_are_named(model: Path, tmp_path: Path) -> None:
    for assignments, message in (
        (["tasks=[]"], "setting tasks: names none"),
        (["task_folder=/nope"], "setting task_folder: /nope: no such folder"),
        (["few_shot=-1"], "setting few_shot: must be at least 0"),
    ):
        with pytest.raises(SettingError, match=message):
            harness_settings.check(options.load(Settings, None, assignments))
    wrong = settings(model, tmp_path / "out")
    for changed, error in (
        (replace(wrong, tasks=("capital",)), "'capital' is not a task in .* Did you mean 'capitals'"),
        (replace(wrong, chat_template=True), "setting chat_template: the tokenizer of .* has none"),
    ):
        with pytest.raises(TaskError, match=error):
            harness_run.evaluate(changed, TASKS)
    assert not (tmp_path / "out" / frame.RECORD).exists()


def test_dry_run_loads_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert harness_run.evaluate(settings(Path("owner/none"), output), TASKS, is_dry=True) == 0
    assert "capitals_text: 10 examples, loglikelihood_rolling" in capsys.readouterr().out
    assert not output.exists()
