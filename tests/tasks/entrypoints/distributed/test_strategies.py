"""Training spread over processes, on the CPU: every way learns what one process does, and continues where it was
stopped.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
RECIPE = Path(os.environ.get("EKIBEN_RECIPE", ROOT / "recipes" / "lora-opencalm"))
ENTRYPOINTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
sys.path.insert(0, str(ENTRYPOINTS))

import numpy as np
import torch
from safetensors.torch import load_file

import train as train_command
from ekiben_tasks.data import (
    packing,
    sources,
)
from ekiben_tasks.data.tokenize import Example, full_text
from ekiben_tasks.distributed import context, model_loading, replicated, sharded, strategy
from ekiben_tasks.distributed.context import REQUEUE, DistributedContext, init_distributed
from ekiben_tasks.distributed.optimizer import OptimizerConfig
from ekiben_tasks.distributed.options import DeepSpeed
from ekiben_tasks.models import attention, load, tiny
from ekiben_tasks.models import device as device_module
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.models.tuning import LossModule
from ekiben_tasks.task.command import DryRun
from ekiben_tasks.task.errors import TaskError
from ekiben_tasks.training import (
    checkpoint,
    loop,  # noqa: F401  # imported once here, and not in every fork
    run,
    run_summary,  # noqa: F401
    train,
)
from ekiben_tasks.training.settings import TrainOptions, resolve_parallel
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.ports import free_port
from support.tiny_runs import signalled

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
SAMPLE = RECIPE / "data" / "sample.jsonl"
KINDS = ("gpt2", "gpt_neox", "falcon", "mpt", "llama")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of every architecture. GPT-2, Falcon and MPT have their head tied to the table, the others not."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("bases")
    texts = [
        full_text(row) for row in sources.read_all([sources.Source(str(SAMPLE), 0.0)], seed=0, skip_bad=False).train
    ]
    for kind in KINDS:
        tiny.make_model(folder / kind, texts, kind)
    return {kind: folder / kind for kind in KINDS}


def settings_of(base: Path, **changes: Any) -> train.Settings:
    values: dict[str, Any] = {
        "model": str(base),
        "data": [str(SAMPLE)],
        "validation_split": 0.1,
        "max_length": 512,
        "batch_size": 32,
        "learning_rate": 1e-2,
        "log_seconds": 0.0,
        "eval_every": 0,
        "device": "cpu",
        "max_steps": 3,
        "lora": Lora(dropout=0.0),
    }
    return train.Settings(**{**values, **changes})


def fit(settings: train.Settings, output: Path, **options_: Any) -> int:
    return train.train(settings, RECIPE, output, **options_)


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("eval_loss")) for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: part for file in folder.glob("*.safetensors") for name, part in load_file(str(file)).items()}


# ---------------------------------------------------------------------- every way learns the same


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("method", ["lora", "full", "last-layer"])
def test_two_processes_train_like_one(kind: str, method: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Losses and what is left: replicated, and sharded with the head tied to the table and not."""
    settings = settings_of(bases[kind], method=method, batch_size=31)  # 31: one process has a row more than the other
    assert fit(settings, tmp_path / "none") == 0
    for way in ("ddp", "fsdp"):
        changed = settings_of(bases[kind], method=method, batch_size=31, parallel=way)
        stdout = multiprocess.run(2, tmp_path / f"log-{way}", fit, changed, tmp_path / way)
        assert "2 x CPU" in stdout
        assert losses(tmp_path / way) == pytest.approx(losses(tmp_path / "none"), rel=1e-4)
        what = "adapter" if method == "lora" else "model"
        ours, theirs = weights(tmp_path / way / what), weights(tmp_path / "none" / what)
        assert ours.keys() == theirs.keys() and len(ours) > 3
        for name, part in ours.items():
            torch.testing.assert_close(part, theirs[name], rtol=1e-2, atol=2e-3)
        assert json.loads((tmp_path / way / "run.json").read_text())["device"]["count"] == 2
    if method != "lora":
        device = device_module.choose_device("cpu")
        again = load.load_base(str(tmp_path / "fsdp" / "model"), device)
        assert load.count_parameters(again)[0] == load.count_parameters(load.load_base(str(bases[kind]), device))[0]


def test_tied_head_is_written_once(bases: dict[str, Path]) -> None:
    """From a GPU, table and head would be copied to the CPU as two tensors."""
    request = strategy.ModelRequest(
        path=str(bases["gpt2"]),
        name="gpt2",
        device=device_module.choose_device("cpu"),
        tuning=settings_of(bases["gpt2"], method="full"),
    )
    replica = replicated.create(request, OptimizerConfig(1e-3, 0.0, 1.0), DistributedContext(), None)
    assert "lm_head.weight" in replica.loss_module.model.state_dict()
    assert replica.weights().keys() == replica.loss_module.model.state_dict().keys() - {"lm_head.weight"}


@pytest.mark.parametrize(("method", "number"), [("full", signal.SIGUSR1), ("lora", signal.SIGTERM)])
def test_resumed_sharded_run_has_the_same_losses(
    method: str, number: int, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Only one of the two processes gets the signal."""
    settings = settings_of(
        bases["llama"], method=method, parallel="fsdp", max_steps=9, epochs=2, lora=Lora(dropout=0.1)
    )
    multiprocess.run(2, tmp_path / "log", fit, settings, tmp_path / "whole")
    work = signalled(3, number, fit, rank=1)
    processes = multiprocess.start(2, tmp_path / "half", work, settings, tmp_path / "halves")
    assert multiprocess.wait(processes) == [REQUEUE] * 2, multiprocess.read_logs(tmp_path / "half")
    stopped_at = len(losses(tmp_path / "halves"))
    assert stopped_at == 3
    assert f"step {stopped_at} of 9" in multiprocess.run(2, tmp_path / "log", fit, settings, tmp_path / "halves")
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")


def test_activation_checkpointing_keeps_sharded_losses(bases: dict[str, Path], tmp_path: Path) -> None:
    for name, twice in (("plain", False), ("twice", True)):
        settings = settings_of(bases["llama"], method="full", parallel="fsdp", gradient_checkpointing=twice)
        stdout = multiprocess.run(2, tmp_path / f"log-{name}", fit, settings, tmp_path / name)
        assert ("2 of 2 blocks checkpointed" in stdout) == twice
    assert losses(tmp_path / "twice") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_a_sharded_block_is_one_graph_for_any_number_of_tokens(tmp_path: Path) -> None:
    """What is traced, without generating code: one graph of all blocks and one of the loss, not pieces."""

    def work() -> int:
        world = init_distributed("cpu")
        attention.register()
        model = tiny.random_model("llama", 300)
        model.set_attn_implementation(attention.ATTENTION)
        loss_module = LossModule(model, torch.float32)
        graphs: list[int] = []

        def look(graph: Any, _inputs: Any) -> Any:
            graphs.append(len(graph.graph.nodes))
            return graph.forward

        loss_module.compile_blocks(backend=look)
        sharded.shard(loss_module, torch.device("cpu"), world, trained=True)
        for rows_ in (4, 6):
            loss_module(packing.pack([Example(np.arange(128) % 300, ((5, 128),))] * rows_)).backward()
        print(f"graphs {graphs}")
        world.destroy()
        return 0 if len(graphs) == 2 else 7

    multiprocess.run(2, tmp_path / "log", work)


def test_only_the_first_process_holds_the_weights(bases: dict[str, Path]) -> None:
    base, device = str(bases["llama"]), device_module.choose_device("cpu")
    request = strategy.ModelRequest(path=base, name=base, device=device, tuning=settings_of(bases["llama"]))
    first, second = (model_loading._load_causal(request, DistributedContext(rank, 2, rank)) for rank in range(2))
    assert not any(part.is_meta for part in first.parameters())
    assert all(part.is_meta for part in [*second.parameters(), *second.buffers()])


def test_the_second_process_never_reads_the_weights(bases: dict[str, Path], tmp_path: Path) -> None:
    """It has none to read: config and tokenizer are enough for it."""
    import shutil

    shutil.copytree(bases["llama"], tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    assert fit(settings_of(bases["llama"], method="full"), tmp_path / "one") == 0

    def work() -> int:
        model_dir = tmp_path / "bare" if os.environ["RANK"] == "1" else bases["llama"]
        return fit(settings_of(model_dir, method="full", parallel="fsdp"), tmp_path / "two")

    multiprocess.run(2, tmp_path / "log", work)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


# ---------------------------------------------------------------------- what is trained, and nothing else


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_last_layer_is_trained(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    assert fit(settings_of(bases[kind], method="last-layer"), tmp_path) == 0
    before, after = weights(bases[kind]), weights(tmp_path / "model")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    norms = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm", "falcon": "ln_f", "mpt": "norm_f", "llama": "model.norm"}
    assert changed and all(norms[kind] in name or name.startswith(("lm_head", "embed_out")) for name in changed)
    assert any(norms[kind] in name for name in changed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_every_architecture_trains(kind: str, method: str, bases: dict[str, Path], tmp_path: Path) -> None:
    assert fit(settings_of(bases[kind], method=method, max_steps=4, schedule="constant"), tmp_path) == 0
    found = losses(tmp_path)
    assert found[3] < found[0]
    if method == "full":
        before, after = weights(bases[kind]), weights(tmp_path / "model")
        assert before.keys() == after.keys()
        assert not any(torch.equal(before[name], after[name]) for name in before)


def test_the_last_layer_can_be_named(bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases["llama"]
    assert fit(settings_of(base, method="last-layer", last_layer=("layers.1.mlp",)), tmp_path) == 0
    before, after = weights(base), weights(tmp_path / "model")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 3 and all(".layers.1.mlp." in name for name in changed)
    with pytest.raises(TaskError, match=r"last_layer: no module is called nrom\. Did you mean 'norm'"):
        fit(settings_of(base, method="last-layer", last_layer=("nrom",)), tmp_path / "other")


# -------------------------------------------------------------------------------------------- errors of settings


def test_strategies_that_do_not_fit_the_launcher() -> None:
    base = Path("unused")
    for way in ("ddp", "fsdp"):
        with pytest.raises(TaskError, match=f"parallel={way}: needs several processes.*train --gpus N"):
            resolve_parallel(settings_of(base, parallel=way), 1)
    assert resolve_parallel(settings_of(base), 1) == "none"
    assert resolve_parallel(settings_of(base), 2) == "ddp"
    with pytest.raises(TaskError, match="parallel=none: this is one of several processes"):
        resolve_parallel(settings_of(base, parallel="none"), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 4, "method": "full"}, "bits=4: such weights cannot be trained"),
        ({"bits": 8, "parallel": "fsdp"}, "bits=8: not together with parallel=fsdp; use parallel=ddp"),
        ({"bits": 4}, "bits=4: needs a GPU"),
        ({"deepspeed": DeepSpeed(stage=2, offload="all")}, "offload=all: weights are shared only with"),
    ],
)
def test_conflicting_settings_are_refused(
    changes: dict[str, Any], message: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=message):
        fit(settings_of(bases["llama"], **changes), tmp_path)


def test_fewer_gpus_than_requested_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node with one GPU, as torch would see it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(TaskError, match=r"process 2 of this node has no GPU: 1 visible here.*--gpus 1"):
        init_distributed("auto")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(TaskError, match="--gpus -1: at least 1"):
        train_command.main(["--gpus", "-1", "--smoke"])


def test_rendezvous_port_in_use_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with pytest.raises(
            TaskError, match=rf"2 processes of this run cannot connect at 127.0.0.1:{port}.*MASTER_PORT"
        ):
            init_distributed("cpu")


def test_peers_that_do_not_come_are_not_waited_for_like_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MEET_SECONDS", 2.0)
    port = free_port()
    for rank in (0, 1):
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        with pytest.raises(
            TaskError, match=rf"2 processes of this run cannot connect at 127.0.0.1:{port}.*MASTER_ADDR"
        ):
            init_distributed("cpu")


LOOPBACK = """
import fcntl, socket, struct
with socket.socket() as control:
    fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS: up
"""


@pytest.mark.parametrize(
    ("setup", "expected"), [(LOOPBACK, "1 processes: 2.0"), ("", "gloo needs a network interface")]
)
def test_group_of_one_process_uses_no_server(setup: str, expected: str) -> None:
    """Where the machine has no network, torch waited for its own server, for more than an hour."""
    work = (
        "import torch\nfrom ekiben_tasks.distributed.context import init_distributed\n"
        "world = init_distributed('cpu', alone=False)\nvalue = torch.tensor(2.0)\ntorch.distributed.all_reduce(value)\n"
        "print(f'{world.size} processes: {value}')\nworld.destroy()\n"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", setup + work],
        env={**os.environ, "PYTHONPATH": str(ENTRYPOINTS)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert expected in done.stdout + done.stderr
    assert done.returncode == ("gloo" in expected)


def test_too_large_model_is_refused_with_a_suggestion(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-2-7B's shape and a GPU of 40 GiB: nothing is loaded, so nothing has to be there but config and
    tokenizer.
    """
    import dataclasses
    import shutil

    shutil.copytree(bases["llama"], tmp_path / "large")
    (tmp_path / "large" / "model.safetensors").unlink()
    file = tmp_path / "large" / "config.json"
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "head_dim": 128,
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), **sizes}))
    chosen = dataclasses.replace(device_module.choose_device("cpu"), dtype=torch.bfloat16, memory=40 << 30)
    monkeypatch.setattr(run, "choose_device", lambda *_: chosen)
    with pytest.raises(TaskError, match=r"will not fit; what would: .*GPUs like this one.*parallel=fsdp.*method=lora"):
        fit(settings_of(tmp_path / "large", method="full"), tmp_path / "out", options=TrainOptions(DryRun()))
    assert fit(settings_of(tmp_path / "large", method="lora"), tmp_path / "out", options=TrainOptions(DryRun())) == 0


def test_nan_weights_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    model = load.load_base(str(bases["llama"]), device_module.choose_device("cpu"))
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    load.load_tokenizer(str(bases["llama"])).save_pretrained(tmp_path / "broken")
    with pytest.raises(
        TaskError, match=r"its weight model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinite values"
    ):
        fit(settings_of(tmp_path / "broken", method="full"), tmp_path / "out")


def test_a_full_disk_leaves_the_checkpoint_before(bases: dict[str, Path], tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: both refuse the write in the middle of a file."""

    def work() -> int:
        assert fit(settings_of(bases["llama"], method="full", max_steps=1), tmp_path / "run") == 0
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            checkpoint.save(
                tmp_path / "run" / "checkpoints", 2, {"step": torch.zeros(100_000)}, lambda _: {}, DistributedContext()
            )
        except TaskError as error:
            print(f"error: {error}")
            return 7
        return 0

    codes = multiprocess.wait(multiprocess.start(1, tmp_path / "log", work, env={"WORLD_SIZE": "1"}))
    log_text = Path(f"{tmp_path / 'log'}-0").read_text()
    assert codes == [7], log_text
    assert "step-000002: cannot be written" in log_text and "continues from step 1" in log_text
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def test_a_full_disk_of_one_process_is_named_by_all(bases: dict[str, Path], tmp_path: Path) -> None:
    """torch reports it to every process, as an exception that is none, with the frames of the one that has it."""
    settings = settings_of(bases["llama"], method="full", parallel="fsdp", save_steps=1, max_steps=2)

    def work() -> int:
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            fit(settings, tmp_path / "run")
        except TaskError as error:
            print(f"error: {error}", flush=True)
            os._exit(7)
        return 0

    codes = multiprocess.wait(multiprocess.start(2, tmp_path / "log", work))
    logs = [Path(f"{tmp_path / 'log'}-{rank}").read_text() for rank in range(2)]
    assert codes == [7, 7], logs
    for text in logs:
        assert "step-000001: cannot be written ([Errno 27] File too large)" in text and "Traceback" not in text
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_checkpoint_without_one_of_its_shards_is_named(bases: dict[str, Path], tmp_path: Path) -> None:
    settings = settings_of(bases["llama"], method="full", parallel="fsdp", max_steps=2, save_steps=1)
    multiprocess.run(2, tmp_path / "log", fit, settings, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    next((tmp_path / "run" / "checkpoints" / "step-000001" / "shards").glob("__1_*.distcp")).unlink()

    def work(parallel: str) -> int:
        try:
            fit(dataclasses.replace(settings, parallel=parallel), tmp_path / "run")
        except TaskError as error:
            print(f"error: {error}", flush=True)
            os._exit(7)
        return 0

    for size, parallel in ((2, "fsdp"), (1, "none")):
        codes = multiprocess.wait(multiprocess.start(size, tmp_path / "again", work, parallel))
        text = Path(f"{tmp_path / 'again'}-0").read_text()
        assert codes == [7] * size, text
        assert "step-000001: cannot be read" in text and "No such file or directory" in text


def test_checkpoint_of_another_model_or_strategy_is_not_resumed(bases: dict[str, Path], tmp_path: Path) -> None:
    assert fit(settings_of(bases["llama"], method="full"), tmp_path) == 0
    for changes in ({"model": str(bases["gpt2"]), "method": "full"}, {"method": "lora"}):
        with pytest.raises(TaskError, match=r"belongs to another run .*--overwrite"):
            fit(settings_of(bases["llama"], **changes), tmp_path)
