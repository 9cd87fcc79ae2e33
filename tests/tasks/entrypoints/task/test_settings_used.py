"""A setting that a task shows is used, or refused, or named as unused: none is ignored in silence."""

from __future__ import annotations

import ast
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [
    str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"),
    *(str(ROOT / "recipes" / name / "entrypoints") for name in ("pretrain-gpt", "lora-bench")),
]

import bench_runs
import bench_settings
import dialogues
import sft
from ekiben_tasks.data.schema import DatasetFormat
from ekiben_tasks.distributed.options import DeepSpeed
from ekiben_tasks.generation.settings import ChatSettings, check_chat
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.training.settings import Settings, check, list_unused
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import base, fit, small  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
FOLDERS = [ROOT / "entrypoints", *sorted((ROOT / "recipes").glob("*/entrypoints"))]
# A valid value that is not a default, for settings whose type does not give one.
VALUES: dict[str, Any] = {
    "model": "owner/other",
    "data": "elsewhere",
    "bits": 8,
    "method": "full",
    "micro_batch": 3,
    "last_layer": ("ln_f",),
    "schedule": "cosine",
    "weights": "bf16",
    "long_examples": "cut",
    "mixture": "all_exhausted",
    "optimizer": "muon",
    "adapter": "folder",
    "min_learning_rate": 1e-5,
    "gradient_checkpointing": True,
    "compile": True,
    "attention": "math",
    "parallel": "ddp",
    "device": "cpu",
    "form": DatasetFormat(kind="chat"),
    "lora": Lora(r=9),
    "deepspeed": DeepSpeed(stage=2),
}


def changed_settings() -> list[tuple[str, Any]]:
    """Return (name, another value than the default) of each setting of the training."""
    changed = []
    for field in dataclasses.fields(Settings):
        value = getattr(Settings(), field.name)
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) and value else 0.5
        changed.append((field.name, VALUES.get(field.name, other)))
    return changed


def definitions() -> dict[tuple[str, str], Path]:
    """Return (class, setting) → file of every setting that a dataclass of the tasks defines with ``option``."""
    fields = {}
    for file in (file for folder in FOLDERS for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for line in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call) and "option" in ast.dump(line):
                    assert isinstance(node, ast.ClassDef) and isinstance(line.target, ast.Name)
                    fields[node.name, line.target.id] = file
    return fields


def test_every_setting_is_read_somewhere() -> None:
    """By its name, outside of the functions that check and describe settings."""
    read: dict[Path, set[str]] = {}
    for folder in FOLDERS:
        for file in folder.rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            checks = [
                node
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef) and node.name.startswith(("check", "list_unused"))
            ]
            hidden = {id(inner) for check in checks for inner in ast.walk(check)}
            names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in hidden}
            read.setdefault(folder, set()).update(names)
    settings = definitions()
    assert len(settings) > 90
    common = read[ROOT / "entrypoints"]
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for (_, name), file in settings.items()
        if not any(name in common | read[folder] for folder in FOLDERS if file.is_relative_to(folder))
    ]
    assert not missing


def test_training_reads_every_setting_or_names_it(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: set[str] = set()
    readers_of_all = {"check", "check_format", "describe", "fingerprint", "list_unused", "replace", "run_record"}

    def record(kind: type, prefix: str) -> None:
        def get(self: Any, name: str) -> Any:
            if sys._getframe(1).f_code.co_name not in readers_of_all:  # these read all settings, whether used or not
                read.add(prefix + name)
            return object.__getattribute__(self, name)

        monkeypatch.setattr(kind, "__getattribute__", get, raising=False)

    for kind, prefix in ((Settings, ""), (DatasetFormat, "form."), (Lora, "lora."), (DeepSpeed, "deepspeed.")):
        record(kind, prefix)
    assert fit(small(base, max_steps=2, warmup_steps=0.5), tmp_path) == 0
    monkeypatch.undo()
    names = {name for name, _, _ in options.describe(Settings())}
    changed = dataclasses.replace(
        Settings(),
        last_layer=("ln_f",),
        form=DatasetFormat(prompt="{a}", response="{b}", chat="prompter", column="c"),
        mixture="all_exhausted",
        decay_steps=5,
        deepspeed=DeepSpeed(stage=2, offload="optimizer", optimizer="torch"),
    )
    sentences = list_unused(changed, "none")
    named = {name for sentence in sentences for name in sentence.split(": not used ")[0].split(", ")}
    assert names - read - named == set()
    assert "deepspeed.stage, deepspeed.offload, deepspeed.optimizer: not used with parallel=none" in sentences


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({}, []),
        ({"method": "full", "lora": Lora(r=9)}, ["lora.r: not used with method=full"]),
        ({"method": "full", "adapter": "a"}, ["adapter: not used with method=full"]),
        ({"adapter": "a", "lora": Lora(r=9)}, ["lora.r: not used with adapter=a"]),
        ({"last_layer": ("ln_f",)}, ["last_layer: not used with method=lora"]),
        ({"form": DatasetFormat(chat="x.jinja")}, ["form.chat: not used with form.kind=instruction"]),
        (
            {"data": [{"source": "a/b", "validation_split": 0.1}], "validation_split": 0.3},
            ["validation_split: not used where each source of the data has its own"],
        ),
        ({"decay_steps": 5}, ["decay_steps: not used with schedule=linear"]),
        (
            {"schedule": "constant", "min_learning_rate": 1e-6},
            ["min_learning_rate: not used with schedule=constant"],
        ),
        ({"optimizer": "adafactor", "adam_beta2": 0.95}, ["adam_beta2: not used with optimizer=adafactor"]),
        ({"mixture": "all_exhausted"}, ["mixture: not used where no source of the data has a weight"]),
        (
            {"form": DatasetFormat(kind="text"), "mask_prompt": False, "long_examples": "cut"},
            ["mask_prompt, long_examples: not used with form.kind=text"],
        ),
    ],
)
def test_unused_settings_are_named(changes: dict[str, Any], sentences: list[str]) -> None:
    assert list_unused(Settings(**changes), "none") == sentences


@pytest.mark.parametrize(("name", "value"), changed_settings())
def test_sft_passes_each_setting_on_or_refuses_it(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EKIBEN_RECIPE", raising=False)  # in an image: that of another recipe
    passed: list[Any] = []
    monkeypatch.setattr(sft, "train", lambda settings, *rest: passed.append(settings) or 0)
    monkeypatch.setattr(sft, "prepare", lambda settings, files, *rest, **more: passed.append(files) or settings.train)
    monkeypatch.setattr(sft.options, "load", lambda *rest: dialogues.Settings(train=Settings(**{name: value})))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rows.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    arguments = ["--output", str(tmp_path / "out"), "--dry-run"]
    if name == "form":
        with pytest.raises(SettingError, match=r"setting train\.form: sft reads dialogues"):
            sft.main(arguments)
        return
    assert sft.main(arguments) == 0
    files, settings = passed
    assert getattr(settings, name) == value
    default = ROOT / "recipes" / "pretrain-gpt" / "data" / "dialogues.jsonl"
    assert files == [Path("elsewhere/rows.jsonl") if name == "data" else default]


def test_sft_refuses_data_that_are_no_files() -> None:
    with pytest.raises(SettingError, match=r"setting train\.data: \{'source': 'a/b'\} is not a file or folder"):
        dialogues.list_locations([{"source": "a/b"}], ROOT)


@pytest.mark.parametrize(("name", "value"), changed_settings())
def test_benchmark_passes_each_setting_on_or_refuses_it(
    name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[Any] = []
    monkeypatch.setattr(bench_runs, "train_model", lambda settings, *rest, **more: passed.append(settings) or 0)
    monkeypatch.setattr(bench_runs.dolly, "read_record", lambda folder: {"model": train.model, "data": str(folder)})
    train = Settings(**{"data": "processed", name: value})
    settings = bench_settings.Settings(target_loss=None, train=train)
    if name in ("form", "mask_prompt", "validation_split", "long_examples", "save_minutes", "adapter"):
        with pytest.raises(SettingError, match=rf"setting train\.{name}: "):
            bench_runs.run_once(settings, 1, tmp_path, config=None, dry=bench_runs.DryRun())
        return
    bench_runs.run_once(settings, 1, tmp_path, config=None, dry=bench_runs.DryRun())
    assert getattr(passed[0], name) == ([value] if name == "data" else value)


def test_chat_refuses_a_system_message_that_its_format_has_not() -> None:
    with pytest.raises(SettingError, match=r"setting system: form\.kind=instruction has no system message"):
        check_chat(ChatSettings(system="s"))
    check_chat(ChatSettings(system="s", form=DatasetFormat(kind="chat")))
    check(Settings())
