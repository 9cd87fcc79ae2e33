"""`build.py run` with the real runtimes: what gets in, what is seen, what stays off every command line; the copy on
local disk.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path

import pytest

from workspaces import CA_BUNDLE, ME, USER, Cli, Workspace, as_user, give, run_as

ENTRYPOINTS = Path(__file__).resolve().parents[2] / "entrypoints"
pytestmark = pytest.mark.covers("ekiben/run", "ekiben/doctor", "ekiben/gpu")

# Says what it sees, and where it is told to wait, waits until it may end.
LOOK = """\
import json, os, sys, time
from pathlib import Path
if "--dry-run" in sys.argv:
    print("memory      20.5 GiB expected")
    sys.exit("--fail" in sys.argv)
wait = Path("wait")
if wait.exists():
    Path("ready").touch()
    for _ in range(600):
        if not wait.exists():
            break
        time.sleep(0.1)
out = next((word.split("=")[1] for word in sys.argv if word.startswith("--output=")), None)
if out:
    Path(out).mkdir(parents=True)
    (Path(out) / "made").touch()
bundle = Path(os.environ.get("SSL_CERT_FILE", "/dev/null")).read_text()
data = next((Path(word.split("=")[1]).read_text() for word in sys.argv if word.startswith("--data=")), None)
shm = os.statvfs("/dev/shm")
print(json.dumps({"environment": dict(os.environ), "cwd": os.getcwd(), "data": data, "shm": shm.f_blocks * shm.f_frsize,
                  "uid": os.getuid(), "argv": sys.argv[1:], "bundle": bundle}))
"""
SECRET = "hf_" + "s3cr3t" * 5
LITERAL = "$(touch /tmp/evaluated) `id` $HOME \\ \" '"
ENVIRONMENT = {
    "HF_TOKEN": SECRET,
    "NCCL_DEBUG": "INFO",
    "SLURM_PROCID": "0",
    "https_proxy": "http://127.0.0.1:9",
    "MASTER_ADDR": "127.0.0.1",
    "LD_LIBRARY_PATH": "/apps/cuda/11.7/lib64",
    "PYTHONPATH": "/apps/python/lib",
    "CUDA_HOME": "/apps/cuda",
    "SINGULARITYENV_LD_LIBRARY_PATH": "/apps/hpcx/lib",
    "APPTAINERENV_PYTHONPATH": "/apps/more",
    "MY_OWN": "1",
    "WANDB_NAME": LITERAL,
    "SSL_CERT_FILE": str(CA_BUNDLE),
}


@dataclass(frozen=True)
class Looker:
    store: Path
    recipe: Path
    sif: Path


@pytest.fixture(scope="module")
def looker(workspace: Workspace, cli: Cli, hello: Path) -> Iterator[Looker]:
    """A recipe whose task says what it sees, as a SIF and in the Docker daemon."""
    recipe = workspace.folder("looker") / "look"
    (recipe / "entrypoints").mkdir(parents=True)
    (recipe / "entrypoints/look.py").write_text(LOOK)
    (recipe / "recipe.yaml").write_text(
        json.dumps(
            {
                "name": "look",
                "description": "a test",
                "stack": "cu130",
                "layer": "python",
                "tasks": {"look": {"entrypoint": "look.py", "help": "say what is seen"}},
            }
        )
    )
    sif = recipe / "look.sif"
    cli.image(hello, recipe, "--format", "sif", "--format", "docker", "--no-verify", cwd=recipe)
    assert sif.is_file()
    yield Looker(hello, recipe, sif)
    subprocess.run(["docker", "rmi", "--force", "ekiben/look:latest"], capture_output=True, check=True)
    shutil.rmtree(recipe.parent)


def command_lines() -> list[str]:
    """Of every process on this machine, as `ps` shows them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def only_singularity(workspace: Workspace) -> Iterator[Path]:
    """A PATH on which Apptainer has its other name only."""
    folder = workspace.folder("bin")
    for program in Path("/usr/bin").iterdir():
        (folder / program.name).symlink_to(program)
    (folder / "apptainer").rename(folder / "singularity")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.guard
@pytest.mark.parametrize(
    ("user", "runtime"), [(USER, "apptainer"), (ME, "apptainer"), (USER, "singularity"), (ME, "docker")]
)
def test_environment_and_folders_inside_the_container(
    user: str, runtime: str, looker: Looker, workspace: Workspace, only_singularity: Path
) -> None:
    """An ordinary cluster's environment around it: host libraries stay out, what a job needs is there, a token is not
    shown.
    """
    home = workspace.folder("job", user)
    here = home / "here"
    for folder in (here, home / "data", home / "models"):
        folder.mkdir()
        give(folder, user)
    (home / "data/talk.jsonl").write_text("rows")
    wait = here / "wait"
    wait.touch()
    argv = ["--store", looker.store, "run", looker.recipe, "--cpu"]
    argv += ["--runtime", "docker"] if runtime == "docker" else ["--sif", looker.sif]
    argv += ["look", "--", "--data=../data/talk.jsonl", f"--output={home}/models/../out/1", "word"]
    (home / "out").mkdir()
    give(home / "out", user)
    cli = Cli(workspace, user)
    path = {"PATH": str(only_singularity)} if runtime == "singularity" else {}
    running = cli.start(*argv, cwd=here, env={**ENVIRONMENT, **path, "HF_HOME": f"{home}/models/hf"})
    deadline = time.monotonic() + 60
    while not (here / "ready").exists() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    lines = command_lines()
    wait.unlink()
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert any("look" in line and "--data=../data/talk.jsonl" in line for line in lines)
    assert [line for line in lines if SECRET in line] == []
    assert SECRET not in err
    seen = json.loads(out)
    inside = seen["environment"]
    for name in ("HF_TOKEN", "NCCL_DEBUG", "SLURM_PROCID", "https_proxy", "MASTER_ADDR", "WANDB_NAME"):
        assert inside[name] == ENVIRONMENT[name]
    assert inside["HF_HOME"] == f"{home}/models/hf"
    assert "/apps" not in " ".join(inside.values())
    assert not {"MY_OWN", "PYTHONPATH", "CUDA_HOME"} & inside.keys()
    assert seen["bundle"] == CA_BUNDLE.read_text()  # this machine's, not the image's
    assert (seen["cwd"], seen["data"], seen["argv"][-1]) == (str(here), "rows", "word")
    assert (home / "out/1/made").is_file()
    assert (home / "out/1/made").stat().st_uid == seen["uid"] == home.stat().st_uid
    if runtime == "docker":
        assert seen["shm"] > 1 << 30  # elsewhere it is the host's
        assert inside["NVIDIA_VISIBLE_DEVICES"] == "void"
    else:
        assert f"/{runtime} run" in err
        assert "SINGULARITYENV_LD_LIBRARY_PATH is not passed on" in err
        assert "preferred" not in err  # what Apptainer says of a variable it has under the old name only


def test_concurrent_jobs_copy_the_sif_once(looker: Looker, workspace: Workspace) -> None:
    disk = Path("/dev/shm") / f"ekiben-run-{os.getpid()}"
    disk.mkdir()
    give(disk, USER)
    try:
        if disk.stat().st_dev == looker.sif.stat().st_dev:
            pytest.skip("/dev/shm and the tests' folder are on one file system")
        here, cli = workspace.folder("job", USER), Cli(workspace, USER)
        argv = ("--store", looker.store, "run", looker.recipe, "--cpu", "--sif", looker.sif, "--copy-local", "look")
        jobs = [cli.start(*argv, cwd=here, env={"TMPDIR": str(disk)}) for _ in range(3)]
        ends = [job.communicate(timeout=120) for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0, 0], ends
        told = "".join(err for _, err in ends)
        assert told.count("copying") == 1
        [staged] = disk.glob("ekiben-*/look-*.sif")
        assert cmp(staged, looker.sif, shallow=False)
        assert told.count(f"{staged} look") == 3
    finally:
        shutil.rmtree(disk)


def test_incompatible_image_is_refused_before_it_starts(looker: Looker, workspace: Workspace, cli: Cli) -> None:
    """A SIF for a machine that is not emulated: the word of doctor, and with --force the runtime's own."""
    here = workspace.folder("job")
    other = here / "power.sif"
    shutil.copy(looker.sif, other)
    with other.open("r+b") as file:
        file.seek(45)
        file.write(b"06")
    argv = ("--store", looker.store, "run", looker.recipe, "--cpu", "--sif", other)
    refused = cli.run(*argv, "look", cwd=here, code=10)
    assert "error: will fail because the image is for ppc64le, this machine is amd64: " in refused.stderr
    assert "hint: --force" in refused.stderr
    forced = cli.run(*argv, "--force", "look", cwd=here, code=None)
    assert "apptainer run" in forced.stderr
    assert forced.returncode != 10


def test_image_unreadable_to_doctor_runs(looker: Looker, workspace: Workspace, cli: Cli) -> None:
    """A small SIF of another make, compressed as we cannot read it; a store of another version."""
    here = workspace.folder("job")
    sif, store, tree = here / "xz.sif", here / "store", here / "tree"
    for name in ("/bin/sh", "/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/libc.so.6"):
        (tree / name[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(name), tree / name[1:])
    for name in ("dev", "etc", "home", "proc", "root", "sys", "tmp", "var/tmp", ".singularity.d"):
        (tree / name).mkdir(parents=True)
    (tree / ".singularity.d/runscript").write_text("#!/bin/sh\necho ran $@\n")
    (tree / ".singularity.d/runscript").chmod(0o755)
    squashfs = here / "xz.squashfs"
    subprocess.run(["mksquashfs", tree, squashfs, "-comp", "xz", "-no-progress"], capture_output=True, check=True)
    subprocess.run(["apptainer", "sif", "new", sif], capture_output=True, check=True)
    argv = ["--datatype", "4", "--parttype", "2", "--partfs", "1", "--partarch", "2", "--groupid", "1"]
    subprocess.run(["apptainer", "sif", "add", *argv, sif, squashfs], capture_output=True, check=True)
    store.mkdir()
    (store / "version").write_text("0\n")
    done = cli.run("--store", store, "run", looker.recipe, "--cpu", "--sif", sif, "look", cwd=here)
    assert done.stdout == "ran look\n"
    assert "could not be read" not in done.stderr  # without a GPU nothing of it is needed
    assert (
        "compressed with xz"
        in cli.run("--store", looker.store, "doctor", "--site", "abci-3.0", sif, cwd=here, code=None).stderr
    )


@pytest.mark.parametrize(("user", "runtime"), [(USER, "apptainer"), (ME, "docker")])
def test_live_run_uses_and_names_this_folder(user: str, runtime: str, looker: Looker, workspace: Workspace) -> None:
    here = workspace.folder("live", user)
    edited = shutil.copytree(looker.recipe, here / "look", ignore=shutil.ignore_patterns("*.sif"))
    (edited / "entrypoints/look.py").write_text(LOOK.replace("json.dumps({", 'json.dumps({"edited": True, '))
    cli = Cli(workspace, user)
    image = ["--runtime", "docker"] if runtime == "docker" else ["--sif", looker.sif]

    def look(*options: str) -> dict[str, object]:
        argv = ["--store", looker.store, "run", edited, "--cpu", *image, *options, "look"]
        seen = json.loads(cli.run(*argv, cwd=here, env={"EKIBEN_LIVE": "an outer run"}).stdout)
        return {"edited": "edited" in seen, "origin": seen["environment"].get("EKIBEN_LIVE")}

    assert look("--live") == {"edited": True, "origin": str(edited)}
    assert look() == {"edited": False, "origin": None}


@pytest.mark.parametrize(("user", "runtime"), [(USER, "apptainer"), (ME, "docker")])
def test_shell_reads_commands_and_has_the_tasks(user: str, runtime: str, looker: Looker, workspace: Workspace) -> None:
    here = workspace.folder("shell", user)
    cli = Cli(workspace, user)
    argv = ["--store", looker.store, "shell", looker.recipe, "--cpu"]
    argv += ["--runtime", "docker"] if runtime == "docker" else ["--sif", looker.sif]
    assert cli.run(*argv, "--", "python3", "-c", "print(6 * 7)", cwd=here).stdout == "42\n"
    done = subprocess.run(
        cli.argv(*argv),
        input="pwd; command -v look; exit 3\n",
        capture_output=True,
        text=True,
        cwd=here,
        env=cli.settings(),
        timeout=300,
        check=False,
        **as_user(user),
    )
    assert (done.returncode, done.stdout) == (3, f"{here}\n/usr/local/bin/look\n"), done.stderr


def test_doctor_on_this_machine(looker: Looker, workspace: Workspace, cli: Cli) -> None:
    """Of the recipe in the store, and of the file under whatever name, the same metadata; both users' words."""
    (looker.recipe / "current").symlink_to("look.sif")
    for user in (ME, USER):
        for image in (looker.recipe, looker.sif, looker.recipe / "current"):
            rows = json.loads(
                Cli(workspace, user)
                .run("--store", looker.store, "doctor", image, "--json", cwd=workspace.path, code=None)
                .stdout
            )
            about = {row["check"]: row for row in rows}
            assert about["run"]["verdict"] == "will run", about
            [runtime] = [finding for finding in about["run"]["findings"] if finding["topic"] == "runtime"]
            assert runtime["message"].startswith("apptainer 1.")
            assert runtime["message"].endswith("3 layers in the SIF")
            if image != looker.recipe:
                continue  # a file is not built here
            assert about["build"]["findings"][0]["topic"] == "engine"
            written = [row["level"] for row in about["build"]["findings"] if row["topic"] == "store"]
            assert written == (["ok"] if user == ME else ["error"])  # root's store


@pytest.mark.parametrize("sif", [True, False], ids=["sif", "docker"])
def test_doctor_gets_memory_from_the_task(sif: bool, looker: Looker, workspace: Workspace, cli: Cli) -> None:
    here = looker.recipe if sif else workspace.folder("job")

    def memory(site: str, *args: str) -> tuple[str, str]:
        done = cli.run(
            "--store", looker.store, "doctor", "--site", site, "--json", looker.recipe, "look", *args, cwd=here
        )
        [row] = [row for row in json.loads(done.stdout)[0]["findings"] if row["topic"] == "memory"]
        return row["level"], row["message"]

    assert memory("slurm-l4") == ("warning", "look --dry-run expects 20.5 GiB, NVIDIA L4 has 22 GiB")
    assert memory("abci-3.0") == ("ok", "look --dry-run expects 20.5 GiB, NVIDIA H200 has 140 GiB")
    assert memory("abci-3.0", "--fail")[1].startswith("look --dry-run ended with exit code 1")


def test_doctor_where_user_namespaces_are_off(workspace: Workspace, cli: Cli) -> None:
    """The limit holds in a user namespace made for it, and below: as on a node whose administrator turned them off."""
    forbid = 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --ambient-caps=-all --inh-caps=-all "$@"'
    prefix = [
        "setpriv",
        f"--reuid={USER}",
        f"--regid={USER}",
        "--init-groups",
        "unshare",
        "--user",
        "--map-current-user",
        "--keep-caps",
        "sh",
        "-c",
        forbid,
        "sh",
        "env",
        f"HOME=/home/{USER}",
        f"USER={USER}",
        f"LOGNAME={USER}",
    ]
    here = workspace.folder("job", USER)
    argv = ("--store", here / "store", "doctor", "--json")
    [about] = json.loads(cli.run(*argv, cwd=here, prefix=prefix, code=10).stdout)
    assert about["verdict"].startswith("will fail because apptainer: user namespaces are switched off")
    assert {row["topic"] for row in about["findings"] if row["level"] == "warning"} == {"namespaces"}
    assert not (here / "store").exists()


def test_doctor_on_a_disk_too_small_and_not_for_programs(workspace: Workspace, cli: Cli) -> None:
    disk = workspace.folder("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m,noexec", "tmpfs", disk], check=True)
    try:
        argv = ("--store", disk / "store", "doctor", "--json")
        [about] = json.loads(cli.run(*argv, cwd=workspace.path, env={"TMPDIR": str(disk)}, code=10).stdout)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    found = {row["topic"]: row for row in about["findings"]}
    assert found["store"]["level"] == "error"
    assert found["store"]["message"].startswith(f"{disk}/store (tmpfs), 0 GiB free; up to 8 GiB are on the way")
    assert found["TMPDIR"]["level"] == "info"
    assert f"{disk} (tmpfs) is mounted noexec" in found["TMPDIR"]["message"]


def test_image_removed_from_the_daemon_is_loaded_again(looker: Looker, cli: Cli) -> None:
    """That an image exists is the daemon's answer, asked in every build."""
    argv = ("--store", looker.store, "image", looker.recipe, "--format", "docker", "--no-verify")
    cli.run(*argv, cwd=looker.recipe)
    assert "(existing)" in cli.run(*argv, cwd=looker.recipe).stdout
    subprocess.run(["docker", "tag", "ekiben/look:latest", "ekiben/kept:latest"], check=True)
    subprocess.run(["docker", "rmi", "ekiben/look:latest"], capture_output=True, check=True)
    try:
        again = cli.run(*argv, cwd=looker.recipe)
        assert "(existing)" not in again.stdout
        subprocess.run(["docker", "image", "inspect", "ekiben/look:latest"], capture_output=True, check=True)
    finally:
        subprocess.run(["docker", "rmi", "ekiben/kept:latest"], capture_output=True, check=True)


def pages_read(sif: Path, start: Callable[[], object]) -> int:
    """Bytes of a SIF in the page cache after ``start``, which had none of it there: what was read, readahead too."""
    with sif.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    asked = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(sif)]
    assert int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) == 0
    start()
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


@pytest.mark.guard
def test_a_cold_start_of_hello_reads_at_most_16_mb(workspace: Workspace, hello: Path, cli: Cli) -> None:
    here = workspace.folder("cold")
    cli.image(hello, "hello", "--no-verify", "--format", "sif", "-o", here / "hello.sif")
    argv = ("--store", hello, "run", "--cpu", "hello", "hello")
    assert pages_read(here / "hello.sif", lambda: cli.run(*argv, cwd=here)) <= 16_000_000
    launcher = ("python3", ENTRYPOINTS / "launch_node.py", "--node", "0", "--nodes", "c1", "--processes", "1", "--")
    in_job = ("apptainer", "exec", "--bind", ENTRYPOINTS, here / "hello.sif", *launcher, "hello")
    assert pages_read(here / "hello.sif", lambda: run_as(ME, *in_job, cwd=here)) <= 16_000_000


@pytest.mark.guard
def test_a_start_reads_little_more_than_apptainer_itself(looker: Looker, workspace: Workspace, cli: Cli) -> None:
    """And so not the file, to hash it."""
    here = workspace.folder("start")
    plain = pages_read(looker.sif, lambda: run_as(ME, "apptainer", "exec", looker.sif, "look", cwd=here))
    argv = ("--store", looker.store, "run", "--cpu", "--sif", looker.sif, looker.recipe, "look")
    read = pages_read(looker.sif, lambda: cli.run(*argv, cwd=here))
    assert read < plain + (2 << 20) < looker.sif.stat().st_size // 2
    compared = pages_read(looker.sif, lambda: cli.run(*argv[:4], looker.recipe, "look", cwd=looker.recipe))
    assert compared < plain + (3 << 20)
