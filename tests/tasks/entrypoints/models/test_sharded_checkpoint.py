"""Folders of torch.distributed.checkpoint are read without running what their pickle names."""

from __future__ import annotations

import io
import os
import pickle
import sys
from pathlib import Path, PosixPath
from typing import Any

import pytest

pytest.importorskip("torch", reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from ekiben_tasks.models.checkpoint_folder import METADATA
from ekiben_tasks.models.sharded_checkpoint import _Unpickler, read_metadata
from ekiben_tasks.task.errors import TaskError

pytestmark = pytest.mark.filterwarnings("default")  # what torch warns of is not ours


class Hostile:
    """Calls a function when its pickle is loaded."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    weights = {
        "a": torch.ones(2, 3),
        "b": torch.zeros(4, dtype=torch.bfloat16),
        "c": torch.zeros((), dtype=torch.int64),
    }
    dcp.save({"model": weights, "groups": [0.1, "text"]}, checkpoint_id=str(tmp_path / "shards"), no_dist=True)
    return tmp_path / "shards"


def test_metadata_of_torch_is_read(shards: Path) -> None:
    found = read_metadata(shards)
    assert {"model.a", "model.b", "model.c"} <= found.keys()
    assert (found["model.b"].size, found["model.b"].properties.dtype) == (torch.Size([4]), torch.bfloat16)


def test_only_a_memory_format_is_asked_for_by_name(shards: Path) -> None:
    """Python 3.11.0 to 3.11.3, Debian 12's among them, pickle an enum as a call of getattr."""
    metadata = shards / METADATA
    metadata.write_bytes(pickle.dumps({"x": Hostile(getattr, torch.Size, "numel")}))
    with pytest.raises(TaskError, match=r"reads an attribute of <class 'torch\.Size'>"):
        read_metadata(shards)
    metadata.write_bytes(pickle.dumps({"x": Hostile(getattr, _MEM_FORMAT_ENCODING, "__class__")}))
    with pytest.raises(TaskError, match="cannot be read: '__class__'"):
        read_metadata(shards)
    metadata.write_bytes(pickle.dumps(_unsaved(Hostile(getattr, _MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"))))
    assert read_metadata(shards).keys() == {"x"}


def _unsaved(memory_format: Any) -> Metadata:
    return Metadata(state_dict_metadata={"x": memory_format})


def test_a_path_is_read_as_python_3_13_pickles_it() -> None:
    assert _Unpickler(io.BytesIO(b"cpathlib._local\nPosixPath\n.")).load() is PosixPath
    with pytest.raises(pickle.UnpicklingError, match="which is code"):
        _Unpickler(io.BytesIO(b"cpathlib._local\nos\n.")).load()


def test_code_in_metadata_is_not_run(shards: Path, tmp_path: Path) -> None:
    for hostile in (
        Hostile(Path.touch, tmp_path / "ran"),
        Hostile(os.system, f"touch {tmp_path / 'ran'}"),
        Hostile(torch.load, "x"),
    ):
        (shards / METADATA).write_bytes(pickle.dumps({"x": hostile}))
        with pytest.raises(TaskError, match=r"shards: cannot be read: .metadata names .*, which is code"):
            read_metadata(shards)
    # A dotted name reaches what a module imports.
    (shards / METADATA).write_bytes(b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93.")
    with pytest.raises(TaskError, match="which is code"):
        read_metadata(shards)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("length", [0, 1, 40])
def test_damaged_metadata_is_an_error(shards: Path, length: int) -> None:
    (shards / METADATA).write_bytes((shards / METADATA).read_bytes()[:length])
    with pytest.raises(TaskError, match="shards: cannot be read: "):
        read_metadata(shards)
