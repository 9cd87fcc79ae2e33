"""`module load` of a published image by an ordinary user, who then runs its task in rootless Apptainer, with no
Ekiben.
"""

from __future__ import annotations

import grp
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ekiben.run.launch import RunRequest, Target, launch
from support.module_systems import NAMES, ModuleSystem, module_system
from test_share import COLLEAGUE, LAB, login
from workspaces import CA_BUNDLE, Cli, Workspace, give, home_of

pytestmark = pytest.mark.covers("ekiben/publish", "ekiben/run")

# What the command sees: its words, its environment, where it is, and what of the host is bound.
LOOK = """\
import json, os, sys
mounts = sorted({line.split()[4] for line in open("/proc/self/mountinfo")})
print(json.dumps({"argv": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd(), "mounts": mounts}))
"""


@pytest.fixture(scope="module")
def lab(workspace: Workspace, cli: Cli, hello: Path) -> Iterator[Path]:
    """`hello` published by root with a mask that lets nobody else read, in a folder of the group's."""
    shared_dir = workspace.folder("lab-with-modules")
    os.chown(shared_dir, -1, grp.getgrnam(LAB).gr_gid)
    shared_dir.chmod(0o2750)
    masked = ["sh", "-c", 'umask 077; exec "$@"', "sh"]
    options = ("--version", "1", "--modulefile", "--no-verify")
    cli.run("--store", hello, "publish", "hello", "--to", shared_dir, *options, prefix=masked)
    yield shared_dir
    shutil.rmtree(shared_dir)


@pytest.fixture(params=NAMES)
def modules(request: pytest.FixtureRequest) -> ModuleSystem:
    return module_system(request.param)


@pytest.fixture
def here(workspace: Workspace) -> Path:
    """A folder of the colleague's, with a blank in its name, and others beside it."""
    top = workspace.folder("colleague", COLLEAGUE)
    for name in ("my work", "data", "more data", "models", "out"):
        (top / name).mkdir()
        give(top / name, COLLEAGUE)
    (top / "data/talk.jsonl").touch()
    return top / "my work"


def run(modules: ModuleSystem, lab: Path, script: str, here: Path, **env: str) -> str:
    done = modules.run(
        lab / "modulefiles",
        f"module load ekiben/hello\n{script}",
        home=Path(home_of(COLLEAGUE)),
        cwd=here,
        prefix=login(COLLEAGUE),
        env=env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.guard
def test_colleague_loads_the_module_and_runs_its_task(modules: ModuleSystem, lab: Path, here: Path) -> None:
    assert json.loads(run(modules, lab, "hello --json", here))["cpus"] > 0
    assert "Python 3.11" in run(modules, lab, "ekiben-hello python3 --version", here)
    assert "say who and where this container runs" in run(modules, lab, "ekiben-hello", here)
    argv = ["a  b", "", "*", "$HOME", "it's", "--", "-x", "new\nline"]
    script = shlex.join(["ekiben-hello", "sh", "-c", 'id -un; printf "%s|" "$@"', "sh", *argv])
    assert run(modules, lab, script, here) == f"{COLLEAGUE}\n{'|'.join(argv)}|"


def seen(argv: list[str], here: Path, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [*login(COLLEAGUE), *argv], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    for name in ("APPTAINER_COMMAND", "SINGULARITY_COMMAND", "SINGULARITY_BIND", "APPTAINER_BIND", "_"):
        found["environment"].pop(name, None)
    return found


CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "what a job has": (
        [],
        {
            "HF_TOKEN": 'hf_secret $(x) `y` "z"',
            "NCCL_DEBUG": "INFO",
            "SLURM_PROCID": "0",
            "https_proxy": "http://proxy:1",
            "MASTER_ADDR": "127.0.0.1",
            "LD_LIBRARY_PATH": "/apps/lib",
            "PYTHONPATH": "/apps/python",
            "CUDA_HOME": "/apps/cuda",
            "MY_OWN": "1",
            "SINGULARITYENV_LD_LIBRARY_PATH": "/apps/lib",
            "APPTAINERENV_PYTHONPATH": "/apps",
            "OMP_NUM_THREADS": "2\nHF_FALSE=1",
            "APPTAINERENV_NCCL_DEBUG": "WARN",
            "NCCL_x;echo": "odd",
        },
    ),
    "caches and local disk": (
        [],
        {
            "HF_HOME": "{top}/models/hf",
            "EKIBEN_CACHE": "{top}/models/new/cache",
            "TMPDIR": "{top}/out",
            "PBS_LOCALDIR": "/nowhere",
            "SSL_CERT_FILE": str(CA_BUNDLE),
            "TRITON_CACHE_DIR": "{top}/models/hf",
        },
    ),
    "what arguments name": (
        [
            "--data=../data/talk.jsonl",
            "--output",
            "{top}/models/../out/run/1",
            "--set=model={top}/more data",
            "--config",
            "/opt/ekiben/recipe/x",
            "https://hub/x",
            "--lr=1e-4",
            "/nowhere/at/all",
            "*",
            "/etc/hosts",
            "--empty=",
        ],
        {},
    ),
    "a folder above": (["--data=.."], {"HF_HOME": "{top}/models"}),
}


# Of each, something that is there: two who see nothing see the same, too.
SEEN = {
    "what a job has": {"environment": "NCCL_DEBUG"},
    "caches and local disk": {"mounts": "{top}/models/new/cache"},
    "what arguments name": {"mounts": "{top}/more\\040data"},
    "a folder above": {"mounts": "{top}"},
}


@pytest.mark.parametrize("case", CASES)
def test_module_has_the_environment_of_run(case: str, lab: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same environment, folders and words as under `build.py run`, in sh."""
    argv, extra = CASES[case]
    top = here.parent
    argv = ["python3", "-c", LOOK, *(word.replace("{top}", str(top)) for word in argv)]
    environment = {
        "PATH": "/usr/bin:/bin",
        "TERM": "dumb",
        "USER": COLLEAGUE,
        "HOME": home_of(COLLEAGUE),
        "LOGNAME": COLLEAGUE,
        **{name: value.replace("{top}", str(top)) for name, value in extra.items()},
    }
    (sif,) = (lab / "images/hello").glob("hello-1-*.sif")
    by_module = seen([str(sif.with_suffix(".bin") / "ekiben-hello"), *argv], here, environment)
    made = {name: Path(environment[name]) for name in ("HF_HOME", "EKIBEN_CACHE") if name in environment}
    assert all(folder.is_dir() for folder in made.values())
    with monkeypatch.context() as patch:
        patch.chdir(here)
        patch.setattr(os, "getuid", lambda: here.stat().st_uid)  # caches of others are not used
        ready = launch(Target("/usr/bin/apptainer", str(sif)), RunRequest(argv=argv, gpu=False), environment)
    by_run = seen(ready.argv, here, ready.environment)
    assert by_module == by_run
    assert by_module["argv"] == argv[3:]
    for name, value in SEEN[case].items():
        assert value.replace("{top}", str(top)) in by_module[name], name


def test_module_passes_gpus_where_a_driver_exists(lab: Path, here: Path, tmp_path: Path) -> None:
    """What would be run is what `sh -x` shows; here and now there may be a driver or none."""
    (sif,) = (lab / "images/hello").glob("hello-1-*.sif")

    def started(**extra: str) -> str:
        command = ["sh", "-x", str(sif.with_suffix(".bin") / "ekiben-hello"), "true"]
        done = subprocess.run(
            [*login(COLLEAGUE), *command],
            cwd=here,
            env={"PATH": "/usr/bin:/bin", "HOME": "/", **extra},
            capture_output=True,
            text=True,
            check=False,
        )
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("+ exec ")]
        return line

    assert ("--nv" in shlex.split(started())) == Path("/dev/nvidiactl").exists()
    assert "--nv" not in shlex.split(started(EKIBEN_CPU="1"))
