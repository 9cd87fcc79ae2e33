"""Define the settings of chat and generate, and check them before anything is loaded."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Literal

from ekiben_tasks.data.schema import DatasetFormat, check_format, refuse_labels
from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class ChatSettings:
    """Define the settings of `chat`."""

    adapter: str = option("result/adapter", "folder of the adapter; --adapter")
    model: str = option(
        "", "a complete model instead of an adapter: a folder or a hub id, perhaps ID@REVISION; --model"
    )
    form: DatasetFormat = field(default_factory=DatasetFormat)
    system: str = option("", "form chat: the system message")
    max_new_tokens: int = option(256, "maximum number of tokens of an answer")
    temperature: float = option(0.7, "0: greedy, as --greedy")
    top_p: float = option(1.0, "sample from the likeliest tokens that together have this probability")
    repetition_penalty: float = option(1.05, "above 1: makes tokens of the prompt and the answer less likely")
    seed: int | None = option(None, "the same seed gives the same answer; empty: a random seed")
    bits: Literal[16, 8, 4] = option(16, "of the weights: 8 and 4 need a GPU and save memory")
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU; cpu: the CPU, which is slow")
    devices: Literal["one", "auto"] = option(
        "one", "auto: the layers of one model are spread over all GPUs of this process (transformers' device_map)"
    )


@dataclass(frozen=True)
class GenerateSettings:
    """Define the settings of `generate`."""

    model: str = option(
        "cyberagent/open-calm-3b",
        "a hub id, perhaps ID@REVISION, or a folder; not used with an adapter, which names its base; --model",
    )
    adapter: str = option("", "folder of an adapter that train wrote; empty: the model without one; --adapter")
    data: object = option(
        "sample",
        "a hub data set, a folder or a file, or {source, subset, split, revision}; sample: the recipe's own; --data",
    )
    form: DatasetFormat = field(default_factory=DatasetFormat)
    output: str = option("generated.jsonl", "--output")
    examples: int = option(100, "number of random examples to use; 0: all")
    max_new_tokens: int = option(256, "maximum number of tokens of an answer")
    temperature: float = option(0.7, "0: greedy, as --greedy")
    top_p: float = option(0.9, "sample from the likeliest tokens that together have this probability")
    repetition_penalty: float = option(1.05, "above 1: makes tokens of the prompt and the answer less likely")
    seed: int = option(42, "seed of the choice of examples and of the sampling")
    model_checksum: bool = option(
        True, "record the SHA-256 of a local model's files; they are read in the background, once the model is loaded"
    )
    batch_size: int = option(32, "prompts at a time; halved when the memory is too small")
    bits: Literal[16, 8, 4] = option(16, "of the weights: 8 and 4 need a GPU and save memory")
    hang_minutes: float = option(
        10,
        "minutes that one of several processes may go without a token before all end; loading, and joining the answers,"
        " may take an hour, or as long as this; 0: an hour everywhere",
    )
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU; cpu: the CPU, which is slow")
    devices: Literal["one", "auto"] = option(
        "one", "auto: the layers of one model are spread over all GPUs of this process (transformers' device_map)"
    )


def check_chat(settings: ChatSettings) -> None:
    """Check the settings of `chat`.

    Raises:
        SettingError: some are wrong; the message has all problems.
    """
    check_format(settings.form)
    refuse_labels(settings.form)
    problems = _sampling_problems(settings)
    if settings.system and settings.form.kind != "chat":
        problems.append(
            f"setting system: form.kind={settings.form.kind} has no system message; use --set form.kind=chat, or"
            " --context for a text to answer from"
        )
    _raise_for(problems)


def check(settings: GenerateSettings) -> None:
    """Check the settings of `generate`.

    Raises:
        SettingError: some are wrong; the message has all problems.
    """
    check_format(settings.form)
    refuse_labels(settings.form)
    problems = _too_small(("examples", settings.examples, 0), ("batch_size", settings.batch_size, 1))
    problems += _sampling_problems(settings)
    if not 0 <= settings.hang_minutes < math.inf:
        problems.append(f"setting hang_minutes: must be at least 0 (0: an hour), not {settings.hang_minutes}")
    _raise_for(problems)


def check_processes(devices: str, gpus: int | None) -> None:
    """Check that one process spreads a model over all GPUs. gpus: the processes to start on this node; None: one.

    Raises:
        SettingError: there are several processes.
    """
    several = max(gpus or 1, int(os.environ.get("WORLD_SIZE", "1")))
    if devices == "auto" and several > 1:
        raise SettingError(
            f"setting devices=auto: one process spreads its model over all GPUs, and these are {several}; leave --gpus"
            " out, and in a job of a scheduler ask for one process"
        )


def _sampling_problems(settings: ChatSettings | GenerateSettings) -> list[str]:
    problems = _too_small(("max_new_tokens", settings.max_new_tokens, 1), ("temperature", settings.temperature, 0))
    if not 0 < settings.top_p <= 1:
        problems.append(f"setting top_p: must be above 0 and at most 1, not {settings.top_p}")
    if not settings.repetition_penalty > 0:
        problems.append(f"setting repetition_penalty: must be above 0, not {settings.repetition_penalty}")
    if settings.devices == "auto" and settings.device == "cpu":
        problems.append("setting devices=auto: spreads a model over GPUs; leave device=cpu out")
    return problems


def _too_small(*limits: tuple[str, float, float]) -> list[str]:
    """Return a problem for each (setting, value, least value) that is below."""
    return [f"setting {name}: must be at least {least}, not {value}" for name, value, least in limits if value < least]


def _raise_for(problems: list[str]) -> None:
    if problems:
        raise SettingError("\n".join(problems))
