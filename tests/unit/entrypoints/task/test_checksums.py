"""Checksums of a local model's files, computed beside the run."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

from ekiben_tasks.task import checksums, run_metadata
from ekiben_tasks.task.checksums import ModelChecksum


@pytest.fixture(autouse=True)
def no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_DIGESTS", {})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "original").mkdir(parents=True)
    for number in range(5):
        (folder / f"model-{number}.safetensors").write_bytes(os.urandom(1000 + 9_000 * number))
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin", ".lock", "original/params.json"):
        (folder / name).write_text(name)
    return folder


def enlarge(model: Path) -> None:
    """Give a model more bytes than are read at once."""
    (model / "model-4.safetensors").write_bytes(os.urandom(36_001_000))


def test_checksums_are_those_of_sha256sum(model: Path) -> None:
    enlarge(model)
    record = ModelChecksum(model).record(wait=True)
    names = ["config.json", *(f"model-{number}.safetensors" for number in range(5)), "tokenizer.json"]
    assert list(record["files"]) == names  # neither weights in another format, nor hidden files
    printed = subprocess.run(["sha256sum", *names], cwd=model, capture_output=True, check=True).stdout
    assert [line.split()[0] for line in printed.decode().splitlines()] == [
        entry["sha256"] for entry in record["files"].values()
    ]
    assert record["sha256"] == hashlib.sha256(printed).hexdigest()
    assert record["files"]["model-4.safetensors"]["bytes"] == 36_001_000


def test_weights_of_another_format_count_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert list(ModelChecksum(tmp_path).record(wait=True)["files"]) == ["pytorch_model.bin"]


def test_model_of_the_hub_and_an_empty_folder_have_none(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        assert ModelChecksum(folder).record(wait=True) == {"sha256": None, "files": {}}


def test_no_file_is_read_twice(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a process, and after a start whose record is kept; a file that has changed is read again."""
    read: list[str] = []
    sha256 = checksums._sha256
    monkeypatch.setattr(checksums, "_sha256", lambda file, stopped: read.append(file.name) or sha256(file, stopped))
    first = ModelChecksum(model).record(wait=True)
    assert len(read) == 7 and ModelChecksum(model).record(wait=True) == first and len(read) == 7
    monkeypatch.setattr(checksums, "_DIGESTS", {})
    (tmp_path / "run.json").write_text(json.dumps({"model": first}))
    (model / "config.json").write_text("changed")
    read.clear()
    second = run_metadata.start_checksum(str(model), tmp_path / "run.json").record(wait=True)
    assert read == ["config.json"] and second["sha256"] != first["sha256"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"model": 3}', '{"model": {"files": [1]}}', '{"model": {"files": {"config.json": 3}}}']
)
def test_damaged_record_of_an_earlier_start_counts_as_none(text: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    assert run_metadata.start_checksum(str(model), tmp_path / "run.json").record(wait=True)["sha256"]


def test_interrupted_run_does_not_wait(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grace period is short. What was read stays in the record, so that the next start need not read it again."""
    monkeypatch.setattr(checksums, "THREADS", 1)
    sha256, first = checksums._sha256, threading.Event()

    def slow(file: Path, stopped: threading.Event) -> str | None:
        if file.name != "model-4.safetensors":
            first.set()
            stopped.wait(30)
        return sha256(file, stopped)

    monkeypatch.setattr(checksums, "_sha256", slow)
    checksum = ModelChecksum(model)
    assert first.wait(30)
    began = time.monotonic()
    record = checksum.record(wait=False)
    assert time.monotonic() - began < 10
    assert record["sha256"] is None and list(record["files"]) == ["model-4.safetensors"]  # the largest comes first


def test_large_model_is_named(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ModelChecksum(model).record(wait=True)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(checksums, "_DIGESTS", {})
    monkeypatch.setattr(checksums, "_PRINTED", 1)
    (model / "model-3.safetensors").write_bytes(bytes(60_000_000))
    ModelChecksum(model).record(wait=True)
    assert "checksum    SHA-256 of the model's 7 files, 0.1 GiB, beside the run, in " in capsys.readouterr().out


def test_file_that_cannot_be_read_is_left_out(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("/proc/self/mem")
    record = ModelChecksum(model).record(wait=True)
    assert record["sha256"] is None and "tokenizer.json" not in record["files"] and len(record["files"]) == 6
