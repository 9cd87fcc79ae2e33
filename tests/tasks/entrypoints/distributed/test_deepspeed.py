"""DeepSpeed's ways beside the plain loop: two processes on the CPU, without a compiled op, as the image finetune has
it.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers", "deepspeed"):
    pytest.importorskip(package, reason="DeepSpeed, or what it trains with, is not installed here")
ROOT = Path(__file__).resolve().parents[4]
RECIPE = Path(os.environ.get("EKIBEN_RECIPE", ROOT / "recipes" / "lora-opencalm"))
sys.path[:0] = [str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"), str(ROOT / "entrypoints")]
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # imported once here, and not in every fork
import torch
from safetensors.torch import load_file

from ekiben_tasks.data import sources
from ekiben_tasks.data.tokenize import full_text
from ekiben_tasks.distributed.context import REQUEUE
from ekiben_tasks.distributed.options import DeepSpeed, compiled_ops
from ekiben_tasks.models import tiny
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training import (
    checkpoint,
    loop,
    run,
    run_summary,  # noqa: F401
    train,
)
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import signalled

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
SAMPLE = RECIPE / "data" / "sample.jsonl"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("bases")
    texts = [
        full_text(row) for row in sources.read_all([sources.Source(str(SAMPLE), 0.0)], seed=0, skip_bad=False).train
    ]
    for kind in ("gpt2", "llama"):
        tiny.make_model(folder / kind, texts, kind)
    return {kind: folder / kind for kind in ("gpt2", "llama")}


def settings_of(base: Path, **changes: Any) -> train.Settings:
    values: dict[str, Any] = {
        "model": str(base),
        "data": [str(SAMPLE)],
        "validation_split": 0.1,
        "max_length": 512,
        "batch_size": 31,
        "learning_rate": 1e-2,
        "log_seconds": 0.0,
        "eval_every": 0,
        "device": "cpu",
        "max_steps": 3,
        "lora": Lora(dropout=0.0),
        "micro_batch": 4,
    }
    return train.Settings(**{**values, **changes})


def fit(settings: train.Settings, output: Path) -> int:
    return train.train(settings, RECIPE, output)


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("eval_loss")) for line in lines]


@pytest.mark.parametrize(
    ("kind", "method", "stage", "offload"),
    [
        ("gpt2", "full", 2, "none"),
        ("llama", "lora", 2, "optimizer"),
        ("gpt2", "full", 3, "optimizer"),
        ("llama", "full", 3, "none"),
        ("llama", "lora", 3, "all"),
    ],
)
def test_two_processes_train_like_one(
    kind: str, method: str, stage: Any, offload: Any, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Several packs a step, the head tied to the table and not, weights and optimizer in the host's memory and not."""
    assert fit(settings_of(bases[kind], method=method), tmp_path / "plain") == 0
    spread = DeepSpeed(stage=stage, offload=offload)
    changed = settings_of(bases[kind], method=method, parallel="deepspeed", deepspeed=spread)
    stdout = multiprocess.run(2, tmp_path / "log", fit, changed, tmp_path / "zero")
    assert "ninja" not in stdout and "JIT" not in stdout  # nothing is compiled while a job runs
    assert losses(tmp_path / "zero") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    what = "adapter/adapter_model" if method == "lora" else "model/model"
    ours, theirs = (load_file(str(tmp_path / way / f"{what}.safetensors")) for way in ("zero", "plain"))
    assert ours.keys() == theirs.keys()
    for name, part in ours.items():
        torch.testing.assert_close(part, theirs[name], rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize(("stage", "offload"), [(2, "none"), (3, "all")])
def test_resumed_run_has_the_same_losses(stage: Any, offload: Any, bases: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_of(
        bases["llama"],
        method="full",
        parallel="deepspeed",
        max_steps=7,
        epochs=2,
        deepspeed=DeepSpeed(stage=stage, offload=offload),
    )
    multiprocess.run(2, tmp_path / "log", fit, settings, tmp_path / "whole")
    work = signalled(3, signal.SIGUSR1, fit, rank=1)
    processes = multiprocess.start(2, tmp_path / "half", work, settings, tmp_path / "halves")
    assert multiprocess.wait(processes) == [REQUEUE] * 2, multiprocess.read_logs(tmp_path / "half")
    stopped_at = len(losses(tmp_path / "halves"))
    assert stopped_at == 3
    multiprocess.run(2, tmp_path / "log", fit, settings, tmp_path / "halves")
    assert losses(tmp_path / "halves") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)


@pytest.mark.parametrize(("stage", "offload"), [(2, "optimizer"), (3, "all")])
def test_optimizers_of_torch_and_of_deepspeed_go_on_from_each_other(
    stage: Any, offload: Any, bases: dict[str, Path], tmp_path: Path
) -> None:
    """AdamW and CPUAdam give the same losses, their names are recorded, and each resumes the other's checkpoint."""
    ways = {
        kind: settings_of(
            bases["llama"],
            method="full",
            parallel="deepspeed",
            max_steps=4,
            deepspeed=DeepSpeed(stage=stage, offload=offload, optimizer=kind),
        )
        for kind in ("torch", "deepspeed")
    }
    names = {"torch": "torch.optim.AdamW, fused", "deepspeed": "deepspeed.ops.adam.DeepSpeedCPUAdam"}
    for kind, settings in ways.items():
        multiprocess.run(2, tmp_path / "log", fit, settings, tmp_path / kind)
        assert json.loads((tmp_path / kind / "run.json").read_text())["optimizer"] == names[kind]
    assert losses(tmp_path / "deepspeed") == pytest.approx(losses(tmp_path / "torch"), rel=1e-4)
    for first, second in (("torch", "deepspeed"), ("deepspeed", "torch")):
        output = tmp_path / f"{first}-{second}"
        multiprocess.run(2, tmp_path / "log", fit, replace(ways[first], max_steps=2, schedule="constant"), output)
        multiprocess.run(2, tmp_path / "log", fit, replace(ways[second], schedule="constant"), output)
        multiprocess.run(
            2, tmp_path / "log", fit, replace(ways["torch"], schedule="constant"), tmp_path / f"whole-{first}"
        )
        assert json.loads((output / "run.json").read_text())["optimizer"] == names[second]
        assert losses(output)[-1] == pytest.approx(losses(tmp_path / f"whole-{first}")[-1], rel=1e-3)


if "cpu_adam" not in compiled_ops():  # it is in an image made with --layer deepspeed
    del test_optimizers_of_torch_and_of_deepspeed_go_on_from_each_other


@pytest.mark.parametrize("stage", [2, 3])
def test_max_grad_norm_of_zero_does_not_clip(stage: Any, bases: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_of(bases["llama"], method="full", max_grad_norm=0.0, warmup_steps=0, learning_rate=1e-3)
    assert fit(settings, tmp_path / "plain") == 0
    changed = replace(settings, parallel="deepspeed", deepspeed=DeepSpeed(stage=stage))
    multiprocess.run(2, tmp_path / "log", fit, changed, tmp_path / "zero")
    assert losses(tmp_path / "zero") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_broken_gradient_in_a_saved_step_keeps_the_previous_checkpoint(
    stage: Any, bases: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_of(
        bases["llama"],
        method="full",
        parallel="deepspeed",
        deepspeed=DeepSpeed(stage=stage),
        max_steps=4,
        save_steps=2,
    )

    def work() -> int:
        gradients = loop.Run._gradients

        def break_last(run: Any, *args: Any) -> Any:
            if run.step == 3 and os.environ["RANK"] == "1":
                backward = run.strategy.backward
                run.strategy.backward = lambda loss, factor, **named: backward(loss, factor * math.nan, **named)
            return gradients(run, *args)

        loop.Run._gradients = break_last  # type: ignore[method-assign]
        try:
            return fit(settings, tmp_path / "out")
        except TaskError as error:
            print(f"error: {error}", flush=True)
            return 7

    codes = multiprocess.wait(multiprocess.start(2, tmp_path / "log", work), 60)
    printed = Path(f"{tmp_path / 'log'}-0").read_text()
    assert codes == [7, 7], printed
    assert "at step 4: look at the data" in printed
    assert "step-000002 is the newest checkpoint, from before it" in printed
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-000002"]
    assert not (tmp_path / "out" / "model").exists()


def test_full_disk_is_named_and_leaves_no_checkpoint(bases: dict[str, Path], tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk. torch reports it as a RuntimeError."""
    settings = settings_of(bases["llama"], method="full", parallel="deepspeed", max_steps=2, save_steps=1)

    def work() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        save = checkpoint.save

        def save_on_full_disk(*args: Any, **named: Any) -> Any:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            return save(*args, **named)

        checkpoint.save = save_on_full_disk
        try:
            fit(settings, tmp_path / "run")
        except TaskError as error:
            print(f"error: {error}", flush=True)
            os._exit(7)  # destructors would wait for the other process
        return 0

    codes = multiprocess.wait(multiprocess.start(2, tmp_path / "log", work, env={"TMPDIR": str(tmp_path)}))
    text = Path(f"{tmp_path / 'log'}-0").read_text()
    assert codes[0] == 7, text
    assert "step-000001: cannot be written (" in text and "it continues from the start" in text
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_too_little_host_memory_is_an_error(bases: dict[str, Path], tmp_path: Path) -> None:
    spread = DeepSpeed(stage=3, offload="all")

    def work() -> int:
        run.free_ram = lambda: 100_000
        try:
            return fit(
                settings_of(bases["llama"], method="full", parallel="deepspeed", deepspeed=spread), tmp_path / "out"
            )
        except TaskError as error:
            print(f"error: {error}")
            return 7

    assert multiprocess.wait(multiprocess.start(1, tmp_path / "log", work)) == [7]
    log_text = Path(f"{tmp_path / 'log'}-0").read_text()
    assert "of this node's own memory would be needed" in log_text
    assert "GiB of the host's for each" in log_text


def test_groups_of_the_library_have_the_timeout_of_the_run(bases: dict[str, Path], tmp_path: Path) -> None:
    """DeepSpeed makes a group of its own for its collectives, which would wait for 10 minutes with NCCL."""

    def work() -> int:
        fit_run = loop.Run.fit

        def fit_and_look(training: Any, *args: Any) -> Any:
            code = fit_run(training, *args)
            print("timeouts", *multiprocess.group_timeouts(), flush=True)
            return code

        loop.Run.fit = fit_and_look  # type: ignore[method-assign]
        return fit(settings_of(bases["gpt2"], parallel="deepspeed", max_steps=1, hang_minutes=90), tmp_path / "out")

    assert "\ntimeouts 1:35:00\n" in multiprocess.run(2, tmp_path / "log", work)


def test_ops_are_not_probed(bases: dict[str, Path], tmp_path: Path) -> None:
    """Probing runs compilers and, beside a GPU, prints a warning of each op that has to be compiled first."""

    def work() -> int:
        deepspeed.ops.__dict__.pop("__compatible_ops__", None)
        deepspeed.ops._probe_compatible_ops = lambda: os._exit(9)
        return fit(settings_of(bases["gpt2"], parallel="deepspeed", max_steps=1), tmp_path / "out")

    processes = multiprocess.start(2, tmp_path / "log", work)
    assert multiprocess.wait(processes) == [0, 0], multiprocess.read_logs(tmp_path / "log")
