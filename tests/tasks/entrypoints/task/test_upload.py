"""upload of an adapter, to a server that answers as the hub does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("torch", "transformers", "peft", "tokenizers"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
ROOT = Path(__file__).resolve().parents[4]
SCRIPTS = Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints"
sys.path.insert(0, str(SCRIPTS))

import peft
import safetensors.torch

from ekiben_tasks.models import load
from ekiben_tasks.models.device import choose_device
from support.hub import HubServer
from support.tiny_runs import base  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # what the libraries warn of is not ours


@pytest.fixture
def hub_server() -> Iterator[HubServer]:
    with HubServer(owner="you", write_token="hf_write") as server:
        yield server


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    config = peft.LoraConfig(r=4, target_modules=["query_key_value"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(load.load_base(str(base), choose_device("cpu")), config)
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").unlink()  # as train does
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, tmp_path / "adapter")
    return tmp_path / "adapter"


def upload(folder: Path, url: str, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the task in a process of its own: the hub's library reads its address once."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_write"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "entrypoints"), *filter(None, [env.get("PYTHONPATH")])])
    script = next(path for path in (SCRIPTS / "upload.py", ROOT / "entrypoints" / "upload.py") if path.is_file())
    argv = [sys.executable, str(script), "--input", str(folder), "--name", "you/adapter", "--prompt", "富士山は"]
    argv += options
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_adapter_is_uploaded_and_generates_the_same(
    adapter: Path,
    base: Path,
    tmp_path: Path,
    hub_server: HubServer,
) -> None:
    done = upload(adapter, hub_server.url, tmp_path / "home")
    assert done.returncode == 1 and "as its base, which is on this machine alone" in done.stderr, done.stderr
    assert not hub_server.files.get("you/adapter")
    hub_server.files["you/base"] = {path.name: path.read_bytes() for path in base.iterdir()}
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "base_model_name_or_path": "you/base"}), encoding="utf-8")
    done = upload(adapter, hub_server.url, tmp_path / "home")
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = re.search(r"continues: (.*)", done.stdout), re.search(r"after +(.*)", done.stdout)
    assert before and after and before[1] == after[1]
    assert hub_server.files["you/adapter"].keys() == {path.name for path in adapter.iterdir()}
    assert "README.md" in hub_server.files["you/adapter"]


def test_card_has_the_records_and_leaves_what_users_wrote(
    base: Path, tmp_path: Path, adapter: Path, hub_server: HubServer
) -> None:
    """The card of the run's records and the base's licence; edited here or on the hub, it stays."""
    card = b"---\nlicense: cc-by-sa-4.0\n---\n# base\n"
    hub_server.files["you/base"] = {path.name: path.read_bytes() for path in base.iterdir()} | {"README.md": card}
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "base_model_name_or_path": "you/base"}), encoding="utf-8")
    record = {"status": "finished", "steps": 12, "settings": {"epochs": 3}, "model": {"name": "you/base"}}
    (tmp_path / "run.json").write_text(json.dumps({**record, "final_eval_loss": 1.25}))
    (tmp_path / "scores").mkdir()
    (tmp_path / "scores/run.json").write_text(json.dumps({"scores": {"jsquad": {"f1": 81.5}}}))

    def run(*options: str) -> str:
        done = upload(adapter, hub_server.url, tmp_path / "home", "--evaluation", str(tmp_path / "scores"), *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run()
    shown = (adapter / "README.md").read_text(encoding="utf-8")
    assert hub_server.files["you/adapter"]["README.md"].decode() == shown
    for line in ("license: cc-by-sa-4.0", "base_model: you/base", "| loss, evaluation | 1.25 |", "| epochs | 3 |"):
        assert line in shown
    assert "| jsquad | f1 | 81.5 |" in shown
    hub_server.files["you/adapter"]["README.md"] += b"edited there\n"
    assert "that of you/adapter was not written here, and stays" in run()
    assert b"edited there" in hub_server.files["you/adapter"]["README.md"]
    (adapter / "README.md").write_text("# mine\n")
    assert "README.md: yours, stays as it is" in run("--replace-card")
    assert hub_server.files["you/adapter"]["README.md"] == b"# mine\n"


def test_what_generates_no_text_is_refused(base: Path, tmp_path: Path, hub_server: HubServer) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPTNeoXForSequenceClassification"]}))
    done = upload(folder, hub_server.url, tmp_path / "home", "--dry-run")
    assert done.returncode == 1 and "is a classifier" in done.stderr, done.stderr
    (folder / "config.json").write_text(json.dumps(config))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["embed_out.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    done = upload(folder, hub_server.url, tmp_path / "home", "--dry-run")
    assert done.returncode == 1 and "lack the weights" in done.stderr, done.stderr
