"""Folders of runs of somebody else: each value of run.json and each file of a job exchanged; their readers."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ekiben.spec.recipe import find_recipe
from support.hostile import NO_RECORDS
from support.programs import write_program

SECRET = "precious thesis"
COMMANDS = (
    ("status", "r"),
    ("status", "--json"),
    ("logs", "r"),
    ("logs", "r", "1-hello", "--rank", "1"),
    ("cancel", "r"),
    ("cancel", "4711"),
    ("submit", "--again", "r", "--dry-run"),
)
JOB_FILES = {
    "1-hello.job": "4711\n",
    "1-hello.exit": "75\n",
    "1-hello.times": "1\n",
    "1-hello.log": "of the job\n",
    "1-hello.processes": "2\n",
    "cancelled": "",
    "environment": "",
    "key": "",
}
LONG = 10**40
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**62,
    LONG,
    1.5,
    "",
    "x",
    "../x",
    "/dev/zero",
    "a\0b",
    "a\nb",
    "\x1b[31m",
    "\ud800",
    [],
    {},
    [None],
    ["a\nb"],
    ["\ud800"],
    ["--x", "--x"],
    [[]],
    [{}],
)
TEXTS = (
    "--user=builder",
    "-u builder",
    "1,2,3",
    "*",
    "\x1b[31m",
    "9" * 5000,
    "1\n2",
    "a b",
    "$(id)",
    "-1",
    "\0",
    "٣",
    "1" * 100,
)


def record(recipe: Path) -> dict[str, Any]:
    """Return what `submit` records of one job."""
    request = {
        "nodes": 1,
        "gpus_per_node": None,
        "cpus_per_node": 1,
        "memory_mib": 900,
        "processes_per_node": None,
        "partition": None,
        "account": "g",
        "qos": None,
        "exclusive": None,
        "env": [],
        "binds": ["/tmp"],
        "time_seconds": 60,
        "grace_seconds": 300,
        "max_resubmits": 20,
        "seeds": [],
        "scheduler_args": [],
        "copy_local": False,
    }
    step = {
        "name": "1-hello",
        "argv": ["hello"],
        "nodes": 1,
        "gpus": 0,
        "processes": 1,
        "resource_args": [],
        "seeds": [],
        "image": {"name": "other", "recipe_path": str(recipe), "sif": "/nowhere/other.sif", "sif_state": None},
    }
    return {
        "format": 3,
        "image": "hello",
        "recipe_path": str(recipe),
        "request": request,
        "scheduler": "slurm",
        "site": None,
        "site_path": None,
        "sif": "/nowhere/hello.sif",
        "sif_id": None,
        "sif_sha256": "0" * 64,
        "work": "/tmp",
        "submitted": "2026-11-01T00:00:00Z",
        "steps": [step],
    }


def fields_of(value: dict[str, Any]) -> list[tuple[str | int, ...]]:
    """Return the way to each value of a record: its own, those of its request and those of its first step."""
    return (
        [(name,) for name in value]
        + [("request", name) for name in value["request"]]
        + [("steps", 0, name) for name in value["steps"][0]]
    )


def exchanged(value: dict[str, Any], way: tuple[str | int, ...], new: Any) -> bytes:
    """Return a record with another value, or without one where ``new`` is ``...``."""
    changed: Any = copy.deepcopy(value)
    inner = changed
    for name in way[:-1]:
        inner = inner[name]
    if new is ...:
        del inner[way[-1]]
    else:
        inner[way[-1]] = new
    return json.dumps(changed).encode()


def make_special(kind: str, path: Path, secret: Path) -> None:
    """Put what is not a file of its own instead of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 40 << 30)
    else:
        links = {
            "zero": "/dev/zero",
            "kmsg": "/proc/kmsg",
            "circle": path.name,
            "secret": str(secret),
            "nowhere": "gone",
        }
        path.symlink_to(links[kind])


SPECIAL = ("pipe", "folder", "sparse", "zero", "kmsg", "circle", "secret", "nowhere")
Put = Callable[[Path, Path], None]  # of a run's folder and a file outside of it


def put_run(folder: Path, content: bytes) -> None:
    """Write a run's folder that is in order but for its record."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(content)
    for name, text in JOB_FILES.items():
        if name != "cancelled":
            (folder / name).write_text(text)


def hostile_runs(recipe: Path, dice: random.Random | None = None) -> Iterator[tuple[str, Put]]:
    """Yield each hostile folder with its name; with ``dice`` as many values as there are, in any order."""
    sound = record(recipe)

    def as_record(content: bytes) -> Put:
        return lambda folder, secret: put_run(folder, content)

    def as_special(kind: str, name: str) -> Put:
        def put(folder: Path, secret: Path) -> None:
            put_run(folder, json.dumps(sound).encode())
            make_special(kind, folder / name, secret)

        return put

    def as_text(name: str, text: str) -> Put:
        def put(folder: Path, secret: Path) -> None:
            put_run(folder, json.dumps(sound).encode())
            (folder / name).write_text(text)

        return put

    for number, content in enumerate(
        (*NO_RECORDS, b'{"format":' + b"9" * 400 + b"}", json.dumps({**sound, "steps": sound["steps"] * 2}).encode())
    ):
        yield f"record {number}", as_record(content)
    steps = sound["steps"][0]
    for name in ("1-", "1-a.2.3", "1-a\n", "a.b", "-1-a", "1-../a", "1-" + "a" * 300):
        yield f"step {name!r:.20}", as_record(exchanged(sound, ("steps", 0, "name"), name))
    many = {**steps, "seeds": [str(seed) for seed in range(19_000)]}
    yield "19,000 seeds", as_record(json.dumps({**sound, "steps": [many]}).encode())
    yield (
        "30,000 steps",
        as_record(json.dumps({**sound, "steps": [{**steps, "name": f"{n}-a"} for n in range(1, 30_001)]}).encode()),
    )
    for number, way in enumerate(fields_of(sound)):
        values = (..., *(VALUES if dice else VALUES[number % 6 :: 6]))
        for value in values:
            yield f"{'.'.join(map(str, way))} {value!r:.20}", as_record(exchanged(sound, way, value))
    for name in ("run.json", *JOB_FILES):
        for kind in SPECIAL:
            if (kind, name) != ("sparse", "1-hello.log"):  # a log has any size
                yield f"{kind} {name}", as_special(kind, name)
    for name in ("1-hello.job", "1-hello.exit", "1-hello.times", "1-hello.processes", "1-hello.log"):
        for text in TEXTS:
            yield f"{name} {text!r:.20}", as_text(name, text)


def make_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a run in order, and Slurm's programs, which note how they were called."""
    for program in ("squeue", "sacct", "scancel"):
        write_program(tmp_path / "bin" / program, f'#!/bin/sh\nprintf "%s\\n" {program} "$@" >>{tmp_path}/called\n')
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "called").touch()
    put_run(tmp_path / "ekiben-runs/sound", json.dumps(record(find_recipe("hello").folder)).encode())
    for name, text in {"1-hello.exit": "0\n", "1-hello.job": "12\n"}.items():
        (tmp_path / "ekiben-runs/sound" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path
