"""pretrain-gpt's checkpoints: pieces that each process writes and reads for itself, in the background."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "sentencepiece", "megatron.core"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "entrypoints"), str(ROOT / "recipes" / "pretrain-gpt" / "entrypoints")]

import torch

from recipes.test_pretrain_gpt import (  # noqa: F401
    RANKS,
    RECIPE,
    SCRIPTS,
    background_save,
    convert,
    data,
    finish,
    losses,
    pretraining,
    same_environment,
    small,
    start_ranks,
    tokenizer,
)
from recipes.test_pretrain_gpt import pretrained as finished_run  # noqa: F401

# isort: split
import sharded_state  # Megatron-Core, which is told first that there is no GPU
from ekiben_tasks.distributed.context import REQUEUE
from ekiben_tasks.models.checkpoint_folder import SHARDS
from ekiben_tasks.models.sharded_checkpoint import read_metadata
from ekiben_tasks.task.errors import TaskError
from support import forkserver, multiprocess

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


@pytest.mark.parametrize("size", [(7,), (4, 6), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2)])
def test_rectangles_are_the_range_once_and_in_order(size: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(size)).view(size)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            numbers_read = []
            for offsets, sizes in sharded_state.rectangles(size, start, stop):
                index = tuple(slice(first, first + length) for first, length in zip(offsets, sizes, strict=True))
                numbers_read += numbers[index].flatten().tolist()
            assert numbers_read == list(range(start, stop)), (start, stop)


def changed(data: Path, **changes: Any) -> pretraining.Settings:
    return small(data, **{"max_steps": 6, "save_every": 3, "eval_every": 0, **changes})


def remove_newest(output: Path) -> None:
    """As if the run had been killed before its last checkpoint was complete."""
    (background_save.list_checkpoints(output / "checkpoints")[-1] / "about.json").unlink()


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        (1, {}),
        (2, {"distributed_optimizer": False}),
        (2, {"tensor_parallel": 2, "sequence_parallel": True}),
        (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
        (4, {"pipeline_parallel": 2}),
    ],
    ids=["1", "2-replicated", "2-tensor", "4-tensor-pipeline", "4-pipeline-data"],
)
def test_resume_is_bit_equal(processes: int, changes: dict[str, Any], data: Path, tmp_path: Path) -> None:
    settings = changed(data, dropout=0.1 if processes == 1 else 0.0, **changes)
    assert finish(start_ranks(processes, settings, tmp_path)) == 0
    before = losses(tmp_path), losses(tmp_path, "grad_norm")
    step_6 = tmp_path / "checkpoints" / "step-0000006"
    written = read_metadata(step_6 / SHARDS)
    files = sorted({file.name.split("_")[2] for file in (step_6 / SHARDS).glob("*.distcp")})
    assert files == [str(rank) for rank in range(processes)]  # every process writes
    remove_newest(tmp_path)
    assert finish(start_ranks(processes, settings, tmp_path)) == 0
    assert (losses(tmp_path), losses(tmp_path, "grad_norm")) == before
    assert read_metadata(step_6 / SHARDS).keys() == written.keys()


def test_a_split_model_is_resumed_by_other_numbers_of_processes(data: Path, finished_run: Path, tmp_path: Path) -> None:
    """4 (tensor 2, two copies), then 2 (pipeline 2), then 1: the losses are those of one process from the start."""
    assert finish(start_ranks(4, small(data, tensor_parallel=2), tmp_path)) == 0
    for processes, changes in ((2, {"pipeline_parallel": 2}), (1, {})):
        remove_newest(tmp_path)
        assert finish(start_ranks(processes, small(data, **changes), tmp_path)) == 0
        assert losses(tmp_path) == pytest.approx(losses(finished_run), rel=1e-4)


# pretrain as its own script runs it; rank 1 runs out of memory when its third step begins.
FAILING = """
import os, pathlib, sys, time, warnings
import torch
torch.set_num_threads(1)
import pretrain, without_gpu
with warnings.catch_warnings(action="ignore"):
    without_gpu.pretend()
    import steps
from ekiben_tasks.distributed import failures
step = steps.Run._step
def fail(self):
    if self.step == 2 and os.environ["RANK"] == "1":
        os.write(1, b"failing %f\\n" % time.time())
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    return step(self)
steps.Run._step = fail
failures.run(lambda: pretrain.main(sys.argv[1:]))
"""


def with_scripts(*folders: str) -> dict[str, str]:
    """Return this environment, in which Python looks into ``folders`` first."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}


def launch(
    size: int, code: str, *argv: str, patience: float = 60, by: str = "launch_node"
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in several processes. by: what starts them."""
    return subprocess.run(
        [*multiprocess.launcher(by, size, patience), forkserver.python(), "-c", code, *argv],
        env=with_scripts(*SCRIPTS, str(ROOT / "tests")),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_rank_that_runs_out_of_memory_ends_all_with_one_sentence(data: Path, tmp_path: Path) -> None:
    options = [
        word for name, value in asdict(changed(data)).items() for word in ("--set", f"{name}={json.dumps(value)}")
    ]
    done = launch(2, FAILING, "--output", str(tmp_path / "out"), *options)
    failed = multiprocess.times_of("failing", done.stdout)
    assert done.returncode == 1 and failed, done.stdout + done.stderr
    assert time.time() - failed[0] < 60  # the other one would wait for an hour
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "rank 1 on " in errors[0] and "out of GPU memory (CUDA error: CUBLAS" in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("by", "host"), [("launch_node", "localhost"), ("torchrun", socket.gethostname())])
def test_rank_whose_data_do_not_come_ends_all_and_is_named(by: str, host: str, data: Path, tmp_path: Path) -> None:
    """A file system that does not answer: the read neither fails nor ends.

    Under torchrun the processes watch each other.
    """
    hanging = FAILING.replace("step = steps.Run._step", "step = steps.Run._micro_batch").replace(
        "steps.Run._step = fail", "steps.Run._micro_batch = fail"
    )
    hanging = hanging.replace("def fail(self):", "def fail(self, *words):").replace("step(self)", "step(self, *words)")
    hanging = hanging.replace(
        'raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")', "time.sleep(1000)"
    )
    settings = {**asdict(changed(data)), "hang_minutes": 0.1}
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    done = launch(2, hanging, "--output", str(tmp_path / "out"), *options, patience=2, by=by)
    errors = [re.sub(r"\d+ s", "N s", line) for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and errors == [
        f"error: rank 1 on {host}: no progress for N s at step 3 (reading its data), and the others wait (setting"
        " hang_minutes)"
    ], done.stdout + done.stderr


# pretrain as its own script runs it; each process prints how long its groups wait.
TIMEOUTS = """
import os, sys, warnings
import torch
torch.set_num_threads(1)
import pretrain, without_gpu
with warnings.catch_warnings(action="ignore"):
    without_gpu.pretend()
    import steps
from ekiben_tasks.distributed import failures
from support import forkserver, multiprocess
fit = steps.Run.fit
def look(self):
    print(f"timeouts {multiprocess.group_timeouts()}\\n", end="", flush=True)
    return fit(self)
steps.Run.fit = look
failures.run(lambda: pretrain.main(sys.argv[1:]))
"""


def test_every_group_has_the_timeout_of_the_run(data: Path, tmp_path: Path) -> None:
    """Also the one in which the processes agree on a checkpoint that they write."""
    settings = {**asdict(changed(data)), "hang_minutes": 90, "max_steps": 1}
    options = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    done = launch(2, TIMEOUTS, "--output", str(tmp_path / "out"), *options)
    assert done.returncode == 0 and done.stdout.count("timeouts {'1:35:00'}") == 2, done.stdout + done.stderr


# pretrain as its own script runs it; rank 1 gets SIGTERM in the step whose number is in STOP_AT.
STOPPED = """
import os, signal, sys, warnings
import torch
torch.set_num_threads(1)
import pretrain, without_gpu
with warnings.catch_warnings(action="ignore"):
    without_gpu.pretend()
    import steps
from ekiben_tasks.distributed import failures
step = steps.Run._step
def stop(self):
    if self.step + 1 == int(os.environ["STOP_AT"]) and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return step(self)
steps.Run._step = stop
failures.run(lambda: pretrain.main(sys.argv[1:]))
"""


def test_evaluation_of_the_step_that_a_signal_ends_follows_the_resume(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle and at the end: metrics.jsonl and run.json are those of a run that nothing has stopped."""
    settings = changed(data, eval_every=3, save_every=0)
    options = [text for name, value in asdict(settings).items() for text in ("--set", f"{name}={json.dumps(value)}")]
    for name, stops in (("undisturbed", [0]), ("stopped", [3, 6, 0])):
        for at in stops:
            monkeypatch.setenv("STOP_AT", str(at))
            done = launch(2, STOPPED, "--output", str(tmp_path / name), *options)
            assert done.returncode == (REQUEUE if at else 0), done.stdout + done.stderr
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("undisturbed", "stopped")]
    assert lines[0] == lines[1] and lines[0].count("eval_loss") == 2
    runs = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("undisturbed", "stopped")]
    assert runs[0]["final_eval_loss"] == runs[1]["final_eval_loss"] is not None


def test_smoke_on_two_processes(tmp_path: Path) -> None:
    """As `pretrain --smoke --gpus 2` runs it: one tokenizer, one model, checked once."""
    argv = [forkserver.python(), str(RECIPE / "entrypoints" / "pretrain.py"), "--smoke", "--gpus", "2"]
    environment = {**with_scripts(*SCRIPTS), "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 GPUs: tensor 1 x pipeline 1 x data 2" in done.stdout
    assert done.stdout.count("smoke       all passed") == done.stdout.count("smoke       the loss falls") == 1


FORMER = """
import functools, json, os, pathlib, sys, warnings
from dataclasses import asdict
import torch
torch.set_num_threads(1)
import pretraining, without_gpu
with warnings.catch_warnings(action="ignore"):
    without_gpu.pretend()
    import background_save, steps
    from megatron.core import dist_checkpointing

def save(self):
    folder = self.output / "checkpoints" / f"step-{self.step:07d}"
    folder.mkdir(parents=True)
    model = self.model.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable",
                "distrib_optim_fully_reshardable_mem_efficient": False}
    optimizer = self.optimizer.sharded_state_dict(model, is_loading=False, metadata=metadata)
    dist_checkpointing.save({"model": model, "optimizer": optimizer}, str(folder))
    fingerprint = {**self.fingerprint, "steps": self.plan.steps}
    metadata = {"step": self.step, "shape": asdict(self.plan.shape), "fingerprint": fingerprint,
                "meter": self.meter.state(),
             "wall": self.wall, "last_loss": self.last_loss, "last_eval_loss": self.last_eval_loss}
    (folder / "about.json").write_text(json.dumps(metadata))

steps.Run._save = save
settings, output = json.loads(sys.argv[1])
sys.exit(pretraining.pretrain(pretraining.Settings(**settings), pathlib.Path(output)))
"""


def test_a_checkpoint_of_an_earlier_release_is_resumed_and_converted(
    data: Path,
    finished_run: Path,
    tmp_path: Path,
) -> None:
    """What they wrote is written here by the functions they used."""
    from dataclasses import asdict

    environment = with_scripts(str(RECIPE / "entrypoints"), str(RECIPE.parents[1] / "entrypoints"))
    former = [forkserver.python(), "-c", FORMER, json.dumps([asdict(small(data)), str(tmp_path)])]
    done = subprocess.run(former, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "checkpoints"
    assert not (folder / "step-0000003" / SHARDS).exists() and (folder / "step-0000003" / "metadata.json").is_file()
    shutil.rmtree(folder / "step-0000006")
    assert pretraining.pretrain(small(data), tmp_path) == 0
    assert losses(tmp_path) == losses(finished_run)
    assert (folder / "step-0000006" / SHARDS).is_dir()
    for step in (3, 6):
        output = tmp_path / f"converted-{step}"
        output.mkdir()
        assert convert.convert(tmp_path, convert.find_checkpoint(tmp_path, step), output) < convert.TOLERANCE


@pytest.mark.parametrize("damage", ["metadata", "missing", "code"])
def test_damaged_shards_are_named(damage: str, data: Path, finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    remove_newest(tmp_path / "run")
    shards = tmp_path / "run" / "checkpoints" / "step-0000003" / SHARDS
    if damage == "metadata":
        (shards / ".metadata").write_bytes(b"nonsense")
    elif damage == "code":
        import pickle

        (shards / ".metadata").write_bytes(pickle.dumps(print))
    else:
        next(shards.glob("*.distcp")).unlink()
    with pytest.raises(TaskError, match=r"step-0000003.*cannot be read"):
        pretraining.pretrain(small(data), tmp_path / "run")


SLOW = """
import sys, time
import background_save
write = background_save.write_shards
def slow(*args, **named):
    print("writing", flush=True)
    time.sleep(float(sys.argv[2]))
    return write(*args, **named)
background_save.write_shards = slow
"""


def start_slow(
    seconds: float, size: int, settings: pretraining.Settings, output: Path, **named: Any
) -> forkserver.Child:
    """Ranks whose every write takes so many seconds more."""
    import recipes.test_pretrain_gpt as base

    script = base.RANKS.replace("children = []", SLOW + "children = []")
    return start_ranks(size, settings, output, script, str(seconds), **named)


def test_training_goes_on_while_a_checkpoint_is_written(data: Path, tmp_path: Path) -> None:
    """The steps between two saves take far less than a write: they are done before the first one is complete."""
    settings = changed(data, max_steps=40, save_every=20, batch_size=2)
    ranks = start_slow(4.0, 2, settings, tmp_path)
    metrics, first = tmp_path / "metrics.jsonl", tmp_path / "checkpoints" / "step-0000020"
    while not first.is_dir():
        assert ranks.poll() is None
        during = len(losses(tmp_path)) if metrics.is_file() else 0
        time.sleep(0.02)
    assert during == 40
    assert finish(ranks) == 0
    assert [path.name for path in background_save.list_checkpoints(first.parent)] == ["step-0000020", "step-0000040"]
    assert json.loads((first / "about.json").read_text())["save_seconds"] >= 4


def test_a_signal_waits_for_the_running_write(data: Path, tmp_path: Path) -> None:
    settings = changed(data, max_steps=4000, save_every=5, batch_size=2, train_tokens=1e9)
    ranks = start_slow(2.0, 2, settings, tmp_path)
    staged = tmp_path / "checkpoints" / ".staged-0000005"
    while not staged.is_dir():
        assert ranks.poll() is None
        time.sleep(0.01)
    os.killpg(ranks.pid, signal.SIGUSR1)
    assert finish(ranks) == REQUEUE
    kept = background_save.list_checkpoints(staged.parent)
    assert kept[0].name == "step-0000005" or len(kept) == 2
    assert int(kept[-1].name.removeprefix("step-")) == len(losses(tmp_path))
    assert not list(staged.parent.glob(".staged-*"))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_weight_that_is_no_number_is_not_saved(processes: int, data: Path, tmp_path: Path) -> None:
    """An infinite gradient in the step that is saved, of one of the processes; its loss was still a number."""
    import recipes.test_pretrain_gpt as base

    broken = """
forward = steps.Run._forward
def break_gradient(self, data, first, batches, *, forward_only):
    losses = forward(self, data, first, batches, forward_only=forward_only)
    if self.step == 5 and self.world.rank == self.world.size - 1 and not forward_only:
        next(self.model.module.parameters()).main_grad.fill_(float("inf"))
    return losses
steps.Run._forward = break_gradient
children = []"""
    script = base.RANKS.replace("children = []", broken, 1)
    with (tmp_path / "log").open("wb") as log:
        ranks = start_ranks(processes, changed(data), tmp_path / "run", script, output_to=log)
        assert finish(ranks) != 0
    text = (tmp_path / "log").read_text()
    assert "a weight is not finite after step 6" in text and "step-0000003 is the newest checkpoint" in text
    kept = background_save.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in kept] == ["step-0000003"]


def test_a_save_slower_than_the_grace_period_is_reported(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EKIBEN_GRACE_SECONDS", "1")
    with (tmp_path / "log").open("wb") as log:
        assert finish(start_slow(1.0, 1, changed(data), tmp_path / "run", output_to=log)) == 0
    assert "the grace period of this job is 1 s" in (tmp_path / "log").read_text()


def test_a_crash_while_writing_leaves_the_last_complete_checkpoint(data: Path, tmp_path: Path) -> None:
    settings = changed(data, max_steps=8, save_every=4, batch_size=2)
    ranks = start_slow(3.0, 2, settings, tmp_path)
    while not (tmp_path / "checkpoints" / ".staged-0000008").is_dir():
        assert ranks.poll() is None
        time.sleep(0.01)
    os.killpg(ranks.pid, signal.SIGKILL)
    finish(ranks)
    assert [path.name for path in background_save.list_checkpoints(tmp_path / "checkpoints")] == ["step-0000004"]
    before = losses(tmp_path)
    assert finish(start_ranks(2, settings, tmp_path)) == 0
    assert losses(tmp_path)[:4] == before[:4] and len(losses(tmp_path)) == 8
    assert not list((tmp_path / "checkpoints").glob(".staged-*"))


def test_a_full_disk_keeps_the_last_complete_checkpoint(data: Path, tmp_path: Path) -> None:
    """A tmpfs with room for one checkpoint and a half, in a mount namespace of the run."""
    output = tmp_path / "full"
    output.mkdir()
    assert pretraining.pretrain(changed(data, max_steps=3), output) == 0
    size = sum(file.stat().st_size for file in (output / "checkpoints").rglob("*") if file.is_file())
    shutil.rmtree(output)
    output.mkdir()
    run = [sys.executable, "-c", RANKS, json.dumps([1, asdict(changed(data)), str(output)])]
    script = (
        'mount -t tmpfs -o "size=$1" none "$2" && cd "$2" && shift 2 && "$@"; echo "$? $(echo'
        ' checkpoints/step-*/about.json)"'
    )
    done = subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
            str(size * 3 // 2),
            str(output),
            *run,
        ],
        env=with_scripts(*SCRIPTS),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "1 checkpoints/step-0000003/about.json", done.stdout + done.stderr
    assert re.search(r"step-0000006: cannot be written \(.*No space left.*continues from step 3", done.stderr), (
        done.stderr
    )
