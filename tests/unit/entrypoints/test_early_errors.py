"""What can be refused without torch is refused before it is imported, which takes half a minute from a cold disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# An import of one of these names raises ImportError, with and without the package.
RUN = """
import runpy, sys
for name in ("torch", "transformers", "peft", "numpy"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
sys.path[:0] = PATHS
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FINETUNE, BENCH, GPT, EVALUATE, ALIGN, SERVE, EXPORT = (
    ROOT / "recipes" / name
    for name in ("finetune", "lora-bench", "pretrain-gpt", "evaluate", "align", "serve", "export")
)
BAD_KEY = (["--config", "bad.yaml"], "bad.yaml: no setting 'nonsense'")
NO_MODEL = "/nope: no such folder"
NO_ADAPTER = "holds no adapter_config.json"
CASES: dict[str, tuple[Path, list[tuple[list[str], str]]]] = {
    "train.py": (
        FINETUNE,
        [
            BAD_KEY,
            (["--set", "model=./nope"], NO_MODEL),
            (["--set", "model=empty"], "holds no config.json"),
            (["--set", "lora.r=0"], "setting lora.r: must be at least 1"),
            (["--set", "bits=8", "--set", "parallel=fsdp"], "setting bits=8: not together with parallel=fsdp"),
            (["--set", "parallel=fsdp"], "setting parallel=fsdp: needs several processes"),
            (["--data", "nope.jsonl"], "nope.jsonl: no such file"),
        ],
    ),
    "generate.py": (
        FINETUNE,
        [
            BAD_KEY,
            (["--model", "./nope"], NO_MODEL),
            (["--adapter", "empty"], NO_ADAPTER),
            (["--adapter", "adapter"], NO_MODEL),
            (["--set", "top_p=9"], "setting top_p"),
            (["--data", "nope.jsonl"], "nope.jsonl: no such file"),
        ],
    ),
    "merge.py": (
        FINETUNE,
        [
            BAD_KEY,
            ([], NO_ADAPTER),
            (["--adapter", "adapter"], NO_MODEL),
            (["--adapter", "adapter", "--base", "empty"], "holds no config.json"),
        ],
    ),
    "merge_weights.py": (
        ROOT / "recipes" / "fsdp-llama",
        [BAD_KEY, (["nope"], "holds no sharded checkpoint"), (["--set", "max_shard_gb=0"], "max_shard_gb: must be")],
    ),
    "chat.py": (
        ROOT / "recipes" / "lora-opencalm",
        [
            BAD_KEY,
            (["q"], NO_ADAPTER),
            (["--model", "./nope", "q"], NO_MODEL),
            (["--model", "nope/", "q"], NO_MODEL),  # as shells complete it
            (["--adapter", "adapter", "q"], NO_MODEL),
            (["--adapter", "adapter", "--base", "./nope/base", "q"], "/nope/base: no such folder"),
            (["--set", "temperature=-1", "q"], "setting temperature: must be at least 0"),
            (["--context", "nope.txt", "q"], "nope.txt: no such file"),
        ],
    ),
    "prepare_jsquad.py": (FINETUNE, [([*BAD_KEY[0], "x"], BAD_KEY[1]), (["nope.json"], "nope.json: no such file")]),
    "dpo.py": (
        ALIGN,
        [
            BAD_KEY,
            (["--model", "./nope"], NO_MODEL),
            (["--data", "nope.jsonl"], "nope.jsonl: no such file"),
            (["--set", "beta=x"], "setting beta: must be"),
            (["--set", "micro_batch=0"], "setting micro_batch: must be at least 1"),
        ],
    ),
    "grpo.py": (
        ALIGN,
        [
            (["--model", "empty"], "holds no config.json"),
            (["--set", "rewards=[./nope]"], NO_MODEL),
            (["--set", "rewards=[nope.py:f]"], "nope.py: no such file"),
            (["--set", "num_generations=1"], "setting num_generations: must be at least 2"),
        ],
    ),
    "jsquad.py": (
        EVALUATE,
        [
            BAD_KEY,
            (["--data", "nope.json", "--dry-run"], "nope.json: no such file"),
            (["--model", "./nope"], NO_MODEL),
            (["--set", "form.kind=chat"], "setting form.kind: questions on a text are no conversations"),
        ],
    ),
    "perplexity.py": (
        EVALUATE,
        [
            BAD_KEY,
            (["--data", "nope.jsonl"], "nope.jsonl: no such file"),
            (["--adapter", "empty"], NO_ADAPTER),
            (["--set", "max_length=-1"], "setting max_length: must be at least 0"),
        ],
    ),
    "harness.py": (
        EVALUATE,
        [
            BAD_KEY,
            (["--model", "./nope"], NO_MODEL),
            (["--adapter", "empty"], NO_ADAPTER),
            (["--model", "a/b", "--adapter", "adapter"], "the adapter adapter names a base model"),
            (["--set", "task_folder=nope"], "nope: no such folder"),
            (["--set", "batch_size=0"], "setting batch_size: must be at least 1"),
        ],
    ),
    "serve.py": (
        SERVE,
        [
            BAD_KEY,
            (["--model", "./nope"], NO_MODEL),
            (["--model", "empty"], "holds no config.json"),
            (["--adapter", "a=empty"], NO_ADAPTER),
            (["--adapter", "a=adapter"], NO_MODEL),
            (["--adapter", "adapter"], "setting adapters: adapter: write it as NAME=FOLDER"),
            (["--adapter", "a=adapter", "--adapter", "a=empty"], "setting adapters: a is the name of two"),
            (["--model", "a/b", "--adapter", "a/b=adapter"], "setting name: a/b is the name of an adapter"),
            (["--port", "70000"], "a port is from 0 to 65535"),
            (["--set", "max_requests=0"], "setting max_requests: must be at least 1"),
            (["--set", "cache_share=2"], "setting cache_share: must be above 0"),
        ],
    ),
    "serve_batch.py": (
        SERVE,
        [BAD_KEY, (["--model", "./nope"], NO_MODEL), (["--model", "a/b", "--input", "nope.jsonl"], "no such file")],
    ),
    "gguf_task.py": (
        EXPORT,
        [
            BAD_KEY,
            (["--model", "./nope"], NO_MODEL),
            (["--model", "empty"], "holds no config.json"),
            (["--adapter", "empty"], NO_ADAPTER),
            (["--adapter", "adapter"], NO_MODEL),
            (["--model", "a/b", "--adapter", "adapter"], "the adapter adapter names its base"),
            (["--type", "Q4_K"], "setting types: 'Q4_K' is not a type that this task writes. Did you mean 'Q4_K_M'?"),
            (["--set", "types=[]"], "setting types: '' is not a type"),
        ],
    ),
    "gguf_chat.py": (
        EXPORT,
        [
            BAD_KEY,
            (["--model", "nope.gguf", "q"], "nope.gguf: no such file"),
            (["--model", "empty", "q"], "empty: is a folder, not a regular file"),
            (["--model", "bad.yaml", "q"], "bad.yaml: is not a GGUF file"),
            (["--set", "context=100", "q"], "setting context: must be a multiple of 256, not 100"),
            (["--set", "top_p=2", "q"], "setting top_p: must be above 0 and at most 1"),
            (["--set", "prompt=text", "--set", "system=x", "q"], "setting system: prompt=text has no system message"),
        ],
    ),
    "bench.py": (
        BENCH,
        [
            BAD_KEY,
            ([], "preprocess writes such a folder"),
            (["--set", "train.lora.r=0"], "setting lora.r"),
        ],
    ),
    "evaluate.py": (
        BENCH,
        [
            BAD_KEY,
            ([], "preprocess writes such a folder"),
            (["--set", "data=ready", "--adapter", "empty"], NO_ADAPTER),
        ],
    ),
    "preprocess.py": (
        BENCH,
        [
            BAD_KEY,
            ([], "raw: no such file"),
            (["--set", "validation_split=3"], "setting validation_split"),
            (["--input", str(BENCH / "data" / "sample.jsonl"), "--set", "model=./nope"], NO_MODEL),
        ],
    ),
    "check_dataset.py": (BENCH, [([], "preprocess writes such a folder")]),
    "pretrain.py": (GPT, [BAD_KEY, (["--data", "nope"], "prepare-data writes such a folder")]),
    "train_tokenizer.py": (GPT, [(["--data", "nope", "--output", "out"], "nope: no such file")]),
    "prepare_data.py": (GPT, [(["--data", "nope", "--output", "out"], "nope: no such file")]),
    "convert.py": (GPT, [BAD_KEY, (["--input", "nope"], "holds no checkpoint")]),
    "sft.py": (
        GPT,
        [
            BAD_KEY,
            (["--data", "nope"], "nope: no such file"),
            (["--set", "train.model=./nope"], NO_MODEL),
            (["--set", "train.lora.r=0"], "setting lora.r"),
        ],
    ),
    "upload.py": (
        FINETUNE,
        [
            (["--input", "nope", "--name", "a/b", "--dry-run"], "no config.json there"),
            (["--input", "adapter", "--name", "a/b", "--dry-run"], NO_MODEL),
        ],
    ),
}
EACH = [
    pytest.param(task, recipe, arguments, message, id=" ".join([task, *arguments[-2:]]).replace(str(ROOT), ""))
    for task, (recipe, cases) in CASES.items()
    for arguments, message in cases
]


@pytest.mark.parametrize(("task", "recipe", "arguments", "message"), EACH)
def test_refused_without_torch(task: str, recipe: Path, arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("nonsense: 1\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "./nope"}))
    (tmp_path / "ready").mkdir()
    (tmp_path / "ready" / "processed.json").write_text(json.dumps({"model": "someone/something"}))
    before = sorted(tmp_path.iterdir())
    folders = [str(folder) for folder in (recipe / "entrypoints", ROOT / "entrypoints") if folder.is_dir()]
    script = next(Path(folder) / task for folder in folders if (Path(folder) / task).is_file())
    done = subprocess.run(
        [sys.executable, "-c", RUN.replace("PATHS", repr(folders)), str(script), *arguments],
        cwd=tmp_path,
        env={**os.environ, "EKIBEN_RECIPE": str(recipe), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith("error: ") and message in done.stderr, done.stderr
    assert done.returncode != 0
    assert sorted(tmp_path.iterdir()) == before  # no empty folder of results
