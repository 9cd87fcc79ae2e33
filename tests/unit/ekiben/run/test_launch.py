"""The command that runs a task: what it lets in, what it binds, what stays off the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from ekiben.core.errors import EngineError, UsageError
from ekiben.gpu import container_gpus
from ekiben.run.contract import COMPILED_CODE, folders_to_bind, protect_caches
from ekiben.run.image import NamedImage
from ekiben.run.launch import Engine, Launch, RunRequest, Target, choose_target, launch

SIF, ID = Path("x.sif"), "sha256:" + 64 * "0"
IMAGE = NamedImage(name="x", sif=SIF, tasks={"train": "single"}, build_args="x")
NO_ENGINE = Engine(lambda tag: "")
DOCKER = Engine(lambda tag: ID)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


def launched(
    program: str,
    environment: Mapping[str, str],
    *args: str,
    gpu: bool = False,
    binds: tuple[Path, ...] = (),
    terminal: bool = False,
) -> Launch:
    target = Target(program, ID, DOCKER) if program.endswith("docker") else Target(program, str(SIF))
    return launch(target, RunRequest(argv=args, gpu=gpu, binds=binds, terminal=terminal), environment)


def bound(ready: Launch) -> list[str]:
    """Folders that are seen inside, at their own path."""
    argv = ready.argv
    found = [argv[at + 1] for at, word in enumerate(argv) if word in ("--bind", "--volume")]
    return [folder.split(":")[0] for folder in found]


def inside(ready: Launch, prefix: str = "APPTAINERENV_") -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in ready.environment.items() if name.startswith(prefix)}


NEEDED = {
    "HF_TOKEN": "hf_secret",
    "NCCL_DEBUG": "INFO",
    "SLURM_PROCID": "3",
    "PBS_NODEFILE": "/x",
    "SGE_TASK_ID": "1",
    "MASTER_ADDR": "n1",
    "RANK": "0",
    "https_proxy": "http://proxy:1",
    "NO_PROXY": "localhost",
    "CUDA_VISIBLE_DEVICES": "1",
    "WANDB_API_KEY": "key",
    "OMP_NUM_THREADS": "4",
    "EKIBEN_RUN": "r",
}
HARMFUL = {
    "LD_LIBRARY_PATH": "/apps/cuda/11.7/lib64",
    "PYTHONPATH": "/home/me/lib",
    "PYTHONHOME": "/apps/python",
    "CUDA_HOME": "/apps/cuda",
    "LD_PRELOAD": "/apps/trace.so",
    "CONDA_PREFIX": "/home/me/conda",
    "VIRTUAL_ENV": "/home/me/venv",
}


@pytest.mark.parametrize("program", ["/usr/bin/apptainer", "/usr/bin/singularity", "/usr/bin/docker"])
def test_passed_variables_and_hidden_secrets(program: str) -> None:
    """Values only in the environment of the runtime: a command line is read by everybody with `ps`."""
    ready = launched(program, {**NEEDED, **HARMFUL, "PATH": "/bin"}, "train")
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


def test_site_wide_container_variables_are_dropped_with_a_message() -> None:
    environment = {
        "SINGULARITYENV_LD_LIBRARY_PATH": "/apps/lib",
        "APPTAINERENV_PYTHONPATH": "/x",
        "APPTAINERENV_MINE": "1",
    }
    ready = launched("apptainer", environment, "train")
    assert ready.kept_out == ("APPTAINERENV_PYTHONPATH", "SINGULARITYENV_LD_LIBRARY_PATH")
    assert inside(ready) == {"MINE": "1"}
    assert not inside(ready, "SINGULARITYENV_")


def test_container_variables_of_the_user_win() -> None:
    ready = launched("apptainer", {"NCCL_DEBUG": "INFO", "APPTAINERENV_NCCL_DEBUG": "WARN"}, "train")
    assert inside(ready) == {"NCCL_DEBUG": "WARN"}


def test_gpu_options_of_each_runtime() -> None:
    assert "--nv" in launched("apptainer", {}, "train", gpu=True).argv
    assert "--nv" not in launched("apptainer", {}, "train").argv
    argv = launched("docker", {}, "train", gpu=True).argv
    assert argv[argv.index("--gpus") + 1] == "all"
    assert "memlock=-1" in argv
    assert "NVIDIA_VISIBLE_DEVICES=void" in launched("docker", {}, "train").argv


@pytest.mark.parametrize(
    ("toolkit", "kind", "expected"),
    [
        (False, "nvidia.com/gpu", "--device nvidia.com/gpu=all"),
        (True, "nvidia.com/gpu", "--gpus all"),
        (False, "example.com/nic", "--gpus all"),
        (False, "", "--gpus all"),
    ],
)
def test_docker_gets_gpus_by_a_cdi_file_where_the_toolkit_is_missing(
    toolkit: bool, kind: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "cdi"
    programs.mkdir()
    folder.mkdir()
    if toolkit:
        (programs / "nvidia-container-cli").touch(0o755)
    if kind:
        (folder / "gpu.json").write_text(json.dumps({"cdiVersion": "0.5.0", "kind": kind, "devices": []}))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(container_gpus, "_FOLDERS", (tmp_path / "missing", folder))
    assert expected in " ".join(launched("docker", {}, "train", gpu=True).argv)


def test_docker_publishes_the_port_of_a_server() -> None:
    request = RunRequest(argv=["server"], gpu=False, publish="127.0.0.1:8888")
    argv = launch(Target("docker", ID, DOCKER), request, {}).argv
    assert argv[argv.index("--publish") + 1] == "127.0.0.1:8888:8888"
    assert argv[argv.index("--pull") + 1] == "never"


def test_docker_options_for_shared_memory_user_and_terminal() -> None:
    argv = launched("docker", {}, "chat").argv
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    assert int(argv[argv.index("--shm-size") + 1]) == max(half, 1 << 30)
    assert argv[argv.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert "--tty" not in argv
    assert "--tty" in launched("docker", {}, "chat", terminal=True).argv
    assert "--user" not in launched("docker", {"DOCKER_HOST": "unix:///run/user/1001/docker.sock"}, "chat").argv


def test_model_caches_are_bind_mounted(tmp_path: Path, here: Path) -> None:
    models = tmp_path / "models"
    ready = launched("apptainer", {"HF_HOME": str(models), "HF_HUB_CACHE": str(tmp_path / "absent")}, "train")
    assert models.is_dir()
    assert bound(ready) == [str(here), str(models)]
    kept = tmp_path / "home/.cache/huggingface"
    kept.mkdir(parents=True)
    ready = launched("docker", {}, "train")
    assert bound(ready) == [str(here), str(kept)]
    assert ready.environment["HF_HOME"] == str(kept)
    assert "HF_HOME" in ready.argv
    assert bound(launched("docker", {"EKIBEN_CACHE": str(models)}, "train")) == [str(here), str(models)]


def test_local_disk_and_certificates_are_passed(tmp_path: Path, here: Path) -> None:
    local, bundle = tmp_path / "local", tmp_path / "ca.pem"
    local.mkdir()
    bundle.touch()
    ready = launched(
        "apptainer", {"TMPDIR": str(local), "SSL_CERT_FILE": str(bundle), "PBS_LOCALDIR": "/none"}, "train"
    )
    assert bound(ready) == [str(here), str(local), str(bundle)]
    systems = {
        "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
        "REQUESTS_CA_BUNDLE": "/etc/ssl/certs/ca-certificates.crt",
    }
    assert bound(launched("apptainer", systems, "train")) == [str(here), "/etc/ssl/certs/ca-certificates.crt"]
    assert bound(launched("apptainer", {"SSL_CERT_FILE": str(here)}, "train")) == [str(here)]
    assert inside(ready) == {"TMPDIR": str(local), "SSL_CERT_FILE": str(bundle), "PBS_LOCALDIR": "/none"}


def test_paths_in_arguments_are_bind_mounted(tmp_path: Path, here: Path) -> None:
    for name in ("data", "out", "more"):
        (tmp_path / name).mkdir()
    (tmp_path / "data/talk.jsonl").touch()
    ready = launched(
        "apptainer",
        {},
        "train",
        "--data=../data/talk.jsonl",
        "--output",
        f"{tmp_path}/out/run/1",
        "--model=cyberagent/open-calm-small",
        "--endpoint=https://hub/x",
        "--config",
        "/opt/ekiben/recipe/x.yaml",
        "--lr=1e-4",
        "here/x",
        "/nowhere/at/all",
        binds=(tmp_path / "more",),
    )
    assert bound(ready) == [str(tmp_path / "data"), str(here), str(tmp_path / "more"), str(tmp_path / "out")]
    assert bound(launched("apptainer", {}, "train", "--data=..")) == [str(tmp_path)]  # and so this folder is, too
    for word in (f"model={tmp_path}/more", f"--set=model={tmp_path}/more", f"--data={tmp_path}/more/run=1/x.jsonl:2"):
        assert bound(launched("apptainer", {}, "train", "--set", word)) == [str(here), str(tmp_path / "more")]
    with pytest.raises(UsageError, match="--bind nowhere: does not exist"):
        launched("apptainer", {}, "train", binds=(Path("nowhere"),))


def test_cache_folder_that_cannot_be_created_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"HF_HOME=.*file/x: Not a directory"):
        launched("apptainer", {"HF_HOME": str(tmp_path / "file/x")}, "train")


def test_pulled_image_whose_sif_nothing_runs_here_is_an_engines(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pulled on a node with Apptainer, and run where only Docker is."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "docker").touch(mode=0o755)
    (here / SIF).touch()
    image = NamedImage(name="x", sif=SIF, tasks=None, pulled=f"registry.example.org/x@{ID}")
    assert choose_target(image, {"docker": lambda: DOCKER}) == Target(str(tmp_path / "docker"), ID, DOCKER)


def test_choose_target_order(tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="x cannot be run here: neither apptainer nor singularity is on PATH"):
        choose_target(IMAGE, {"docker": lambda: DOCKER})
    for name in ("docker", "singularity"):
        (tmp_path / name).touch(mode=0o755)
    assert choose_target(IMAGE, {"docker": lambda: DOCKER}) == Target(str(tmp_path / "docker"), ID, DOCKER)
    (here / SIF).touch()
    assert choose_target(IMAGE, {"docker": lambda: DOCKER}) == Target(str(tmp_path / "singularity"), str(SIF))


def test_engine_without_the_image_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would ask a registry for the name, and run what lies there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "docker").touch(mode=0o755)
    for asked, message in (
        ("auto", r"x\.sif is not there; docker has no image ekiben/x"),
        ("docker", "no image ekiben/x"),
    ):
        with pytest.raises(EngineError, match=message) as raised:
            choose_target(IMAGE, {"docker": lambda: NO_ENGINE}, asked)
        assert "build x" in str(raised.value.hint)


def test_sif_file_is_no_image_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "docker").touch(mode=0o755)
    file = NamedImage(name="x", sif=SIF, tasks=None)
    with pytest.raises(UsageError, match=r"--runtime docker: x\.sif is a SIF file"):
        choose_target(file, {"docker": lambda: DOCKER}, "docker")
    with pytest.raises(EngineError, match="neither apptainer nor singularity"):
        choose_target(file, {"docker": lambda: DOCKER})


def test_targets_of_links_are_bind_mounted(tmp_path: Path, here: Path) -> None:
    for name in ("deep", "data", "models"):
        (tmp_path / name).mkdir()
    (tmp_path / "deep/talk.jsonl").touch()
    (tmp_path / "data/talk.jsonl").symlink_to("../deep/talk.jsonl")
    (here / "link.jsonl").symlink_to(tmp_path / "data/talk.jsonl")
    assert bound(launched("apptainer", {}, "train", "--data", "./link.jsonl")) == [
        str(tmp_path / "data"),
        str(tmp_path / "deep"),
        str(here),
    ]
    for argument, count in {
        "link.jsonl": 3,
        "--data=link.jsonl": 3,
        "--set=data=link.jsonl": 3,
        "other.jsonl": 1,
    }.items():
        assert len(folders_to_bind(("train", argument), (), {})) == count, argument
    (here / "cache").symlink_to(tmp_path / "models")
    assert bound(launched("apptainer", {"HF_HOME": str(here / "cache")}, "train")) == [
        str(here),
        str(tmp_path / "models"),
    ]
    assert bound(launched("apptainer", {}, "train", "--output", "cache/run/1")) == [str(here), str(tmp_path / "models")]
    (tmp_path / "models/weights").symlink_to(tmp_path / "deep/talk.jsonl")
    (here / "linked").mkdir()
    (here / "linked/talk.jsonl").symlink_to(tmp_path / "deep/talk.jsonl")
    for model, folders in (("../models", ["deep", "models"]), ("linked", ["deep"])):
        assert folders_to_bind(("train", "--set", f"model={model}"), (), {}) == sorted(
            [str(here), *(str(tmp_path / name) for name in folders)]
        )
    (here / "loop").symlink_to("loop")
    assert bound(launched("apptainer", {}, "train", "--data", "./loop")) == [str(here)]


def test_values_are_not_evaluated_by_a_shell(here: Path) -> None:
    ready = launched("apptainer", {"HF_TOKEN": "hf_$abc", "APPTAINER_NO_EVAL": "0"}, "train")
    assert (ready.environment["APPTAINER_NO_EVAL"], ready.environment["SINGULARITY_NO_EVAL"]) == ("1", "1")
    assert inside(ready)["HF_TOKEN"] == "hf_$abc"


def test_argument_longer_than_a_path_is_not_bound(here: Path) -> None:
    for word in ("x" * 5000, f"/tmp/{'x' * 300} and/or", "a/" * 3000, "あ/" + "い" * 100):
        assert folders_to_bind(("chat", word), (), {}) == [str(here)]


@pytest.mark.parametrize("mode", [0o777, 0o770, None])
def test_compiled_code_is_never_in_a_folder_that_others_can_write(tmp_path: Path, mode: int | None) -> None:
    (tmp_path / "local").mkdir()
    folder = tmp_path / f"local/ekiben-{os.getuid()}"
    environment = {"TMPDIR": str(tmp_path / "local")}
    assert protect_caches(environment) == environment
    assert folder.stat().st_mode & 0o777 == 0o700  # made before a task makes it, whatever the umask
    folder.rmdir()
    if mode is None:
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
        folder.chmod(mode)
    private = tmp_path / "own"
    private.mkdir(mode=0o755)
    ready = launched("apptainer", {**environment, "TRITON_CACHE_DIR": str(private)}, "train")
    caches = {name: Path(inside(ready)[name]) for name in COMPILED_CODE}
    assert caches.pop("TRITON_CACHE_DIR") == private
    assert all(path.parent.parent == tmp_path / "local" and path.is_dir() for path in caches.values())
    assert all(path.parent.stat().st_mode & 0o777 == 0o700 for path in caches.values())


def test_a_cache_that_others_can_write_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    found = protect_caches(
        {"TMPDIR": str(tmp_path / "local"), "CUDA_CACHE_PATH": str(shared), "TRITON_CACHE_DIR": "/n"}
    )
    assert Path(found["CUDA_CACHE_PATH"]).parent.parent == tmp_path / "local"
    assert (found["TRITON_CACHE_DIR"], "TORCHINDUCTOR_CACHE_DIR" in found) == ("/n", False)
