"""A model is fetched once from a local server that answers as the hub does, and is used and checked offline."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("huggingface_hub", "datasets", "peft"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
from support.hub import HubServer
from support.tiny_runs import SAMPLE

ROOT = Path(__file__).resolve().parents[4]
ENTRYPOINTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
sys.path.insert(0, str(ENTRYPOINTS))

from ekiben_tasks.models import tiny

PICKLED = "you/pickled"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    tiny.make_model(tmp_path / "made", ["a text to make a tokenizer of"], "llama")
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    extra = {"modeling_x.py": b"open('ran', 'w')", "pytorch_model.bin": b"pickle", "sub/model.safetensors": b"other"}
    with HubServer(owner="you", tags=("v1",), refused={"you/gated": (403, "GatedRepo")}) as hub:
        hub.files = {"you/tiny": {**files, **extra}, PICKLED: {"config.json": b"{}", "pytorch_model.bin": b"pickle"}}
        yield hub


def run(server: HubServer, folder: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_HOME": str(folder / "home"), "HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1", **variables}
    task, *options = map(str, arguments)
    # The image of the tests has another recipe, perhaps without the task.
    script = next(path for path in (ENTRYPOINTS / f"{task}.py", ROOT / "entrypoints" / f"{task}.py") if path.is_file())
    argv = [sys.executable, str(script), *options, "--set", "device=cpu"]
    return subprocess.run(argv, env=env, capture_output=True, text=True, cwd=folder, check=False, timeout=300)


@pytest.mark.parametrize("to_folder", [False, True], ids=["cache", "folder"])
def test_a_model_is_fetched_resumed_checked_and_used_offline(
    to_folder: bool, server: HubServer, tmp_path: Path
) -> None:
    commit, files = server.commit_of("you/tiny"), server.files["you/tiny"]
    server.cut["model.safetensors"] = 20_000
    model = tmp_path / "models" / "tiny"
    where = [str(model)] if to_folder else []
    for downloads in (2, 0):  # the first one breaks off, and is continued; later nothing is left to fetch
        done = run(server, tmp_path, "train", "--set", "model=you/tiny@v1", "--fetch-only", *where)
        assert done.returncode == 0, done.stdout + done.stderr
        assert server.downloads.count("model.safetensors") == downloads
        server.downloads.clear()
    if not to_folder:
        cached = tmp_path / "home" / "hub" / "models--you--tiny"
        model = cached / "snapshots" / commit
    record = model / "ekiben-model.json" if to_folder else cached / "ekiben" / f"{commit}.json"
    content = json.loads(record.read_text())
    kept = {name: data for name, data in files.items() if Path(name).suffix in (".json", ".safetensors")}
    del kept["sub/model.safetensors"]
    assert (content["model"], content["commit"], content["files"].keys()) == ("you/tiny", commit, kept.keys())
    assert all(content["files"][name]["sha256"] == hashlib.sha256(data).hexdigest() for name, data in kept.items())
    assert not list(model.glob("*.py")) and not list(model.glob("*.bin"))

    name = str(model) if to_folder else "you/tiny@v1"
    options = ["--data", SAMPLE, "--set", f"model={name}", "--set", "max_steps=1", "--set", "lora.target_modules=auto"]
    offline = {"HF_HUB_OFFLINE": "1"}
    done = run(server, tmp_path, "train", "--output", "out", *options, **offline)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out" / "run.json").read_text())["model"]["commit"] == commit

    weights = (model / "model.safetensors").resolve()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    damage = ((bytes(data), "its SHA-256 is not that of its record"), (bytes(data[:-1]), "bytes, and its record"))
    for damaged, message in damage:
        weights.write_bytes(damaged)
        done = run(server, tmp_path, "train", "--dry-run", *options, **offline)
        assert done.returncode == 1 and message in done.stderr.splitlines()[-1], done.stdout + done.stderr
        assert done.stderr.splitlines()[-1].endswith("fetch the model again with --fetch-only")


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("you/unknown", {}, "you/unknown: not on the hub, or private"),
        ("you/gated", {}, "you/gated: its owner asks you to accept terms"),
        ("you/tiny@v9", {}, "you/tiny@v9: is on the hub, but has no such revision"),
        ("you/tiny", {"HF_HUB_OFFLINE": "1"}, "you/tiny: not in the cache .* and the hub cannot be reached"),
        (PICKLED, {}, "has no model.safetensors, and Ekiben loads no weights as pickles; it has pytorch_model.bin"),
        ("made", {}, "made: is a folder here, so there is nothing to fetch"),
    ],
)
def test_what_cannot_be_fetched_is_one_sentence(
    name: str, variables: dict[str, str], message: str, server: HubServer, tmp_path: Path
) -> None:
    done = run(server, tmp_path, "generate", "--model", name, "--fetch-only", **variables)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert re.search(f"error: model .*{message}", done.stderr.splitlines()[-1])
