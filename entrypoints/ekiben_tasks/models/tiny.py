"""Make tiny random models of every architecture, with a tokenizer trained on the spot, for smoke tests offline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from ekiben_tasks.data.schema import DatasetFormat
from ekiben_tasks.data.sources import Source, read_all
from ekiben_tasks.data.tokenize import full_text
from ekiben_tasks.models.architecture import find_module

END = "<|endoftext|>"


def make_model(
    folder: Path,
    texts: Iterable[str],
    kind: str = "gpt_neox",
    *,
    layers: int = 2,
    width: int = 64,
    vocabulary: int = 800,
) -> None:
    """Save a random model of ``kind`` (a module of architectures/) and a tokenizer trained on ``texts``."""
    tokenizer = learn_tokenizer(texts, vocabulary)
    tokenizer.save_pretrained(folder)
    random_model(kind, len(tokenizer), layers=layers, width=width).save_pretrained(folder)


def sample_texts(sample: Path, form: DatasetFormat) -> list[str]:
    """Return the examples of a recipe's sample file as text, to train a tokenizer on.

    Raises:
        TaskError: it cannot be read, or an example is invalid.
    """
    examples = read_all([Source(str(sample), 0.0)], seed=0, skip_bad=False, form=form).train
    return [full_text(example) for example in examples]


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Return a byte-level BPE tokenizer trained on ``texts``; it encodes any text, however small ``vocabulary`` is."""
    bytes_ = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = bytes_(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], show_progress=False, initial_alphabet=bytes_.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)


def random_model(kind: str, vocabulary: int, *, layers: int = 2, width: int = 64, seed: int = 0) -> Any:
    """Return a random causal model of ``kind`` with 4 heads and 1024 positions, without dropout."""
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.1,
        **find_module(kind).tiny_config(layers, width),
    )
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config)
