"""Trackers: what they get, what a failure does, and TensorBoard's files; no tracker's package is here."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "entrypoints"))

from ekiben_tasks.task import event_file, trackers
from ekiben_tasks.task.run_metadata import Metrics
from ekiben_tasks.task.trackers import TrackedRun, Trackers, list_trackers, tracker_problems


@dataclass
class Settings:
    tracker: Any = "none"
    learning_rate: float = 1e-3
    method: str = "lora"
    data: str = "/home/me/secret.jsonl"
    note: str = "hf_abcdefghijklmnop"
    lora: dict[str, int] = field(default_factory=lambda: {"r": 8})


@dataclass
class Recorder:
    """A tracker in this process; it fails from ``fails_at`` on."""

    run: TrackedRun
    fails_at: int = 1 << 30
    lines: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    closed: list[bool] = field(default_factory=list)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self.fails_at:
            raise ConnectionError("no answer from https://me:password@host/api\nretry")
        self.lines.append((step, dict(values)))

    def close(self, *, finished: bool) -> None:
        self.closed.append(finished)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    recorded: list[Recorder] = []

    def open_recorder(run: TrackedRun) -> Recorder:
        recorded.append(Recorder(run))
        return recorded[-1]

    monkeypatch.setitem(trackers._KINDS, "wandb", open_recorder)
    return recorded


def test_a_tracker_gets_the_lines_of_metrics_and_no_private_settings(tmp_path: Path, recorders: list[Recorder]) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.track("wandb", Settings())
    metrics.add([{"step": 1, "loss": 2.5, "grad_norm": None, "lr": float("nan")}, {"step": 1, "eval_loss": 3.0}])
    metrics.close(finished=True)
    (recorder,) = recorders
    assert recorder.lines == [(1, {"loss": 2.5}), (1, {"eval_loss": 3.0})]
    assert recorder.run.config == {"tracker": "none", "learning_rate": 1e-3, "method": "lora", "lora.r": 8}
    assert recorder.closed == [True]
    assert "step" in (tmp_path / "metrics.jsonl").read_text()


def test_a_resumed_run_is_the_same_to_its_tracker(tmp_path: Path, recorders: list[Recorder]) -> None:
    first = Metrics(tmp_path / "metrics.jsonl", 0)
    first.track("wandb", Settings())
    first.add([{"step": step, "loss": 1.0} for step in (1, 2, 3)])
    resumed = Metrics(tmp_path / "metrics.jsonl", 2)
    resumed.track(["wandb", "none", "tensorboard"], Settings())
    resumed.add([{"step": 3, "loss": 0.5}])
    again = Metrics(tmp_path / "metrics.jsonl", 0)
    again.track("wandb", Settings())
    ids = [recorder.run.id for recorder in recorders]
    assert ids[0] == ids[1] != ids[2]
    assert [recorder.run.first_step for recorder in recorders] == [0, 2, 0]
    assert recorders[1].lines == [(3, {"loss": 0.5})]
    assert [step for step, values in scalars(tmp_path) if values] == [1, 2, 3]  # a tracker that is new gets all
    (tmp_path / trackers.FOLDER / "ids.json").write_text('{"wandb": "../x')
    Metrics(tmp_path / "metrics.jsonl", 2).track("wandb", Settings())
    assert len(recorders) == 4


def test_a_tracker_that_fails_is_one_warning(
    tmp_path: Path, recorders: list[Recorder], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: TrackedRun) -> Recorder:
        raise SystemExit("not logged in")

    monkeypatch.setitem(trackers._KINDS, "trackio", refuse)
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.track(["wandb", "trackio", "tensorboard"], Settings())
    recorders[0].fails_at = 2
    for step in range(1, 5):
        metrics.add([{"step": step, "loss": 1.0}])
    metrics.close(finished=False)
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        "warning: tracker trackio: SystemExit: not logged in; training continues without it",
        "warning: tracker wandb: ConnectionError: no answer from https://host/api retry; training continues without it",
    ]
    assert [line["step"] for line in metrics.lines] == [1, 2, 3, 4]
    assert [step for step, values in scalars(tmp_path) if values] == [1, 2, 3, 4]
    assert recorders[0].closed == []


@pytest.mark.parametrize(
    ("setting", "names", "problem"),
    [
        ("none", [], ""),
        (["tensorboard", "none", "tensorboard"], ["tensorboard"], ""),
        (
            ("trackio",),
            ["trackio"],
            "setting tracker=trackio: this image has no trackio; build it with --layer tracking",
        ),
        ("comet", ["comet"], "setting tracker: must be of none, tensorboard, wandb, trackio, mlflow, not 'comet'"),
    ],
)
def test_trackers_are_named_and_checked(setting: Any, names: list[str], problem: str) -> None:
    assert list_trackers(setting) == names
    assert "".join(tracker_problems(setting)).startswith(problem)
    assert bool(tracker_problems(setting)) == bool(problem)


def scalars(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Read event files as the format has them: (step, values) of each event."""
    events = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12])[0] == event_file._masked_crc(data[:8])
            body, data = data[12 : 12 + size], data[16 + size :]
            step = body[10]
            values = {}
            if body[11:12] == b"\x2a":
                summary = body[13:]
                while summary:
                    length, name_size = summary[1], summary[3]
                    name = summary[4 : 4 + name_size].decode()
                    (values[name],) = struct.unpack("<f", summary[5 + name_size : 9 + name_size])
                    summary = summary[2 + length :]
            events.append((step, values))
    return events


def test_an_event_file_has_its_checksums_and_values(tmp_path: Path) -> None:
    masked = ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF  # CRC-32C's check value, RFC 3720
    assert event_file._masked_crc(b"123456789") == masked
    events = event_file.EventFile(tmp_path, 1)
    events.add(7, {"loss": 1.5, "eval_loss": 2.0})
    assert scalars(tmp_path) == [(0, {}), (1, {}), (7, {"loss": 1.5, "eval_loss": 2.0})]
    assert event_file._varint(300) == b"\xac\x02"


def test_ids_are_no_secret_of_the_user(tmp_path: Path, recorders: list[Recorder]) -> None:
    Trackers(["wandb"], TrackedRun(tmp_path, {}, 0))
    ids = json.loads((tmp_path / trackers.FOLDER / "ids.json").read_text())
    assert ids == {"wandb": recorders[0].run.id}
    assert recorders[0].run.name == f"{tmp_path.name}-{recorders[0].run.id[:8]}"
