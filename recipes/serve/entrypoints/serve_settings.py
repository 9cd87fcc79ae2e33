"""Define the settings of `serve` and `batch`, and find what they name, before anything is imported to load it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from ekiben_tasks.task import adapter_folder, caches
from ekiben_tasks.task import settings as options
from ekiben_tasks.task.command import print_once
from ekiben_tasks.task.errors import SettingError
from ekiben_tasks.task.hub import split_revision
from ekiben_tasks.task.settings import option


@dataclass(frozen=True)
class EngineSettings:
    """Define the settings of the models, and of the requests that run at once."""

    model: str = option("", "a hub id, perhaps ID@REVISION, or a folder; empty: the adapters' base; --model")
    name: str = option("", "of the model in requests; empty: the hub id, or the name of the folder")
    adapters: tuple[str, ...] = option((), "NAME=FOLDER of each adapter, which requests name as their model; --adapter")
    max_requests: int = option(64, "requests that run at once; a server refuses more with 429")
    max_new_tokens: int = option(1024, "tokens of an answer, where a request does not limit them")
    cache_share: float = option(0.8, "of the memory that the weights leave free, for the tokens of running requests")
    seed: int = option(1234, "of sampling")
    model_checksum: bool = option(True, "record the SHA-256 of a local model's files")
    device: Literal["auto", "cpu"] = option("auto", "auto: the GPU; cpu: without one, slowly")


@dataclass(frozen=True)
class ServeSettings(EngineSettings):
    """Define the settings of `serve`."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: every one of this machine; --host")
    port: int = option(8000, "0: any that is free; --port")
    key_file: str = option("", "file with the key that clients send; empty: OUTPUT/key; created where there is none")
    max_body_mb: float = option(4, "largest body of a request, in megabytes")
    output: str = option("serving", "folder of run.json and of the key; --output")


@dataclass(frozen=True)
class BatchSettings(EngineSettings):
    """Define the settings of `batch`."""

    input: str = option("sample", "JSONL file of requests; sample: that of the recipe; --input")
    output: str = option("answers.jsonl", "file of the answers; --output")


S = TypeVar("S", bound=EngineSettings)


def read(
    settings: type[S], parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[S, argparse.Namespace]:
    """Return the settings and options of a command line, and prepare the caches for them.

    Raises:
        SettingError: an option or a setting is wrong.
    """
    parser.add_argument("--model", metavar="MODEL", help="instead of the setting model")
    parser.add_argument(
        "--adapter", action="append", metavar="NAME=DIR", help="instead of the setting adapters; repeatable"
    )
    parser.add_argument("--output", metavar="PATH", help="instead of the setting output")
    parser.add_argument("--dry-run", action="store_true", help="print what would be loaded and done, and stop")
    parser.add_argument("--smoke", action="store_true", help="test with a tiny model, offline")
    args = parser.parse_args(arguments)
    loaded = options.load(settings, args.config, args.set)
    if args.adapter:  # without --model, their base is served
        loaded = replace(loaded, adapters=tuple(args.adapter), model=args.model or "")
    names = ("model", "output", "host", "port", "input")
    loaded = replace(loaded, **{name: value for name in names if (value := vars(args).get(name)) is not None})
    limits = {"max_requests": 1, "max_new_tokens": 1}
    problems = [
        f"setting {name}: must be at least {low}, not {getattr(loaded, name)}"
        for name, low in limits.items()
        if getattr(loaded, name) < low
    ]
    if not 0 < loaded.cache_share <= 1:
        problems.append(f"setting cache_share: must be above 0 and at most 1, not {loaded.cache_share}")
    if problems:
        raise SettingError("\n".join(problems))
    print_once(*caches.prepare_caches(os.environ))
    if args.smoke:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return loaded, args


def find_models(settings: EngineSettings) -> dict[str, str]:
    """Return the name in requests → hub id or folder, of the model first and then of each adapter.

    Raises:
        SettingError: none is named, a name is not unique, or the adapters have several bases.
        TaskError: a folder does not exist, or holds no model or adapter.
    """
    folders = {}
    for each in settings.adapters:
        name, equals, folder = each.partition("=")
        if not (name and equals and folder):
            raise SettingError(f"setting adapters: {each}: write it as NAME=FOLDER")
        if name in folders:
            raise SettingError(f"setting adapters: {name} is the name of two")
        folders[name] = folder
    bases = {name: adapter_folder.read_base(adapter_folder.find_config(Path(each))) for name, each in folders.items()}
    model = settings.model or next(iter(bases.values()), "")
    if not model:
        raise SettingError("setting model: names none; give --model, or --adapter NAME=FOLDER")
    if other := [name for name, base in bases.items() if base != next(iter(bases.values()))]:
        raise SettingError(
            f"setting adapters: {other[0]} is of another base, {bases[other[0]]}; start another server for it"
        )
    if adapter_folder.check_source(model, ""):
        print_once(*caches.prefer_cache(os.environ))
    path, _ = split_revision(model)
    name = settings.name or (Path(path).expanduser().resolve().name if Path(path).expanduser().is_dir() else path)
    if name in folders:
        raise SettingError(f"setting name: {name} is the name of an adapter, too")
    for adapter, base in bases.items():
        if base != model and Path(base).expanduser().resolve() != Path(model).expanduser().resolve():
            print_once(f"note        adapter {adapter} names the base {base}, and is served on {model}")
    return {name: model, **folders}
