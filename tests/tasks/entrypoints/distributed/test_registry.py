"""The folder of strategies is their registry: each fits the Protocol, and a file more is a strategy more."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
RECIPE = Path(os.environ.get("EKIBEN_RECIPE", ROOT / "recipes" / "lora-opencalm"))
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints")]

from ekiben_tasks.distributed import strategies, strategy
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.training import smoke
from ekiben_tasks.training.settings import Settings, check
from ekiben_tasks.training.train import train
from support.multiprocess import same_environment  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
SAMPLE = RECIPE / "data" / "sample.jsonl"

HALF_RATE = '''
"""As ``none``, at half the learning rate."""

from ekiben_tasks.distributed import replicated
from ekiben_tasks.distributed.strategies.none import COMPILES, NEEDS_PROCESS_GROUP, PROCESSES, TAKES_QUANTIZED
from ekiben_tasks.distributed.strategies.none import memory_layout, unavailable

SUMMARY = "at half the rate"


class HalfRate(replicated.ReplicatedStrategy):
    def step(self, rate):
        return super().step(rate / 2)


def create(request, optimizer, world, options):
    return HalfRate(replicated.load_loss_module(request), optimizer, world)
'''


def check_fits(module: object, protocol: type) -> None:
    """``module`` has every attribute of ``protocol``, and functions with the same parameters."""
    names = set(protocol.__annotations__) | {name for name in vars(protocol) if not name.startswith("_")}
    assert len(names) > 2
    for name in names:
        assert hasattr(module, name), f"{module}: no {name}"
        wanted = vars(protocol).get(name)
        if inspect.isfunction(wanted):
            parameters = list(inspect.signature(wanted).parameters)[1:]
            assert list(inspect.signature(getattr(module, name)).parameters) == parameters, f"{module}.{name}"


@pytest.mark.parametrize("name", strategy.names())
def test_every_module_of_the_folder_is_a_strategy(name: str) -> None:
    module = strategy.find(name)
    check_fits(module, strategy.StrategyModule)
    assert module.__doc__
    assert module.PROCESSES in ("one", "several", "any")
    assert all(type(getattr(module, flag)) is bool for flag in ("NEEDS_PROCESS_GROUP", "TAKES_QUANTIZED", "COMPILES"))


def test_module_that_lacks_a_protocol_name_is_refused() -> None:
    class Half:
        SUMMARY = ""

    with pytest.raises(AssertionError, match="no "):
        check_fits(Half, strategy.StrategyModule)


def test_the_names_are_those_of_the_files() -> None:
    assert {"none", "ddp", "fsdp", "deepspeed"} <= set(strategy.names())
    for wrong in ("fdsp", "", "../none"):
        with pytest.raises(SettingError, match=r"setting parallel: must be one of auto, .*fsdp"):
            check(Settings(parallel=wrong))
        with pytest.raises(SettingError, match="setting parallel: no strategy is called"):
            strategy.find(wrong)


def test_one_file_adds_a_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "half_rate.py").write_text(HALF_RATE)
    monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(tmp_path / "added")])
    smoke.make_base(tmp_path / "base", SAMPLE)
    losses = {}
    for name, parallel, rate in (("plain", "none", 1e-2), ("added", "half_rate", 2e-2)):
        settings = Settings(
            model=str(tmp_path / "base"),
            data=[str(SAMPLE)],
            max_length=512,
            max_steps=4,
            batch_size=8,
            eval_every=0,
            learning_rate=rate,
            device="cpu",
            parallel=parallel,
            lora=Lora(dropout=0.0),
        )
        assert train(settings, RECIPE, tmp_path / name) == 0
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines if "loss" in line]
        assert json.loads((tmp_path / name / "run.json").read_text())["device"]["parallel"] == parallel
    assert len(losses["plain"]) == 4
    assert losses["added"] == losses["plain"]  # twice the rate, halved
    sys.modules.pop("ekiben_tasks.distributed.strategies.half_rate")
