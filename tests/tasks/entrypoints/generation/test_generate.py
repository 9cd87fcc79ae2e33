"""Batch answers with tiny random models of every architecture: alone or in a batch, at once or in two goes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only wait for a second thread
ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [
    str(Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"),
    str(ROOT / "entrypoints"),
]

import torch
import transformers

import generate
from ekiben_tasks.data.schema import DatasetFormat, PromptCompletion
from ekiben_tasks.distributed.context import REQUEUE
from ekiben_tasks.generation import batch, chat, resumable_jsonl
from ekiben_tasks.generation import smoke as generation_smoke
from ekiben_tasks.generation.batch import Prompt
from ekiben_tasks.generation.sampling import Sampling, sample
from ekiben_tasks.generation.settings import ChatSettings, GenerateSettings
from ekiben_tasks.models import load, tiny
from ekiben_tasks.models.architecture import names as architecture_names
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.task.output_lock import lock_output
from support import forkserver, multiprocess
from support.launchers import wait_for
from support.multiprocess import same_environment  # noqa: F401
from support.tiny_runs import SAMPLE

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
TEXTS = [f"設問: {number}番の山の高さは? 答え: {number * 37}m です。" for number in range(40)]
FORM = DatasetFormat(kind="template", prompt="設問: {question}\n\n答え: ")
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [20, 21]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.learn_tokenizer(TEXTS, 300)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and 20 rows beside it."""
    folder = tmp_path_factory.mktemp("model")
    tiny.make_model(folder, TEXTS, "llama", vocabulary=300)
    rows = [{"question": f"{number}番の山の" + "高さ" * (number % 5) + "は?"} for number in range(20)]
    (folder / "rows.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return folder


def settings(model_dir: Path, output: Path, **changes: Any) -> GenerateSettings:
    made = GenerateSettings(
        model=str(model_dir),
        data=str(model_dir / "rows.json"),
        form=FORM,
        output=str(output),
        examples=9,
        max_new_tokens=6,
        batch_size=4,
        device="cpu",
    )
    return replace(made, **changes)


def run(made: GenerateSettings, **options: Any) -> list[dict[str, Any]]:
    assert generate.generate(made, Path("/nonexistent"), **options) == 0
    return lines(Path(made.output))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# --------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("kind", architecture_names())
def test_batched_and_single_answers_are_equal(kind: str, tokenizer: Any) -> None:
    model = tiny.random_model(kind, len(tokenizer)).eval()
    for params in (
        Sampling(repetition_penalty=1.3),
        Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=3),
    ):
        together = sample(model, tokenizer, PROMPTS, range(4), 8, params)
        alone = [sample(model, tokenizer, [ids], [number], 8, params)[0] for number, ids in enumerate(PROMPTS)]
        assert together == alone
        assert len({tuple(ids) for ids, _ in together}) > 1


def test_greedy_equals_transformers(tokenizer: Any) -> None:
    model = tiny.random_model("gpt_neox", len(tokenizer)).eval()
    ids = torch.tensor([PROMPTS[2]])
    for penalty in (1.0, 1.4):
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=10,
            do_sample=False,
            repetition_penalty=penalty,
            pad_token_id=0,
            eos_token_id=0,
        )
        ours, _ = sample(model, tokenizer, [PROMPTS[2]], [0], 10, Sampling(repetition_penalty=penalty))[0]
        assert ours == [token for token in theirs[0, len(PROMPTS[2]) :].tolist() if token != 0]


def test_token_beyond_the_embeddings_is_named(tokenizer: Any, model_dir: Path) -> None:
    model = tiny.random_model("llama", len(tokenizer) - 1)
    last = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    examples = [PromptCompletion(text, "") for text in ("設問", f"設問{tokenizer.convert_tokens_to_string([last])}")]
    message = rf"has the token {re.escape(repr(last))}, number {len(tokenizer) - 1:,} of the tokenizer, and the model"
    with pytest.raises(TaskError, match=f"example 2 of the data: {message}"):
        batch.prepare_prompts(model, tokenizer, examples, [0, 1], GenerateSettings())
    with pytest.raises(TaskError, match=f"the question {message}"):
        chat.reply(model, tokenizer, examples[1], ChatSettings())


def test_samples_follow_the_probabilities(tokenizer: Any) -> None:
    """First tokens of 3,000 rows against softmax(logits / temperature) cut to its nucleus."""
    model = tiny.random_model("llama", len(tokenizer), layers=1, width=16).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1].float()
    wanted = (logits / 0.7).softmax(-1)
    ordered, order = wanted.sort(descending=True)
    kept = ordered.cumsum(-1) - ordered < 0.8
    wanted = torch.zeros_like(wanted).scatter_(0, order[kept], ordered[kept] / ordered[kept].sum())
    params = Sampling(temperature=0.7, top_p=0.8, seed=1)
    answers = sample(model, tokenizer, [PROMPTS[0]] * 3000, range(3000), 1, params)
    tokens = torch.tensor([ids[0] if ids else tokenizer.eos_token_id for ids, _ in answers])
    found = torch.bincount(tokens, minlength=len(wanted)) / 3000
    assert found[wanted == 0].sum() == 0
    assert (found - wanted).abs().max() < 4 * (0.25 / 3000) ** 0.5


def test_generation_stops_at_the_end_token(tokenizer: Any) -> None:
    model = tiny.random_model("llama", len(tokenizer)).eval()
    with torch.no_grad():  # whatever is asked, the end is the likeliest
        model.model.norm.weight.zero_()
    assert sample(model, tokenizer, [[5]], [0], 8, Sampling()) == [([], True)]


def test_the_bases_generation_defaults_do_not_apply(tokenizer: Any) -> None:
    model = tiny.random_model("llama", len(tokenizer)).eval()
    plain = sample(model, tokenizer, [PROMPTS[2]], [0], 12, Sampling())
    defaults = transformers.GenerationConfig(
        repetition_penalty=5.0, no_repeat_ngram_size=1, suppress_tokens=[plain[0][0][0]], bos_token_id=0, eos_token_id=0
    )
    model.generation_config = defaults
    assert sample(model, tokenizer, [PROMPTS[2]], [0], 12, Sampling()) == plain
    assert model.generation_config is defaults  # a model saved later keeps them


def test_tokens_a_model_never_generates_are_not_an_error(tokenizer: Any) -> None:
    model = tiny.random_model("llama", len(tokenizer)).eval()
    head = model.lm_head
    head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, torch.tensor([3]), -torch.inf))
    for params in (Sampling(repetition_penalty=1.2), Sampling(temperature=1.0, top_p=0.9, seed=1)):
        ((ids, _),) = sample(model, tokenizer, [[5, 3]], [0], 12, params)
        assert ids
        assert 3 not in ids


# ------------------------------------------------------------------------------------------------------------- rows


def test_examples_are_chosen_by_the_seed() -> None:
    assert batch.choose_examples(5, 0, 1) == batch.choose_examples(5, 9, 1) == [0, 1, 2, 3, 4]
    assert (
        batch.choose_examples(1000, 100, 42)
        == batch.choose_examples(1000, 100, 42)
        != batch.choose_examples(1000, 100, 43)
    )
    assert len(set(batch.choose_examples(1000, 100, 42))) == 100


def test_batches_group_similar_lengths_within_a_limit() -> None:
    questions = [Prompt(index, [1] * (1 + index % 7), 5 if index != 3 else 2) for index in range(20)]
    batches = batch.make_batches(questions, 8)
    assert sorted(question.index for batch in batches for question in batch) == list(range(20))
    assert [len(batch) for batch in batches] == [1, 8, 8, 3]
    assert all(len({question.max_new_tokens for question in batch}) == 1 for batch in batches)
    lengths = [len(question.ids) for batch in batches[1:] for question in batch]
    assert lengths == sorted(lengths, reverse=True)


# ------------------------------------------------------------------------------------------------------------- runs


def test_output_does_not_depend_on_the_batch_size(model_dir: Path, tmp_path: Path) -> None:
    first = run(settings(model_dir, tmp_path / "a.jsonl"))
    assert [line["index"] for line in first] == batch.choose_examples(20, 9, 42)
    assert first[0]["prompt"].endswith("は?\n\n答え: ")
    assert sorted(first[0]) == ["complete", "ended", "index", "prompt", "tokens"]
    assert run(settings(model_dir, tmp_path / "b.jsonl", batch_size=1)) == first
    assert run(settings(model_dir, tmp_path / "c.jsonl", seed=43)) != first
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_killed_run_is_resumed(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(settings(model_dir, tmp_path / "whole.jsonl"))
    interrupted = settings(model_dir, tmp_path / "interrupted.jsonl")
    original = resumable_jsonl.ResumableJsonlWriter.finish
    resumable_jsonl.ResumableJsonlWriter.finish = lambda _: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            generate.generate(interrupted, Path("/nonexistent"))
    finally:
        resumable_jsonl.ResumableJsonlWriter.finish = original  # type: ignore[method-assign]
    part = tmp_path / ".interrupted.jsonl.part-0"
    text = part.read_bytes()
    kept = text.split(b"\n")
    part.write_bytes(b"\n".join(kept[:5]) + b"\n" + kept[5][:20])  # cut in the middle of a line
    assert not (tmp_path / "interrupted.jsonl").exists()
    with pytest.raises(TaskError, match=r"other settings or data.*--overwrite"):
        generate.generate(replace(interrupted, temperature=0.3), Path("/nonexistent"))
    assert run(interrupted) == whole
    assert "resumed     4 answers were there" in capsys.readouterr().out
    with pytest.raises(TaskError, match=r"exists already.*--overwrite"):
        generate.generate(interrupted, Path("/nonexistent"))
    assert run(interrupted, fresh=True) == whole


def test_two_processes_split_the_examples(model_dir: Path, tmp_path: Path) -> None:
    stdout = multiprocess.run(
        2, tmp_path / "log", generate.generate, settings(model_dir, tmp_path / "two.jsonl"), Path("/nonexistent")
    )
    assert lines(tmp_path / "two.jsonl") == run(settings(model_dir, tmp_path / "one.jsonl"))
    assert stdout.count("done  ") == 1
    assert "done  " not in (tmp_path / "log-1").read_text()


def answered(log: Path) -> int:
    """Return how many batches a process says in its log that it has answered."""
    return log.read_text(encoding="utf-8").count("answered a batch")


def test_signal_while_another_process_has_answered_all(model_dir: Path, tmp_path: Path) -> None:
    """One stops after the batch at work, the other waits for it: both end with 75, and the rest is answered by the next
    start.
    """
    configured = settings(model_dir, tmp_path / "a.jsonl", batch_size=1)

    def work() -> int:
        answer_batch = batch.answer_batch

        def get_signal(*args: Any) -> Any:
            if os.environ["RANK"] == "0":
                wait_for(lambda: answered(tmp_path / "log-1") == 4)  # its part of 9 prompts
                os.kill(os.getpid(), signal.SIGTERM)
            answer = answer_batch(*args)
            print("answered a batch", flush=True)
            return answer

        batch.answer_batch = get_signal
        return generate.generate(configured, Path("/nonexistent"))

    codes = multiprocess.wait(multiprocess.start(2, tmp_path / "log", work))
    assert codes == [REQUEUE] * 2, multiprocess.read_logs(tmp_path / "log")
    assert run(configured) == run(settings(model_dir, tmp_path / "b.jsonl", batch_size=1))


def test_continued_run_shares_what_is_left(model_dir: Path, tmp_path: Path) -> None:
    """The first start ends when one process has answered its part, and the other a single prompt."""
    chosen = settings(model_dir, tmp_path / "a.jsonl", examples=0, batch_size=1)

    def work() -> int:
        answer_batch = batch.answer_batch

        def get_signal(*args: Any) -> Any:
            if os.environ["RANK"] == "1" and "STOP" in os.environ:
                wait_for(lambda: answered(tmp_path / "stopped-0") == 10)
                os.kill(os.getpid(), signal.SIGTERM)
            answer = answer_batch(*args)
            print("answered a batch", flush=True)
            return answer

        batch.answer_batch = get_signal
        return generate.generate(chosen, Path("/nonexistent"))

    stopped = multiprocess.start(2, tmp_path / "stopped", work, env={"STOP": "1"})
    assert multiprocess.wait(stopped) == [REQUEUE] * 2, multiprocess.read_logs(tmp_path / "stopped")
    multiprocess.run(2, tmp_path / "log", work)
    counts = {name: [answered(tmp_path / f"{name}-{rank}") for rank in range(2)] for name in ("stopped", "log")}
    assert counts == {"stopped": [10, 1], "log": [5, 4]}
    assert lines(tmp_path / "a.jsonl") == run(replace(chosen, output=str(tmp_path / "b.jsonl")))


def test_record_of_a_run(model_dir: Path, tmp_path: Path) -> None:
    answers = run(settings(model_dir, tmp_path / "out.jsonl"))
    record = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert (record["status"], record["answers"], record["resumed"]) == ("finished", 9, 0)
    assert record["tokens"] == sum(line["tokens"] for line in answers) and record["tokens_per_s"] > 0
    assert record["settings"]["max_new_tokens"] == 6 and record["seed"] == record["settings"]["seed"]
    assert record["device"] == {"name": "CPU", "count": 1, "dtype": "float32"}
    assert record["data"] == {
        "source": str(model_dir / "rows.json"),
        "examples": 20,
        "chosen": 9,
        "bad": 0,
        "too_long": 0,
        "versions": {str(model_dir / "rows.json"): hashlib.sha256((model_dir / "rows.json").read_bytes()).hexdigest()},
    }
    weights = record["model"]["files"]["model.safetensors"]
    assert weights["sha256"] == hashlib.sha256((model_dir / "model.safetensors").read_bytes()).hexdigest()
    assert (record["model"]["name"], record["model"]["commit"]) == (str(model_dir), None)
    assert {"torch", "transformers", "python"} <= record["versions"].keys()
    assert record["site"]["host"] and record["started"] and "image" in record


def test_record_of_two_processes_adds_up_and_an_interrupted_run_has_one(model_dir: Path, tmp_path: Path) -> None:
    chosen = settings(model_dir, tmp_path / "out.jsonl", examples=0, model_checksum=False)
    multiprocess.run(2, tmp_path / "log", generate.generate, chosen, Path("/nonexistent"))
    record = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert (record["answers"], record["device"]["count"]) == (20, 2)
    assert record["tokens"] == sum(line["tokens"] for line in lines(tmp_path / "out.jsonl"))
    assert record["model"]["sha256"] is None and record["model"]["files"] == {}


def test_second_run_with_one_output_file_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with lock_output(tmp_path / "a.jsonl"):
        with pytest.raises(TaskError, match=r"a\.jsonl: another run writes there \(process \d+ on \S+\); .*--output"):
            generate.generate(settings(model_dir, tmp_path / "a.jsonl"), Path("/nonexistent"))
        run(settings(model_dir, tmp_path / "b.jsonl"))
    run(settings(model_dir, tmp_path / "a.jsonl"))


def test_smoke_on_two_processes(model_dir: Path, tmp_path: Path) -> None:
    """As `generate --smoke --gpus 2` runs it: one model, one output, checked once."""
    work = [generation_smoke.smoke_generate, settings(model_dir, tmp_path / "a.jsonl", form=DatasetFormat()), SAMPLE]
    codes = multiprocess.wait(multiprocess.start(2, tmp_path / "log", *work), 100)
    printed = [Path(f"{tmp_path / 'log'}-{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], printed
    assert printed[0].count("smoke       every example is answered") == 1
    assert "smoke " not in printed[1]


def test_wrong_setting_of_several_processes_is_printed_once(tmp_path: Path) -> None:
    # The image in which this runs may be of a recipe without `generate`: the module's own file is the command.
    argv = [forkserver.python(), str(generate.__file__), "--gpus", "2", "--set", "top_p=2"]
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: setting top_p: must be above 0 and at most 1, not 2.0\n"


def test_full_disk_keeps_finished_answers(model_dir: Path, tmp_path: Path) -> None:
    """The kernel's own limit on the size of a file stands for the disk: text is cut in the middle of a line, too."""
    made = settings(model_dir, tmp_path / "a.jsonl", batch_size=1)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(TaskError, match=r"cannot be written: File too large; earlier answers are kept"):
            generate.generate(made, Path("/nonexistent"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / ".a.jsonl.part-0").stat().st_size == 600
    assert not (tmp_path / "a.jsonl").exists()
    assert run(made) == run(settings(model_dir, tmp_path / "b.jsonl"))


def test_invalid_and_too_long_examples_are_counted(model_dir: Path, tmp_path: Path) -> None:
    rows = [{"question": "よい"}, {"qestion": "?"}, {"question": "長" * 2000}, {"question": "また"}]
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    made = settings(model_dir, tmp_path / "a.jsonl", data=str(data))
    with pytest.raises(TaskError, match=r"rows\.json item 2: question is missing\. Did you mean 'qestion'"):
        generate.generate(made, Path("/nonexistent"))
    data.write_text(json.dumps([rows[0], *rows[2:]], ensure_ascii=False), encoding="utf-8")
    with pytest.raises(
        TaskError, match=r"example 2 leaves no tokens for an answer \(1 of 3 do not: the model takes 1,024 tokens"
    ):
        generate.generate(made, Path("/nonexistent"))
    assert [line["index"] for line in run(made, skip_bad=True)] == [0, 2]
    data.write_text("[]")
    with pytest.raises(TaskError, match="holds no valid example"):
        generate.generate(made, Path("/nonexistent"))


def test_all_wrong_settings_are_reported(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as error:
        generate.generate(settings(model_dir, tmp_path / "a", top_p=0, batch_size=0), Path("/nonexistent"))
    assert "batch_size: must be at least 1, not 0" in str(error.value)
    assert "top_p: must be above 0" in str(error.value)


def test_an_adapter_is_applied(model_dir: Path, tmp_path: Path) -> None:
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(base, lora)
    adapted.save_pretrained(tmp_path / "adapter")
    plain = run(settings(model_dir, tmp_path / "plain.jsonl", temperature=0.0))
    with_adapter = run(
        settings(model_dir, tmp_path / "adapted.jsonl", temperature=0.0, adapter=str(tmp_path / "adapter"), model="")
    )
    assert [line["prompt"] for line in plain] == [line["prompt"] for line in with_adapter]
    assert plain != with_adapter


def test_quantised_weights_need_a_gpu(model_dir: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.fail("this test is for machines without a GPU")
    with pytest.raises(TaskError, match=r"bits=4: needs a GPU.*--set bits=16"):
        generate.generate(settings(model_dir, tmp_path / "a.jsonl", bits=4), Path("/nonexistent"))


def test_weights_with_nan_are_refused(model_dir: Path, tmp_path: Path) -> None:
    """Said before a file full of noise is written."""
    broken = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        broken.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    broken.save_pretrained(tmp_path / "broken")
    load.load_tokenizer(str(model_dir)).save_pretrained(tmp_path / "broken")
    with pytest.raises(TaskError, match="NaN or infinite"):
        generate.generate(
            settings(tmp_path / "broken", tmp_path / "a.jsonl", data=str(model_dir / "rows.json")), Path("/nonexistent")
        )
    assert not (tmp_path / "a.jsonl").exists()


def test_sample_of_a_record_is_like_a_record(model_dir: Path, tmp_path: Path) -> None:
    """tests/support/generate.run.json, with which the catalog is tested."""
    run(settings(model_dir, tmp_path / "out.jsonl", examples=1))
    record = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    sample_record = json.loads((Path(__file__).parents[3] / "support" / "generate.run.json").read_text())
    assert record.keys() == sample_record.keys() - {"adapter"}
    for key in ("settings", "data", "device"):
        assert record[key].keys() == sample_record[key].keys(), key
