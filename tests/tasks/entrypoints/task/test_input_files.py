"""Hostile files instead of each small file that a task reads: one sentence, never a hang or a traceback."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))
sys.path[1:1] = [str(ROOT / "recipes" / name / "entrypoints") for name in ("lora-bench", "pretrain-gpt")]

import bench_runs
import chat as chat_task
import dolly
import prepare_data
import texts
from ekiben_tasks.data import sources, squad, tokenize
from ekiben_tasks.data.schema import DatasetFormat
from ekiben_tasks.generation.resumable_jsonl import ResumableJsonlWriter
from ekiben_tasks.generation.settings import ChatSettings
from ekiben_tasks.task import adapter_folder, hub, input_files, run_metadata, settings
from ekiben_tasks.task.errors import SettingError, TaskError


def make_sparse(file: Path) -> None:
    with file.open("wb") as out:
        out.truncate(40 << 30)


# What lies there → its content, or who makes it; what the message says of it.
HOSTILE: dict[str, tuple[bytes | Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "is a pipe, not a regular file"),
    "endless": (lambda file: file.symlink_to("/dev/zero"), "is a device, not a regular file"),
    "folder": (lambda file: file.mkdir(), "is a folder, not a regular file"),
    "sparse": (make_sparse, "has 40 GiB, more than|more than 256 MiB"),
    "not UTF-8": (b'{"a": "\xff"}\n', "is not UTF-8"),
    "deep": (b"[" * 50_000 + b"]" * 50_000 + b"\n", "is nested too deep"),
    "rather deep": (b"[" * 150 + b"]" * 150 + b"\n", "is nested too deep"),
    "digits": (b'{"step": %s}\n' % (b"9" * 400), "integer of more than 300 digits"),
    "more digits": (b'{"step": %s}\n' % (b"9" * 5000), "integer of more than 300 digits"),
    "half a character": (rb'{"a": "cut \ud83d"}' + b"\n", r"has half a character \(\\ud83d\)"),
    "empty": (b"", "is empty"),
    "truncated": (b'{"a": [1, \n', "is not JSON"),
    "list": (b"[1, 2]\n", "is not|has no|no valid|must be|missing|no '|not text"),
}
FILE_ONLY = ("pipe", "endless", "folder", "sparse", "not UTF-8")


def put(kind: str, file: Path, *, lines: int = 1) -> Path:
    """Make the hostile ``file``, in which the content is ``lines`` times."""
    content = HOSTILE[kind][0]
    if isinstance(content, bytes):
        file.write_bytes(content * lines)
    else:
        content(file)
    return file


def finish(function: Callable[[], Any], seconds: float = 60.0) -> BaseException | Any:
    """Return what ``function`` returns or raises; a test fails where it hangs."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert result, "it hangs"
    return result[0]


def check_refused(kind: str, file: Path, read: Callable[[], Any], *, message: str = "") -> None:
    error = finish(read)
    assert isinstance(error, TaskError), error
    assert re.search(message or HOSTILE[kind][1], str(error)), error
    assert file.name in str(error)
    assert "\n" not in str(error) or "invalid example" in str(error)


# A reader → the file that it reads, in an empty folder, and how it is called.
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "object": ("a.json", lambda file: input_files.read_object(file, "remove it")),
    "adapter": ("adapter_config.json", adapter_folder.read_base),
    "prepared": ("prepared.json", lambda file: prepare_data.read_record(file.parent)),
    "benchmark": ("processed.json", lambda file: dolly.read_record(file.parent)),
    "reference": ("reference/result.json", lambda file: bench_runs.read_target(file.parents[1], "model", "data")),
    "results": ("run-1/result.json", lambda file: bench_runs.summarise(file.parents[1], 1)),
    "squad": ("squad.json", lambda file: list(squad.read_squad(file))),
    "examples": ("rows.json", lambda file: read_examples(file)),
}


def read_examples(file: Path) -> Any:
    return sources.read_all([sources.Source(str(file))], seed=0, skip_bad=False)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("reader", READERS)
def test_hostile_json_gets_one_sentence(reader: str, kind: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    file = put(kind, tmp_path / name)
    folder_of_examples = (reader, kind) == ("examples", "folder")
    check_refused(kind, file, lambda: read(file), message="holds no .jsonl" if folder_of_examples else "")


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_lines_get_one_sentence(kind: str, tmp_path: Path) -> None:
    file = put(kind, tmp_path / "hostile.jsonl", lines=2)
    nothing = kind in ("empty", "folder")
    check_refused(kind, file, lambda: read_examples(file), message="holds no" if nothing else "")
    check_refused(kind, file, lambda: dolly.read(file), message="no such file" if kind == "folder" else "")
    if not nothing:
        check_refused(kind, file, lambda: list(texts.read_documents(texts.find_files([str(file)], tmp_path), "text")))


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_metrics_get_one_sentence(kind: str, tmp_path: Path) -> None:
    file = put(kind, tmp_path / "metrics.jsonl", lines=2)
    if kind == "empty":
        assert run_metadata.Metrics(file, 3).lines == []
        return
    check_refused(kind, file, lambda: run_metadata.Metrics(file, 3))


def test_damaged_last_line_of_metrics_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for last in ('{"step": 2, "lo', "\0\0\0\0", "[" * 5000, "[]", '{"step": "2"}'):
        file.write_text('{"step": 1, "loss": 2.0}\n' + last)
        assert run_metadata.Metrics(file, 3).lines == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_unfinished_answers_get_one_sentence(kind: str, tmp_path: Path) -> None:
    file = put(kind, tmp_path / ".answers.jsonl.part-0", lines=2)
    if kind == "empty":
        assert ResumableJsonlWriter(tmp_path / "answers.jsonl", "run", 0, fresh=False).done == {}
        return
    check_refused(kind, file, lambda: ResumableJsonlWriter(tmp_path / "answers.jsonl", "run", 0, fresh=False))


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_former_records_are_not_used(kind: str, tmp_path: Path) -> None:
    model, record = tmp_path / "model", put(kind, tmp_path / "run.json")
    model.mkdir()
    (model / "config.json").write_text("{}")
    checksum = finish(lambda: run_metadata.start_checksum(str(model), record))
    assert set(checksum.record(wait=True)["files"]) == {"config.json"}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_settings_get_one_sentence(kind: str, tmp_path: Path) -> None:
    file = put(kind, tmp_path / "config.yaml")
    error = finish(lambda: settings.load(ChatSettings, file))
    if kind == "empty":
        assert error == ChatSettings()
        return
    assert isinstance(error, SettingError), error
    assert str(file) in str(error)
    assert len(str(error)) < 500


ALIASES = "\n".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 8 if n else '1'}]" for n in range(12))  # 8^11 values


@pytest.mark.parametrize(
    "text",
    ["2026-99-99", "seed: 2026-99-99", "a: &a [*a]", "9" * 5000, "seed: 0x" + "f" * 5000, "\x00", ALIASES],
    ids=["no date", "no date in it", "circle", "digits", "hexadecimal", "control character", "aliases"],
)
def test_hostile_yaml_gets_one_sentence(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    error = finish(lambda: settings.load(ChatSettings, file))
    assert isinstance(error, SettingError), error
    assert len(str(error)) < 500


@pytest.mark.parametrize("value", ["9" * 400, "9" * 5000, "[" * 5000, "2026-99-99", "-" + "9" * 400])
@pytest.mark.parametrize("name", ["seed", "temperature", "max_new_tokens"])
def test_hostile_assignments_get_one_sentence(name: str, value: str) -> None:
    error = finish(lambda: settings.load(ChatSettings, None, [f"{name}={value}"]))
    assert isinstance(error, SettingError), error


@pytest.mark.parametrize("kind", FILE_ONLY)
def test_hostile_texts_get_one_sentence(kind: str, tmp_path: Path) -> None:
    file = put(kind, tmp_path / "hostile.txt")
    form = DatasetFormat(kind="chat", chat=str(file))
    check_refused(kind, file, lambda: tokenize.apply_format(type("Tokenizer", (), {})(), form))
    if kind == "pipe":
        assert finish(lambda: chat_task._read_context(file)) == ""  # nobody writes to it
    else:
        check_refused(kind, file, lambda: chat_task._read_context(file))


def test_context_is_read_from_a_pipe(tmp_path: Path) -> None:
    file = tmp_path / "context"
    os.mkfifo(file)
    reader, text = threading.Event(), "文脈\n" * 50_000  # more than a pipe holds

    def write() -> None:
        with file.open("w", encoding="utf-8") as out:
            reader.set()
            out.write(text)

    keep = os.open(file, os.O_RDWR)
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert reader.wait(10)
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(chat_task._read_context(file)), daemon=True)
    thread.start()
    writer.join(30)
    os.close(keep)
    thread.join(30)
    assert result == [text.strip()]


@pytest.mark.parametrize("kind", ["pipe", "endless", "sparse"])
def test_hostile_files_of_a_model_are_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = put(kind, tmp_path / "tokenizer.json")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    check_refused(kind, file, lambda: hub.is_hub_model(str(tmp_path)))


def test_sparse_weights_are_left_to_their_library(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    make_sparse(tmp_path / "model.safetensors")
    assert hub.is_hub_model(str(tmp_path)) is False


def test_good_files_are_read_as_before(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps({"a": 10**299, "b": [[1.5], "ä"]}).encode())
    assert input_files.read_object(file, "") == {"a": 10**299, "b": [[1.5], "ä"]}
    assert input_files.parse_json(r'"\ud83d\ude00 \\ud83d"') == "😀 \\ud83d"
    link = tmp_path / "link"
    link.symlink_to(file)
    assert input_files.read_object(link, "")["b"][1] == "ä"
