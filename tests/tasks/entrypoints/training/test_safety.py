"""What a run must not do to the state it has: train on broken gradients, overwrite a good checkpoint, share its
folder.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import torch
from safetensors.torch import load_file

from ekiben_tasks.distributed.context import REQUEUE, DistributedContext
from ekiben_tasks.distributed.replicated import ReplicatedStrategy
from ekiben_tasks.task import files, run_metadata
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import DryRun
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.task.output_lock import lock_output
from ekiben_tasks.training import checkpoint, loop, smoke
from ekiben_tasks.training.settings import Settings, TrainOptions
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import SAMPLE, base, fit, metrics, small  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


@pytest.mark.parametrize("way", ["none", "fsdp"])
def test_max_grad_norm_of_zero_does_not_clip(way: str, base: Path, tmp_path: Path) -> None:
    """As with a bound that no gradient reaches, and otherwise than with one that every gradient exceeds."""
    found = {}
    for bound in (0.0, 1e9, 1e-3):
        settings = small(base, parallel=way, method="full", max_steps=4, max_grad_norm=bound, warmup_steps=0)
        output = tmp_path / str(bound)
        multiprocess.run(1 if way == "none" else 2, tmp_path / "log", fit, settings, output)
        found[bound] = (output / "model" / "model.safetensors").read_bytes()
    assert found[0.0] == found[1e9] != found[1e-3]


@pytest.mark.parametrize("bound", [-1.0, math.nan, math.inf])
def test_negative_max_grad_norm_is_refused(bound: float, base: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"setting max_grad_norm: must be at least 0 \(0: no clipping\)"):
        fit(small(base, max_grad_norm=bound), tmp_path)


def break_gradient(at: int, value: float) -> None:
    """Put ``value`` into the gradient of step ``at`` in this process, before the optimizer sees it."""
    gradients = loop.Run._gradients

    def broken(run: Any, *args: Any) -> Any:
        total = gradients(run, *args)
        if run.step == at - 1:
            gradient = getattr(run.strategy, "gradient", None)
            part = run.strategy.parameters[0].grad.to_local() if gradient is None else gradient
            part.view(-1)[0] = value
        return total

    loop.Run._gradients = broken  # type: ignore[method-assign]


def saved_steps(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


@pytest.mark.parametrize(("way", "method"), [("none", "lora"), ("none", "full"), ("ddp", "lora"), ("fsdp", "full")])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_broken_gradient_in_a_saved_step_keeps_the_previous_checkpoint(
    way: str, method: str, value: float, base: Path, tmp_path: Path
) -> None:
    """The last step, which is saved; epochs of three steps, and the checkpoint of the first epoch stays."""
    settings = small(base, parallel=way, method=method, batch_size=64, epochs=2, log_seconds=60.0)
    output, size = tmp_path / "run", 1 if way == "none" else 2

    def work() -> int:
        if int(os.environ["RANK"]) == size - 1:
            break_gradient(6, value)
        try:
            return fit(settings, output)
        except TaskError as error:
            print(f"error: {error}", flush=True)
            return 7

    codes = multiprocess.wait(multiprocess.start(size, tmp_path / "log", work), 60)
    printed = Path(f"{tmp_path / 'log'}-0").read_text()
    assert codes == [7] * size, printed
    assert "at step 6: look at the data" in printed
    assert "step-000003 is the newest checkpoint, from before it" in printed
    assert "done " not in printed
    assert saved_steps(output) == ["step-000003"]
    assert [line["step"] for line in metrics(output)] == [1, 2, 3, 4, 5]
    assert not (output / "model").exists()
    if method == "lora":
        weights = load_file(str(output / "adapter" / "adapter_model.safetensors"))
        assert all(bool(part.isfinite().all()) for part in weights.values())
    printed = multiprocess.run(size, tmp_path / "log", fit, settings, output)
    assert "step 3 of 6" in printed


def test_weights_that_overflow_are_not_saved(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and the gradient of the last step are numbers, what the optimizer makes of them is none."""
    step = ReplicatedStrategy.step

    def overflow(strategy: ReplicatedStrategy, rate: float) -> Any:
        norm = step(strategy, rate)
        strategy.vector[0] = math.inf
        return norm

    monkeypatch.setattr(ReplicatedStrategy, "step", overflow)
    with pytest.raises(TaskError, match=r"a weight is not finite after step 1: .*; no checkpoint was saved before it"):
        fit(small(base, max_steps=1), tmp_path)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("parallel", ["auto", "fsdp"])
def test_smoke_on_two_processes(parallel: str, tmp_path: Path) -> None:
    """As `train --smoke --gpus 2` runs it: one base model, one result, checked once."""
    work = [smoke.smoke_test, small(tmp_path, parallel=parallel), SAMPLE, None]
    processes = multiprocess.start(2, tmp_path / "log", *work)
    codes = multiprocess.wait(processes)
    printed = [Path(f"{tmp_path / 'log'}-{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], printed
    assert "2 x CPU" in printed[0]
    assert printed[0].count("smoke       all passed") == 1
    assert "smoke       " not in printed[1]


def test_newest_checkpoint_is_the_highest_step_also_above_a_million(tmp_path: Path) -> None:
    for step in (999_998, 999_999, 1_000_000):
        checkpoint.save(tmp_path, step, {"step": step}, lambda _: {}, DistributedContext())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-999999"]
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.name == "step-1000000"


def test_save_steps_and_save_total_limit(base: Path, tmp_path: Path) -> None:
    assert fit(small(base, max_steps=5, save_steps=1, save_total_limit=3), tmp_path) == 0
    assert saved_steps(tmp_path) == ["step-000003", "step-000004", "step-000005"]


def test_signal_before_the_first_step_ends_saves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after a resume: a checkpoint of the same step again would look like progress to a job that is requeued."""
    gradients = loop.Run._gradients

    def get_signal(run: Any, *args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return gradients(run, *args)

    output = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(loop.Run, "_gradients", get_signal)
        assert fit(small(base, max_steps=4), output) == REQUEUE
    assert "nothing to save: no step was finished since the start" in capsys.readouterr().out
    assert not (output / "checkpoints").exists()
    assert fit(small(base, max_steps=2), output) == 0
    written = (output / "checkpoints" / "step-000002").stat().st_mtime_ns
    monkeypatch.setattr(loop.Run, "_gradients", get_signal)
    assert fit(small(base, max_steps=4), output) == REQUEUE
    assert "nothing to save" in (printed := capsys.readouterr().out) and "saved step" not in printed
    assert (output / "checkpoints" / "step-000002").stat().st_mtime_ns == written


def test_run_can_be_lengthened_and_epochs_be_fractions(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Epochs of six steps; with a constant rate, as if the run had been that long from the start."""
    common: dict[str, Any] = {"schedule": "constant", "warmup_steps": 0}
    assert fit(small(base, epochs=0.5, **common), tmp_path / "run") == 0
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1, 2, 3]
    assert fit(small(base, epochs=1.5, **common), tmp_path / "run") == 0
    assert "step 3 of 9" in (printed := capsys.readouterr().out) and "9 steps instead of 3" in printed
    assert fit(small(base, epochs=1.5, **common), tmp_path / "at-once") == 0
    ours, theirs = (
        [line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("run", "at-once")
    )
    assert ours == theirs and len(ours) == 9
    lengths = [
        json.loads((tmp_path / name / "run.json").read_text())["schedule"]["lengths"] for name in ("run", "at-once")
    ]
    assert lengths == [[{"from_step": 0, "steps": 3}, {"from_step": 3, "steps": 9}], [{"from_step": 0, "steps": 9}]]


def test_run_of_the_release_before_goes_on_under_the_new_names(base: Path, tmp_path: Path, capsys: Any) -> None:
    """Its checkpoint, its metrics.jsonl and its setting have the names of before."""
    assert fit(small(base, max_steps=2), tmp_path) == 0
    file = tmp_path / "checkpoints" / "step-000002" / "state.pt"
    state = torch.load(file, weights_only=True)
    for former, name in checkpoint._FORMER_NAMES.items():
        values = state if name in state else state["fingerprint"]
        values[former] = values.pop(name)
    del state["fingerprint"]["optimizer"]  # a setting that there was not
    torch.save(state, file)
    former_keys = {name: former for former, name in run_metadata._FORMER_KEYS.items()}
    lines = [{former_keys.get(key, key): value for key, value in line.items()} for line in metrics(tmp_path)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options._WARNED.clear()
    settings = options.load(Settings, None, ["test_share=0.1"])
    assert "setting test_share is now validation_split" in capsys.readouterr().err
    assert fit(small(base, max_steps=3, validation_split=settings.validation_split), tmp_path) == 0
    assert "step 2 of 3" in capsys.readouterr().out
    assert [next(key for key in line if key.endswith("loss")) for line in metrics(tmp_path)] == [
        "loss",
        "loss",
        "eval_loss",
        "loss",
        "eval_loss",
    ]
    assert all("num_target_tokens" in line for line in metrics(tmp_path) if "loss" in line)


def test_warmup_steps_below_one_are_a_share(base: Path, tmp_path: Path) -> None:
    settings = small(base, max_steps=4, warmup_steps=0.5, schedule="constant", learning_rate=1e-2)
    assert fit(settings, tmp_path) == 0
    assert [line["lr"] for line in metrics(tmp_path) if "lr" in line] == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2])


def test_second_run_in_one_output_folder_is_refused(base: Path, tmp_path: Path) -> None:
    """The lock ends with the process that holds it: afterwards the folder can be used again."""

    def hold() -> None:
        with lock_output(tmp_path):
            print("held", flush=True)
            time.sleep(60)

    (holder,) = multiprocess.start(1, tmp_path.parent / "holder", hold, env={"WORLD_SIZE": "1"})
    printed, deadline = Path(f"{tmp_path.parent / 'holder'}-0"), time.monotonic() + 30
    while time.monotonic() < deadline and not (printed.is_file() and "held" in printed.read_text()):
        time.sleep(0.02)
    try:
        with pytest.raises(TaskError, match=rf"another run writes there \(process {holder.pid} on \S+\); .*--output"):
            fit(small(base, max_steps=1), tmp_path)
        assert fit(small(base, max_steps=1), tmp_path, options=TrainOptions(DryRun())) == 0
    finally:
        holder.kill()
        holder.join()
    assert fit(small(base, max_steps=1), tmp_path) == 0


def test_full_disk_leaves_nothing_of_an_adapter_or_a_record(base: Path, tmp_path: Path) -> None:
    """After the checkpoint the limit on the size of a file stands for the disk."""
    output = tmp_path / "run"

    def work() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        save = checkpoint.save

        def save_before(*args: Any, **named: Any) -> Path:
            path = save(*args, **named)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, 4_000))
            return path

        checkpoint.save = save_before
        try:
            fit(small(base, max_steps=1), output)
        except TaskError as error:
            print(f"error: {str(error)[-120:]}", flush=True)
        try:
            files.write_json(output / "run.json", "x" * 10_000)
        except OSError:
            return 7
        return 0

    (process,) = multiprocess.start(1, tmp_path / "log", work, env={"WORLD_SIZE": "1"})
    printed = (multiprocess.wait([process]), Path(f"{tmp_path / 'log'}-0").read_text())
    assert printed[0] == [7] and "it continues from the last checkpoint" in printed[1], printed
    assert sorted(path.name for path in output.iterdir()) == [".lock", "checkpoints", "metrics.jsonl"]


def test_output_on_a_full_disk_is_locked(tmp_path: Path) -> None:
    """The kernel's own limit on the size of a file stands for the disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with lock_output(tmp_path), pytest.raises(TaskError, match="another run writes there"), lock_output(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
