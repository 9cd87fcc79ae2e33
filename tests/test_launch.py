"""The command that runs a task: what it lets in, what it binds, what stays off the command line; the copy on local disk."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from builder.errors import EngineError, StoreError, UsageError
from builder.launch import Launch, Wish, choose_runtime, launch, local_folder, stage
from builder.sif import Partition, sif_id, write_sif

SIF, TAG = Path("x.sif"), "ekiben/x:latest"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


def made(
    program: str, environment: Mapping[str, str], *words: str, gpu: bool = False, binds: tuple[Path, ...] = (), terminal: bool = False
) -> Launch:  # fmt: skip
    return launch(program, SIF, TAG, Wish(words=words, gpu=gpu, binds=binds, terminal=terminal), environment)


def bound(ready: Launch) -> list[str]:
    """Folders that are seen inside, at their own path."""
    words = ready.argv
    found = [words[at + 1] for at, word in enumerate(words) if word in ("--bind", "--volume")]
    return [folder.split(":")[0] for folder in found]


def inside(ready: Launch, prefix: str = "APPTAINERENV_") -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in ready.environment.items() if name.startswith(prefix)}


NEEDED = {
    "HF_TOKEN": "hf_secret", "NCCL_DEBUG": "INFO", "SLURM_PROCID": "3", "PBS_NODEFILE": "/x", "SGE_TASK_ID": "1", "MASTER_ADDR": "n1",
    "RANK": "0", "https_proxy": "http://proxy:1", "NO_PROXY": "localhost", "CUDA_VISIBLE_DEVICES": "1", "WANDB_API_KEY": "key",
    "OMP_NUM_THREADS": "4", "EKIBEN_RUN": "r",
}  # fmt: skip
HARMFUL = {
    "LD_LIBRARY_PATH": "/apps/cuda/11.7/lib64", "PYTHONPATH": "/home/me/lib", "PYTHONHOME": "/apps/python", "CUDA_HOME": "/apps/cuda",
    "LD_PRELOAD": "/apps/trace.so", "CONDA_PREFIX": "/home/me/conda", "VIRTUAL_ENV": "/home/me/venv",
}  # fmt: skip


@pytest.mark.parametrize("program", ["/usr/bin/apptainer", "/usr/bin/singularity", "/usr/bin/docker"])
def test_what_is_let_in_and_never_shown(program: str) -> None:
    """Values only in the environment of the runtime: a command line is read by everybody with `ps`."""
    ready = made(program, {**NEEDED, **HARMFUL, "PATH": "/bin"}, "train")
    for value in (*NEEDED.values(), *HARMFUL.values()):
        assert not any(len(value) > 3 and value in word for word in ready.argv)
    if program.endswith("docker"):
        names = [ready.argv[at + 1] for at, word in enumerate(ready.argv) if word == "--env"]
        assert set(names) == {*NEEDED, "NVIDIA_VISIBLE_DEVICES=void"}
        assert NEEDED.items() <= ready.environment.items()
    else:
        assert inside(ready) == NEEDED
        assert inside(ready, "SINGULARITYENV_") == (NEEDED if program.endswith("singularity") else {})
        assert "--cleanenv" in ready.argv
        assert ready.environment["PATH"] == "/bin"


def test_what_a_site_set_for_all_containers_is_kept_out_and_told() -> None:
    environment = {
        "SINGULARITYENV_LD_LIBRARY_PATH": "/apps/lib",
        "APPTAINERENV_PYTHONPATH": "/x",
        "APPTAINERENV_MINE": "1",
    }
    ready = made("apptainer", environment, "train")
    assert ready.kept_out == ("APPTAINERENV_PYTHONPATH", "SINGULARITYENV_LD_LIBRARY_PATH")
    assert inside(ready) == {"MINE": "1"}
    assert not inside(ready, "SINGULARITYENV_")


def test_what_the_user_set_for_the_container_wins() -> None:
    ready = made("apptainer", {"NCCL_DEBUG": "INFO", "APPTAINERENV_NCCL_DEBUG": "WARN"}, "train")
    assert inside(ready) == {"NCCL_DEBUG": "WARN"}


def test_gpus_and_none() -> None:
    assert "--nv" in made("apptainer", {}, "train", gpu=True).argv
    assert "--nv" not in made("apptainer", {}, "train").argv
    words = made("docker", {}, "train", gpu=True).argv
    assert words[words.index("--gpus") + 1] == "all"
    assert "memlock=-1" in words
    assert "NVIDIA_VISIBLE_DEVICES=void" in made("docker", {}, "train").argv


def test_docker_has_room_for_shared_memory_an_identity_and_a_terminal_where_there_is_one() -> None:
    words = made("docker", {}, "chat").argv
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    assert int(words[words.index("--shm-size") + 1]) == max(half, 1 << 30)
    assert words[words.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert "--tty" not in words
    assert "--tty" in made("docker", {}, "chat", terminal=True).argv
    assert "--user" not in made("docker", {"DOCKER_HOST": "unix:///run/user/1001/docker.sock"}, "chat").argv


def test_where_models_are_kept_is_seen(tmp_path: Path, here: Path) -> None:
    models = tmp_path / "models"
    ready = made("apptainer", {"HF_HOME": str(models), "HF_HUB_CACHE": str(tmp_path / "absent")}, "train")
    assert models.is_dir()
    assert bound(ready) == [str(here), str(models)]
    kept = tmp_path / "home/.cache/huggingface"
    kept.mkdir(parents=True)
    ready = made("docker", {}, "train")
    assert bound(ready) == [str(here), str(kept)]
    assert ready.environment["HF_HOME"] == str(kept)
    assert "HF_HOME" in ready.argv
    assert bound(made("docker", {"EKIBEN_CACHE": str(models)}, "train")) == [str(here), str(models)]


def test_the_jobs_local_disk_and_certificates(tmp_path: Path, here: Path) -> None:
    local, bundle = tmp_path / "local", tmp_path / "ca.pem"
    local.mkdir()
    bundle.touch()
    ready = made("apptainer", {"TMPDIR": str(local), "SSL_CERT_FILE": str(bundle), "PBS_LOCALDIR": "/none"}, "train")
    assert bound(ready) == [str(here), str(local), str(bundle)]
    systems = {
        "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
        "REQUESTS_CA_BUNDLE": "/etc/ssl/certs/ca-certificates.crt",
    }
    assert bound(made("apptainer", systems, "train")) == [str(here), "/etc/ssl/certs/ca-certificates.crt"]
    assert bound(made("apptainer", {"SSL_CERT_FILE": str(here)}, "train")) == [str(here)]
    assert inside(ready) == {"TMPDIR": str(local), "SSL_CERT_FILE": str(bundle), "PBS_LOCALDIR": "/none"}


def test_what_the_arguments_name_is_seen(tmp_path: Path, here: Path) -> None:
    for name in ("data", "out", "more"):
        (tmp_path / name).mkdir()
    (tmp_path / "data/talk.jsonl").touch()
    ready = made("apptainer", {}, "train", "--data=../data/talk.jsonl", "--output", f"{tmp_path}/out/run/1", "--model=cyberagent/open-calm-small",
                 "--endpoint=https://hub/x", "--config", "/opt/ekiben/recipe/x.yaml", "--lr=1e-4", "here/x", "/nowhere/at/all",
                 binds=(tmp_path / "more",))  # fmt: skip
    assert bound(ready) == [str(tmp_path / "data"), str(here), str(tmp_path / "more"), str(tmp_path / "out")]
    assert bound(made("apptainer", {}, "train", "--data=..")) == [str(tmp_path)]  # and so this folder is, too
    for word in (f"model={tmp_path}/more", f"--set=model={tmp_path}/more", f"--data={tmp_path}/more/run=1/x.jsonl:2"):
        assert bound(made("apptainer", {}, "train", "--set", word)) == [str(here), str(tmp_path / "more")]
    with pytest.raises(UsageError, match="--bind nowhere: is not there"):
        made("apptainer", {}, "train", binds=(Path("nowhere"),))


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"HF_HOME=.*file/x: Not a directory"):
        made("apptainer", {"HF_HOME": str(tmp_path / "file/x")}, "train")


def test_which_runtime(tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        EngineError, match="x cannot be run here: neither apptainer nor singularity nor docker is on PATH"
    ):
        choose_runtime("x", SIF)
    for name in ("docker", "singularity"):
        (tmp_path / name).touch(mode=0o755)
    assert choose_runtime("x", SIF) == str(tmp_path / "docker")
    (tmp_path / "docker").unlink()
    with pytest.raises(EngineError, match=r"x\.sif is not there"):
        choose_runtime("x", SIF)
    (here / SIF).touch()
    assert choose_runtime("x", SIF) == str(tmp_path / "singularity")


# -------------------------------------------------------------------------------------------------------------- staging


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than ``tmp_path``: memory."""
    folder = Path("/dev/shm") / f"ekiben-test-{os.getpid()}"
    folder.mkdir()
    if folder.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm and the tests' folder are on one file system")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def sif(tmp_path: Path) -> Path:
    data = os.urandom(4096) * 4000
    (tmp_path / "part").write_bytes(data)
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    path = tmp_path / "mine.sif"
    write_sif(
        path,
        [Partition(tmp_path / "part", 0, len(data), digest)],
        id=sif_id([digest], ""),
        deffile="",
        arch="amd64",
        epoch=1,
    )
    return path


def _stage(sif: Path, folder: Path, said: multiprocessing.Queue[str]) -> None:
    target = stage(sif, {"TMPDIR": str(folder)}, said.put)
    said.put(f"done {target}")


def test_two_jobs_at_once_copy_once(sif: Path, other_disk: Path) -> None:
    said: multiprocessing.Queue[str] = multiprocessing.Queue()
    jobs = [multiprocessing.Process(target=_stage, args=(sif, other_disk, said)) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    lines = []
    while sum(line.startswith("done") for line in lines) < 4:
        lines.append(said.get(timeout=10))
    assert sum(line.startswith("copying") for line in lines) == 1
    [target] = {line.removeprefix("done ") for line in lines if line.startswith("done")}
    assert Path(target).read_bytes() == sif.read_bytes()
    assert os.access(target, os.X_OK)
    assert [path.name for path in local_folder({"TMPDIR": str(other_disk)}).iterdir() if path.suffix != ".lock"] == [
        Path(target).name
    ]


def test_what_a_killed_job_left_is_removed_and_another_image_is_another_file(sif: Path, other_disk: Path) -> None:
    environment, said = {"TMPDIR": str(other_disk)}, list[str]()
    first = stage(sif, environment, said.append)
    first.unlink()
    left = first.with_name(f".{first.name}.abc.part")
    left.write_bytes(b"half")
    assert stage(sif, environment, said.append) == first
    assert not left.exists()
    os.utime(sif, (time.time() + 5, time.time() + 5))
    assert stage(sif, environment, said.append) != first
    assert len(said) == 3


def test_a_sif_on_the_same_disk_is_used_where_it_is(sif: Path, tmp_path: Path) -> None:
    assert stage(sif, {"TMPDIR": str(tmp_path)}, lambda _: None) == sif


def test_no_room(sif: Path, other_disk: Path) -> None:
    with sif.open("ab") as file:
        file.truncate(1 << 43)
    with pytest.raises(StoreError, match=r"GB free, and .*mine\.sif has") as caught:
        stage(sif, {"TMPDIR": str(other_disk)}, lambda _: None)
    assert caught.value.hint == "make room there, or run it without --stage"


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / f"ekiben-{os.getuid()}"
    folder.symlink_to("/")
    with pytest.raises(StoreError, match="is not a folder of"):
        local_folder({"TMPDIR": str(tmp_path)})


def test_the_schedulers_own_folder_comes_first(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert local_folder({"TMPDIR": str(tmp_path / "a"), "PBS_LOCALDIR": str(tmp_path / "b")}).parent == tmp_path / "b"
    assert local_folder({"SGE_LOCALDIR": "/none", "TMPDIR": str(tmp_path / "a")}).parent == tmp_path / "a"
