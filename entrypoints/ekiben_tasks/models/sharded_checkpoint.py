"""Write and read folders of torch.distributed.checkpoint, with errors that name the cause and without running code."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from ekiben_tasks.models.checkpoint_folder import METADATA
from ekiben_tasks.task.errors import TaskError

_DCP = "torch.distributed.checkpoint"
# What torch's own file of metadata names; dtypes beside it. A pickle with other names could run whatever it
# wants.
_CLASSES = {
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


def _memory_format(enum: Any, name: str) -> Any:
    if enum is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"{METADATA} reads an attribute of {enum!r}")
    return enum[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickles an enum
            return _memory_format
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 pickles a path
        if (module, name) in _CLASSES or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which is code")


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return torch's description of each entry in a folder of shards, by the entry's key.

    torch's own reader runs whatever the file names, so it is read here first.

    Raises:
        TaskError: it cannot be read, or holds code.
    """
    try:
        _Unpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
        return dict(dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata)
    except Exception as error:  # a damaged pickle may raise any
        raise TaskError(f"{folder}: cannot be read: {error}") from error


def write_shards(entries: dict[str, Any], folder: Path, *, alone: bool = False, group: Any = None) -> None:
    """Write the ``entries`` of this process into ``folder``; every process calls this with its own.

    alone: this process writes them all, whatever process groups there are. group: the processes that agree on who
    writes what.

    Raises:
        OSError: the disk is full, or fails in another way, in any of the processes.
    """
    with _name_cause():
        # One thread: torch loses exceptions of further threads, and with them a part of the checkpoint.
        dcp.save(entries, storage_writer=_Writer(str(folder), thread_count=1), process_group=group, no_dist=alone)


def read_shards(entries: dict[str, Any], folder: Path, *, alone: bool) -> None:
    """Fill ``entries`` in place from ``folder``. alone: without the other processes.

    Raises:
        Exception: what torch raises for shards that are missing, damaged or of another size.
    """
    with _name_cause():
        dcp.load(entries, storage_reader=dcp.FileSystemReader(str(folder)), no_dist=alone)


@contextmanager
def _name_cause() -> Iterator[None]:
    """Raise the error of the first process that has one: torch's own is not an Exception, and begins with pages of
    frames.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as error:
            _, (reason, _) = min(error.failures.items())
            raise reason from error


class _Writer(dcp.FileSystemWriter):  # type: ignore[misc]  # torch has no types here
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # torch's error for a full disk; other processes do not see the cause
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror) from error
