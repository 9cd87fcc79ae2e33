"""DeepSpeed's compiled ops: which an image has, which optimizer a run then takes, and what is said where they are
missing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import train as train_command
from ekiben_tasks.distributed.options import DeepSpeed, compiled_ops
from ekiben_tasks.distributed.strategies import deepspeed as strategy
from ekiben_tasks.task.errors import TaskError
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import SAMPLE, base  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
OPS = (
    "version='0.19.8'\ninstalled_ops={{'cpu_adam': {cpu}, 'fused_adam': {fused}, 'async_io':"
    " False}}\naccelerator_name='cuda'\n"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package deepspeed of which only the list of its ops is there."""
    folder = tmp_path / "site" / "deepspeed"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder / "git_version_info_installed.py"


def test_compiled_ops_are_read_without_an_import(package: Path) -> None:
    assert compiled_ops() == frozenset()
    package.write_text(OPS.format(cpu=1, fused=False))
    assert compiled_ops() == {"cpu_adam"}
    package.write_text("installed_ops = make()\n")
    assert compiled_ops() == frozenset()
    assert "deepspeed" not in sys.modules


@pytest.mark.parametrize(
    ("compiled", "offload", "optimizer", "takes"),
    [
        ((1, 1), "none", "auto", False),
        ((1, 1), "optimizer", "auto", True),
        ((1, 1), "all", "torch", False),
        ((1, 1), "none", "deepspeed", True),
        ((0, 1), "all", "auto", False),
        ((0, 0), "none", "deepspeed", False),
    ],
)
def test_optimizer_by_settings_and_ops(
    compiled: tuple[int, int], offload: Any, optimizer: Any, takes: bool, package: Path
) -> None:
    package.write_text(OPS.format(cpu=compiled[0], fused=compiled[1]))
    assert DeepSpeed(offload=offload, optimizer=optimizer).takes_adam_op() is takes


@pytest.mark.parametrize(("offload", "op"), [("none", "fused_adam"), ("all", "cpu_adam")])
def test_missing_op_is_named_with_the_layer_that_has_it(offload: Any, op: str, package: Path) -> None:
    package.write_text(OPS.format(cpu=0, fused=0))
    reason = strategy.unavailable(DeepSpeed(offload=offload, optimizer="deepspeed"))
    assert reason is not None
    assert f"needs DeepSpeed's op {op}, which is not compiled in this image; build it with --layer deepspeed" in reason
    assert strategy.unavailable(DeepSpeed(offload=offload)) is None


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--dry-run", "--gpus", "2", "--on", "H100"]], ids=" ".join)
def test_train_refuses_a_missing_op(options: list[str], base: Path, package: Path, tmp_path: Path) -> None:
    package.write_text(OPS.format(cpu=0, fused=0))
    settings = [f"model={base}", "device=cpu", "parallel=deepspeed", "deepspeed.optimizer=deepspeed"]
    argv = [
        "--data",
        str(SAMPLE),
        "--output",
        str(tmp_path / "out"),
        *(word for item in settings for word in ("--set", item)),
    ]
    with pytest.raises(TaskError, match=r"setting parallel=deepspeed: .* build it with --layer deepspeed") as caught:
        train_command.main([*argv, *options])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cpu", [0, 1])
def test_plan_with_offload_names_the_layer_with_compiled_ops(
    cpu: int, base: Path, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package.write_text(OPS.format(cpu=cpu, fused=0))
    settings = [f"model={base}", "method=full", "parallel=deepspeed", "deepspeed.offload=all"]
    argv = [
        "--data",
        str(SAMPLE),
        "--output",
        str(tmp_path / "out"),
        *(word for item in settings for word in ("--set", item)),
    ]
    assert train_command.main([*argv, "--dry-run", "--gpus", "2", "--on", "H100"]) == 0
    printed = capsys.readouterr().out
    assert "GiB of the host's for each" in printed
    assert ("built with --layer deepspeed" in printed) == (not cpu)
