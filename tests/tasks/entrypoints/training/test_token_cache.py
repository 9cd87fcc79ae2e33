"""Examples are tokenised once on a node, and again when something changes that they depend on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

from ekiben_tasks.data.schema import DatasetFormat
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training import prepare, run, token_cache
from ekiben_tasks.training.settings import TrainOptions
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import SAMPLE, base, fit, metrics, small  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
CHAT = DatasetFormat(kind="chat")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(token_cache.FOLDER, str(tmp_path / "tokens"))
    return tmp_path / "tokens"


def counted(settings: Any, output: Path, **options: Any) -> int:
    """Train, and write a file for each time that this process tokenises."""

    def count(*arguments: Any) -> Any:
        name = f"{os.environ.get('RANK', '0')}-{len(list(output.parent.glob('tokenised-*')))}"
        (output.parent / f"tokenised-{name}").touch()
        return prepare.prepare_data(*arguments)

    run.prepare_data = count  # type: ignore[attr-defined, assignment]
    try:
        return fit(settings, output, **options)
    finally:
        run.prepare_data = prepare.prepare_data  # type: ignore[attr-defined]


def count_and_clear(folder: Path) -> int:
    files = list(folder.glob("tokenised-*"))
    for file in files:
        file.unlink()
    return len(files)


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in metrics(output) if "loss" in line]


def test_one_of_two_processes_tokenises(base: Path, tmp_path: Path, folder: Path) -> None:
    settings = small(base, max_steps=2, parallel="ddp")
    for name, times in (("first", 1), ("second", 0)):
        processes = multiprocess.start(2, tmp_path / name, counted, settings, tmp_path / name / "run")
        assert multiprocess.wait(processes) == [0, 0], [
            Path(f"{tmp_path / name}-{rank}").read_text() for rank in (0, 1)
        ]
        assert count_and_clear(tmp_path / name) == times
    (entry,) = folder.iterdir()
    assert sorted(file.name for file in entry.iterdir()) == [
        "counts.npy",
        "ids.npy",
        "labels.npy",
        "lengths.npy",
        "meta.json",
        "targets.npy",
    ]
    os.environ.pop(token_cache.FOLDER)
    assert fit(small(base, max_steps=2), tmp_path / "alone") == 0
    records = [
        json.loads((tmp_path / name / "run.json").read_text())["data"] for name in ("first/run", "second/run", "alone")
    ]
    assert records[0] == records[1] == records[2]
    assert losses(tmp_path / "first/run") == losses(tmp_path / "second/run")
    assert losses(tmp_path / "first/run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


def test_changes_are_noticed(base: Path, tmp_path: Path, folder: Path) -> None:
    file = shutil.copy(SAMPLE, tmp_path / "rows.jsonl")
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "あ"}, {"role": "assistant", "content": "い"}]
    chat.write_text((json.dumps({"messages": turns}) + "\n") * 9)
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    common = {"data": [str(file)], "max_steps": 1}
    number = 0

    def tokenises(**changes: Any) -> int:
        nonlocal number
        number += 1
        assert counted(small(base, **{**common, **changes}), tmp_path / "runs" / str(number)) == 0
        return count_and_clear(tmp_path / "runs")

    (tmp_path / "runs").mkdir()
    assert [tokenises(), tokenises(), tokenises(learning_rate=1e-4, batch_size=4)] == [1, 0, 0]
    changes: list[dict[str, Any]] = [
        {"max_length": 100},
        {"mask_prompt": False},
        {"validation_split": 0.5},
        {"seed": 7},
        {"data": [{"source": str(file), "take": 20}]},
        {"form": DatasetFormat(kind="template", response="{output}")},
        {"data": [str(chat)], "form": DatasetFormat(kind="chat", chat=str(template))},
    ]
    assert [tokenises(**each) for each in changes] == [1] * len(changes)
    template.write_text("{% for message in messages %}{{ message['content'] + '!' }}{% endfor %}")
    assert tokenises(**changes[-1]) == 1
    lines = Path(file).read_text().splitlines()
    Path(file).write_text("\n".join([*lines[1:], lines[0]]) + "\n")  # as many bytes as before
    assert tokenises() == 1
    assert len(list(folder.iterdir())) == 8


def test_killed_and_damaged_entries_are_rewritten(
    base: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()

    def killed() -> None:
        write = token_cache._write

        def write_two(*arguments: Any) -> None:
            if arguments[1] == "counts":
                os.kill(os.getpid(), signal.SIGKILL)
            write(*arguments)

        token_cache._write = write_two  # type: ignore[assignment]
        fit(small(base, max_steps=1), tmp_path / "runs" / "killed")

    (process,) = multiprocess.start(1, tmp_path / "killed", killed, env={"WORLD_SIZE": "1"})
    process.join()
    assert [entry.name[:8] for entry in folder.iterdir()] == [".staged-"]
    assert counted(small(base, max_steps=1), tmp_path / "runs" / "a") == 0
    (entry,) = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    for name in ("ids.npy", "targets.npy", "meta.json"):
        content = (entry / name).read_bytes()
        for damaged in (content[: len(content) // 2], b"", None):
            (entry / name).unlink()
            if damaged is not None:
                (entry / name).write_bytes(damaged)
            count_and_clear(tmp_path / "runs")
            assert counted(small(base, max_steps=1), tmp_path / "runs" / "b", options=TrainOptions(fresh=True)) == 0
            assert count_and_clear(tmp_path / "runs") == 1
            assert (entry / name).read_bytes() == content
    assert losses(tmp_path / "runs" / "a") == losses(tmp_path / "runs" / "b")
    monkeypatch.setenv(token_cache.FOLDER, "/proc/nowhere")  # no room
    assert counted(small(base, max_steps=1), tmp_path / "runs" / "c") == 0


def test_all_processes_name_the_invalid_example(base: Path, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a"}\n')

    def work() -> None:
        with pytest.raises(TaskError, match="line 1: output is missing"):
            fit(small(base, data=[str(tmp_path / "rows.jsonl")], parallel="ddp"), tmp_path / "run")

    assert multiprocess.wait(multiprocess.start(2, tmp_path / "log", work)) == [0, 0]
    assert not folder.exists()
