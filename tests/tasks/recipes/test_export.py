"""export: files of three architectures that are as likely as with transformers, adapters, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "export"
sys.path[:0] = [str(ROOT / "entrypoints"), str(RECIPE / "entrypoints")]
os.environ["TQDM_DISABLE"] = "1"

import peft
import sentencepiece
import tokenizers
import torch
import transformers

import gguf_chat
import gguf_write
from ekiben_tasks.models import tiny
from ekiben_tasks.task.errors import TaskError
from gguf_settings import TYPES, ChatSettings, GgufSettings

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours
SAMPLE = RECIPE / "data" / "sample.txt"
TEXTS = SAMPLE.read_text(encoding="utf-8").splitlines()
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
QWEN_PATTERN = (  # of Qwen2Tokenizer in transformers
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {"gpt_neox": "gpt-2", "qwen3": "qwen2", "llama": ""}
WIDTH = 256  # ggml's types of 4 bits have blocks of 256 weights


def save_model(folder: Path, kind: str, vocabulary: int, **options: Any) -> None:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=vocabulary, max_position_embeddings=1024, initializer_range=0.1, **sizes, **options
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_neox(folder: Path) -> None:
    """OpenCALM's shape: no parallel residual, rotation of all of a head, bytes in its tokens."""
    tokenizer = tiny.learn_tokenizer(TEXTS, 800)
    tokenizer.save_pretrained(folder)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    save_model(folder, "gpt_neox", len(tokenizer), use_parallel_residual=False, rotary_pct=1.0, **ids)


def write_qwen3(folder: Path) -> None:
    """Norms of queries and keys, tied embeddings, Qwen's own way to split words, and a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN_PATTERN), "isolated")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, bytes_(False, use_regex=False)])
    tokenizer.normalizer, tokenizer.decoder = tokenizers.normalizers.NFC(), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=800, special_tokens=[tiny.END], show_progress=False, initial_alphabet=bytes_.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tiny.END)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    heads = {"num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
    save_model(folder, "qwen3", len(fast), bos_token_id=0, eos_token_id=0, **heads)


def write_llama(folder: Path) -> None:
    """SentencePiece with a fallback to bytes."""
    folder.mkdir()
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=file,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(file.getvalue())
    tokenizer = transformers.LlamaTokenizer.from_pretrained(str(folder))
    tokenizer.save_pretrained(folder)
    save_model(folder, "llama", len(tokenizer), num_key_value_heads=2, bos_token_id=1, eos_token_id=2)


KINDS: dict[str, Callable[[Path], None]] = {"gpt_neox": write_neox, "qwen3": write_qwen3, "llama": write_llama}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    for kind, write in KINDS.items():
        write(folder / kind)
    return folder


def export(model: Path, output: Path, *, overwrite: bool = False, **changes: Any) -> dict[str, Any]:
    """Write the files, and return their record."""
    settings = GgufSettings(model=str(model), output=str(output), pre_tokenizer=PRE_TOKENIZERS[model.name])
    request = gguf_write.Request(replace(settings, **changes), SAMPLE, overwrite=overwrite)
    assert gguf_write.run(request) == 0
    return dict(json.loads((output / "run.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_as_likely_as_with_transformers(kind: str, models: Path, tmp_path: Path) -> None:
    record = export(models / kind, tmp_path / "gguf", types=TYPES)
    exact = record["scores"]["transformers"]["perplexity"]
    off = {name: abs(record["scores"][name]["perplexity"] / exact - 1) for name in TYPES}
    print(kind, exact, off)
    assert off["F16"] < 1e-3 and off["Q8_0"] < 2e-2 and off["Q4_K_M"] < 0.2
    assert set(record["files"]) == {f"{name}.gguf" for name in TYPES}
    for name, entry in record["files"].items():
        assert hashlib.sha256((tmp_path / "gguf" / name).read_bytes()).hexdigest() == entry["sha256"]
    assert sorted(path.name for path in (tmp_path / "gguf").iterdir()) == sorted(
        [".lock", "run.json", *record["files"]]
    )
    chat = gguf_chat.Chat(ChatSettings(model=str(tmp_path / "gguf/Q8_0.gguf"), max_new_tokens=5, temperature=0.0))
    assert chat.kind == ("chat" if kind == "qwen3" else "instruction")
    first = "".join(chat.answer("昔々"))
    assert first and len(chat.history) == (2 if kind == "qwen3" else 0)
    with pytest.raises(TaskError, match="does not fit the 1,024 tokens"):
        list(chat.answer("昔々" * 2000))
    with pytest.raises(TaskError, match=r"has run.json, F16.gguf, Q8_0.gguf, Q4_K_M.gguf; give another --output"):
        export(models / kind, tmp_path / "gguf", types=("F16",))
    assert export(models / kind, tmp_path / "gguf", types=("Q8_0",), overwrite=True)["files"].keys() == {"Q8_0.gguf"}
    assert [path.name for path in (tmp_path / "gguf").glob("*.gguf")] == ["Q8_0.gguf"]


def test_an_adapter_is_merged_first(models: Path, tmp_path: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(models / "llama")
    config = peft.LoraConfig(target_modules="all-linear", lora_alpha=32, init_lora_weights=False)
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    transformers.AutoTokenizer.from_pretrained(models / "llama").save_pretrained(tmp_path / "adapter")
    plain = export(models / "llama", tmp_path / "plain", types=("F16",))["scores"]
    settings: dict[str, Any] = {"adapter": str(tmp_path / "adapter"), "types": ("F16",)}
    merged = export(models / "llama", tmp_path / "merged", **settings)
    assert merged["adapter"]["name"] == settings["adapter"] and merged["model"]["name"] == str(models / "llama")
    assert abs(merged["scores"]["F16"]["perplexity"] / plain["F16"]["perplexity"] - 1) > 0.05


def edit(file: str, **values: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / file
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8")

    return change


def cut_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


REFUSED: dict[str, tuple[str, Callable[[Path], None] | None, dict[str, Any], str]] = {
    "unknown tokenizer": (
        "gpt_neox",
        None,
        {"pre_tokenizer": ""},
        "does not know its pre-tokenizer; --set pre_tok.*gpt-2",
    ),
    "unknown Qwen": ("qwen3", None, {"pre_tokenizer": ""}, "--set pre_tokenizer=qwen2 gives the tokens"),
    "unknown name": ("gpt_neox", None, {"pre_tokenizer": "nonsense"}, "llama.cpp has no 'nonsense'"),
    "other tokens": (
        "gpt_neox",
        None,
        {"pre_tokenizer": "starcoder"},
        "splits the text differently than its tokenizer",
    ),
    "no architecture": ("llama", edit("config.json", architectures=["NopeForCausalLM"]), {}, "no architecture NopeFor"),
    "custom code": ("llama", edit("tokenizer_config.json", auto_map={"AutoTokenizer": "x.X"}), {}, "names custom code"),
    "cut weights": ("llama", cut_weights, {}, "safetensors: is cut or damaged"),
    "no text": ("llama", None, {"text": "nope.txt"}, "nope.txt: no such file"),
    "short text": ("llama", None, {"text": os.devnull}, "/dev/null: is a device, not a regular file"),
    "small vocabulary": ("qwen3", edit("config.json", vocab_size=9), {}, "refuses it .*assert max"),
    "wrong result": ("gpt_neox", edit("config.json", hidden_act="relu"), {}, "does not convert this model rightly"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_nothing(case: str, models: Path, tmp_path: Path) -> None:
    kind, damage, changes, message = REFUSED[case]
    model = tmp_path / kind
    model.mkdir()
    for file in (models / kind).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    if damage:
        damage(model)
    with pytest.raises(TaskError, match=message):
        export(model, tmp_path / "gguf", **changes)
    assert not list((tmp_path / "gguf").glob("[!.]*"))


def test_a_full_disk_leaves_nothing(models: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(TaskError, match=r"cannot be written .*; make room"):
            export(models / "llama", tmp_path / "gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list((tmp_path / "gguf").glob("[!.]*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "chat"}, "has no chat template"),
        ({"system": "x"}, "setting system: .* has no chat template"),
        ({"model": "cut.gguf"}, "cannot load it .*data is not within the file bounds"),
    ],
)
def test_what_chat_refuses(changes: dict[str, Any], message: str, models: Path, tmp_path: Path) -> None:
    export(models / "llama", tmp_path / "gguf", types=("Q8_0",), compare=False)
    file = tmp_path / "gguf/Q8_0.gguf"
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-1000])
    changes = {name: str(tmp_path / value) if name == "model" else value for name, value in changes.items()}
    with pytest.raises(TaskError, match=message):
        gguf_chat.Chat(ChatSettings(**{"model": str(file), **changes}))
