"""Why there is no GPU to compute on, in one sentence: none here, a container started without its driver, or an old
driver.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import torch

from ekiben_tasks.models import device
from ekiben_tasks.task.errors import TaskError


def sentence() -> str:
    with pytest.raises(TaskError) as caught:
        device.choose_device("auto")
    return str(caught.value)


@pytest.fixture(autouse=True)
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for /dev, of a machine whose GPU torch cannot use."""
    monkeypatch.setattr(device, "_DEV", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


def test_without_a_gpu() -> None:
    assert sentence().startswith("no GPU is visible here; start with --nv under Apptainer or SingularityCE,")


def test_without_the_drivers_libraries(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    (dev / "nvidia0").touch()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert "its driver's libraries are not in this container; start with --nv under Apptainer" in sentence()
    assert "needs driver 580" not in sentence()


def test_with_a_driver_that_torch_cannot_use(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (dev / "nvidia0").touch()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)
    assert "CUDA 13 needs driver 580 or later" in sentence() and "--nv" not in sentence()
