"""pretrain-gpt: tokenizer, data, Megatron-Core on the CPU, conversion. Every number comes from the real libraries."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "sentencepiece", "megatron.core"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "pretrain-gpt"
SCRIPTS = [str(ROOT / "entrypoints"), str(RECIPE / "entrypoints")]
sys.path[:0] = SCRIPTS

import torch
import transformers

torch.set_num_threads(1)
import pretrain
import pretraining
import without_gpu

with warnings.catch_warnings(action="ignore"):
    without_gpu.pretend()
    import gpt
    import steps  # noqa: F401  # here, where its warnings are silenced

import background_save
import convert
import dialogues
import model_configs
import pieces
import prepare_data
import pretrain_smoke_test
import sft
import texts
import train_tokenizer
import upload
from ekiben_tasks.distributed.context import REQUEUE
from ekiben_tasks.task.errors import DoesNotFitError, SettingError, TaskError
from support import forkserver
from support.hub import HubServer

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    saved, handlers = dict(os.environ), {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    os.environ["EKIBEN_RECIPE"] = str(RECIPE)  # in an image of another recipe it names that one
    yield
    os.environ.clear()
    os.environ.update(saved)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer.train(train_tokenizer.Settings(vocab_size=1500), ["sample"], RECIPE, folder)
    return folder


@pytest.fixture(scope="module")
def data(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare_data.prepare(prepare_data.Settings(workers=1), ["sample"], RECIPE, tokenizer, folder)
    return folder


def small(data: Path, **changes: Any) -> pretraining.Settings:
    values: dict[str, Any] = {"max_steps": 6, "batch_size": 8, "save_every": 3, "eval_every": 4, "log_seconds": 0.0}
    return replace(pretrain_smoke_test.tiny(data, cpu=True), **{**values, **changes})


def losses(output: Path, key: str = "loss") -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


@pytest.fixture(scope="module")
def pretrained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("pretrained")
    assert pretraining.pretrain(small(data), output) == 0
    return output


# ---------------------------------------------------------------------- tokenizer

SAYINGS = [
    "富士山は日本で一番高い山です。",
    "改行\nあり\n\n続く",
    "  二つ  の空白 ",
    "㍿ﾗｰﾒﾝ１２３",
    "𠮷野家で😀",
    "\n",
    "",
    "a\tb",
    "<EOD>は記号、</s>も<mask>も。",
    "한국어 кириллица é",
]


def test_special_tokens_come_first_in_order(tokenizer: Path) -> None:
    learnt = pieces.load(tokenizer)
    symbols = ["<unk>", "<s>", "</s>", "<pad>", "<CLS>", "<SEP>", "<EOD>", "<MASK>", "\n", "<0x00>"]
    assert [learnt.id_to_piece(number) for number in range(10)] == symbols
    assert learnt.vocab_size() == 1500
    listed = (tokenizer / "tokenizer.vocab").read_text(encoding="utf-8")
    assert len(listed.split("\n")) == 1502  # one piece is a newline, and the last line ends with one


def test_japanese_text_round_trips(tokenizer: Path) -> None:
    learnt = pieces.load(tokenizer)
    for text in ("富士山は日本で一番高い山です。", "改行\nあり\n\n続く", "  二つ  の空白 ", "𠮷野家で😀"):
        assert learnt.decode(learnt.encode(text)) == text
    digits = learnt.encode("2026", out_type=str)
    assert [piece.strip("▁") for piece in digits if piece.strip("▁")] == ["2", "0", "2", "6"]


def test_the_converted_tokenizer_makes_the_same_tokens(tokenizer: Path, tmp_path: Path) -> None:
    learnt = pieces.load(tokenizer)
    pieces.to_hugging_face(tokenizer / pieces.MODEL).save_pretrained(tmp_path)
    converted = transformers.AutoTokenizer.from_pretrained(tmp_path)
    sample = [text for _, text in texts.read_documents(texts.find_files(["sample"], RECIPE), "text")]
    for text in SAYINGS + sample:
        ids = learnt.encode(text)
        assert converted.encode(text, add_special_tokens=False, split_special_tokens=True) == ids
        assert converted.decode(ids, skip_special_tokens=False) == learnt.decode(ids)
    assert converted.eos_token == "<EOD>"


def test_unsuitable_vocabulary_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"vocab_size: 90000 .* too high .* <= \d+"):
        train_tokenizer.train(train_tokenizer.Settings(vocab_size=90000), ["sample"], RECIPE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_of_another_kind_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    train_tokenizer.train(train_tokenizer.Settings(vocab_size=1600, model_type="bpe"), ["sample"], RECIPE, tmp_path)
    with pytest.raises(TaskError, match="only unigram"):
        pieces.to_hugging_face(tmp_path / pieces.MODEL)
    (tmp_path / "other.model").write_bytes(b"not a model")
    with pytest.raises(TaskError, match="is not a SentencePiece model"):
        pieces.load(tmp_path / "other.model")
    with pytest.raises(TaskError, match="train-tokenizer writes one"):
        pieces.load(tmp_path / "nowhere")


# ---------------------------------------------------------------------- data


def test_megatron_reads_the_prepared_data(tokenizer: Path, data: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    learnt = pieces.load(tokenizer)
    documents = [text for _, text in texts.read_documents(texts.find_files(["sample"], RECIPE), "text")]
    read = IndexedDataset(str(data / "text_document"))
    assert [ids.tolist() for ids in read[0 : len(documents)]] == [[*learnt.encode(text), 6] for text in documents]
    assert read.document_indices.tolist() == list(range(len(documents) + 1))
    about = json.loads((data / "prepared.json").read_text())
    assert about["documents"] == len(documents)
    assert about["tokens"] == sum(map(len, read[0 : len(documents)]))


def test_prepared_data_do_not_depend_on_the_workers(tokenizer: Path, data: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": f"文書{number}です。"}) + "\n" for number in range(700)))
    written = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        out.mkdir()
        settings = prepare_data.Settings(column="body", workers=workers)
        prepare_data.prepare(settings, [str(rows)], RECIPE, tokenizer, out)
        written.append([(out / f"text_document{suffix}").read_bytes() for suffix in (".bin", ".idx")])
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 3}', "line 2: text is 3, not text"),
        ('{"txet": "a"}', "Did you mean 'txet'"),
        ('{"text": "a"', "is not JSON"),
    ],
)
def test_invalid_example_is_named_and_nothing_is_written(
    line: str, message: str, tokenizer: Path, tmp_path: Path
) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text('{"text": "一つ"}\n' + line + '\n{"text": "三つ"}\n')
    out.mkdir()
    with pytest.raises(TaskError, match=message):
        prepare_data.prepare(prepare_data.Settings(workers=1), [str(rows)], RECIPE, tokenizer, out)
    assert list(out.iterdir()) == []
    prepare_data.prepare(prepare_data.Settings(workers=1), [str(rows)], RECIPE, tokenizer, out, skip_bad=True)
    assert json.loads((out / "prepared.json").read_text())["documents"] == 2


def test_missing_data_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("a")
    with pytest.raises(TaskError, match=r"Did you mean 'corpus\.txt'"):
        texts.find_files([str(tmp_path / "corpsu.txt")], RECIPE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match=r"holds no \.txt"):
        texts.find_files([str(tmp_path / "empty")], RECIPE)


# ---------------------------------------------------------------------- shapes and plans


def test_parameters_and_flops_by_hand() -> None:
    shape = model_configs.Shape(layers=2, width=32, heads=4, positions=16, vocabulary=128)
    model = transformers.GPT2LMHeadModel(model_configs.hugging_face_config(shape, end=6, begin=1))
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    products = 2 * 12 * 32 * 32 + 32 * 128  # the blocks' weights, and the head's
    pairs = 16 * 17 / 2
    assert model_configs.training_flops(shape, 3) == 3 * (6 * products * 16 + 2 * 12 * 32 * pairs)
    assert model_configs.pad_vocabulary(2000) == 2048


def test_learning_rate_warms_up_and_decays(data: Path) -> None:
    settings = replace(
        pretraining.Settings(),
        data=str(data),
        batch_size=4,
        sequence=100,
        train_tokens=40e3,
        warmup_tokens=4e3,
        decay_tokens=40e3,
        micro_batch=1,
    )
    plan = pretraining.make_plan(settings, {"vocab_size": 1500}, 1, 1 << 50, torch.bfloat16)
    assert (plan.steps, plan.warmup, plan.decay) == (100, 10, 100)
    assert plan.rate(0) == pytest.approx(6e-5)
    assert plan.rate(9) == plan.rate(10) == pytest.approx(6e-4)
    assert plan.rate(55) == pytest.approx((6e-4 + 1e-6) / 2)
    assert plan.rate(100) == plan.rate(10**6) == pytest.approx(1e-6)


def test_the_defaults_are_the_recipes(capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path) -> None:
    config = ["--config", str(RECIPE / "configs" / "pretrain.yaml"), "--data", str(data)]
    assert pretrain.main([*config, "--dry-run", "--set", "device=cpu", "--output", str(tmp_path / "out")]) == 0
    stdout = capsys.readouterr().out
    assert "12 layers of 768, 12 heads" in stdout
    assert "572,205 of 256 x 2,048 tokens" in stdout
    assert not (tmp_path / "out").exists()


def test_models_that_do_not_fit_or_divide_are_refused(data: Path) -> None:
    about = {"vocab_size": 1500}
    large = replace(pretraining.Settings(), size="13B")
    with pytest.raises(TaskError, match=r"13\.\d+|12\.\d+ G parameters need .* try --set tensor_parallel=2"):
        pretraining.make_plan(large, about, 1, 80 << 30, torch.bfloat16)
    assert (
        pretraining.make_plan(replace(large, tensor_parallel=8), about, 64, 80 << 30, torch.bfloat16).micro_batch >= 1
    )
    with pytest.raises(TaskError, match=r"start as many processes or a multiple \(--gpus 4\)"):
        pretraining.make_plan(small(data, tensor_parallel=2, pipeline_parallel=2), about, 6, 1 << 50, torch.float32)
    with pytest.raises(TaskError, match="make it a multiple of 6"):
        pretraining.make_plan(small(data, micro_batch=3), about, 2, 1 << 50, torch.float32)
    full, again = (
        pretraining.expect_memory(large, pretraining.shape_of(large, 1500), 8, 4, recompute=r) for r in (False, True)
    )
    assert again < full


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "0.125"}, "Did you mean '0.125B'"),
        ({"tensor_parallel": 3}, "4 heads cannot be shared by 3"),
        ({"pipeline_parallel": 3}, "4 layers cannot be shared by 3"),
        ({"split": "9,1"}, "three numbers like 949,50,1"),
        ({"heads": 5}, "64 cannot be divided by 5"),
        ({"sequence_parallel": True}, "needs tensor_parallel above 1"),
        ({"data": "/nowhere"}, "prepare-data writes such a folder"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        pretraining.pretrain(replace(small(data), **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- training


# Forked by a process that has computed nothing yet: importing Megatron takes longer than the training.
RANKS = """
import dataclasses, json, os, pathlib, signal, sys, warnings
import torch
torch.set_num_threads(1)
import pretraining, without_gpu
with warnings.catch_warnings(action="ignore"):
    without_gpu.pretend()
    import steps, transformers
    transformers.GPT2LMHeadModel
size, settings, output = json.loads(sys.argv[1])
settings = dataclasses.replace(pretraining.Settings(), **settings)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
children = []
for rank in range(size):
    children.append(os.fork())
    if children[-1] == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        os._exit(pretraining.pretrain(settings, pathlib.Path(output)))
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(max(codes, key=abs))
"""


def start_ranks(
    size: int, settings: pretraining.Settings, output: Path, script: str = RANKS, *argv: str, output_to: Any = None
) -> forkserver.Child:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([*SCRIPTS, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    what = json.dumps([size, asdict(settings), str(output)])
    output = 1 if output_to is None else output_to.fileno()
    return forkserver.Child(["-c", script, what, *argv], environment, (0, output, 2 if output_to is None else output))


def finish(ranks: forkserver.Child) -> int:
    try:
        return ranks.wait(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(ranks.pid, signal.SIGKILL)
        raise


def test_files_of_a_run(pretrained: Path, data: Path) -> None:
    found = losses(pretrained)
    assert len(found) == 6
    assert found[-1] < found[0]
    assert losses(pretrained, "eval_loss")[-1] == pytest.approx(
        json.loads((pretrained / "run.json").read_text())["final_eval_loss"], abs=1e-5
    )
    result = json.loads((pretrained / "run.json").read_text())
    assert (result["status"], result["steps"], result["device"]["dtype"]) == ("finished", 6, "float32")
    assert result["tokens_per_s"] > 0
    assert result["optimizer"].startswith("torch.optim.Adam")
    assert result["site"]["host"] == socket.gethostname()
    assert [path.name for path in background_save.list_checkpoints(pretrained / "checkpoints")] == [
        "step-0000003",
        "step-0000006",
    ]
    assert (pretrained / pieces.MODEL).read_bytes() == (data / pieces.MODEL).read_bytes()
    assert (pretrained / "loss.png").is_file()


def test_compiled_layers_are_one_graph_with_the_same_losses(
    pretrained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is traced, without generating code: one for all layers, one for the loss."""
    build, graphs = gpt.build, []

    def look(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(*args: Any, **named: Any) -> Any:
        model = build(*args, **named)
        gpt.compile_layers(model, backend=look)
        return model

    monkeypatch.setattr(gpt, "build", compiled)
    torch._dynamo.reset()
    assert pretraining.pretrain(small(data), tmp_path) == 0
    assert len(graphs) == 2
    assert losses(tmp_path) == pytest.approx(losses(pretrained), rel=1e-6)
    assert losses(tmp_path, "eval_loss") == pytest.approx(losses(pretrained, "eval_loss"), rel=1e-6)


def test_four_processes_train_like_one_and_one_resumes(pretrained: Path, data: Path, tmp_path: Path) -> None:
    """Tensor 2 x pipeline 2; then its checkpoint, made whole again, by one process."""
    assert finish(start_ranks(4, small(data, tensor_parallel=2, pipeline_parallel=2), tmp_path)) == 0
    assert losses(tmp_path) == pytest.approx(losses(pretrained), rel=1e-4)
    assert losses(tmp_path, "eval_loss") == pytest.approx(losses(pretrained, "eval_loss"), rel=1e-4)
    (
        background_save.list_checkpoints(tmp_path / "checkpoints")[-1] / "about.json"
    ).unlink()  # as if it had died in the middle
    assert pretraining.pretrain(small(data), tmp_path) == 0
    assert losses(tmp_path) == pytest.approx(losses(pretrained), rel=1e-4)


def test_two_gpus_with_all_memory_saving_options(pretrained: Path, data: Path, tmp_path: Path) -> None:
    """As a user starts it: the norms shared too, and activations computed twice."""
    changes = {"tensor_parallel": 2, "sequence_parallel": True, "recompute": True}
    options = [
        word
        for name, value in asdict(small(data, **changes)).items()
        for word in ("--set", f"{name}={json.dumps(value)}")
    ]
    paths = os.pathsep.join([*SCRIPTS, os.environ.get("PYTHONPATH", "")])
    command = [
        forkserver.python(),
        str(RECIPE / "entrypoints" / "pretrain.py"),
        "--gpus",
        "2",
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 GPUs: tensor 2 x pipeline 1 x data 1" in done.stdout
    assert "activations computed twice" in done.stdout
    # The norm notices gradients that were not summed, where losses do not.
    for key in ("loss", "eval_loss", "grad_norm"):
        assert losses(tmp_path, key) == pytest.approx(losses(pretrained, key), rel=1e-4), key


def test_recomputed_activations_use_the_same_dropout(data: Path, tmp_path: Path) -> None:
    for name, twice in (("once", False), ("twice", True)):
        assert pretraining.pretrain(small(data, dropout=0.1, recompute=twice, max_steps=3), tmp_path / name) == 0
    assert losses(tmp_path / "twice") == pytest.approx(losses(tmp_path / "once"), rel=1e-6)


def test_dry_run_computes_for_the_given_gpus(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--data", str(data), "--dry-run", "--set", "device=cpu", "--output", str(tmp_path / "out")]
    assert pretrain.main([*argv, "--gpus", "4", "--set", "tensor_parallel=2", "--set", "pipeline_parallel=2"]) == 0
    assert "4 GPUs: tensor 2 x pipeline 2 x data 1" in capsys.readouterr().out
    for wrong in ([], ["--dry-run"]):
        with pytest.raises(TaskError, match="--gpus 0: at least 1"):
            pretrain.main(["--gpus", "0", *wrong])
    elsewhere = ["--data", str(data), "--dry-run", "--output", str(tmp_path / "out"), "--gpus", "8"]
    assert pretrain.main([*elsewhere, "--on", "H100", "--set", "size=1.3B"]) == 0
    printed = capsys.readouterr().out
    assert "tensor 1 x pipeline 1 x data 8" in printed and "device      H100, bfloat16" in printed
    assert "of 79.0 GiB free on each" in printed and not (tmp_path / "out").exists()
    with pytest.raises(DoesNotFitError, match=r"14\.0 GiB are free; try --set tensor_parallel=2"):
        pretrain.main([*elsewhere, "--on", "T4", "--set", "size=13B"])


def test_signal_saves_and_the_resumed_run_has_the_same_losses(data: Path, tmp_path: Path) -> None:
    """Two copies of the model are interrupted; one continues."""
    settings = small(data, max_steps=40, save_every=0, eval_every=0, train_tokens=1e9, learning_rate=1e-3)
    ranks = start_ranks(2, settings, tmp_path / "stopped")
    metrics, deadline = tmp_path / "stopped" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 2):
        assert ranks.poll() is None, "it ended before it was told to"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(ranks.pid, signal.SIGUSR1)
    assert finish(ranks) == REQUEUE
    done = len(losses(tmp_path / "stopped"))
    assert 2 <= done < 40
    assert json.loads((tmp_path / "stopped" / "run.json").read_text())["status"] == "interrupted"
    assert pretraining.pretrain(settings, tmp_path / "stopped") == 0
    assert pretraining.pretrain(settings, tmp_path / "whole") == 0
    assert losses(tmp_path / "stopped") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


def test_resumed_run_has_bitwise_equal_losses(data: Path, tmp_path: Path) -> None:
    """With dropout: what is left out goes by the step."""
    settings = small(data, dropout=0.1)
    assert pretraining.pretrain(settings, tmp_path) == 0
    whole = losses(tmp_path)
    (background_save.list_checkpoints(tmp_path / "checkpoints")[-1] / "about.json").unlink()
    assert pretraining.pretrain(settings, tmp_path) == 0
    assert losses(tmp_path) == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"step": 3', "is not JSON: Expecting"),
        (b"[]", "is not a JSON object"),
        (b"{}", "has no valid step, fingerprint"),
        (b'{"step": "3", "fingerprint": {}, "meter": {}, "wall": 1.0}', "has no valid step;"),
        (b"\xff", "is not UTF-8"),
    ],
    ids=["cut", "list", "empty", "text", "no text"],
)
def test_checkpoint_with_a_damaged_record_is_named(pretrained: Path, data: Path, content: bytes, message: str) -> None:
    newest = background_save.list_checkpoints(pretrained / "checkpoints")[-1]
    file = newest / "about.json"
    before = file.read_bytes()
    try:
        file.write_bytes(content)
        with pytest.raises(TaskError, match=re.escape(str(file)) + f": .*{message}.*remove {re.escape(str(newest))}"):
            pretraining.pretrain(small(data), pretrained)
        assert newest.is_dir()
    finally:
        file.write_bytes(before)


def test_checkpoint_of_another_run_is_not_resumed(pretrained: Path, data: Path) -> None:
    with pytest.raises(TaskError, match=r"belongs to another run \(learning_rate was .*; give another --output"):
        pretraining.pretrain(small(data, learning_rate=1e-3), pretrained)


# ---------------------------------------------------------------------- conversion


@pytest.fixture(scope="module")
def converted(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its logits are compared on the way."""
    folder = tmp_path_factory.mktemp("converted")
    assert convert.convert(pretrained, convert.find_checkpoint(pretrained, None), folder) < convert.TOLERANCE
    return folder


def test_converted_model_loads_in_transformers(pretrained: Path, converted: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(converted)
    assert (model.config.eos_token_id, model.config.n_positions) == (6, 128)
    assert pretrain_smoke_test.generate(converted, "富士山は")[0]
    ids = torch.arange(50, 90)[None]
    about = json.loads((convert.find_checkpoint(pretrained, None) / "about.json").read_text())
    with convert.load_megatron(
        convert.find_checkpoint(pretrained, None), model_configs.Shape(**about["shape"]), torch.float32
    ) as whole:
        convert.compare(whole(ids, torch.arange(40)[None], None).detach(), model, ids)
        with pytest.raises(TaskError, match="logits differ by"):
            convert.compare(1.01 * whole(ids, torch.arange(40)[None], None).detach(), model, ids)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_model_in_half_precision_is_converted_without_rounding(
    precision: str, dtype: torch.dtype, data: Path, tmp_path: Path
) -> None:
    """A checkpoint holds all weights in fp32, the norms', too; training uses them in the model's dtype."""
    settings = small(data, precision=precision, eval_every=0, save_every=0)
    assert pretraining.pretrain(settings, tmp_path / "out") == 0
    (tmp_path / "model").mkdir()
    checkpoint = convert.find_checkpoint(tmp_path / "out", None)
    assert convert.convert(tmp_path / "out", checkpoint, tmp_path / "model") < convert.TOLERANCE
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    assert not torch.equal(model.transformer.ln_f.weight.float(), torch.ones(64)), "the norm has not changed"


RECORD = """{"shape": {"layers": 4, "width": 64, "heads": 4, "positions": 128, "vocabulary": 1536},
"fingerprint": {"dtype": "torch.bfloat16"}}"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("torch.bfloat16", "torch.load", "its dtype is 'load', not float32, float16, bfloat16"),
        ('{"dtype": "torch.bfloat16"}', "[]", "has no sizes or dtype that pretrain writes"),
        ('"layers": 4', '"layers": -1', "its sizes are not all positive integers"),
        ('"width": 64', '"width": "64"', "its sizes are not all positive integers"),
        ('"heads": 4', '"heads": 4, "hands": 2', "has no sizes or dtype that pretrain writes"),
        (RECORD, "[" * 100_000, "is nested too deep"),
    ],
)
def test_damaged_record_of_a_checkpoint_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "about.json"
    file.write_text(RECORD)
    assert convert._read_record(file)[1] == "bfloat16"
    file.write_text(RECORD.replace(old, new))
    with pytest.raises(TaskError, match=f"about.json: .*{message}"):
        convert._read_record(file)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), (b"\x0a\xffnonsense", "is not a SentencePiece model")]
)
def test_a_run_without_its_tokenizer_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    (tmp_path / "about.json").write_text(RECORD)
    if content:
        (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TaskError, match=message):
        convert.convert(tmp_path, tmp_path, tmp_path / "model")


def test_unconvertible_checkpoints_are_refused(pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="holds no checkpoint"):
        convert.find_checkpoint(tmp_path, None)
    with pytest.raises(TaskError, match="no checkpoint of step 5; there is 3, 6"):
        convert.find_checkpoint(pretrained, 5)
    assert convert.find_checkpoint(pretrained, 3).name == "step-0000003"
    for step in ("step-9999999", "step-10000000"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "about.json").touch()
    assert convert.find_checkpoint(tmp_path, None).name == "step-10000000"


# ---------------------------------------------------------------------- tuning and upload


def test_split_turns() -> None:
    split = dialogues.split_turns
    text = "### Human: 一つ目?### Assistant: はい。\n### Human: 次?### Assistant: いいえ。### Human: 無視"
    assert split(text, "### Human:", "### Assistant:") == [
        {"role": "user", "content": "一つ目?"},
        {"role": "assistant", "content": "はい。"},
        {"role": "user", "content": "次?"},
        {"role": "assistant", "content": "いいえ。"},
    ]
    assert split("a ### Human: b", "### Human:", "### Assistant:") == "does not begin with '### Human:'"
    assert "do not take turns" in split("### Assistant: a### Human: b### Assistant: c", "### Human:", "### Assistant:")
    assert split("### Human: a### Assistant: ", "### Human:", "### Assistant:") == "turn 2 is empty"


def test_prepared_dialogues_are_written_once(tmp_path: Path) -> None:
    times = []
    for _ in range(2):
        dialogues.prepare(dialogues.Settings(), [RECIPE / "data" / "dialogues.jsonl"], tmp_path)
        times.append({path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()})
    assert times[0] == times[1] and len(times[0]) == 2


def test_only_response_tokens_are_targets(converted: Path, tmp_path: Path) -> None:
    """Token by token: nothing of the question, all of the answer, and its end."""
    from ekiben_tasks.data import sources, tokenize

    tuned = dialogues.prepare(dialogues.Settings(), [RECIPE / "data" / "dialogues.jsonl"], tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    tokenize.apply_format(tokenizer, tuned.form)
    read = sources.read_all([sources.Source(str(tuned.data[0]), 0.0)], seed=0, skip_bad=False, form=tuned.form).train
    for example, row in zip(tokenize.encode_examples(tokenizer, read[:4]), read[:4], strict=True):
        learnt = tokenizer.decode(example.ids[example.target_positions])
        assert learnt.replace(" ", "") == "".join(
            turn.content + "<EOD>" for turn in row.messages if turn.role == "assistant"
        ).replace(" ", "")


def test_converted_model_can_be_fine_tuned(converted: Path, tmp_path: Path) -> None:
    changes = [
        "train.method=full",
        f"train.model={converted}",
        "train.device=cpu",
        "train.max_steps=3",
        "train.batch_size=2",
    ]
    settings = [
        word
        for change in [*changes, "train.max_length=512", "train.validation_split=0.1"]
        for word in ("--set", change)
    ]
    assert sft.main([*settings, "--output", str(tmp_path / "out"), "--dry-run", "--gpus", "4", "--on", "H100"]) == 0
    assert not (tmp_path / "out").exists()
    assert sft.main([*settings, "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "run.json").read_text())
    assert (result["status"], result["steps"]) == ("finished", 3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "問"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "### Human: 問### Assistant:"
    with pytest.raises(TaskError, match="does not begin with '### Human:'"):
        sft.main([*settings, "--data", str(RECIPE / "data" / "sample.jsonl"), "--output", str(tmp_path / "bad")])


def test_upload_runs_generation_first(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    options = ["--input", str(converted), "--prompt", "富士山は"]
    assert upload.main([*options, "--name", "you/tiny", "--dry-run"]) == 0
    stdout = capsys.readouterr().out
    assert "before      '富士山は' continues: '" in stdout
    assert "model.safetensors" in stdout
    assert "nothing was sent" in stdout
    with pytest.raises(TaskError, match="set HF_TOKEN"):
        upload.main([*options, "--name", "you/tiny"])
    with pytest.raises(TaskError, match="write it as OWNER/NAME"):
        upload.main([*options, "--name", "tiny", "--dry-run"])
    with pytest.raises(TaskError, match=r"no config\.json there"):
        upload.main(["--input", str(tmp_path), "--name", "you/tiny", "--dry-run"])


@pytest.fixture
def hub_server() -> Iterator[HubServer]:
    with HubServer(owner="you", write_token="hf_write") as server:
        yield server


def upload_to(url: str, folder: Path, name: str, token: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the task in a process of its own: the hub's library reads its address once."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": token}
    env["PYTHONPATH"] = os.pathsep.join([*SCRIPTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    argv = [sys.executable, f"{SCRIPTS[0]}/upload.py", "--input", str(folder), "--name", name, "--prompt", "富士山は"]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_uploaded_model_is_downloaded_and_generates_the_same(
    converted: Path, tmp_path: Path, hub_server: HubServer
) -> None:
    """The second time with shards, instead of the single file that loaders would take before them."""
    sharded = tmp_path / "sharded"
    transformers.AutoModelForCausalLM.from_pretrained(converted).save_pretrained(sharded, max_shard_size="200KB")
    transformers.AutoTokenizer.from_pretrained(converted).save_pretrained(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    kept = {"training_args.bin": b"1", "epoch-1/model.safetensors": b"2", "README.md": b"3"}
    hub_server.files["you/tiny"] = dict(kept)
    for folder in (converted, sharded):
        done = upload_to(hub_server.url, folder, "you/tiny", "hf_write", tmp_path / "home")
        assert done.returncode == 0, done.stdout + done.stderr
        before, after = re.search(r"continues: (.*)", done.stdout), re.search(r"after +(.*)", done.stdout)
        assert before and after and before[1] == after[1]
        weights = {path.name for path in folder.glob("*.safetensors*")}
        on_hub = hub_server.files["you/tiny"]
        assert {name for name in on_hub if ".safetensors" in name} == {*weights, "epoch-1/model.safetensors"}
        assert kept.items() <= on_hub.items()
        assert all(on_hub[path.name] == path.read_bytes() for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [
        ("other/tiny", "hf_write", "may not write there; is other your account or organisation?"),
        ("you/tiny", "hf_read", "may not write there"),
        ("you/tiny", "hf_unknown", "does not know the token in HF_TOKEN"),
    ],
)
def test_upload_that_the_hub_refuses_ends_with_one_sentence(
    name: str, token: str, message: str, converted: Path, tmp_path: Path, hub_server: HubServer
) -> None:
    done = upload_to(hub_server.url, converted, name, token, tmp_path / "home")
    assert done.returncode == 1
    assert re.fullmatch(rf"error: model {name}: .*{re.escape(message)}.*", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr and token not in done.stdout + done.stderr
    assert not hub_server.files.get(name)


def test_upload_without_a_network_ends_with_one_sentence(converted: Path, tmp_path: Path) -> None:
    done = upload_to("http://127.0.0.1:9", converted, "you/tiny", "hf_write", tmp_path / "home")
    assert done.returncode == 1
    assert "error: model you/tiny: the hub cannot be reached from here; upload it again where" in done.stderr


def test_other_model_on_the_hub_than_was_uploaded_is_an_error(
    converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = transformers.AutoModelForCausalLM.from_pretrained(converted)
    with torch.no_grad():
        other.transformer.wte.weight.copy_(other.transformer.wte.weight.roll(7, 0))
    other.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(converted).save_pretrained(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_write")
    monkeypatch.setattr(upload, "upload", lambda *_, **__: None)
    monkeypatch.setattr(upload, "_download", lambda *_: str(tmp_path))
    with pytest.raises(TaskError, match="the uploaded model generates another text"):
        upload.main(["--input", str(converted), "--name", "you/tiny", "--prompt", "富士山は"])


def test_upload_refuses_a_link_that_leads_out_of_the_folder(converted: Path, tmp_path: Path) -> None:
    folder, private = tmp_path / "model", tmp_path / "id_ed25519"
    shutil.copytree(converted, folder)
    private.write_text("secret")
    (folder / "notes.txt").symlink_to(private)
    with pytest.raises(TaskError, match=r"notes\.txt: is a link that points out of"):
        upload.main(["--input", str(folder), "--name", "you/tiny", "--dry-run"])


@pytest.mark.parametrize(
    ("options", "message"), [(["--name", "you/.."], "write it as OWNER/NAME"), (["--prompt", ""], "has no tokens")]
)
def test_upload_refuses_wrong_options(options: list[str], message: str, converted: Path) -> None:
    with pytest.raises(SettingError, match=message):
        upload.main(["--input", str(converted), "--name", "you/tiny", "--dry-run", *options])


def test_upload_runs_no_code_of_a_model(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its own modules, of which transformers would ask on the terminal, nor a pickle."""

    class Code:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    monkeypatch.setattr("builtins.input", lambda *_: "y")
    modules, pickled, cut = (shutil.copytree(converted, tmp_path / name) for name in ("modules", "pickled", "cut"))
    config = json.loads((modules / "config.json").read_text())
    (modules / "config.json").write_text(json.dumps({**config, "model_type": "x", "auto_map": {"AutoConfig": "x.X"}}))
    (modules / "x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Code()))
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for folder, message in ((modules, "custom code"), (pickled, "which could run code"), (cut, "is cut or damaged")):
        with pytest.raises(TaskError, match=message):
            upload.main(["--input", str(folder), "--name", "you/tiny", "--dry-run"])
        assert not (tmp_path / "ran").exists()
    assert "[y/N]" not in capsys.readouterr().out
