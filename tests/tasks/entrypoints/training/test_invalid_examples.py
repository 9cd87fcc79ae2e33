"""Examples that a template or a model cannot take, and damaged weights: a sentence with the file and the line."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import numpy as np
import peft
import safetensors.torch

from ekiben_tasks.data.schema import DatasetFormat
from ekiben_tasks.models import device as device_module
from ekiben_tasks.models import load
from ekiben_tasks.models.merge import merge
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training.prepare import check_tokens, prepare_data
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import base, device, fit, small  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours

GOOD = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    "{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write(file: Path, items: list[Any]) -> str:
    file.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return str(file)


def prepare(settings: Any, *, skip_bad: bool) -> Any:
    from ekiben_tasks.data.sources import parse_sources
    from ekiben_tasks.data.tokenize import apply_format

    tokenizer = load.load_tokenizer(settings.model)
    apply_format(tokenizer, settings.form)
    sources = parse_sources(settings.data, settings.validation_split)
    return prepare_data(settings, sources, tokenizer, 1 << 20, skip_bad), sources, tokenizer


def test_conversation_that_a_template_refuses_is_named_and_can_be_skipped(base: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    bad = [{"role": "user", "content": "no"}, GOOD[1]]
    file = write(tmp_path / "a.jsonl", [{"messages": GOOD}, {"messages": bad}, {"messages": GOOD}])
    form = DatasetFormat(kind="chat", chat=str(tmp_path / "chat.jinja"))
    settings = small(base, data=[file], form=form, validation_split=0.0)
    with pytest.raises(TaskError, match=r"a\.jsonl line 2: the tokenizer's chat template refuses .*: not this"):
        prepare(settings, skip_bad=False)
    data = prepare(settings, skip_bad=True)[0]
    assert (len(data.train), data.too_long) == (2, 0)


def test_long_examples_are_dropped_cut_or_split(base: Path, tmp_path: Path) -> None:
    items = [{"prompt": "abc", "completion": "de"}, {"prompt": "q" * 9, "completion": "xyz " * 9}]
    file = write(tmp_path / "a.jsonl", [*items, {"prompt": "q " * 50, "completion": "a"}])
    settings = small(base, data=[file], validation_split=0.0)
    full = prepare(settings, skip_bad=False)[0].train
    limit = len(full[1].ids) - 5
    shortened = {}
    for way in ("drop", "cut", "chunk"):
        changed = replace(settings, max_length=limit, long_examples=way)
        shortened[way] = prepare(changed, skip_bad=False)[0]
    assert [each.ids.tolist() for each in shortened["drop"].train] == [full[0].ids.tolist()]
    assert (shortened["drop"].too_long, shortened["cut"].too_long) == (2, 0)
    assert [each.ids.tolist() for each in shortened["cut"].train] == [each.ids[:limit].tolist() for each in full[:2]]
    assert shortened["cut"].train[1].targets == ((full[1].targets[0][0], limit),)
    chunks = shortened["chunk"].train[1:3]
    assert np.concatenate([each.ids for each in chunks]).tolist() == full[1].ids.tolist()
    assert chunks[1].targets == ((0, 5),)
    with pytest.raises(TaskError, match="none of the 3 rows fits 1 tokens"):
        prepare(replace(settings, max_length=1, long_examples="cut"), skip_bad=False)


def test_token_without_an_embedding_is_named(base: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"instruction": "a", "output": "b"}, {"instruction": "<think>", "output": "b"}])
    settings = small(base, data=[file], validation_split=0.0)
    data, sources, tokenizer = prepare(settings, skip_bad=False)
    check_tokens(data, settings, sources, tokenizer, len(tokenizer))
    tokenizer.add_tokens(["<think>"])
    data = prepare_data(settings, sources, tokenizer, 1 << 20, False)
    message = (
        rf"a\.jsonl line 2: has the token '<think>', number {len(tokenizer) - 1:,} of the tokenizer, and the model"
    )
    with pytest.raises(TaskError, match=message):
        check_tokens(data, settings, sources, tokenizer, len(tokenizer) - 1)


@pytest.mark.parametrize("damage", ["cut", "empty", "incomplete"])
def test_damaged_weights_are_named(
    damage: str,
    base: Path,
    device: device_module.Device,
    tmp_path: Path,
) -> None:
    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    message = "model.safetensors: is cut or damaged"
    if damage == "incomplete":
        tensors = safetensors.torch.load_file(weights)
        name = next(name for name in sorted(tensors) if name.endswith("bias"))
        del tensors[name]
        safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
        message = f"its files lack the weights {name}; copy or download it again"
    else:
        weights.write_bytes(weights.read_bytes()[:-1000] if damage == "cut" else b"")
    with pytest.raises(TaskError, match=message):
        load.load_base(str(tmp_path), device)


def test_adapter_that_cannot_be_merged_is_named(base: Path, device: device_module.Device, tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(load.load_base(str(base), device), config).save_pretrained(tmp_path / "prompt")
    with pytest.raises(TaskError, match="prompt: is an adapter of the method PROMPT_TUNING, which cannot be merged"):
        merge(tmp_path / "prompt", tmp_path / "merged", device, base=str(base))


def test_run_names_a_token_without_an_embedding(base: Path, tmp_path: Path) -> None:
    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = load.load_tokenizer(str(base))
    tokenizer.add_tokens([f"<added{number}>" for number in range(2000)])
    tokenizer.save_pretrained(tmp_path)
    item = {"instruction": "a", "output": "<added1999>"}
    data = write(tmp_path / "a.jsonl", [{"instruction": "a", "output": "b"}, item])
    with pytest.raises(TaskError, match=r"a\.jsonl line 2: has the token '<added1999>'"):
        fit(small(tmp_path, data=[data], validation_split=0.0), tmp_path / "out")
