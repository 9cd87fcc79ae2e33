"""Test that an image writes GGUF files: a tiny random model as a file of each type, and an answer of one, offline."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import gguf_chat
import gguf_write
from ekiben_tasks.models import tiny
from ekiben_tasks.task import input_files
from ekiben_tasks.task.command import check_smoke
from ekiben_tasks.task.errors import TaskError
from gguf_settings import FULL, TYPES, ChatSettings, GgufSettings


def smoke_test(sample: Path) -> int:
    """Write a tiny model of OpenCALM's shape, check what a user relies on, and return 0. sample: the recipe's text.

    Raises:
        TaskError: a check failed.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as folder:
        model, output = Path(folder) / "model", Path(folder) / "gguf"
        # ggml's types of 4 bits have blocks of 256 weights.
        tiny.make_model(model, sample.read_text(encoding="utf-8").splitlines(), width=256)
        settings = GgufSettings(model=str(model), output=str(output), types=TYPES)
        try:
            gguf_write.run(gguf_write.Request(settings, sample))
            raise TaskError("smoke: failed: a tokenizer that the converter does not know was not refused")
        except TaskError as error:
            check_smoke("an unknown tokenizer is refused", "--set pre_tokenizer=gpt-2" in str(error), str(error)[-80:])
        settings = GgufSettings(model=str(model), output=str(output), types=TYPES, pre_tokenizer="gpt-2")
        gguf_write.run(gguf_write.Request(settings, sample))
        scores = input_files.read_object(output / gguf_write.RECORD, "")["scores"]
        exact = scores["transformers"]["perplexity"]
        off = {name: abs(scores[name]["perplexity"] / exact - 1) for name in TYPES}
        check_smoke(f"{FULL} is as likely as with transformers", off[FULL] < 1e-3, f"{off[FULL]:.1e} of {exact:.1f}")
        check_smoke(
            "fewer bits change little", max(off.values()) < 0.2, str({name: f"{off[name]:.1e}" for name in off})
        )
        chat = gguf_chat.Chat(ChatSettings(model=str(output / "Q4_K_M.gguf"), max_new_tokens=8, temperature=0.0))
        check_smoke("chat answers on the CPU", sum(1 for _ in chat.answer("昔々")) > 0)
    print(f"smoke       all passed in {time.monotonic() - started:.0f} s", flush=True)
    return 0
