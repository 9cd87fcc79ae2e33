"""Keep the tokens of a run's examples on this node: one process writes them, the others map them into memory.

An entry is a folder that gets its name once it is complete, so a process that is killed leaves none. Its name is the
hash of all that decides the tokens: data, tokenizer, settings, and this code.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ekiben_tasks.data import tokenize
from ekiben_tasks.data.sources import InvalidExample, Source, SplitExamples, identify_versions
from ekiben_tasks.data.tokenize import Example
from ekiben_tasks.distributed.context import DistributedContext
from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.files import replace_folder, write_json
from ekiben_tasks.training.prepare import Prepared
from ekiben_tasks.training.settings import Settings

FOLDER = "EKIBEN_TOKENS"  # the variable that names it
_KEPT = 8  # entries, the last ones that were used
_META = "meta.json"


def is_on() -> bool:
    """Return whether the environment names a folder for tokens."""
    return bool(os.environ.get(FOLDER))


def share_tokens(
    key: str, prepare: Callable[[], Prepared], world: DistributedContext, device: torch.device
) -> Prepared:
    """Return what ``prepare`` returns, which one process of each node calls, or none where an earlier run has.

    device: where collectives run.

    Raises:
        TaskError: as ``prepare``.
    """
    entry = Path(os.environ[FOLDER]) / key
    cached, prepared, problem = _load(entry), None, None
    if cached is None and world.local_rank == 0:
        try:
            prepared = prepare()
            _save(prepared, entry)
        except TaskError as error:
            problem = error
        except OSError:
            pass  # no room: each process keeps its own
    world.minimum(0, device)  # wait for all
    if problem:
        raise problem
    return cached or _load(entry) or prepared or prepare()


def make_key(
    settings: Settings, sources: Sequence[Source], tokenizer: Any, limits: Sequence[int], world: DistributedContext
) -> str:
    """Return the name of an entry. limits: other numbers that decide the tokens."""
    versions = identify_versions(sources, settings.form)
    content = {
        "settings": [
            str(getattr(settings, name))
            for name in ("form", "mask_prompt", "max_length", "long_examples", "mixture", "seed")
        ],
        "sources": [str(source) for source in sources],
        "versions": versions,
        # Of rows that are fetched one by one nothing says what they are before they are read.
        "run": world.broadcast(uuid.uuid4().hex) if versions is None else "",
        "limits": list(limits),
        "tokenizer": _hash_tokenizer(tokenizer),
        "code": [_hash_files(sorted(Path(tokenize.__file__).parent.glob("*.py"))), version("tokenizers")],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _hash_files(files: Sequence[Path]) -> str:
    """Return one SHA-256 of the names and contents of ``files``."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _hash_tokenizer(tokenizer: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return _hash_files(sorted(file for file in Path(folder).rglob("*") if file.is_file()))


def _save(data: Prepared, entry: Path) -> None:
    """Write ``data`` as ``entry``, without the examples' texts. Raises OSError."""
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=".staged-", dir=entry.parent))
    examples, raw = [*data.train, *data.test], data.rows
    try:
        _write(staged, "ids", np.concatenate([example.ids for example in examples]))
        _write(staged, "lengths", np.array([len(example.ids) for example in examples]))
        _write(staged, "counts", np.array([len(example.targets) for example in examples]))
        spans = np.array([span for example in examples for span in example.targets], dtype=np.int64)
        _write(staged, "targets", spans.reshape(-1, 2))  # also where there are none
        _write(staged, "labels", np.array([-1 if example.label is None else example.label for example in examples]))
        bad = [[each.where, each.problem] for each in raw.bad]
        kept = {name: getattr(raw, name) for name in ("counts", "versions", "notes", "sha256")}
        meta = [len(data.train), data.too_long, data.limit, data.limit_reason, list(data.labels), bad, kept]
        write_json(staged / _META, {"meta": meta})
        replace_folder(staged, entry)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    by_use = sorted(entry.parent.iterdir(), key=lambda path: path.stat().st_mtime)
    for old in by_use[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def _write(folder: Path, name: str, array: Any) -> None:
    with (folder / f"{name}.npy").open("wb") as stream:
        np.save(stream, array, allow_pickle=False)
        stream.flush()
        os.fsync(stream.fileno())  # a named entry must be complete


def _load(entry: Path) -> Prepared | None:
    """Return the data of ``entry``; None where there is none, or it is damaged."""
    try:
        count, too_long, limit, reason, names, bad, kept = input_files.read_object(entry / _META, "")["meta"]
        ids, lengths, counts, targets, labels = (
            np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False).view(np.ndarray)
            for name in ("ids", "lengths", "counts", "targets", "labels")
        )
        spans = iter([(start, end) for start, end in targets.tolist()])
        ends = np.cumsum(lengths).tolist()
        if ends[-1] != len(ids) or counts.sum() != len(targets):
            return None
        examples = [
            Example(ids[end - length : end], tuple(itertools.islice(spans, number)), None if label < 0 else label)
            for end, length, number, label in zip(ends, lengths.tolist(), counts.tolist(), labels.tolist(), strict=True)
        ]
        raw = SplitExamples(**kept, bad=[InvalidExample(*each) for each in bad])
        os.utime(entry)
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, TaskError):
        return None
    return Prepared(examples[:count], examples[count:], raw, too_long, limit, reason, labels=tuple(names))
