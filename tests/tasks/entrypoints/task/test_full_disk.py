"""What a full disk gives with each library that writes weights: one sentence.

The limit of a process on the size of files has the effect of one: writes fail, with another number.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "entrypoints"))

import safetensors.torch
import torch

from ekiben_tasks.task import command, errors

WEIGHTS = {"weight": torch.zeros(1_000_000)}
WRITERS: dict[str, Callable[[Path], object]] = {
    "open": lambda path: path.write_bytes(bytes(4_000_000)),
    "torch": lambda path: torch.save(WEIGHTS, path),
    "safetensors": lambda path: safetensors.torch.save_file(WEIGHTS, path),
}


@pytest.fixture
def _small_files() -> Iterator[None]:
    former, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, former[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, former)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("_small_files")
@pytest.mark.parametrize("library", WRITERS)
def test_full_disk_is_one_sentence(library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def task() -> int:
        WRITERS[library](tmp_path / "weights")
        return 0

    with pytest.raises(SystemExit) as ended:
        command.run(task)
    assert ended.value.code == 1
    printed = capsys.readouterr().err
    assert "cannot be written" in printed
    assert "make room" in printed
    assert "Traceback" not in printed


def test_error_of_no_disk_has_no_message() -> None:
    harmless = (ValueError("x (os error 2)"), RuntimeError("unexpected pos 1 vs 2"), FileNotFoundError(2, "x", "y"))
    assert [errors.explain_disk(error) for error in harmless] == [None, None, None]
