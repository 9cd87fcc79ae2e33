"""What trackers wrote, read by their own libraries: those that are installed here."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
SCRIPTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
# A process for each start of a run, as in jobs: the libraries keep what they began.
START = """
import sys
from pathlib import Path
from ekiben_tasks.task.run_metadata import Metrics
from ekiben_tasks.training.settings import Settings
output, tracker, first, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
metrics = Metrics(output / "metrics.jsonl", first)
metrics.track(tracker, Settings(learning_rate=0.25))
for step in range(first + 1, last + 1):
    metrics.add([{"step": step, "loss": 10.0 - step, "lr": None}])
metrics.add([{"step": last, "eval_loss": 100.0 + last}])
metrics.close(finished=last == 5)
"""


def run_twice(tracker: str, output: Path) -> None:
    """Write steps 1 to 3, and from the checkpoint of step 2 steps 3 to 5, without a network."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))}
    env |= {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(ROOT / "entrypoints")]), "HF_HUB_OFFLINE": "1"}
    for first, last in ((0, 3), (2, 5)):
        argv = [sys.executable, "-c", START, str(output), tracker, str(first), str(last)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr, done.stderr


def read_tensorboard(output: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(output))
    events.Reload()
    return {tag: {item.step: item.value for item in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def records_of(file: Path) -> Iterator[bytes]:
    """Yield the records of a file of W&B: 7 bytes of a header, then LevelDB's log format in blocks of 32 KiB."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # complete, or its last part
            yield record
            record = b""


def read_wandb(output: Path) -> dict[str, dict[int, float]]:
    from wandb.proto import wandb_internal_pb2

    values: dict[str, dict[int, float]] = {}
    ids = set()
    for file in sorted(output.glob("ekiben-trackers/wandb/offline-run-*/run-*.wandb")):
        for data in records_of(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config = {item.key: item.value_json for item in record.run.config.update}
                assert config["learning_rate"] == "0.25"
            items = {item.nested_key[-1] if item.nested_key else item.key: item for item in record.history.item}
            for name in items.keys() & {"loss", "eval_loss"}:
                step = json.loads(items["step"].value_json)
                values.setdefault(name, {})[step] = json.loads(items[name].value_json)
    assert len(ids) == 1
    return values


def read_trackio(output: Path) -> dict[str, dict[int, float]]:
    os.environ["TRACKIO_DIR"] = str(output / "ekiben-trackers/trackio")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("ekiben")
    assert run.config["learning_rate"] == 0.25
    lines = SQLiteStorage.get_logs("ekiben", run.name, run_id=run.id)
    return {name: {line["step"]: line[name] for line in lines if name in line} for name in ("loss", "eval_loss")}


def read_mlflow(output: Path) -> dict[str, dict[int, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{output / 'ekiben-trackers/mlflow.db'}")
    experiment = client.get_experiment_by_name("ekiben")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.params["learning_rate"]) == ("FINISHED", "0.25")
    history = {name: client.get_metric_history(run.info.run_id, name) for name in ("loss", "eval_loss")}
    return {name: {item.step: item.value for item in items} for name, items in history.items()}


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "trackio": read_trackio, "mlflow": read_mlflow}
INSTALLED = [name for name in READERS if importlib.util.find_spec(name)]


@pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
def test_a_resumed_run_is_one_run_with_every_step(tmp_path: Path) -> None:
    """Of each tracker that is installed; an image without the layer tracking has none."""
    for tracker in INSTALLED:
        output = tmp_path / tracker
        output.mkdir()
        run_twice(tracker, output)
        values = READERS[tracker](output)
        assert values["loss"] == {step: 10.0 - step for step in range(1, 6)}, tracker
        assert values["eval_loss"][5] == 105, tracker
    private = [path for path in tmp_path.rglob("*") if path.is_file() and b"open-calm-3b" in path.read_bytes()]
    assert private == []
