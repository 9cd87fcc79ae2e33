"""Define the settings of `gguf` and of the recipe's `chat`, and check them before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from ekiben_tasks.task import input_files
from ekiben_tasks.task.errors import SettingError, TaskError, nearest
from ekiben_tasks.task.settings import option

SAMPLE = "sample"
FULL = "F16"
TYPES = (FULL, "Q8_0", "Q4_K_M")  # names of ggml


@dataclass(frozen=True)
class GgufSettings:
    """Define the settings of `gguf`."""

    seed: ClassVar[None] = None  # of the run's record: nothing is random
    model: str = option("merged", "folder of a complete model, or a hub id, perhaps ID@REVISION; --model")
    adapter: str = option("", "folder of an adapter, which is merged into its base first; empty: none; --adapter")
    output: str = option("gguf", "folder of the files, TYPE.gguf; --output")
    types: tuple[str, ...] = option(("Q4_K_M",), f"of the weights, a file for each: {', '.join(TYPES)}; --type")
    pre_tokenizer: str = option("", "llama.cpp's name of how words are split, for a tokenizer that it does not know")
    text: str = option(SAMPLE, "a text in UTF-8 that the tokens and the files are compared on; sample: the recipe's")
    compare: bool = option(True, "compare the files with transformers: 4 bytes of memory for each parameter")
    model_checksum: bool = option(True, "record the SHA-256 of a local model's files")


@dataclass(frozen=True)
class ChatSettings:
    """Define the settings of `chat`."""

    model: str = option("gguf/Q4_K_M.gguf", "a GGUF file; --model")
    prompt: Literal["auto", "chat", "instruction", "text"] = option(
        "auto",
        "chat: the file's chat template; instruction: Alpaca's headings; text: as given; auto: chat, if it has one",
    )
    system: str = option("", "the system message of a chat")
    max_new_tokens: int = option(256, "maximum number of tokens of an answer")
    context: int = option(
        4096, "tokens of question and answers, a multiple of 256, at most the model's; 0: the model's"
    )
    temperature: float = option(0.7, "0: greedy, as --greedy")
    top_p: float = option(1.0, "sample from the likeliest tokens that together have this probability")
    repetition_penalty: float = option(1.05, "above 1: makes tokens of the prompt and the answer less likely")
    seed: int | None = option(None, "the same seed gives the same answer; empty: a random seed")
    threads: int = option(0, "0: a thread for each core of this job")


def check_gguf(settings: GgufSettings) -> None:
    """Check the settings of `gguf`.

    Raises:
        SettingError: a type is unknown, or none is named.
    """
    for name in settings.types or ("",):
        if name not in TYPES:
            raise SettingError(f"setting types: '{name}' is not a type that this task writes.{nearest(name, TYPES)}")


def check_chat(settings: ChatSettings) -> None:
    """Check the settings of `chat`, and that its model is a GGUF file.

    Raises:
        SettingError: some are wrong; the message has all problems.
        TaskError: the file does not exist, or is of another kind.
    """
    limits = (
        ("max_new_tokens", settings.max_new_tokens, 1),
        ("context", settings.context, 0),
        ("temperature", settings.temperature, 0),
        ("threads", settings.threads, 0),
    )
    problems = [
        f"setting {name}: must be at least {low}, not {value}" for name, value, low in limits if not value >= low
    ]
    if not 0 < settings.top_p <= 1:
        problems.append(f"setting top_p: must be above 0 and at most 1, not {settings.top_p}")
    if not settings.repetition_penalty > 0:
        problems.append(f"setting repetition_penalty: must be above 0, not {settings.repetition_penalty}")
    if settings.context % 256:
        problems.append(f"setting context: must be a multiple of 256, not {settings.context}")
    if settings.system and settings.prompt in ("instruction", "text"):
        problems.append(f"setting system: prompt={settings.prompt} has no system message")
    if problems:
        raise SettingError("\n".join(problems))
    check_file(Path(settings.model))


def check_file(file: Path) -> None:
    """Check the first bytes of a GGUF file.

    Raises:
        TaskError: it does not exist, is no regular file, or is of another kind.
    """
    advice = "`gguf` writes such a file"
    input_files.check_regular(file, advice)
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise TaskError(f"{file}: is not a GGUF file; {advice}")
