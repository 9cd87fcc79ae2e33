"""Training, asking and merging with a tiny random model: every number here comes from the real libraries."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"))

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import chat
import merge
from ekiben_tasks.data import (
    sources,
)
from ekiben_tasks.data.tokenize import Example
from ekiben_tasks.distributed.context import REQUEUE
from ekiben_tasks.generation import chat as chat_library
from ekiben_tasks.generation.settings import ChatSettings
from ekiben_tasks.models import device as device_module
from ekiben_tasks.models import (
    load,
)
from ekiben_tasks.models import merge as merging
from ekiben_tasks.models.adapter import add_adapter, load_adapter
from ekiben_tasks.models.lora import Lora
from ekiben_tasks.task import (
    adapter_folder,
    hub,
    plot,
)
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import DryRun
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.training import (
    smoke,
    train,
)
from ekiben_tasks.training.prepare import Prepared
from ekiben_tasks.training.settings import TrainOptions
from support import multiprocess
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import (  # noqa: F401
    ENTRYPOINTS,
    RECIPE,
    SAMPLE,
    base,
    device,
    fit,
    metrics,
    signalled,
    small,
    tokenizer,
    trained,
)

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


# ---------------------------------------------------------------------- a run


def test_run_lowers_the_loss_and_writes_its_record(trained: Path) -> None:
    found = [line["loss"] for line in metrics(trained) if "loss" in line]
    assert len(found) == 12
    assert found[-1] < found[0] - 0.1
    run = json.loads((trained / "run.json").read_text())
    assert run["status"] == "finished"
    assert run["steps"] == 12
    assert run["data"]["rows"] + run["data"]["eval_rows"] == 208
    assert run["final_eval_perplexity"] == pytest.approx(math.exp(run["final_eval_loss"]), rel=1e-4)
    assert run["versions"]["torch"] == torch.__version__.split("+")[0] or run["versions"]["torch"] == torch.__version__
    weights = Path(run["model"]["name"], "model.safetensors")
    assert run["model"]["files"]["model.safetensors"]["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert len(run["model"]["sha256"]) == 64 and run["model"]["trainable"] > 0 and run["model"]["commit"] is None
    assert run["tokens_per_s"] > 0
    assert run["site"]["host"] and run["device"]["attention"] == "sdpa row by row over packed rows"
    assert run["optimizer"] == "torch.optim.AdamW"
    assert drawn_colours(trained / "loss.png") >= {(255, 255, 255), *plot.COLOURS[:2]}
    assert (trained / "adapter" / "adapter_model.safetensors").is_file()
    assert not list(trained.glob("**/*staged*"))


def test_many_points_are_drawn_smoothed_too(tmp_path: Path) -> None:
    pale = (181, 207, 230)
    for count, is_drawn in ((plot.SMOOTHED - 1, False), (plot.SMOOTHED, True)):
        plot.draw(tmp_path / "loss.png", "a", {"train": [(step, 4.0 - step % 2) for step in range(count)]})
        assert (pale in drawn_colours(tmp_path / "loss.png")) is is_drawn
        assert plot.COLOURS[0] in drawn_colours(tmp_path / "loss.png")
    assert plot.smooth([3.0] * 5, 10) == pytest.approx([3.0] * 5)
    assert plot.smooth([4.0, 2.0], 2)[1] == pytest.approx((0.5 * 4 + 2) / 1.5)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 399, [0, 50, 100, 150, 200, 250, 300, 350]),
        (1.082, 4.644, [1.5, 2, 2.5, 3, 3.5, 4, 4.5]),
        (0, 7, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0.30001, 0.30002, [0.30001, 0.300012, 0.300014, 0.300016, 0.300018, 0.30002]),
        (-2.0, 2.0, [-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert plot.ticks(low, high) == pytest.approx(expected)


def test_every_range_has_ticks() -> None:
    drawn = np.random.default_rng(0)
    for low, size in zip(drawn.normal(0, 100, 2000), 10 ** drawn.uniform(-6, 9, 2000), strict=True):
        values = plot.ticks(low, low + size)
        assert 3 <= len(values) <= 9 and low - size / 1e6 <= values[0] <= values[-1] <= low + size * (1 + 1e-6)


def drawn_colours(file: Path) -> set[tuple[int, ...]]:
    """Of a PNG without filters, read as the format says."""
    data, pixels, at = file.read_bytes(), b"", 8
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        content = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + content)
        pixels += content if kind == b"IDAT" else b""
        at += 12 + length
    rows_ = np.frombuffer(zlib.decompress(pixels), dtype=np.uint8).reshape(plot.HEIGHT, 1 + 3 * plot.WIDTH)[:, 1:]
    return {tuple(map(int, colour)) for colour in np.unique(rows_.reshape(-1, 3), axis=0)}


def test_micro_batch_size_keeps_the_losses(base: Path, trained: Path, tmp_path: Path) -> None:
    lora = Lora(dropout=0.0)
    assert fit(small(base, lora=lora), tmp_path / "auto") == 0
    assert fit(small(base, lora=lora, micro_batch=5), tmp_path / "five") == 0
    for ours, theirs in zip(metrics(tmp_path / "auto"), metrics(tmp_path / "five"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_activation_checkpointing_keeps_the_losses(base: Path, tmp_path: Path) -> None:
    assert fit(small(base), tmp_path / "a") == 0
    assert fit(small(base, gradient_checkpointing=True), tmp_path / "b") == 0
    for ours, theirs in zip(metrics(tmp_path / "a"), metrics(tmp_path / "b"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_resumed_run_has_the_same_losses(base: Path, trained: Path, tmp_path: Path) -> None:
    """Stopped by SIGTERM in the middle of an epoch, and started again with the same command."""
    settings, log = small(base, epochs=2), tmp_path / "log"
    stopped = multiprocess.start(1, log, signalled(3, signal.SIGTERM, fit), settings, tmp_path / "run")
    codes, output = multiprocess.wait(stopped), multiprocess.read_logs(log, 1)
    assert codes == [REQUEUE] == [75], output
    assert "SIGTERM: saving and stopping" in output
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
    stopped_at = max(line["step"] for line in metrics(tmp_path / "run"))
    assert stopped_at == 3

    again = multiprocess.run(1, log, fit, settings, tmp_path / "run")
    assert f"step {stopped_at} of 12" in again
    ours = [(line["step"], line["loss"]) for line in metrics(tmp_path / "run") if "loss" in line]
    theirs = [(line["step"], line["loss"]) for line in metrics(trained) if "loss" in line]
    assert ours == theirs
    first = load_file(str(tmp_path / "run" / "adapter" / "adapter_model.safetensors"))
    second = load_file(str(trained / "adapter" / "adapter_model.safetensors"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("saves", "code", "message"), [(False, 75, "nothing to save yet"), (True, 3, "saving and stopping")]
)
def test_signal_ends_a_run_without_checkpoints(saves: bool, code: int, message: str) -> None:
    program = f"""
import os, signal, sys
from ekiben_tasks.distributed import context
stop = context.Stop()
stop.saves = {saves}
stop.listen()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(3 if stop.exit_code == context.REQUEUE else 4)
"""
    env = {**os.environ, "PYTHONPATH": str(ENTRYPOINTS)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, message in done.stderr) == (code, True)


def test_checkpoint_of_another_run_is_not_resumed(base: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    with pytest.raises(TaskError, match=r"learning_rate was '0.01' and is '0.02'.*--overwrite"):
        fit(small(base, epochs=2, learning_rate=2e-2), tmp_path / "run")
    assert fit(small(base, max_steps=2, learning_rate=2e-2), tmp_path / "run", options=TrainOptions(fresh=True)) == 0


def test_incomplete_checkpoint_is_ignored(base: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".staged-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".staged-1" / "state.pt").write_bytes(b"half")
    (tmp_path / "checkpoints" / "step-000009").mkdir()
    assert fit(small(base, max_steps=1), tmp_path) == 0
    assert metrics(tmp_path)[0]["step"] == 1


def test_nan_loss_stops_the_run(base: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TaskError,
        match=(
            r"(loss|norm of the gradient) is (nan|inf) at step \d+: .*--overwrite --set learning_rate=\S+; no"
            r" checkpoint"
        ),
    ):
        fit(small(base, learning_rate=1e18, warmup_steps=0), tmp_path)


def test_a_dry_run_writes_nothing(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(small(base), tmp_path / "run", options=TrainOptions(DryRun())) == 0
    stdout = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    for part in ("202,496 parameters", "trainable", "187 rows for training, 21 for evaluation", "GiB expected"):
        assert part in stdout


def test_too_long_examples_are_skipped_and_counted(base: Path, tmp_path: Path) -> None:
    assert fit(small(base, max_length=80, max_steps=1), tmp_path) == 0
    data = json.loads((tmp_path / "run.json").read_text())["data"]
    assert data["too_long"] > 0
    assert data["rows"] + data["eval_rows"] + data["too_long"] == 208
    with pytest.raises(TaskError, match="none of the 187 rows fits 3 tokens"):
        fit(small(base, max_length=3), tmp_path / "none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora": Lora(target_modules=("q_proj",))},
            r"no layer is called q_proj; this model has .*query_key_value",
        ),
        ({"model": "/nowhere/model"}, "no such folder; is it bound into the container"),
        ({"batch_size": 0}, "batch_size: must be at least 1"),
        ({"learning_rate": -1.0}, "learning_rate: must be above 0"),
        ({"max_steps": 0}, "max_steps: must be at least 1, or -1"),
        ({"warmup_steps": -1, "eval_every": -5}, "warmup_steps: must be at least 0, not -1\nsetting eval_every"),
    ],
)
def test_invalid_settings_are_refused_before_training(
    base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        fit(small(base, **changes), tmp_path)


def test_recipe_name_is_that_of_its_folder() -> None:
    """The values of the published OpenCALM run this recipe follows."""
    made = options.load(train.Settings, RECIPE / "configs" / "train.yaml")
    assert made.model == "cyberagent/open-calm-3b"
    assert made.lora == Lora(r=4, alpha=16, dropout=0.05, target_modules="auto")
    assert (made.batch_size, made.epochs, made.learning_rate, made.warmup_steps, made.eval_every) == (
        32,
        1,
        3e-4,
        0.1,  # 199 of 1,981 steps; the published run's are 200
        500,
    )
    shares = [source.validation_split for source in sources.parse_sources(made.data, made.validation_split)]
    assert shares == [0.01, 0.03]
    options.load(ChatSettings, RECIPE / "configs" / "chat.yaml")
    options.load(merge.Settings, RECIPE / "configs" / "merge.yaml")


# ---------------------------------------------------------------------- what comes after


def test_a_reloaded_adapter_gives_the_same_logits(base: Path, trained: Path, device: device_module.Device) -> None:
    ids = torch.arange(5, 25)[None]
    state = torch.load(next((trained / "checkpoints").glob("step-000012")) / "state.pt", weights_only=True)
    fresh = add_adapter(
        load.load_base(str(base), device, "sdpa"),
        Lora(dropout=0.0),
        ("query_key_value",),
        seed=0,
    )
    start = 0
    for parameter in (p for p in fresh.parameters() if p.requires_grad):
        parameter.data = state["weights"][start : start + parameter.numel()].view_as(parameter).clone()
        start += parameter.numel()
    loaded, name = load_adapter(trained / "adapter", device)
    assert name == str(base)
    assert torch.equal(merging.logits(loaded, ids), merging.logits(fresh, ids))
    with loaded.disable_adapter():
        assert not torch.equal(merging.logits(loaded, ids), merging.logits(fresh, ids))


def test_merging_keeps_the_logits_and_refuses_a_full_folder(
    trained: Path, device: device_module.Device, tmp_path: Path
) -> None:
    assert merge.main(["--adapter", str(trained / "adapter"), "--output", str(tmp_path / "merged")]) == 0
    ids = torch.arange(5, 25)[None]
    adapted, _ = load_adapter(trained / "adapter", device)
    merged = load.load_base(str(tmp_path / "merged"), device, "sdpa")
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merging.logits(merged, ids), merging.logits(adapted, ids), rtol=1e-4, atol=1e-4)
    assert load.load_tokenizer(str(tmp_path / "merged")).eos_token_id == 0
    with pytest.raises(TaskError, match="is not empty"):
        merge.main(["--adapter", str(trained / "adapter"), "--output", str(tmp_path / "merged")])
    assert (
        merge.main(
            ["--adapter", str(trained / "adapter"), "--output", str(tmp_path / "half"), "--set", "dtype=bfloat16"]
        )
        == 0
    )
    assert all(
        tensor.dtype == torch.bfloat16 for tensor in load_file(str(tmp_path / "half" / "model.safetensors")).values()
    )


def test_old_checkpoints_that_call_the_head_embed_out_load(
    base: Path, device: device_module.Device, tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "old")
    file = tmp_path / "old" / "model.safetensors"
    weights = load_file(str(file))
    assert "lm_head.weight" in weights or "embed_out.weight" in weights
    save_file(
        {name.replace("lm_head", "embed_out"): tensor for name, tensor in weights.items()}, str(file), {"format": "pt"}
    )
    ids = torch.arange(20)[None]
    ours = load.load_base(str(tmp_path / "old"), device, "sdpa")
    assert torch.equal(merging.logits(ours, ids), merging.logits(load.load_base(str(base), device, "sdpa"), ids))
    binary = tmp_path / "bin"
    shutil.copytree(tmp_path / "old", binary)
    torch.save(load_file(str(binary / "model.safetensors")), binary / "pytorch_model.bin")
    (binary / "model.safetensors").unlink()
    assert torch.equal(merging.logits(load.load_base(str(binary), device, "sdpa"), ids), merging.logits(ours, ids))


def test_chat_prints_the_response_alone(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    common = ["--adapter", str(trained / "adapter"), "--set", "device=cpu", "--set", "max_new_tokens=12", "--greedy"]

    def ask(*more: str, stdin: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        assert chat.main([*common, *more]) == 0
        return capsys.readouterr().out

    answer = ask("日本の首都はどこですか。")
    assert "### " not in answer
    assert "日本の首都" not in answer[:12]
    # The same without a question argument: one line in, one answer out, and the end of input ends it.
    assert ask(stdin="日本の首都はどこですか。\n\n日本の首都はどこですか。\n") == answer * 2
    (tmp_path / "long.txt").write_text("貸出期間は14日間とする。" * 300, encoding="utf-8")
    with pytest.raises(TaskError, match="shorten the context"):
        ask("--context", str(tmp_path / "long.txt"), "何日借りられますか。")
    with pytest.raises(TaskError, match="no such file"):
        ask("--context", str(tmp_path / "none.txt"), "何日借りられますか。")


def test_a_temperature_samples_and_a_seed_repeats(trained: Path, device: device_module.Device, tokenizer: Any) -> None:
    model, _ = load_adapter(trained / "adapter", device)

    def ask(seed: int, **changes: Any) -> str:
        torch.manual_seed(seed)
        return chat_library.answer(model, tokenizer, "空は?", "", ChatSettings(max_new_tokens=20, **changes))

    assert len({ask(seed, temperature=1.5) for seed in range(4)}) > 1
    assert ask(1) == ask(1)
    assert len({ask(seed, temperature=0.0) for seed in range(3)}) == 1
    with pytest.raises(TaskError, match="shorten the context"):
        chat_library.answer(model, tokenizer, "空は?", "長い文脈です。" * 400, ChatSettings())


def test_invalid_adapter_is_refused(base: Path, device: device_module.Device, tmp_path: Path, trained: Path) -> None:
    with pytest.raises(
        TaskError, match=r"holds no adapter_config.json, so it is not an adapter; there is one in .*/adapter"
    ):
        load_adapter(trained, device)
    with pytest.raises(TaskError, match="so it is not a model \\(it is an adapter: chat and merge take it\\)"):
        load.load_base(str(trained / "adapter"), device, "sdpa")
    other = tmp_path / "other"
    smoke.make_base(other, SAMPLE, width=32)
    with pytest.raises(TaskError, match="does not fit the base model"):
        load_adapter(trained / "adapter", device, base=str(other))


# ---------------------------------------------------------------------- without the hub


def test_without_a_network_train_says_so_once(tmp_path: Path) -> None:
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    command = [
        sys.executable,
        str(ENTRYPOINTS / "train.py"),
        "--dry-run",
        "--data",
        str(SAMPLE),
        "--set",
        "model=some/model",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "only what was downloaded before is used" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: model some/model: not in the cache ")
    assert "Retrying" not in done.stderr


def test_unknown_hub_error_shows_the_exception() -> None:
    assert "ValueError: odd" in hub.format_hub_error(ValueError("odd"), "a/b", "model")


# ---------------------------------------------------------------------- the proof


def test_smoke_run_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.smoke_test(train.Settings(), SAMPLE, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert printed.count("smoke ") >= 7
    assert f"chat --adapter {tmp_path / 'out' / 'adapter'}" in printed
    base = adapter_folder.read_base(tmp_path / "out" / "adapter" / "adapter_config.json")
    assert load.load_tokenizer(base).eos_token  # the adapter can be used: its base was kept with it


def test_smoke_run_names_nothing_that_it_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.smoke_test(train.Settings(), SAMPLE, None) == 0
    printed = capsys.readouterr().out
    assert "try  " not in printed and "adapter     /" not in printed
    assert "output      removed afterwards" in printed


def test_a_run_that_fails_at_once_leaves_no_folder(base: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    (broken / "tokenizer.json").write_text("{}")
    with pytest.raises(TaskError, match="tokenizer"):
        fit(small(broken), tmp_path / "result")
    assert not (tmp_path / "result").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(TaskError, match="tokenizer"):
        fit(small(broken), tmp_path / "mine")
    assert (tmp_path / "mine").is_dir()


def test_smoke_run_fails_when_the_loss_stays(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": 5.0}) + "\n" for n in range(20)))
    with pytest.raises(TaskError, match="smoke: failed: the loss falls"):
        smoke.check_loss_fell(tmp_path)


def test_largest_batch_is_between_the_mean_and_the_longest() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(300, 1000, 400)
    data = Prepared([Example(np.zeros(n, np.int32), ((0, int(n)),)) for n in lengths], [], sources.SplitExamples(), 0)
    batches = [int(rng.choice(lengths, 16, replace=False).sum()) for _ in range(1000)]
    expected = data.batch_tokens(16)
    assert sum(batch > expected for batch in batches) < 10
    assert expected < 1.1 * max(batches)
    assert data.batch_tokens(1) == max(lengths)
    assert data.batch_tokens(10_000) == sum(lengths)


def test_metrics_go_to_the_tracker_of_the_settings(base: Path, tmp_path: Path) -> None:
    settings = small(base, max_steps=2, tracker=("tensorboard", "none"))
    assert fit(settings, tmp_path) == 0
    (events,) = tmp_path.glob("events.out.tfevents.*")
    content = events.read_bytes()
    assert content.count(b"grad_norm") == 2
    assert content.count(b"eval_loss") == 1
    assert not any(word in content for word in (b"open-calm", str(base).encode()))
    with pytest.raises(SettingError, match="setting tracker: must be of none, tensorboard"):
        fit(small(base, tracker="nonsense"), tmp_path / "other")
