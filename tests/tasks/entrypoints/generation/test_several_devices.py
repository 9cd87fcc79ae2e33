"""A model is spread over several devices: where its layers go is planned on the meta device, and its answers stay."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "accelerate"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [
    str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"),
    str(ROOT / "entrypoints"),
]

import transformers

import generate
from ekiben_tasks.generation.sampling import Sampling, sample
from ekiben_tasks.models import tiny
from ekiben_tasks.models.adapter import load_ready
from ekiben_tasks.models.device import GIB, choose_device, named_device
from ekiben_tasks.models.placement import DeviceName, spread_layers
from ekiben_tasks.task.errors import DoesNotFitError, SettingError
from support.multiprocess import same_environment  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def llama_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("70b")
    transformers.LlamaConfig(**LLAMA_70B).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("bits", "gpus", "total"), [(16, 4, 131.4), (16, 2, 131.4), (4, 1, 35.8)])
def test_70b_is_spread_evenly(bits: int, gpus: int, total: float, llama_70b: Path) -> None:
    memory: dict[DeviceName, int] = dict.fromkeys(range(gpus), 79 * GIB)
    placement = spread_layers(str(llama_70b), named_device("H100"), memory, bits)
    sizes = [size / GIB for size in placement.weights.values()]
    assert sum(sizes) == pytest.approx(total, abs=0.1)
    assert list(placement.weights) == list(range(gpus)) and max(sizes) < 0.9 * 79
    if gpus == 4:
        assert max(sizes) - min(sizes) < 4
    layers = [number for gpu in range(gpus) for number in placement.blocks[gpu]]
    assert layers == list(range(80))  # in order, each whole on one device
    assert placement.format_lines("H100")[1].startswith("            0: layers 0 to ")


def test_what_does_not_fit_is_refused(llama_70b: Path) -> None:
    with pytest.raises(DoesNotFitError, match="weights take 131 GiB, and 90% of the memory of 1 devices is 71 GiB"):
        spread_layers(str(llama_70b), named_device("H100"), {0: 79 * GIB})


def test_a_plan_without_a_gpu(llama_70b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dry-run", "--gpus", "4", "--on", "H100", "--set", "devices=auto", "--model", str(llama_70b)]
    assert generate.main(options) == 0
    out = capsys.readouterr().out
    assert "devices     4 x H100, layers spread" in out and "3: layers " in out and "nothing was loaded" in out


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # gpt2's head is its embeddings
def test_answers_of_a_spread_model_are_the_same(kind: str, tmp_path: Path) -> None:
    tiny.make_model(tmp_path, ["some words about mountains and rivers"], kind, layers=4, vocabulary=300)
    device = choose_device("cpu")
    total = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    placement = spread_layers(str(tmp_path), device, {0: total, 1: total})
    assert set(placement.device_map.values()) == {0, 1}
    # accelerate has two kinds of devices without a GPU: what is on the disk is read for each use.
    names: dict[DeviceName, DeviceName] = {0: "cpu", 1: "disk"}
    spread = {module: names[gpu] for module, gpu in placement.device_map.items()}
    answers = []
    for device_map in (None, spread):
        model, tokenizer = load_ready(str(tmp_path), "", device, device_map=device_map)
        answers.append(sample(model, tokenizer, [[5, 6, 7], [8, 9]], [0, 1], 8, Sampling(temperature=0.7)))
    assert answers[0] == answers[1]
    assert any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "2"], "devices=auto: one process spreads its model over all GPUs, and these are 2"),
        (["--set", "device=cpu"], "devices=auto: spreads a model over GPUs; leave device=cpu out"),
    ],
)
def test_what_cannot_be_spread_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(SettingError, match=f"setting {message}"):
        generate.main(["--set", "devices=auto", *options])
