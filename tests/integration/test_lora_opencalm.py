"""The whole GPU image, built once as a user builds it, then used in every way there is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from bills import check_bill
from builder.catalog.runs import about_image, reduced
from builder.squashfs import SquashfsReader
from builder.stack import find_stack, read_pins
from builder.store import Store
from rooms import CA_BUNDLE, ME, ROOT, USER, Cli, Room, as_user, copy_checkout, home_of, need

pytestmark = pytest.mark.slow

TAG = "ekiben/lora-opencalm"
DOCKER = "/usr/bin/docker" if Path("/usr/bin/docker").exists() else "docker"


@dataclass(frozen=True)
class Built:
    checkout: Path
    store: Path
    sif: Path
    said: str

    def cli(self, room: Room) -> Cli:
        return Cli(room, ME, self.checkout)


@pytest.fixture(scope="module")
def built(room: Room) -> Iterator[Built]:
    """`make image recipe=lora-opencalm` in a clone."""
    checkout = room.folder("clone")
    copy_checkout(checkout)
    store = room.store(ME, "lora-opencalm")
    done = make_image(checkout, store)
    assert done.returncode == 0, done.stdout + done.stderr
    yield Built(checkout, store, checkout / "lora-opencalm.sif", done.stdout)
    shutil.rmtree(checkout)


def make_image(checkout: Path, store: Path) -> subprocess.CompletedProcess[str]:
    # Not those of the make that runs the tests.
    settings = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS")) and name != "options"
    }
    environment = {**settings, "EKIBEN_STORE": str(store)}
    command = ["make", "image", "recipe=lora-opencalm"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def run_as(user: str, *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": home_of(user), **(env or {})}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, **as_user(user)
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_what_the_build_says(built: Built) -> None:
    assert str(built.sif.name) in built.said
    assert "tested  under apptainer" in built.said
    assert "tested  under docker" in built.said
    assert f"docker run --rm --gpus all {TAG} train" in built.said
    assert "singularity exec --nv lora-opencalm.sif train" in built.said
    assert built.sif.stat().st_size <= 3_100_000_000


def test_a_second_invocation_builds_nothing(built: Built, room: Room) -> None:
    before = built.sif.stat().st_mtime_ns
    began = time.monotonic()
    again = make_image(built.checkout, built.store)
    took = time.monotonic() - began
    assert again.returncode == 0
    assert "all 5 layers are stored" in again.stderr
    assert built.sif.stat().st_mtime_ns == before
    assert took < 10  # a shared and busy machine; bench/ measures it
    rows = json.loads(built.cli(room).run("--store", built.store, "plan", "lora-opencalm", "--json").stdout)
    assert [(row["layer"], row["stored"]) for row in rows] == [
        ("base", True), ("python", True), ("pytorch", True), ("huggingface", True), ("lora-opencalm", True),
    ]  # fmt: skip


def test_list_and_inspect(built: Built, room: Room) -> None:
    cli = built.cli(room)
    listed = cli.run("--store", built.store, "list").stdout
    assert any(line.startswith("lora-opencalm") and "sha256:" in line for line in listed.splitlines())
    about = json.loads(cli.run("--store", built.store, "inspect", "lora-opencalm", "--json").stdout)
    assert [layer["name"] for layer in about["layers"]] == ["base", "python", "pytorch", "huggingface", "lora-opencalm"]
    file = json.loads(cli.run("--store", built.store, "inspect", built.sif, "--json").stdout)
    assert file["size"] == built.sif.stat().st_size
    loaded = subprocess.check_output([DOCKER, "image", "inspect", "--format", "{{.Id}}", TAG], text=True).strip()
    assert loaded == about["image"]


def test_doctor_finds_the_device_code_that_is_in_it(built: Built, room: Room) -> None:
    """Of the layers and of the SIF the same; torch's libraries hold what the stack says, and so a V100 cannot run them."""
    cli = built.cli(room)
    stack = (built.checkout / "images/stacks/cu130/stack.yaml").read_text()
    declared = re.findall(r'"([\d.]+)"', re.search(r"compute_capabilities: (.*)", stack)[1])  # type: ignore[index]
    code: dict[str, str] = {}
    for image in ("lora-opencalm", built.sif):
        words = ("--store", built.store, "doctor", "--site", "abci-2.0", image, "--json")
        [about] = json.loads(cli.run(*words, cwd=built.checkout, code=10).stdout)
        assert about["verdict"].startswith(
            "will fail because Tesla V100-SXM2-16GB (7.0) is not among what libtorch_cuda.so"
        )
        assert about["verdict"].endswith("; use --stack cu124")
        code[str(image)] = next(row["said"] for row in about["findings"] if row["topic"] == "GPU code")
        [about] = json.loads(cli.run(*words[:4], "abci-3.0", *words[5:], cwd=built.checkout).stdout)
        assert [row["level"] for row in about["findings"] if row["topic"] == "GPU code"] == ["fine"]
    assert len(set(code.values())) == 1
    assert {f"sm_{name.replace('.', '')}" for name in declared} <= set(
        re.findall(r"sm_\d+a?", next(iter(code.values())))
    )


def test_the_bill_of_materials_has_what_is_locked_and_all_that_is_installed(built: Built, room: Room) -> None:
    bill = built.cli(room).run("--store", built.store, "sbom", "lora-opencalm").stdout
    debian, python = check_bill(bill, built.sif)
    stack = find_stack("cu130", [built.checkout / "images"])
    texts = [(stack.folder / f"{name}.lock").read_text() for name in ("python", "pytorch", "huggingface")]
    locked = {name: version for text in texts for name, version, _ in read_pins(text)}
    assert {"torch", "transformers"} <= locked.keys()
    assert python == locked
    drifted = re.findall(r'"ekiben:drift",\s*"value": "(\S+) ', bill)  # what the mirror here has in another version
    there = {
        name: version for name, version in stack.apt_lock().packages.items() if name in debian and name not in drifted
    }
    assert "libc6" in {*there, *drifted}
    assert {name: debian[name] for name in there} == there


@pytest.mark.parametrize("user", [ME, USER])
def test_the_sif_trains(user: str, built: Built, room: Room) -> None:
    out = room.folder("out", user)
    said = run_as(user, "apptainer", "exec", "--cleanenv", built.sif, "train", "--smoke", cwd=out)
    assert "loss" in said
    assert "learning_rate" in run_as(user, "apptainer", "run", built.sif, "train", "--help", cwd=out)
    assert "train" in run_as(user, "apptainer", "run", built.sif, cwd=out)


@pytest.mark.parametrize("options", [[], ["--user", "12345:12345"]], ids=["root", "another id"])
def test_the_docker_image_trains(options: list[str], built: Built, room: Room) -> None:
    command = [DOCKER, "run", "--rm", "--network", "none", "--shm-size", "1g", *options, TAG]
    assert "loss" in run_as(ME, *command, "train", "--smoke", cwd=room.path)


def test_equal_images_are_equal_files(built: Built, room: Room) -> None:
    out = room.folder("out")
    built.cli(room).image(built.store, "lora-opencalm", "--format", "sif", "-o", out / "again.sif", "--no-verify")
    assert digest(out / "again.sif") == digest(built.sif)
    (out / "again.sif").unlink()


def test_flat(built: Built, room: Room) -> None:
    out = room.folder("out")
    built.cli(room).image(
        built.store, "lora-opencalm", "--format", "sif", "--flat", "-o", out / "flat.sif", "--no-verify"
    )
    assert run_as(ME, "apptainer", "sif", "list", out / "flat.sif", cwd=out).count("FS (Squashfs") == 1
    assert "torch" in run_as(
        USER, "apptainer", "exec", out / "flat.sif", "python", "-c", "import torch; print(torch)", cwd=out
    )
    (out / "flat.sif").unlink()


def test_the_tests_of_the_tasks_pass_in_the_image(built: Built, room: Room) -> None:
    """What ships is what is tested: the scripts and packages are the image's, only pytest comes from outside."""
    out = room.folder("tasks", USER)
    lock = (built.checkout / "requirements-dev.lock").read_text()
    exact = re.findall(r"^(?:pytest|pluggy|iniconfig)==\S+", lock, re.MULTILINE)
    # What other recipes' images add is pure Python, or nearly: their tasks' tests run here, too, without an image each.
    layers = "".join(
        (built.checkout / f"images/stacks/cu130/{name}.lock").read_text()
        for name in ("megatron", "mlperf", "deepspeed", "deepspeed-source")
    )
    exact += re.findall(
        r"^(?:megatron-core|mlperf-logging|hjson|msgpack|nvidia-ml-py|py-cpuinfo|deepspeed)==\S+", layers, re.MULTILINE
    )
    assert len(exact) == 10
    inside = ["apptainer", "--silent", "exec", "--cleanenv", "--pwd", out]
    trust = [
        "--bind",
        CA_BUNDLE,
        "--env",
        f"UV_SYSTEM_CERTS=1,SSL_CERT_FILE={CA_BUNDLE},DS_BUILD_OPS=0,DS_ACCELERATOR=cuda",
    ]
    # DeepSpeed comes as a source: it is put together with what the image has.
    install = [
        "uv",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-cache",
        "--target",
        out / "pytest",
        *exact,
    ]
    run_as(USER, *inside, "--bind", out, *trust, built.sif, *install, cwd=out)
    tests = sorted(str(path) for path in (built.checkout / "tests").glob("test_entrypoints_*.py"))
    tests.remove(str(built.checkout / "tests/test_entrypoints_hello.py"))  # another recipe's task
    assert len(tests) >= 4
    pytest_ = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null"]
    settings = f"PYTHONPATH={out}/pytest,OMP_NUM_THREADS=1"
    command = [*inside, "--bind", f"{built.checkout},{out}", "--env", settings, built.sif, *pytest_]
    # Megatron-Core on the CPU changes what torch means by a GPU, for the whole process: its tests run beside the others.
    apart = str(built.checkout / "tests/test_entrypoints_pretrain.py")
    tests.remove(apart)

    def passed(some: list[str]) -> str:
        return run_as(USER, *command, "--rootdir", built.checkout / "tests", *some, cwd=out)

    with ThreadPoolExecutor(2) as pool:
        for said in pool.map(passed, (tests, [apart])):
            assert " passed" in said
            assert "skipped" not in said, said[-3000:]
            print(said.splitlines()[-1])


OTHERS = sorted({path.parent.name for path in ROOT.glob("recipes/*/recipe.yaml")} - {"hello", "lora-opencalm"})
# The layers of lora-opencalm have passed theirs in its own image.
OWN_TESTS = """
for script in /opt/ekiben/tests/*; do
    case "$script" in
        *-base.sh | *-python.sh | *-pytorch.sh | *-huggingface.sh) ;;
        *) echo "test: ${script##*/}"; sh -e "$script" </dev/null || exit 1 ;;
    esac
done
"""


def test_the_other_recipes_pass_their_tests_in_images_of_their_own(built: Built, room: Room) -> None:
    """Made as a user makes them, two at once: a core each. Docker has the layers of lora-opencalm."""
    assert {"finetune", "fsdp-llama", "lora-bench", "pretrain-gpt"} <= {*OTHERS}

    def prove(recipe: str) -> str:
        made = built.cli(room).image(built.store, recipe, "--format", "docker", "--no-verify")
        alone = ["--rm", "--network", "none", "--shm-size", "1g", "--env", "OMP_NUM_THREADS=1"]
        try:
            return run_as(ME, DOCKER, "run", *alone, made["image"], "sh", "-c", OWN_TESTS, cwd=room.path)
        finally:
            subprocess.run([DOCKER, "image", "rm", "--force", f"ekiben/{recipe}"], capture_output=True, check=False)

    with ThreadPoolExecutor(2) as pool:
        for recipe, said in zip(OTHERS, pool.map(prove, OTHERS), strict=True):
            assert re.search(rf"^test: \d+-{recipe}\.sh$", said, re.MULTILINE), said


MAKE_BASE = """
import os, sys, pathlib
home = pathlib.Path(os.environ["EKIBEN_RECIPE"])
sys.path.insert(0, str(home / "entrypoints"))
import smoke
smoke.make_base(pathlib.Path("base"), home / "data/sample.jsonl")
"""


def test_two_nodes_of_slurm_learn_what_one_process_learns(built: Built, room: Room, user_cli: Cli) -> None:
    """The same steps: once in a plain container, once as a job of two nodes that meet over gloo."""
    need("sbatch")
    out = room.folder("slurm", USER)
    inside = [
        "apptainer",
        "--silent",
        "exec",
        "--cleanenv",
        "--env",
        "OMP_NUM_THREADS=1,EKIBEN_RECIPE=/opt/ekiben/recipe",
    ]
    run_as(USER, *inside, built.sif, "python", "-W", "ignore", "-c", MAKE_BASE, cwd=out)
    words = ["--data", "sample"]
    for setting in ("model=base", "max_steps=6", "batch_size=8", "device=cpu", "lora.dropout=0"):
        words += ["--set", setting]
    run_as(USER, *inside, built.sif, "train", *words, "--output", "one", cwd=out)
    user_cli.run("submit", "lora-opencalm", "train", "--scheduler", "slurm", "--sif", built.sif, "--nodes", "2", "--time", "10m", "--wait",
                 "--", *words, "--output", "two", cwd=out, env={"OMP_NUM_THREADS": "1"})  # fmt: skip
    (log,) = out.glob("ekiben-runs/*/1-train.log")
    assert "on c1,c2" in log.read_text()
    runs = [json.loads((out / name / "run.json").read_text()) for name in ("one", "two")]
    assert [run["device"]["count"] for run in runs] == [1, 2]
    # Each says of its image just what the catalogue finds in the last layer, and so finds it.
    store = Store(built.store)
    top = store.layer((store.image("lora-opencalm") or {})["keys"][-1])
    assert top is not None
    with store.blob_path(top.digest).open("rb") as file:
        about = about_image(SquashfsReader(file))
    assert [run["image"] for run in runs] == [about, about]
    assert [reduced(run)["model"]["name"] for run in runs] == ["base", "base"]
    losses = {
        name: [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    }
    assert [line["step"] for line in losses["two"]] == [line["step"] for line in losses["one"]]
    for key in ("loss", "test_loss", "grad_norm"):
        one, two = ([line[key] for line in losses[name] if key in line] for name in ("one", "two"))
        assert len(one) >= 1
        assert two == pytest.approx(one, rel=1e-5), key


def test_an_edited_entrypoint_rebuilds_the_top_layer_only(built: Built, room: Room) -> None:
    """Last, for it changes the clone."""
    script = built.checkout / "entrypoints/chat.py"
    script.write_text(script.read_text() + "\n# edited\n")
    rows = json.loads(built.cli(room).run("--store", built.store, "plan", "lora-opencalm", "--json").stdout)
    assert [row["stored"] for row in rows] == [True, True, True, True, False]
    assert "entrypoints/chat.py" in rows[-1]["reason"]
    began = time.monotonic()
    made = built.cli(room).image(built.store, "lora-opencalm", "--format", "sif", "--no-verify", "-o", built.sif)
    took = time.monotonic() - began
    assert made["built"] == ["lora-opencalm"]
    assert took < 60  # copying 2.7 GB on a busy machine; bench/ measures it
    read = ["apptainer", "--silent", "exec", built.sif, "tail", "-n", "1", "/opt/ekiben/recipe/entrypoints/chat.py"]
    assert run_as(USER, *read, cwd=room.path) == "# edited\n"
