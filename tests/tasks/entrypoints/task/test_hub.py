"""Models of the hub, and tokens that are missing or may not: local servers answer as the hub does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("huggingface_hub", "datasets"):
    pytest.importorskip(package, reason="the recipe's packages are not installed here")
from support.hub import HubServer
from support.tiny_runs import SAMPLE

ROOT = Path(__file__).resolve().parents[4]
FOLDERS = [Path(os.environ.get("EKIBEN_RECIPE", ROOT)) / "entrypoints", ROOT / "entrypoints"]

REFUSED = {
    "owner/gated": (403, "GatedRepo"),
    "owner/private": (401, "RepoNotFound"),
    "owner/unknown": (404, "RepoNotFound"),
    "owner/old": (404, "RevisionNotFound"),
    "owner/incomplete": (404, "EntryNotFound"),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """Return the address of a hub that refuses REFUSED, as models and as data sets."""
    with HubServer(owner="owner", refused=REFUSED) as server:
        yield server.url


def run_script(hub: str, folder: Path, script: str, token: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in a process of its own: the hub's library reads its address once, when it is imported."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "HF_HUB_OFFLINE")}
    environment |= {"HF_HOME": str(folder), "HF_ENDPOINT": hub, "PYTHONPATH": os.pathsep.join(map(str, FOLDERS))}
    if token:
        environment["HF_TOKEN"] = token
    argv = [sys.executable, "-c", script]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, cwd=folder)


def ask(hub: str, folder: Path, script: str, token: str) -> list[str]:
    """Return the errors that ``script`` prints."""
    done = run_script(hub, folder, script, token)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


MODELS = """
from ekiben_tasks.task import errors, hub
for name in ("gated", "private", "unknown", "incomplete"):
    try:
        hub.locate_model(f"owner/{name}")
    except errors.TaskError as error:
        print(error)
"""
DATA = """
from ekiben_tasks.data import sources
from ekiben_tasks.task import errors
for name in ("gated", "private", "unknown"):
    try:
        sources.read_all([sources.Source(f"owner/{name}", 0.0)], seed=0, skip_bad=False)
    except errors.TaskError as error:
        print(error)
"""


REVISIONS = """
import sys
from pathlib import Path
from ekiben_tasks.task import errors, hub
folder = Path("with@sign")
folder.mkdir()
(folder / "config.json").write_text("{}")
print(hub.split_revision("owner/name@v2"), hub.split_revision(str(folder)), hub.is_hub_model("owner/name@v2"))
try:
    hub.locate_model("owner/old@v9")
except errors.TaskError as error:
    print(error)
cached = Path(sys.argv[1] if sys.argv[1:] else ".") / "hub" / "models--owner--name"
commit = "0123456789abcdef0123456789abcdef01234567"
(cached / "snapshots" / commit).mkdir(parents=True)
(cached / "snapshots" / commit / "config.json").write_text("{}")
(cached / "refs").mkdir()
(cached / "refs" / "v2").write_text(commit)
print(hub.model_commit("owner/name@v2"), hub.model_commit("owner/name"), hub.model_commit(str(folder)))
"""


def test_revision_of_a_model(hub: str, tmp_path: Path) -> None:
    names, missing, commits = ask(hub, tmp_path, REVISIONS, "")
    assert names == "('owner/name', 'v2') ('with@sign', None) True"
    assert missing == "model owner/old@v9: is on the hub, but has no such revision; give a branch, a tag or a commit"
    assert commits == "0123456789abcdef0123456789abcdef01234567 None None"


@pytest.mark.parametrize(("kind", "script"), [("model", MODELS), ("data set", DATA)], ids=["model", "data set"])
@pytest.mark.parametrize("token", ["", "hf_read"], ids=["no token", "a token"])
def test_errors_about_tokens_have_hints(hub: str, tmp_path: Path, kind: str, script: str, token: str) -> None:
    gated, private, unknown, *incomplete = ask(hub, tmp_path, script, token)
    assert all("a file is missing" in text for text in incomplete) and len(incomplete) == (kind == "model")
    for name, text in (("gated", gated), ("private", private), ("unknown", unknown)):
        assert text.startswith(f"{kind} owner/{name}: "), text
    if token:
        assert "token you gave" in gated
        assert re.search("not on the hub, or private; .*is the token you gave allowed", private)
    else:
        assert "HF_TOKEN" in gated
        assert re.search("not on the hub, or private; .*HF_TOKEN", private)
    assert "not on the hub" in unknown
    assert "hf_read" not in gated + private + unknown


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gated", "accept terms.*HF_TOKEN"),
        ("private", "not on the hub, or private.*HF_TOKEN"),
        ("unknown", "not on the hub, or private"),
        ("incomplete", "a file is missing"),
    ],
)
def test_refused_model_ends_a_task_with_one_sentence(hub: str, tmp_path: Path, name: str, message: str) -> None:
    script = (
        f"from ekiben_tasks.task import command, hub\ncommand.run(lambda: print(hub.locate_model('owner/{name}')) or 0)"
    )
    done = run_script(hub, tmp_path, script, "")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(f"error: model owner/{name}: .*{message}", done.stderr)
    assert "Traceback" not in done.stderr


def test_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    """It would be left out, and another model trained than the one that is named."""
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from ekiben_tasks.task import errors, hub\n"
        "assert not hub.is_hub_model(sys.argv[2])\n"
        "try: hub.is_hub_model(sys.argv[2] + '@v2')\n"
        "except errors.TaskError as error: print(error)\n"
    )
    argv = [sys.executable, "-c", code, str(FOLDERS[0]), str(tmp_path)]
    stdout = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    assert stdout == f"model {tmp_path}: is a folder, which has no revision v2; leave @v2 out\n"


def test_model_of_the_hub_is_trained_and_used_offline_afterwards(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the recipe's packages are not installed here")
    sys.path.insert(0, str(FOLDERS[0]))
    from ekiben_tasks.models import tiny

    tiny.make_model(tmp_path / "made", ["a text to make a tokenizer of"], "llama")
    adapter = tmp_path / "out" / "adapter"

    def run(task: str, *options: object, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": server.url, **variables}
        argv = [sys.executable, str(FOLDERS[0] / f"{task}.py"), *map(str, options), "--set", "device=cpu"]
        return subprocess.run(argv, env=env, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=300)

    with HubServer(owner="you", write_token="hf_write") as server:
        server.files["you/tiny"] = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
        commit = server.commit_of("you/tiny")
        settings = ["--set", f"model=you/tiny@{commit}", "--set", "max_steps=1", "--set", "lora.target_modules=auto"]
        done = run("train", "--data", SAMPLE, "--output", adapter.parent, *settings)
        assert done.returncode == 0, done.stdout + done.stderr
        record = json.loads((adapter.parent / "run.json").read_text())
        assert (record["model"]["name"], record["model"]["commit"]) == (f"you/tiny@{commit}", commit)
        missing = run("chat", "--set", f"model=you/tiny@{'0' * 40}", "a")
        assert "has no such revision" in missing.stderr.splitlines()[-1]
    for source in ("--adapter", adapter), ("--set", f"model=you/tiny@{commit}"):
        done = run("chat", *source, "a", HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stdout + done.stderr


def test_code_of_a_model_is_not_run_and_nobody_is_asked(tmp_path: Path) -> None:
    config = {"model_type": "x", "auto_map": {"AutoConfig": "x.X"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "x.py").write_text("open('ran', 'w')")
    script = (
        "from ekiben_tasks.models import load\nfrom ekiben_tasks.task import command\ncommand.run(lambda:"
        " load.read_config('.') and 0)"
    )
    done = run_script("http://127.0.0.1:9", tmp_path, script, "")
    assert done.returncode == 1 and "[y/N]" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "error: model .: comes with custom code, which Ekiben's tasks do not run"
    )
    assert not (tmp_path / "ran").exists()


READ = """
import json, sys
from ekiben_tasks.data import sources
from ekiben_tasks.data.schema import DatasetFormat
read = sources.read_all(
    sources.parse_sources(json.loads(sys.argv[1]), 0.0), seed=0, skip_bad=False, form=DatasetFormat(kind="text")
)
print(json.dumps([[each.completion for each in read.train], [each.completion for each in read.test], read.versions]))
"""


def test_subsets_and_splits_of_a_data_set_of_the_hub(tmp_path: Path) -> None:
    """They are there offline afterwards. Of a set that is streamed, too, the commit is recorded."""
    named = [(subset, split) for subset in ("en", "ja") for split in ("train", "validation")]
    lines = {
        f"{subset}/{split}.jsonl": [json.dumps({"text": f"{subset} {split} {n}"}) for n in range(4)]
        for subset, split in named
    }
    listed = "".join(
        f"- config_name: {subset}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {subset}/{split}.jsonl\n" for split in ("train", "validation"))
        for subset in ("en", "ja")
    )
    files = {path: ("\n".join(each) + "\n").encode() for path, each in lines.items()}
    files["README.md"] = f"---\nconfigs:\n{listed}---\n".encode()
    group = {"source": "owner/set", "subset": "ja", "eval_split": "validation", "revision": "v2"}
    with HubServer(owner="owner", files={"owner/set": files}, tags=("v2",)) as server:

        def read(**changes: Any) -> Any:
            argv = json.dumps([{**group, **changes}])
            script = READ.replace("sys.argv[1]", repr(argv))
            done = run_script(server.url, tmp_path, script, "")
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout.splitlines()[-1])

        expected = [[f"ja {split} {n}" for n in range(4)] for split in ("train", "validation")]
        versions = {"owner/set": server.commit_of("owner/set")}
        assert read() == [*expected, versions]
        assert read(subset="en", eval_split="", take=2) == [["en train 0", "en train 1"], [], versions]
    offline = READ.replace("sys.argv[1]", repr(json.dumps([group])))
    done = run_script("http://127.0.0.1:9", tmp_path, "import os; os.environ['HF_HUB_OFFLINE'] = '1'\n" + offline, "")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [*expected, versions]
