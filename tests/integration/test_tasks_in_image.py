"""The tests of the tasks, in the image: what ships is what is tested.

The scripts and packages are the image's; only pytest comes from outside, and what other recipes' images add: pure
Python, or nearly, so that their tasks' tests run here, too, without an image each.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from workspaces import CA_BUNDLE, ROOT, USER, BuiltImage, Workspace, end_of, make_image, run_as

pytestmark = pytest.mark.covers("entrypoints", each=True)

TASKS = ROOT / "tests/tasks"
# Groups: a folder; of distributed/, whose files take half of the time, and of the recipes each file. Megatron-Core on
# the CPU changes what torch means by a GPU for its whole process.
ONE_BY_ONE = ("distributed", "recipes")
GROUPS = sorted({path if path.parent.name in ONE_BY_ONE else path.parent for path in TASKS.rglob("test_*.py")})


def covered(path: Path) -> list[str]:
    """Return the paths that the tests of a group cover."""
    if path.parent.name == "recipes":
        recipe = "pretrain-gpt" if "pretrain" in path.name else path.stem.removeprefix("test_").replace("_", "-")
        layers = ["images/llama-cpp.def"] if recipe == "export" else []
        return [f"recipes/{recipe}/entrypoints", path.relative_to(ROOT).as_posix(), *layers]
    package = path.name if path.is_dir() else path.parent.name
    return [f"entrypoints/ekiben_tasks/{package}", path.relative_to(ROOT).as_posix()]


@pytest.fixture(scope="module")
def sif(lora_opencalm: BuiltImage, workspace: Workspace) -> Path:
    """The image as it was built: a test of another file writes a new one in its place."""
    link = workspace.folder("image") / "image.sif"
    link.hardlink_to(lora_opencalm.sif)
    return link


@pytest.fixture(scope="module")
def export_sif(lora_opencalm: BuiltImage) -> Path:
    """The image of `export`, whose layer has a compiled package, on the layers of lora-opencalm."""
    done = make_image(lora_opencalm, "export")
    assert done.returncode == 0, done.stdout + done.stderr
    return lora_opencalm.checkout / "export.sif"


@pytest.fixture(scope="module")
def pytest_folder(sif: Path, workspace: Workspace) -> Path:
    """A folder of the ordinary user's with pytest and the packages of other recipes, installed by the image's uv."""
    lock = (ROOT / "requirements-dev.lock").read_text()
    exact = re.findall(r"^(?:pytest|pytest-rerunfailures|pluggy|iniconfig)==\S+", lock, re.MULTILINE)
    layers = "".join(
        (ROOT / f"images/stacks/cu130/{name}.lock").read_text()
        for name in ("megatron", "mlperf", "deepspeed", "deepspeed-source")
    )
    exact += re.findall(
        r"^(?:megatron-core|mlperf-logging|hjson|msgpack|nvidia-ml-py|py-cpuinfo|deepspeed)==\S+", layers, re.MULTILINE
    )
    assert len(exact) == 11
    for name in ("align", "evaluate", "serve"):
        locked = (ROOT / f"recipes/{name}/images/{name}-packages.lock").read_text()
        exact += re.findall(r"^[a-z0-9._-]+==[^\s\\]+", locked, re.MULTILINE)
    folder = workspace.folder("pytest", USER)
    # DeepSpeed comes as a source: it is put together with what the image has.
    settings = f"UV_SYSTEM_CERTS=1,SSL_CERT_FILE={CA_BUNDLE},DS_BUILD_OPS=0,DS_ACCELERATOR=cuda"
    inside = ["apptainer", "--silent", "exec", "--cleanenv", "--bind", f"{folder},{CA_BUNDLE}", "--env", settings]
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache", "--target", folder]
    run_as(USER, *inside, "--pwd", folder, sif, *install, *exact, cwd=folder)
    return folder


@pytest.mark.flaky(reruns=0)  # in CI each of them runs once more if it fails, not all
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem.removeprefix("test_"), marks=pytest.mark.covers(*covered(path), each=True))
        for path in GROUPS
    ],
)
def test_tasks(
    path: Path, pytest_folder: Path, lora_opencalm: BuiltImage, workspace: Workspace, request: pytest.FixtureRequest
) -> None:
    sif = request.getfixturevalue("export_sif" if path.name == "test_export.py" else "sif")
    out = workspace.folder("tasks", USER)
    tests = lora_opencalm.checkout / "tests"
    settings = f"PYTHONPATH={pytest_folder}:{tests},OMP_NUM_THREADS=1"
    inside = ["apptainer", "--silent", "exec", "--cleanenv", "--pwd", out, "--env", settings]
    inside += ["--bind", f"{lora_opencalm.checkout},{pytest_folder},{out}", sif]
    command = ["python", "-m", "pytest", "-q", "-rR", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null"]
    command += ["--durations", "5", "--rootdir", tests, lora_opencalm.checkout / path.relative_to(ROOT)]
    if os.environ.get("CI") == "true":
        command += ["--reruns", "1", "--max-suite-reruns", "2"]
    code, output = end_of(USER, *inside, *command, cwd=out)
    assert code == 0, output[-12000:]
    assert "skipped" not in output.splitlines()[-1], output[-2000:]
    print(
        *(line for line in output.splitlines() if re.match(r"RERUN |\d+ passed|[\d.]+s (call|setup)", line)), sep="\n"
    )
