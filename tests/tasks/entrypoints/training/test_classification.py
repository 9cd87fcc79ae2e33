"""A classification head trains as transformers' Trainer trains it, is scored as scikit-learn does, and is loaded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "accelerate", "datasets"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import datasets
import peft
import torch
import transformers

from ekiben_tasks.data.schema import DatasetFormat, parse_example
from ekiben_tasks.data.tokenize import prepare_padding
from ekiben_tasks.generation.settings import ChatSettings, GenerateSettings, check_chat
from ekiben_tasks.generation.settings import check as check_generate
from ekiben_tasks.models import load, tiny
from ekiben_tasks.models.adapter import load_adapter
from ekiben_tasks.models.classifier import Classes
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.models.tuning import apply_tuning_method
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.training import smoke
from ekiben_tasks.training.class_scores import ClassScores
from ekiben_tasks.training.settings import Settings, check
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import fit, metrics, small

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
FORM = DatasetFormat(kind="classification")
TOPICS = {"sport": "ball goal team", "food": "rice soup tea", "music": "song drum choir"}
EXAMPLES = [
    {"text": " ".join((TOPICS[label] + f" {number}").split()[number % 3 :] * (1 + number % 4)), "label": label}
    for number in range(24)
    for label in TOPICS
]
LABELS = ("food", "music", "sport")
STEPS = 3
PLAIN: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}


def make_base(folder: Path, kind: str) -> Path:
    tokenizer = tiny.learn_tokenizer([example["text"] for example in EXAMPLES], 400)
    tokenizer.save_pretrained(folder)
    tiny.random_model(kind, len(tokenizer)).save_pretrained(folder)
    return folder


def write_examples(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(example) + "\n" for example in EXAMPLES))
    return file


def settings_of(base: Path, data: Path, **changes: Any) -> Settings:
    values = {"validation_split": 0.0, "batch_size": len(EXAMPLES), "epochs": STEPS, "learning_rate": 1e-2}
    values |= {"warmup_steps": 0, "weight_decay": 0.1, "lora": Lora(r=4, dropout=0.0), "data": [str(data)]}
    return small(base, form=FORM, **{**values, **changes})


def reference(settings: Settings, folder: Path) -> Any:
    """Train the same model by transformers' Trainer on padded data, from the same first weights."""
    tokenizer = load.load_tokenizer(settings.model)
    pad = prepare_padding(tokenizer, load.read_config(settings.model))
    classes = Classes(LABELS, pad, settings.seed)
    model = apply_tuning_method(
        load.load_base(settings.model, choose_device("cpu"), "eager", classes=classes), settings
    )
    encoded = [{**tokenizer(example["text"]), "labels": LABELS.index(example["label"])} for example in EXAMPLES]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=len(EXAMPLES),
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        lr_scheduler_type="linear",
        max_grad_norm=settings.max_grad_norm,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(encoded),
        data_collator=transformers.DataCollatorWithPadding(tokenizer),
    ).train()
    return model


def load_trained(output: Path, base: Path, method: str) -> Any:
    if method != "lora":
        return transformers.AutoModelForSequenceClassification.from_pretrained(output / "model", **PLAIN)
    labels = json.loads((output / "adapter" / "labels.json").read_text())["id2label"]
    assert tuple(labels.values()) == LABELS
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=3, **PLAIN)
    return peft.PeftModel.from_pretrained(model, str(output / "adapter"))


@pytest.mark.parametrize(
    ("kind", "method"),
    [("llama", "full"), ("gpt2", "full"), ("gpt_neo", "full"), ("falcon", "lora"), ("gpt_neox", "last-layer")],
)
def test_three_steps_are_those_of_transformers(kind: str, method: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", kind)
    settings = settings_of(base, write_examples(tmp_path), method=method)
    assert fit(settings, tmp_path / "run") == 0
    theirs, ours = reference(settings, tmp_path / "theirs"), load_trained(tmp_path / "run", base, method)
    # Not weights: those of a key's bias change nothing, and AdamW moves them by the noise of their gradients.
    tokenizer = load.load_tokenizer(str(base))
    for example in EXAMPLES[::7]:
        ids = torch.tensor([tokenizer(example["text"])["input_ids"]])
        with torch.no_grad():
            one, two = (model.eval()(input_ids=ids).logits for model in (ours, theirs))
        assert one.abs().max() > 0.1 and (one - two).abs().max() < 1e-4
    losses = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert len(losses) == STEPS


def test_a_saved_classifier_is_loaded_and_scored(tmp_path: Path) -> None:
    base, data = make_base(tmp_path / "base", "llama"), write_examples(tmp_path)
    settings = settings_of(base, data, method="full", validation_split=0.25, epochs=12, batch_size=54)
    assert fit(settings, tmp_path / "run") == 0
    classify = transformers.pipeline("text-classification", model=str(tmp_path / "run" / "model"), device="cpu")
    predicted = classify([example["text"] for example in EXAMPLES], batch_size=8)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    right = sum(each["label"] == example["label"] for each, example in zip(predicted, EXAMPLES, strict=True))
    assert right == len(EXAMPLES) and record["final_eval_accuracy"] == record["final_eval_f1"] == 1.0
    assert record["data"]["labels"] == list(LABELS)
    assert metrics(tmp_path / "run")[-1]["eval_accuracy"] == 1.0
    # The classifier is a base model, too, whose order of labels stays.
    again = settings_of(tmp_path / "run" / "model", data, method="last-layer", learning_rate=1e-6)
    assert fit(again, tmp_path / "again") == 0
    assert metrics(tmp_path / "again")[0]["loss"] < 0.1
    for refuse in (lambda: fit(small(tmp_path / "run" / "model"), tmp_path / "text"), lambda: load_text(tmp_path)):
        with pytest.raises(TaskError, match="is a classifier, which has labels and writes no text; load it with"):
            refuse()


def load_text(folder: Path) -> Any:
    return load.load_base(str(folder / "run" / "model"), choose_device("cpu"))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_several_processes_train_and_score_as_one(parallel: str, tmp_path: Path) -> None:
    base, data = make_base(tmp_path / "base", "llama"), write_examples(tmp_path)
    common: dict[str, Any] = {"method": "full", "validation_split": 0.25, "batch_size": 27}
    assert fit(settings_of(base, data, **common), tmp_path / "one") == 0
    several = settings_of(base, data, parallel=parallel, **common)
    assert multiprocess.run(2, tmp_path / "log", fit, several, tmp_path / "two")
    one, two = (metrics(tmp_path / name)[-1] for name in ("one", "two"))
    assert one["eval_loss"] == pytest.approx(two["eval_loss"], abs=1e-4)
    assert (one["eval_accuracy"], one["eval_f1"]) == pytest.approx((two["eval_accuracy"], two["eval_f1"]))


def test_an_adapter_of_a_classifier_writes_no_text(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    assert fit(settings_of(base, write_examples(tmp_path), method="lora"), tmp_path / "run") == 0
    with pytest.raises(TaskError, match="is of a classifier, which has labels and writes no text"):
        load_adapter(tmp_path / "run" / "adapter", choose_device("cpu"))
    adapter = str(tmp_path / "run" / "adapter")
    assert fit(settings_of(base, write_examples(tmp_path), adapter=adapter), tmp_path / "more") == 0
    assert metrics(tmp_path / "more")[0]["loss"] < metrics(tmp_path / "run")[0]["loss"]
    with pytest.raises(TaskError, match="it is of the task SEQ_CLS, and the run is of CAUSAL_LM"):
        fit(small(base, adapter=adapter), tmp_path / "text")


def test_scores_are_those_of_scikit_learn() -> None:
    scores = ClassScores(4, torch.device("cpu"))
    truth, predicted = torch.tensor([0, 0, 1, 1, 1, 3]), torch.tensor([0, 1, 1, 1, 0, 3])
    scores.add(torch.nn.functional.one_hot(predicted, 4).float(), truth)
    # f1_score(truth, predicted, average="macro"): of 0.5, 2/3 and 1, for label 2 neither occurs nor was predicted.
    assert scores.results()[1] == pytest.approx({"accuracy": 4 / 6, "f1": (0.5 + 2 / 3 + 1) / 3})


@pytest.mark.parametrize(
    ("example", "form", "problem"),
    [
        ({"text": "a"}, FORM, "label is missing. Known: text"),
        ({"text": "a", "lable": "x"}, FORM, "label is missing. Did you mean 'lable'?"),
        ({"text": "", "label": "x"}, FORM, "text is empty"),
        ({"text": "a", "label": 0.5}, FORM, "label is 0.5; a label is a text or a whole number"),
        ({"text": "a", "label": True}, FORM, "label is True; a label is a text or a whole number"),
        ({"text": "a", "label": ["x", "y"]}, FORM, "label is ['x', 'y']; a label is a text or a whole number"),
        (
            {"text": "a", "label": "goood"},
            DatasetFormat(kind="classification", labels=("good", "bad")),
            "label is 'goood', which is not one of form.labels. Did you mean 'good'?",
        ),
    ],
)
def test_a_wrong_row_is_a_sentence(example: dict[str, Any], form: DatasetFormat, problem: str) -> None:
    assert parse_example(example, form) == problem


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 4}, "bits=4: not together with form.kind=classification"),
        ({"parallel": "deepspeed"}, "parallel=deepspeed: not together with form.kind=classification"),
        ({"sample_answers": 2}, "sample_answers=2: not together with form.kind=classification"),
        ({"long_examples": "chunk"}, "long_examples=chunk: not together with form.kind=classification"),
        ({"form": DatasetFormat(kind="classification", labels=("a", "a"))}, "form.labels: must be at least two"),
    ],
)
def test_what_a_classifier_cannot_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=f"setting {message}"):
        check(Settings(**{"form": FORM, **changes}))
    for refuse in (lambda: check_generate(GenerateSettings(form=FORM)), lambda: check_chat(ChatSettings(form=FORM))):
        with pytest.raises(SettingError, match="is for `train`; load the classifier with"):
            refuse()


@pytest.mark.parametrize(
    ("labels", "form", "message"),
    [
        (["x"] * 4, FORM, "every row has the label 'x'"),
        (["10", "9", "-1", "9"], FORM, ""),
    ],
)
def test_labels_are_those_of_the_data(
    labels: list[str], form: DatasetFormat, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_base(tmp_path / "base", "llama")
    file = tmp_path / "rows.csv"
    file.write_text("text,label\n" + "".join(f"some words,{label}\n" for label in labels))
    settings = small(base, data=[str(file)], validation_split=0.0, form=form)
    if message:
        with pytest.raises(TaskError, match=message):
            fit(settings, tmp_path / "run")
        return
    assert fit(settings, tmp_path / "run") == 0
    assert "as texts with a label; 3 labels: -1, 9, 10" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_smoke_test_trains_and_loads_a_classifier(
    method: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(form=FORM, method=method, device="cpu")
    assert smoke.smoke_test(settings, tmp_path / "data" / "sample.jsonl", None) == 0
    assert "the classifier finds the labels" in capsys.readouterr().out
