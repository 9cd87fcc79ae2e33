"""Find the splits of a folder of data by the names of its files and folders, as the library ``datasets`` does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiben_tasks.task.errors import TaskError

# datasets.data_files.SPLIT_KEYWORDS and NON_KEYWORDS_CHARS. Upper case counts, too: Test.jsonl is a test set.
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEPARATORS = re.compile(r"[-._ 0-9]+")


@dataclass(frozen=True, slots=True)
class FolderSplits:
    """Hold the files of a folder by their use. skipped: those of splits that have none."""

    train: tuple[Path, ...]
    evaluation: tuple[Path, ...] = ()
    skipped: tuple[Path, ...] = ()


def find_splits(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return split → files; the empty name has those whose path names no split.

    Names of folders decide where one of them names a split, else those of files.

    Raises:
        TaskError: a name has the words of several splits.
    """
    for of_folders in (True, False):
        splits: dict[str, list[Path]] = {}
        for file in files:
            *folders, stem = file.relative_to(folder).parts
            named = {split for name in (folders if of_folders else [stem]) for split in _name_splits(name)}
            if len(named) > 1:
                raise TaskError(
                    f"{file}: its name has the words of several splits ({', '.join(sorted(named))}); rename it, or name"
                    " the files to read one by one"
                )
            splits.setdefault(next(iter(named), ""), []).append(file)
        if splits.keys() - {""}:
            return splits
    return {"": list(files)}


def choose_files(folder: Path, files: Sequence[Path], split: str, eval_split: str) -> FolderSplits:
    """Return which of the ``files`` in ``folder`` are for training and for evaluation.

    split, eval_split: the splits to take; empty: train, and validation or, without one, test. Files whose names have no
    split are for training where no other file is. Those of another split never are.

    Raises:
        TaskError: there is no file for training, or none of a split that was named.
    """
    splits = find_splits(folder, files)
    for name in (split, eval_split):
        if name and name not in splits:
            known = ", ".join(sorted(splits.keys() - {""})) or "none"
            raise TaskError(f"{folder}: holds no file of the split {name}; its splits: {known}")
    if split:
        evaluation = splits[eval_split] if eval_split else []
        train = splits[split]
    else:
        train = splits.get("train") or splits.get("", [])
        evaluation = splits[eval_split] if eval_split else splits.get("validation") or splits.get("test", [])
    if not train:
        names = ", ".join(sorted(splits))
        raise TaskError(
            f"{folder}: holds no file for training, only of the split {names}; to train on that, name it:"
            f" data: {{source: {folder}, split: {names.split(',')[0]}}}"
        )
    return FolderSplits(
        tuple(train), tuple(evaluation), tuple(file for file in files if file not in {*train, *evaluation})
    )


def describe_splits(folder: Path, splits: FolderSplits) -> str:
    """Return a sentence that says which files have which use."""
    uses = {"trained on": splits.train, "for evaluation": splits.evaluation, "not read": splits.skipped}
    shown = [f"{_format_files(folder, files)} {use}" for use, files in uses.items() if files]
    return f"{folder}: {', '.join(shown)}"


def _name_splits(name: str) -> set[str]:
    tokens = set(_SEPARATORS.split(name.lower()))
    return {split for split, names in _KEYWORDS.items() if tokens & set(names)}


def _format_files(folder: Path, files: Sequence[Path]) -> str:
    names = [str(file.relative_to(folder)) for file in files]
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
