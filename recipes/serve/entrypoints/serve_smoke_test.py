"""Test that an image serves and answers batches: a tiny random model with an adapter, asked by OpenAI's client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import peft
import torch

import serve_lines
from ekiben_tasks.models import load, tiny
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.task import input_files
from ekiben_tasks.task.command import check_smoke
from ekiben_tasks.task.errors import TaskError
from serve_settings import BatchSettings, ServeSettings

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_TEXTS = ("日本で一番高い山は富士山です。", "名物は何ですか。", "The quick brown fox jumps over the lazy dog. ")
_SECONDS = 300.0


def make_models(folder: Path) -> None:
    """Write a tiny random model with a chat template into ``folder``/base, and an adapter of it into /adapter."""
    load.silence_warnings()
    tiny.make_model(folder / "base", [text * 20 for text in _TEXTS], "llama", vocabulary=400)
    tokenizer = load.load_tokenizer(str(folder / "base"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    peft.get_peft_model(load.load_base(str(folder / "base"), choose_device("cpu")), config).save_pretrained(
        folder / "adapter"
    )


def smoke_test(_: ServeSettings) -> int:
    """Serve a tiny random model and its adapter, check what a user relies on, and return 0.

    Raises:
        TaskError: a check failed.
    """
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as scratch:
        folder = Path(scratch)
        make_models(folder)
        with started(folder, "--model", "base", "--adapter", "mine=adapter") as (url, process):
            key = (folder / "serving" / "key").read_text(encoding="utf-8").strip()
            client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
            check_smoke("the models are listed", [each.id for each in client.models.list()] == ["base", "mine"])

            def ask(model: str, **more: Any) -> str:
                asked = [{"role": "user", "content": "名物は何ですか。"}]
                more = {"temperature": 0, "max_tokens": 12, **more}
                return str(
                    client.chat.completions.create(model=model, messages=asked, **more).choices[0].message.content
                )

            first = ask("base")
            check_smoke("it answers, and greedy answers repeat", bool(first) and ask("base") == first)
            check_smoke("the adapter answers otherwise", ask("mine") != first)
            check_smoke("sampling is on", len({ask("base", temperature=1.5) for _ in range(4)}) > 1)
            for what, error, changes in (
                ("a wrong key is refused", openai.AuthenticationError, {"api_key": "wrong"}),
                ("an unknown model is refused", openai.APIStatusError, {}),
            ):
                other = client.with_options(**changes)
                with contextlib.suppress(error):
                    other.completions.create(model="other", prompt="a")
                    raise TaskError(f"smoke: failed: {what}")
                check_smoke(what, True)
            process.send_signal(signal.SIGTERM)
            check_smoke("a signal ends it with exit code 0", process.wait(_SECONDS) == 0)
    return 0


def smoke_batch(_: BatchSettings, sample: Path) -> int:
    """Answer ``sample`` with a tiny random model, check the answers, and return 0.

    Raises:
        TaskError: a check failed.
    """
    with tempfile.TemporaryDirectory(prefix="ekiben-smoke-") as scratch:
        folder = Path(scratch)
        make_models(folder)
        settings = BatchSettings(model=str(folder / "base"), device=_device())
        models = {"base": str(folder / "base")}
        lines = serve_lines.read_requests(sample, list(models))

        def answers(name: str, **changes: Any) -> list[Any]:
            file = folder / f"{name}.jsonl"
            serve_lines.answer_file(replace(settings, output=str(file), **changes), models, lines, overwrite=False)
            read = [json.loads(content) for _, content in input_files.read_lines(file, "")]
            check_smoke("each request has its line", [each["index"] for each in read] == [each.index for each in lines])
            return [each["response"]["body"]["choices"] for each in read]

        check_smoke("several at once give what one after the other gives", answers("a") == answers("b", max_requests=1))
    return 0


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start `serve` in ``folder`` on a free port, and yield (URL of its API, process) once it listens.

    Raises:
        TaskError: it ended before.
    """
    script = Path(__file__).with_name("serve.py")
    command = [sys.executable, str(script), "--port", "0", "--set", f"device={_device()}", *arguments]
    library = os.pathsep.join([str(script.parent), *filter(None, sys.path)])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": library}
    with (folder / "log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
        )
        try:
            until = time.monotonic() + _SECONDS
            while "tunnel" not in (text := (folder / "log").read_text(encoding="utf-8")):
                if process.poll() is not None or time.monotonic() > until:
                    raise TaskError(f"smoke: the server did not start: {text[-2000:]}")
                time.sleep(0.05)
            yield next(line.split()[1] for line in text.splitlines() if line.startswith("listening")), process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _device() -> Any:
    return "auto" if torch.cuda.is_available() else "cpu"
