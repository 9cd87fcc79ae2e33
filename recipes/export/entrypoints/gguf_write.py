"""Write GGUF files: merge, convert by llama.cpp's converter, quantise, and compare each file with transformers."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import llama_cpp
import torch

from ekiben_tasks.models import load, merge
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.task import adapter_folder, files, input_files, run_metadata
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import SettingError, TaskError
from ekiben_tasks.task.hub import format_hub_error, is_hub_model, split_revision
from ekiben_tasks.task.output_lock import claim_output
from gguf_load import load_file
from gguf_settings import FULL, SAMPLE, TYPES, GgufSettings

# llama.cpp's converter: convert_hf_to_gguf.py is a command line for the package that lies beside it.
sys.path.append(os.environ.get("LLAMA_CPP", "/opt/llama.cpp"))
import conversion

RECORD = "run.json"
WINDOW = 512  # tokens that the files are compared on
TOLERANCE = 0.01  # of F16's perplexity, relative to transformers': above it, the conversion is wrong
_STAGED = ".staged-"
_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.safetensors", "*.bin"]  # of a model on the hub
_GUESSES = ("gpt-2", "qwen2", "llama-bpe")  # pre-tokenizers that are tried for a suggestion


@dataclass(frozen=True, slots=True)
class Request:
    """Describe a requested run. sample: the recipe's text. base: the adapter's, if not that of its config."""

    settings: GgufSettings
    sample: Path
    base: str | None = None
    is_dry: bool = False
    overwrite: bool = False


def run(request: Request) -> int:
    """Write the files and their record, and return 0.

    Raises:
        TaskError: the model, its tokenizer or the output cannot be used, or a file differs from the model.
    """
    began, settings, output = time.time(), request.settings, Path(request.settings.output)
    text = input_files.read_text(
        request.sample if settings.text == SAMPLE else Path(settings.text), "--set text= takes a text in UTF-8"
    )
    names = {"model": settings.model}
    if settings.adapter:
        base = request.base or adapter_folder.read_base(adapter_folder.find_config(Path(settings.adapter)))
        names = {"model": base, "adapter": settings.adapter}
    folder = find_folder(names["model"])
    logging.getLogger("hf-to-gguf").addFilter(_is_news)
    with tempfile.TemporaryDirectory(prefix="ekiben-gguf-") as scratch:
        ids = check_tokenizer(folder, settings.pre_tokenizer, text, Path(scratch) / "vocabulary.gguf")
    targets = [output / f"{name}.gguf" for name in dict.fromkeys(settings.types)]
    print_once(f"model       {' with '.join(names.values())}", f"files       {', '.join(map(str, targets))}")
    if request.is_dry:
        print_once("dry run     no weights were loaded, nothing was written")
        return 0
    with claim_output(output):
        _begin(output, overwrite=request.overwrite)
        sums = {
            key: run_metadata.start_checksum(name, output / RECORD, key)
            for key, name in names.items()
            if settings.model_checksum
        }
        staged = Path(tempfile.mkdtemp(prefix=_STAGED, dir=output))
        try:
            if settings.adapter:
                print_once(f"merging     {settings.adapter}")
                folder = files.ensure_output_dir(staged / "merged")
                merge.merge(Path(settings.adapter), folder, choose_device("cpu"), base=request.base)
                ids = check_tokenizer(folder, settings.pre_tokenizer, text, staged / "vocabulary.gguf")
            written = write(folder, staged, settings)
            scores = compare(folder, written, ids) if settings.compare else {}
            record = run_metadata.run_record(settings, None, began)
            record["versions"] |= {"llama-cpp-python": llama_cpp.__version__}
            record |= {key: run_metadata.model_record(names[key], each, wait=True) for key, each in sums.items()}
            record |= {"files": {path.name: _describe(staged / path.name) for path in targets}, "scores": scores}
            for earlier in _list_files(output):
                earlier.unlink()  # the record is of all files in the folder
            for target in targets:
                (staged / target.name).replace(target)
            files.write_json(output / RECORD, record)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    print_once(*(f"done        {target}: {target.stat().st_size / 1e6:,.1f} MB" for target in targets))
    return 0


def find_folder(name: str) -> Path:
    """Return the folder of model ``name``; one of the hub is downloaded.

    Raises:
        TaskError: it cannot be downloaded, or comes with code of its own, which the converter would run.
    """
    folder = Path(name).expanduser()
    if is_hub_model(name):
        repository, revision = split_revision(name)
        try:
            folder = Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=_FILES))
        except Exception as error:
            raise TaskError(format_hub_error(error, name, "model")) from error
    for file in (folder / "config.json", folder / "tokenizer_config.json"):
        if file.is_file() and input_files.read_object(file, "copy or download the model again").get("auto_map"):
            raise TaskError(
                f"{file}: names custom code (auto_map), which Ekiben's tasks do not run; use a model that"
                " transformers itself has"
            )
    return folder


def open_model(folder: Path, file: Path, pre_tokenizer: str) -> Any:
    """Return llama.cpp's converter for the model in ``folder``, which has read no weights yet.

    Raises:
        TaskError: llama.cpp has no such architecture, or the model is damaged.
    """
    if problem := load.name_damaged(str(folder)):
        raise TaskError(problem)
    with _explained(folder):
        parameters = conversion.ModelBase.load_hparams(folder, False)
        # transformers 5 has renamed what the converter of GPT-NeoX reads, and names a type where there is no scaling.
        rope = parameters.get("rope_parameters") or {}
        parameters.setdefault("rotary_pct", rope.get("partial_rotary_factor", 1.0))
        if rope.get("rope_type") == "default":
            del rope["rope_type"]
        architecture = conversion.get_model_architecture(parameters, conversion.ModelType.TEXT)
        try:
            kind = conversion.get_model_class(architecture)
        except NotImplementedError:
            raise TaskError(
                f"model {folder}: llama.cpp has no architecture {architecture}; the converter's"
                " --print-supported-models lists them"
            ) from None
        model = kind(folder, gguf.LlamaFileType.MOSTLY_F16, file, hparams=parameters)
        if pre_tokenizer:
            model.get_vocab_base_pre = lambda tokenizer: pre_tokenizer
    return model


def check_tokenizer(folder: Path, pre_tokenizer: str, text: str, file: Path) -> list[int]:
    """Return the tokens of ``text``, which llama.cpp and the model's own tokenizer split alike.

    file: where a vocabulary is written.

    Raises:
        TaskError: they split it differently, or the converter does not know how the tokenizer splits words.
    """
    ids: list[int] = load.load_tokenizer(str(folder)).encode(text, add_special_tokens=False)
    if len(ids) < 2:
        raise SettingError("setting text: has fewer than 2 tokens; name a longer one")
    try:
        tokens = _tokens(folder, pre_tokenizer, text, file)
    except NotImplementedError:
        equal = [name for name in _GUESSES if _tokens(folder, name, text, file) == ids]
        advice = (
            f"--set pre_tokenizer={equal[0]} gives the tokens of its tokenizer on the text"
            if equal
            else (f"none of {', '.join(_GUESSES)} gives its tokens; --set pre_tokenizer= takes llama.cpp's other names")
        )
        raise TaskError(f"model {folder}: llama.cpp's converter does not know its pre-tokenizer; {advice}") from None
    if tokens != ids:
        where = next((at for at, pair in enumerate(zip(tokens, ids, strict=False)) if pair[0] != pair[1]), 0)
        raise TaskError(
            f"model {folder}: llama.cpp splits the text differently than its tokenizer ({len(tokens):,} and"
            f" {len(ids):,} tokens, token {where:,} is the first that differs), so its answers would be wrong; try"
            f" another --set pre_tokenizer= ({', '.join(_GUESSES)}, ...)"
        )
    return ids


def _tokens(folder: Path, pre_tokenizer: str, text: str, file: Path) -> list[int]:
    """Return llama.cpp's tokens of ``text``. Raises NotImplementedError for an unknown pre-tokenizer."""
    model = open_model(folder, file, pre_tokenizer)
    with _explained(folder, NotImplementedError):
        model.write_vocab()
    try:
        vocabulary = load_file(file, vocab_only=True)
    except TaskError as error:
        if not pre_tokenizer:
            raise
        raise SettingError(
            f"setting pre_tokenizer: llama.cpp has no '{pre_tokenizer}'; try {', '.join(_GUESSES)}"
        ) from error
    return list(vocabulary.tokenize(text.encode(), add_bos=False, special=False))


def write(folder: Path, output: Path, settings: GgufSettings) -> dict[str, Path]:
    """Write a file of each type into ``output``, F16 among them, and return them by type.

    Raises:
        TaskError: the weights are damaged, or a file cannot be written.
    """
    full = output / f"{FULL}.gguf"
    print_once(f"converting  {folder}")
    with torch.inference_mode(), _explained(folder):
        open_model(folder, full, settings.pre_tokenizer).write()
    written = {FULL: full}
    for name in settings.types:
        if name in written:
            continue
        print_once(f"quantising  {name}")
        written[name] = output / f"{name}.gguf"
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
        params.nthread = len(os.sched_getaffinity(0))
        if llama_cpp.llama_model_quantize(bytes(full), bytes(written[name]), ctypes.byref(params)):
            raise TaskError(f"{written[name]}: llama.cpp could not write it; is the disk full?")
    return written


def compare(folder: Path, written: dict[str, Path], ids: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the perplexity of the first tokens of ``ids`` by type, and by transformers in fp32.

    Raises:
        TaskError: F16's differs from transformers' by more than the tolerance: the conversion is wrong.
    """
    model = load.load_base(str(folder), choose_device("cpu"))
    ids = ids[: min(WINDOW, load.longest_context(model.config))]
    logits = {"transformers": merge.logits(model, torch.tensor([ids]))}
    del model
    scores = {}
    for name in ("transformers", *written):
        if name in written:
            llama = load_file(written[name], n_ctx=len(ids), logits_all=True)
            llama.eval(ids)
            logits[name] = torch.from_numpy(llama.scores[: len(ids)])
        loss = torch.nn.functional.cross_entropy(logits.pop(name)[:-1], torch.tensor(ids[1:]))
        scores[name] = {"perplexity": loss.exp().item()}
        print_once(f"perplexity  {name}: {scores[name]['perplexity']:.4f} on {len(ids)} tokens")
    exact = scores["transformers"]["perplexity"]
    for name, limit in ((FULL, TOLERANCE), *((each, math.inf) for each in written)):
        value = scores[name]["perplexity"]
        if not (math.isfinite(value) and abs(value - exact) <= limit * exact):
            raise TaskError(
                f"model {folder}: {name} has the perplexity {value:.4f}, transformers {exact:.4f}: llama.cpp's"
                " converter does not convert this model rightly; nothing was written"
            )
    return scores


def _begin(output: Path, *, overwrite: bool) -> None:
    """Remove what an interrupted run left. Raises TaskError where a run has written, without ``overwrite``."""
    for left in output.glob(f"{_STAGED}*"):
        shutil.rmtree(left, ignore_errors=True)
    if existing := [file.name for file in _list_files(output) if not overwrite]:
        raise TaskError(
            f"{output}: has {', '.join(existing)}; give another --output, or replace what an earlier run wrote with"
            " --overwrite"
        )


def _list_files(output: Path) -> list[Path]:
    names = (RECORD, *(f"{name}.gguf" for name in TYPES))
    return [output / name for name in names if (output / name).exists()]


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


@contextlib.contextmanager
def _explained(folder: Path, allowed: type[Exception] = TaskError) -> Iterator[None]:
    """Turn an exception of the converter into one sentence, but that of a full disk and those of ``allowed``."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TaskError | allowed) or (isinstance(error, OSError) and error.errno):
            raise
        if isinstance(error, OSError):  # NumPy's, whose text is a number of bytes
            raise TaskError(
                f"setting output: cannot be written ({error}); make room, or give another --output"
            ) from error
        line = traceback.extract_tb(error.__traceback__)[-1].line  # of an assertion without a text
        reason = f"{type(error).__name__}: {' '.join((str(error) or line or '').split())[:300]}"
        raise TaskError(f"model {folder}: llama.cpp's converter refuses it ({reason})") from error


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a line of the converter's log is shown: not the box about a tokenizer, which is refused here."""
    return record.levelno >= logging.WARNING and bool(text := record.getMessage().strip()) and not text.startswith("**")
