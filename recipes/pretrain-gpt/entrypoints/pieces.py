"""Train and load the SentencePiece tokenizer, and convert it for Hugging Face's libraries."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece

from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import TaskError

MODEL = "tokenizer.model"
END = "<EOD>"  # end of a document, in the data and in generated text
# Every one a piece of its own, in this order, after <unk>: 1, 2, 3 ...
SYMBOLS = ("<s>", "</s>", "<pad>", "<CLS>", "<SEP>", END, "<MASK>", "\n")
# SentencePiece's normaliser makes a space of a newline, except where the newline is a symbol. Hugging Face's keeps only
# characters it does not know, so there a private-use character replaces the newline.
_NEWLINE = "\ue000"


def learn(texts: Iterable[str], *, vocabulary: int, coverage: float, kind: str, threads: int) -> bytes:
    """Return the content of a SentencePiece model file trained on ``texts``.

    vocabulary: the number of pieces. coverage: the share of characters that get one. kind: "unigram" or "bpe".

    Raises:
        TaskError: the texts do not hold that many pieces, or SentencePiece fails.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocabulary,
            character_coverage=coverage,
            model_type=kind,
            num_threads=threads,
            train_extremely_large_corpus=True,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            remove_extra_whitespaces=False,
            user_defined_symbols=list(SYMBOLS),
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        if "Vocabulary size" in reason:
            advice = reason.partition("Vocabulary size")[2].strip().removeprefix("is ")
            raise TaskError(f"setting vocab_size: {vocabulary} does not suit these texts: {advice}") from error
        raise TaskError(f"SentencePiece cannot learn from these texts: {reason}") from error
    return model.getvalue()


def load(folder: Path) -> Any:
    """Return the SentencePiece processor of ``folder``/tokenizer.model, or of that file.

    Raises:
        TaskError: there is no such file, it is not a SentencePiece model, or it has no piece that ends a document.
    """
    file = folder / MODEL if folder.is_dir() else folder
    input_files.check_regular(file, "train-tokenizer writes one", max_size=input_files.MAX_MODEL_JSON)
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        raise TaskError(
            f"tokenizer {file}: is not a SentencePiece model: {' '.join(str(error).split())[:200]}"
        ) from error
    if processor.piece_to_id(END) == processor.unk_id():
        raise TaskError(f"tokenizer {file}: has no piece {END}, so no document could end; make it with train-tokenizer")
    return processor


def fingerprint(folder: Path) -> str:
    """Return the SHA-256 of ``folder``/tokenizer.model, or of that file."""
    file = folder / MODEL if folder.is_dir() else folder
    return hashlib.sha256(file.read_bytes()).hexdigest()


def to_hugging_face(file: Path) -> Any:
    """Return the same tokenizer as a PreTrainedTokenizerFast, whose texts end with <EOD>.

    Raises:
        TaskError: it is not a unigram model.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto()
    proto.ParseFromString(file.read_bytes())
    if proto.trainer_spec.model_type != 1:
        raise TaskError(f"tokenizer {file}: only unigram models can be written for Hugging Face's libraries")
    vocabulary = [(piece.piece.replace("\n", _NEWLINE), piece.score) for piece in proto.pieces]
    unknown = proto.trainer_spec.unk_id
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=unknown, byte_fallback=True))
    steps = [normalizers.Replace("\n", _NEWLINE), normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)]
    steps += [normalizers.Replace(" ", "▁"), normalizers.Prepend("▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    spaces = [decoders.Replace("▁", " "), decoders.Replace(_NEWLINE, "\n")]
    tokenizer.decoder = decoders.Sequence(
        [*spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=END,
        unk_token="<unk>",
        pad_token="<pad>",
        cls_token="<CLS>",
        sep_token="<SEP>",
        mask_token="<MASK>",
        clean_up_tokenization_spaces=False,
    )
