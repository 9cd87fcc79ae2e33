"""align: losses equal to TRL's trainers by hand, resume, several processes, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="the recipe's packages are not installed here")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "align"
sys.path[:0] = [str(ROOT / "entrypoints"), str(RECIPE / "entrypoints")]

import datasets
import peft
import torch

import align_callback
import align_models
import align_run
import align_settings
import preferences
from ekiben_tasks.data.sources import Source
from ekiben_tasks.models import load, tiny
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.errors import SettingError, TaskError
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
PAIRS, LABELS = RECIPE / "data" / "sample-pairs.jsonl", RECIPE / "data" / "sample-labels.jsonl"
KINDS: dict[str, type[align_settings.Settings]] = {
    kind.NAME: kind
    for kind in (
        align_settings.DpoSettings,
        align_settings.OrpoSettings,
        align_settings.KtoSettings,
        align_settings.RewardSettings,
        align_settings.GrpoSettings,
    )
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    tiny.make_model(folder, PAIRS.read_text(encoding="utf-8").splitlines())
    return folder


def settings_of(name: str, model: Path, **changes: Any) -> align_settings.Settings:
    values: dict[str, Any] = {
        "model": str(model),
        "lora": Lora(r=4, dropout=0.0, target_modules=("query_key_value",)),
        "max_steps": 3,
        "batch_size": 4,
        "micro_batch": 2,
        "learning_rate": 1e-3,
        "max_length": 96,
        "device": "cpu",
    }
    if name == "grpo":
        values |= {
            "num_generations": 2,
            "max_new_tokens": 8,
            "rewards": (f"{RECIPE / 'data/sample_reward.py'}:reward",),
        }
    return KINDS[name](**{**values, **changes})


def sources_of(settings: align_settings.Settings) -> list[Source]:
    return [Source(str(LABELS if settings.DATA == "labels" else PAIRS))]


def align(settings: align_settings.Settings, output: Path, **changes: Any) -> int:
    return align_run.run(align_run.Request(settings, sources_of(settings), output, **changes))


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def test_processes_learn_the_same(model: Path, tmp_path: Path) -> None:
    # First of all tests here: after a fork, the threads of Arrow are gone that other tests have started.
    settings = settings_of("dpo", model)
    multiprocess.run(2, tmp_path / "log", align, settings, tmp_path / "two")
    assert align(settings, tmp_path / "one") == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    record = json.loads((tmp_path / "two" / "run.json").read_text(encoding="utf-8"))
    assert record["device"]["count"] == 2 and record["steps"] == 3


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "lora") for name in KINDS), ("dpo", "full"), ("kto", "full"), ("reward", "full")]
)
def test_losses_are_those_of_trl(name: str, method: str, model: Path, tmp_path: Path) -> None:
    settings = settings_of(name, model, method=method)
    assert align(settings, tmp_path / "ours") == 0
    configuration, trainer = align_run.TRAINERS[name]
    tokenizer = load.load_tokenizer(str(model))
    tokenizer.pad_token = tokenizer.eos_token
    lines = Path(sources_of(settings)[0].location).read_text(encoding="utf-8").splitlines()
    more: dict[str, Any] = {"max_length": 96}
    further: dict[str, Any] = {}
    if name == "grpo":
        more = {"num_generations": 2, "max_completion_length": 8}
        further["reward_funcs"] = align_models.load_functions(settings_of(name, model).rewards)  # type: ignore[attr-defined]
    if method == "lora":
        kind = "SEQ_CLS" if name == "reward" else "CAUSAL_LM"
        further["peft_config"] = peft.LoraConfig(
            r=4,
            lora_alpha=16,
            target_modules=["query_key_value"],
            task_type=kind,
            modules_to_save=["score"] if name == "reward" else None,
        )
    by_name: Any = str(model)
    if name in ("orpo", "reward"):  # not by its name: ORPO's trainer takes no tokenizer then, the other draws numbers
        by_name = align_models.load_model(settings, str(model), _cpu())
    if name in ("dpo", "orpo", "kto"):
        more["beta"] = 0.1
    by_hand = trainer(
        model=by_name,
        args=configuration(
            output_dir=str(tmp_path / "theirs"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=3,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            **more,
        ),
        train_dataset=datasets.Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=tokenizer,
        **further,
    )
    by_hand.train()
    theirs = [line["loss"] for line in by_hand.state.log_history if "loss" in line]
    assert len(theirs) == 3
    assert losses(tmp_path / "ours") == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def _cpu() -> Any:
    from ekiben_tasks.models.device import choose_device

    return choose_device("cpu")


def test_killed_run_continues(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of("dpo", model, max_steps=5, save_steps=2, tracker=("tensorboard",))
    assert align(settings, tmp_path / "complete") == 0

    def at_step(number: int, act: Callable[[], None]) -> None:
        begin = align_callback.RunCallback.on_step_begin

        def on_step_begin(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
            begin(self, args, state, control, **more)
            if state.global_step == number:
                act()

        monkeypatch.setattr(align_callback.RunCallback, "on_step_begin", on_step_begin)

    def fail() -> None:
        raise KeyboardInterrupt

    output = tmp_path / "cut"
    at_step(3, fail)
    with pytest.raises(KeyboardInterrupt):
        align(settings, output)
    monkeypatch.undo()
    (output / "checkpoints" / "checkpoint-4").mkdir()  # as a kill leaves it, while it is written
    with pytest.raises(TaskError, match="has checkpoints of other settings or data"):
        align(replace(settings, learning_rate=2e-3), output)
    at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    assert align(settings, output) == 75
    assert json.loads((output / "run.json").read_text(encoding="utf-8"))["status"] == "interrupted"
    monkeypatch.undo()
    assert align(settings, output) == 0
    assert losses(output) == pytest.approx(losses(tmp_path / "complete"), rel=1e-5)
    events = b"".join(file.read_bytes() for file in (tmp_path / "complete").glob("events.out.tfevents.*"))
    assert events.count(b"rewards/margins") == 5
    folders = (str(path / "adapter") for path in (output, tmp_path / "complete"))
    first, second = (peft.utils.load_peft_weights(folder, device="cpu") for folder in folders)
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(first[key], second[key])


@pytest.mark.parametrize("name", ["dpo", "reward"])
def test_adapter_has_the_settings(name: str, model: Path, tmp_path: Path) -> None:
    lora = Lora(
        r=4, target_modules=("query_key_value",), use_rslora=True, use_dora=True, rank_pattern={"query_key_value": 2}
    )
    settings = settings_of(name, model, max_steps=1)
    assert align(replace(settings, lora=lora), tmp_path / "out") == 0
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    expected = {"use_rslora": True, "use_dora": True, "rank_pattern": {"query_key_value": 2}}
    assert expected.items() <= config.items()
    with pytest.raises(TaskError, match=r"setting lora\.target_modules: no layer is called nope"):
        align(replace(settings, lora=Lora(target_modules=("nope",))), tmp_path / "nope")


def test_reward_model_rates_in_grpo(model: Path, tmp_path: Path) -> None:
    assert align(settings_of("reward", model), tmp_path / "reward") == 0
    changes = {"rewards": (str(tmp_path / "reward" / "adapter"),), "max_steps": 1}
    assert align(settings_of("grpo", model, **changes), tmp_path / "grpo") == 0
    line = json.loads((tmp_path / "grpo" / "metrics.jsonl").read_text(encoding="utf-8"))
    assert any(key.startswith("rewards/") for key in line)
    with pytest.raises(TaskError, match=r"is not a reward model: its files lack the weights score\.weight"):
        align_models.load_reward(str(model), _cpu())


GOOD = {
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "labels": {"prompt": "a", "completion": "b", "label": True},
    "prompts": {"prompt": "a", "answer": 4},
}
TURNS = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("pairs", {"rejected": None}, "rejected is missing"),
        ("pairs", {"chosen": " "}, "chosen is empty"),
        ("pairs", {"chosen": 3}, "chosen is 3, neither text nor a list of messages"),
        ("pairs", {"chosen": "c"}, "chosen and rejected are the same"),
        ("pairs", {"chosen": TURNS}, "prompt and rejected are not both text, or both messages"),
        ("pairs", {"prompt": []}, "prompt has no messages"),
        ("labels", {"label": "yes"}, "label is 'yes', not true or false"),
        ("labels", {"completion": [{"role": "users", "content": "b"}]}, "has the role 'users'. Did you mean 'user'?"),
        ("labels", {"completion": ["b"]}, "completion: message 1 is not like"),
        ("prompts", {"prompt": None}, "prompt is missing"),
    ],
)
def test_bad_examples_are_named(kind: str, changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines = [json.dumps(GOOD[kind]), json.dumps({**GOOD[kind], **changes}), "{"]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with pytest.raises(TaskError) as raised:
        preferences.read([Source(str(file))], kind, skip=False)
    assert f"{file} line 2: " in str(raised.value) and problem in str(raised.value)
    assert f"{file} line 3: is not JSON" in str(raised.value)
    assert len(preferences.read([Source(str(file))], kind, skip=True).items) == 1


def test_unused_columns_and_mixed_examples_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({**GOOD["pairs"], "score": 3}) + "\n", encoding="utf-8")
    request = align_run.Request(settings_of("dpo", tmp_path), [Source(str(file))], tmp_path / "out", is_dry=True)
    assert align_run.run(request) == 0
    assert "note        nothing uses the columns score (1)\n" in capsys.readouterr().out
    messages = {name: [{"role": "assistant", "content": name}] for name in ("prompt", "chosen", "rejected")}
    file.write_text(json.dumps(GOOD["pairs"]) + "\n" + json.dumps(messages) + "\n", encoding="utf-8")
    with pytest.raises(TaskError, match=r"line 2: has messages, and .* line 1 has text"):
        align_run.run(request)


def test_messages_take_the_chat_template(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.jsonl"
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("富士山です。", "知りません。" * 100))
    file.write_text(json.dumps({"prompt": TURNS, "chosen": chosen, "rejected": rejected}) + "\n", encoding="utf-8")
    settings = settings_of("dpo", model, max_steps=1, batch_size=1, micro_batch=1)
    request = align_run.Request(settings, [Source(str(file))], tmp_path / "out")
    with pytest.raises(TaskError, match="its tokenizer has no chat template for the data's messages"):
        align_run.run(request)
    tokenizer = load.load_tokenizer(str(model))
    tokenizer.chat_template = (
        "{% for each in messages %}{{ each['role'] + ': ' + each['content'] + '\\n' }}{% endfor %}"
    )
    load.load_base(str(model), _cpu()).save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    request = replace(request, settings=replace(settings, model=str(tmp_path / "chat")), output=tmp_path / "chat-out")
    assert align_run.run(request) == 0
    assert "note        1 examples have more than 96 tokens, and are cut\n" in capsys.readouterr().out
    assert len(losses(tmp_path / "chat-out")) == 1


@pytest.mark.parametrize(
    ("name", "assignments", "message"),
    [
        ("dpo", ["batch_size=3"], "setting batch_size: 3 is not a multiple of micro_batch times processes"),
        ("dpo", ["learning_rate=0"], "setting learning_rate: must be above 0"),
        ("dpo", ["bits=8", "method=full"], "setting bits=8: not together with method=full"),
        ("kto", ["micro_batch=1"], "setting micro_batch: must be at least 2 for kto"),
        ("grpo", ["num_generations=3"], "setting batch_size: 16 completions are no multiple of num_generations"),
        ("grpo", ["rewards=[/nope.py:f]"], "setting rewards: /nope.py: no such file"),
        ("grpo", ["reward_weights=[1, 2]"], "setting reward_weights: must be as many as rewards"),
    ],
)
def test_bad_settings_are_named(name: str, assignments: list[str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        align_settings.check(options.load(KINDS[name], None, assignments), 1)


def test_bad_reward_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    for text, message in (("x = ", "cannot be run: SyntaxError"), ("def g(): ...", "has no function f; it has g")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(TaskError, match=message):
            align_models.load_functions([f"{file}:f"])
