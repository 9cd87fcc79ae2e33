"""The folder of model families is their registry: each fits the Protocol, and a file more is a family more."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints")]

from ekiben_tasks.models import architecture, architectures
from ekiben_tasks.task.errors import TaskError

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
# Qwen2 has Llama's names.
QWEN2 = '''
"""Qwen2."""

import dataclasses

from ekiben_tasks.models.architectures import llama

ARCHITECTURE = dataclasses.replace(llama.ARCHITECTURE, name="Qwen2")
attention_windows = llama.attention_windows
tiny_config = llama.tiny_config
'''


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "qwen2.py").write_text(QWEN2)
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ekiben_tasks.models.architectures.qwen2", raising=False)
    return "qwen2"


@pytest.mark.parametrize("name", architecture.names())
def test_every_module_of_the_folder_is_a_family(name: str) -> None:
    module = architecture.find_module(name)
    known = module.ARCHITECTURE
    assert isinstance(known, architecture.Architecture)
    assert set(known.lora) <= set(known.linear)
    assert module.tiny_config(2, 64)
    config = SimpleNamespace(num_hidden_layers=2, attention_layers=["global", "local"], window_size=16)
    assert module.attention_windows(config) == ([None, 16] if name == "gpt_neo" else [None, None])


def test_an_unknown_family_is_named_with_those_known() -> None:
    with pytest.raises(TaskError, match=r"model_type 'qwen2' is not one whose parts are known here \(.*llama.*\)"):
        architecture.find_module("qwen2")


def test_one_file_adds_a_family(added: str) -> None:
    """It is trained, counted and measured as the others are: a tiny random model of it through each of these."""
    for package in ("torch", "transformers", "peft"):
        pytest.importorskip(package, reason="the recipe's packages are not installed here")
    import torch

    from ekiben_tasks.models import flops, memory, tiny
    from ekiben_tasks.models.tuning import LossModule, apply_tuning_method, check_head
    from ekiben_tasks.training.settings import Settings

    assert added in architecture.names()
    model = apply_tuning_method(tiny.random_model(added, 300), Settings(method="lora"))
    assert model.config.model_type == added and architecture.find_module(added).ARCHITECTURE.name == "Qwen2"
    assert len(architecture.list_blocks(model)) == 2
    check_head(LossModule(model, torch.float32))
    assert flops.training_costs(model).per_token > 0
    assert memory.expect_memory(memory.profile_model(model, longest=64)).per_token > 0
