"""Splits of a folder by the names of its files: what is named test is never trained on."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

from ekiben_tasks.data import sources
from ekiben_tasks.data.schema import DatasetFormat, Instruction
from ekiben_tasks.data.splits import choose_files, describe_splits, find_splits
from ekiben_tasks.task.errors import TaskError

LAYOUTS = [
    ["train.jsonl", "test.jsonl"],
    ["rows.jsonl", "latest.jsonl", "trainer.jsonl"],
    ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/validation-00000-of-00001.jsonl"],
    ["a_train.jsonl", "a.dev.jsonl", "a-test-1.jsonl"],
    ["train/a.jsonl", "test/a.jsonl", "other/a.jsonl"],
    ["x/training_1/a.jsonl", "x/eval/a.jsonl"],
    ["jsquad-train.jsonl", "jsquad-valid.jsonl"],
    ["val/test.jsonl", "train/test.jsonl"],
]


def write(folder: Path, names: list[str]) -> list[Path]:
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"instruction": name, "output": "a"}) + "\n")
    return sorted(folder.rglob("*.jsonl"))


def read(folder: Path, **keys: object) -> sources.SplitExamples:
    (source,) = sources.parse_sources([{"source": str(folder), **keys}], 0.0)
    return sources.read_all([source], seed=0, skip_bad=False)


def names(examples: list[object]) -> list[str]:
    return [example.instruction for example in examples if isinstance(example, Instruction)]


@pytest.mark.parametrize("layout", LAYOUTS, ids="+".join)
def test_splits_are_those_of_datasets(layout: list[str], tmp_path: Path) -> None:
    data_files = pytest.importorskip("datasets.data_files")
    files = write(tmp_path, layout)
    expected: dict[str, set[Path]] = {}
    for split, patterns in data_files.get_data_patterns(str(tmp_path)).items():
        expected[str(split)] = set()
        for pattern in patterns:
            with contextlib.suppress(FileNotFoundError):  # several patterns make a split
                expected[str(split)] |= {Path(file) for file in data_files.resolve_pattern(pattern, str(tmp_path))}
    splits = {split or "train": set(named) for split, named in find_splits(tmp_path, files).items()}
    if "train" in expected and "" in find_splits(tmp_path, files):  # datasets does not read those at all
        splits["train"] = set(choose_files(tmp_path, files, "", "").train)
    assert splits == expected


@pytest.mark.parametrize(
    ("layout", "keys", "train", "evaluation", "note"),
    [
        (["train.jsonl", "test.jsonl"], {}, [0], [1], "train.jsonl trained on, test.jsonl for evaluation"),
        (["Train.jsonl", "TEST.jsonl"], {}, [0], [1], "Train.jsonl trained on, TEST.jsonl for evaluation"),
        (["train.jsonl", "dev.jsonl", "test.jsonl"], {}, [0], [1], "dev.jsonl for evaluation, test.jsonl not read"),
        (["rows.jsonl", "test.jsonl"], {}, [0], [1], "rows.jsonl trained on, test.jsonl for evaluation"),
        (["train.jsonl", "more.jsonl"], {}, [0], [], "train.jsonl trained on, more.jsonl not read"),
        (["a.jsonl", "b.jsonl"], {}, [0, 1], [], ""),
        (["train.jsonl", "test.jsonl"], {"split": "test"}, [1], [], "test.jsonl trained on, train.jsonl not read"),
        (["train.jsonl", "dev.jsonl", "test.jsonl"], {"eval_split": "test"}, [0], [2], "test.jsonl for evaluation"),
    ],
)
def test_a_test_set_is_never_trained_on(
    layout: list[str], keys: dict[str, str], train: list[int], evaluation: list[int], note: str, tmp_path: Path
) -> None:
    write(tmp_path, layout)
    examples = read(tmp_path, **keys)
    assert sorted(names(list(examples.train))) == sorted(layout[number] for number in train)
    assert names(list(examples.test)) == [layout[number] for number in evaluation]
    assert note in "".join(examples.notes)
    assert bool(examples.notes) == bool(note)


@pytest.mark.parametrize(
    ("layout", "keys", "message"),
    [
        (["test.jsonl"], {}, r"no file for training, only of the split test; to train on that.*split: test"),
        (["train.jsonl"], {"split": "dev"}, "holds no file of the split dev; its splits: train"),
        (["train-test.jsonl"], {}, r"train-test\.jsonl: its name has the words of several splits \(test, train\)"),
        (["a.jsonl"], {"validation_split": 1}, "every source is for evaluation"),
    ],
)
def test_folders_without_training_files_are_refused(
    layout: list[str], keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    write(tmp_path, layout)
    with pytest.raises(TaskError, match=message):
        read(tmp_path, **keys)


def test_a_file_can_be_for_evaluation_alone(tmp_path: Path) -> None:
    first, second = write(tmp_path, ["a.jsonl", "b.jsonl"])
    data = [str(first), {"source": str(second), "validation_split": 1}]
    examples = sources.read_all(sources.parse_sources(data, 0.0), seed=0, skip_bad=False)
    assert (names(list(examples.train)), names(list(examples.test))) == (["a.jsonl"], ["b.jsonl"])


def test_generate_refuses_several_splits(tmp_path: Path) -> None:
    write(tmp_path, ["train.jsonl", "test.jsonl"])
    (source,) = sources.parse_sources([str(tmp_path)], 0.0)
    with pytest.raises(TaskError, match="its files belong to several splits; name one of them"):
        sources.read_prompts(source, DatasetFormat(), skip_bad=False)
    (source,) = sources.parse_sources([{"source": str(tmp_path), "split": "test"}], 0.0)
    assert names(list(sources.read_prompts(source, DatasetFormat(), skip_bad=False)[0])) == ["test.jsonl"]


def test_many_files_are_counted(tmp_path: Path) -> None:
    files = write(tmp_path, [f"train-{number}.jsonl" for number in range(5)] + ["test.jsonl"])
    note = describe_splits(tmp_path, choose_files(tmp_path, files, "", ""))
    assert note == f"{tmp_path}: train-0.jsonl and 4 more trained on, test.jsonl for evaluation"


def test_subset_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="subset names a part of a hub data set"):
        sources.parse_sources([{"source": str(tmp_path), "subset": "ja"}], 0.0)
