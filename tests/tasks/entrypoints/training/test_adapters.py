"""Adapters of each kind train as PEFT's do in a plain loop, are read by PEFT, merge, and are trained further."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import peft
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ekiben_tasks.models import load, merge
from ekiben_tasks.models.adapter import load_adapter
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.training.settings import Settings, check
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.plain_training import SMALL_RUN, train_plainly
from support.tiny_runs import base, fit, metrics, small  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
BLOCK = ("q_proj", "v_proj")
KINDS: dict[str, Lora] = {
    "dora": Lora(use_dora=True),
    "rslora": Lora(r=3, use_rslora=True),
    "patterns": Lora(rank_pattern={"v_proj": 2, "layers.0.self_attn.q_proj": 3}, alpha_pattern={"v_proj": 5}),
    "head": Lora(target_modules=("q_proj", "lm_head")),
    "embeddings": Lora(target_modules=("q_proj", "embed_tokens")),
    "both-dora": Lora(target_modules=("lm_head", "embed_tokens", "down_proj"), use_dora=True),
    "save-head": Lora(modules_to_save=("lm_head",)),
    "save-embeddings-and-norm": Lora(modules_to_save=("embed_tokens", "norm")),
    "tokens": Lora(trainable_token_indices=(5, 17, 300)),
}


@pytest.fixture(scope="module")
def llamas(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return random models, by whether the head is tied to the embeddings."""
    folders = {}
    for is_tied in (False, True):
        tokenizer = load.load_tokenizer(str(base))
        config = AutoConfig.for_model(
            "llama",
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.1,
            tie_word_embeddings=is_tied,
        )
        torch.manual_seed(1)
        folders[is_tied] = tmp_path_factory.mktemp("llama")
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[is_tied])
        tokenizer.save_pretrained(folders[is_tied])
    return folders


def reference(settings: Settings, tokenizer: Any) -> dict[str, torch.Tensor]:
    """Return the weights of the same adapter as PEFT trains it."""
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
    lora = settings.lora
    torch.manual_seed(settings.seed)
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            target_modules=list(lora.target_modules),
            use_dora=lora.use_dora,
            use_rslora=lora.use_rslora,
            rank_pattern=lora.rank_pattern or {},
            alpha_pattern=lora.alpha_pattern or {},
            modules_to_save=list(lora.modules_to_save) or None,
            trainable_token_indices=list(lora.trainable_token_indices) or None,
            task_type="CAUSAL_LM",
        ),
    )
    trained = [each for each in adapted.parameters() if each.requires_grad]
    before = [each.detach().clone() for each in trained]
    train_plainly(settings, tokenizer, adapted, [torch.optim.AdamW(trained, weight_decay=0.0)])
    assert all(not torch.equal(each, old) for each, old in zip(trained, before, strict=True))
    return dict(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_as_pefts(kind: str, is_tied: bool, llamas: dict[bool, Path], tmp_path: Path) -> None:
    lora = dataclasses.replace(KINDS[kind], dropout=0.0)
    lora = dataclasses.replace(lora, target_modules=BLOCK) if lora.target_modules == "auto" else lora
    settings = small(llamas[is_tied], **SMALL_RUN, lora=lora)
    tokenizer = load.load_tokenizer(settings.model)
    theirs = reference(settings, tokenizer)
    assert fit(settings, tmp_path) == 0
    ours = peft.load_peft_weights(str(tmp_path / "adapter"), device="cpu")
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, atol=3e-5), (name, (ours[name] - weight).abs().max())
    device = choose_device("cpu")
    model, _ = load_adapter(tmp_path / "adapter", device)
    ids = torch.arange(5, 25)[None]
    logits = merge.logits(model, ids)
    with model.disable_adapter():
        assert not torch.allclose(logits, merge.logits(model, ids), atol=1e-4)
    at_one_end = is_tied and kind in ("head", "embeddings", "both-dora")
    if at_one_end:  # the one weight of both ends cannot have it
        with pytest.raises(TaskError, match="merged logits differ"):
            merge.merge(tmp_path / "adapter", tmp_path / "merged", device)
    else:
        assert merge.merge(tmp_path / "adapter", tmp_path / "merged", device) < 1e-4


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["both-dora", "save-embeddings-and-norm", "tokens"])
def test_two_processes_train_the_same_adapter(kind: str, way: str, llamas: dict[bool, Path], tmp_path: Path) -> None:
    settings = {**SMALL_RUN, "lora": dataclasses.replace(KINDS[kind], dropout=0.0)}
    assert fit(small(llamas[True], **settings), tmp_path / "one") == 0
    started = multiprocess.start(
        2, tmp_path / "log", fit, small(llamas[True], **settings, parallel=way), tmp_path / "two"
    )
    assert multiprocess.wait(started) == [0, 0], (tmp_path / "log-0").read_text()
    one, two = (peft.load_peft_weights(str(tmp_path / name / "adapter"), device="cpu") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=3e-5) for name in one)


@pytest.mark.parametrize("kind", ["dora", "save-head", "tokens", "head"])
def test_adapters_are_trained_further(kind: str, llamas: dict[bool, Path], tmp_path: Path) -> None:
    """A second run begins with the loss that the first one ended with, and takes the adapter's own configuration."""
    lora = dataclasses.replace(KINDS[kind], dropout=0.0)
    common = {**SMALL_RUN, "eval_every": 0, "schedule": "constant", "warmup_steps": 0}
    assert fit(small(llamas[False], **common, lora=lora), tmp_path / "first") == 0
    assert fit(small(llamas[False], **common, adapter=str(tmp_path / "first" / "adapter")), tmp_path / "second") == 0
    ended = next(line["eval_loss"] for line in metrics(tmp_path / "first") if "eval_loss" in line)
    assert (
        fit(
            small(llamas[False], **{**common, "learning_rate": 1e-12}, adapter=str(tmp_path / "first" / "adapter")),
            tmp_path / "same",
        )
        == 0
    )
    assert next(line["eval_loss"] for line in metrics(tmp_path / "same") if "eval_loss" in line) == pytest.approx(ended)
    configs = [
        json.loads((tmp_path / name / "adapter" / "adapter_config.json").read_text()) for name in ("first", "second")
    ]
    assert configs[0] == configs[1]
    assert next(line["eval_loss"] for line in metrics(tmp_path / "second") if "eval_loss" in line) < ended


def test_adapter_that_does_not_fit_is_refused(llamas: dict[bool, Path], base: Path, tmp_path: Path) -> None:
    assert fit(small(base, max_steps=1), tmp_path / "first") == 0
    adapter = tmp_path / "first" / "adapter"
    with pytest.raises(TaskError, match=r"setting adapter=\S+: does not fit the model"):
        fit(small(llamas[False], max_steps=1, adapter=str(adapter)), tmp_path / "second")
    with pytest.raises(TaskError, match=r"holds no adapter_config\.json"):
        fit(small(llamas[False], max_steps=1, adapter=str(tmp_path)), tmp_path / "second")
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "peft_type": "IA3"}))
    with pytest.raises(TaskError, match=r"IA3|LoRA alone"):
        fit(small(base, max_steps=1, adapter=str(adapter)), tmp_path / "second")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(r=0), "lora.r: must be at least 1, not 0"),
        (Lora(rank_pattern={"a": 0}), r"lora.rank_pattern: must be names with whole numbers above 0"),
        (Lora(rank_pattern={"a(": 2}), r"lora.rank_pattern: must be names with whole numbers above 0"),
        (Lora(alpha_pattern=[1]), r"lora.alpha_pattern: must be names with whole numbers above 0"),
        (Lora(trainable_token_indices=(-1,)), "lora.trainable_token_indices: must be numbers of tokens"),
    ],
)
def test_wrong_settings_are_refused(lora: Lora, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        check(Settings(lora=lora))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(rank_pattern={"query": 2}), "lora.rank_pattern: no layer is called query"),
        (Lora(modules_to_save=("embed_ot",)), "lora.modules_to_save: no module is called embed_ot. Did you mean"),
        (Lora(trainable_token_indices=(10**6,)), "lora.trainable_token_indices: the model has embeddings of"),
        (Lora(target_modules=("input_layernorm",)), "setting lora"),
        (Lora(target_modules=("dense", "embed_out")), "lora.target_modules: no layer is called embed_out; this model"),
    ],
)
def test_what_the_model_has_not_is_refused(lora: Lora, message: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        fit(small(base, lora=lora), tmp_path)
