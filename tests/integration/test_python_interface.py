"""`import ekiben`: plan, build, open; programs and instances in a real SIF; and the same SIF through spython alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ekiben
from ekiben.api import ExecutionError
from ekiben.core.errors import EngineError, StoreError, UsageError
from ekiben.run.containers import Runtime
from workspaces import ME, ROOT, NewStore, Workspace

pytestmark = pytest.mark.covers("ekiben/api.py", "ekiben/run", "ekiben/cli")

NOISY = "import sys\nfor number in range(4000): print('out', number); print('e' * 100, file=sys.stderr)\nsys.exit(7)"


@pytest.fixture
def sif(hello: Path, workspace: Workspace) -> Path:
    return workspace.path / "hello.sif"


@pytest.fixture
def image(sif: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ekiben.Image:
    monkeypatch.chdir(tmp_path)
    return ekiben.open(sif)


def instances() -> list[str]:
    listing = subprocess.check_output(["apptainer", "instance", "list", "--json"])
    return [item["instance"] for item in json.loads(listing)["instances"]]


# ------------------------------------------------------------------------------------------------------- plan and build


def test_import_loads_none_of_the_interface_until_it_is_used() -> None:
    script = (
        "import sys, ekiben; before = {*sys.modules}; ekiben.plan; "
        "print('ekiben.api' in before, 'click' in before, 'ekiben.api' in sys.modules, 'spython' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True) == "False False True False\n"


def test_build_is_the_function_whether_the_package_of_its_name_was_imported_or_not() -> None:
    script = (
        "import ekiben, inspect; print(callable(ekiben.build)); import ekiben.builder.build;"
        " print(callable(ekiben.build))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True) == "True\nTrue\n"
    script = "import ekiben, ekiben.builder.build; ekiben.build('no-such-recipe')"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "UsageError: no recipe 'no-such-recipe'" in done.stderr


def test_plan_then_build_then_run(new_store: NewStore, tmp_path: Path) -> None:
    store = new_store(ME, "base", "python")
    assert [(layer.name, layer.is_stored) for layer in ekiben.plan("hello", store=store)] == [
        ("base", True),
        ("python", True),
        ("hello", False),
    ]
    made = ekiben.build("hello", output=tmp_path / "here.sif", store=store, engine="apptainer")
    assert made.path == tmp_path / "here.sif"
    assert all(layer.is_stored for layer in ekiben.plan("hello", store=store))
    assert json.loads(made.execute(["hello", "--json"], check=True).stdout)["cpus"] > 0


def test_open_reads_the_image_metadata(sif: Path, hello: Path) -> None:
    with ekiben.open(sif) as image:
        assert image.tasks == {"hello": "say who and where this container runs, and what it may use"}
        assert (image.metadata.recipe, image.metadata.stack) == ("hello", "cu130")
        planned = {layer.name: layer.cache_key for layer in ekiben.plan("hello", store=hello)}
        assert image.metadata.layers == {name: planned[name] for name in ("base", "python")}


def test_open_takes_the_name_of_a_local_recipe(sif: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=r"hello\.sif is not here"):
        ekiben.open("hello")
    (tmp_path / "hello.sif").symlink_to(sif)
    assert ekiben.open("hello").metadata.recipe == "hello"
    (tmp_path / "text.sif").write_text("text\n")
    with pytest.raises(StoreError, match="not a SIF file"):
        ekiben.open("text.sif")


# ---------------------------------------------------------------------------- what spython has wrong, and is right here


def test_long_output_on_both_streams_neither_hangs_nor_loses_the_exit_code(image: ekiben.Image) -> None:
    result = image.execute(["python", "-c", NOISY])
    assert result.exit_code == 7
    assert result.stdout.splitlines() == [f"out {number}" for number in range(4000)]
    assert len(result.stderr) == 4000 * 101
    lines: list[str] = []
    assert image.execute(["python", "-c", NOISY], on_line=lines.append).exit_code == 7
    assert len(lines) == 8000


def test_execute_returns_exit_code_stdout_and_stderr(image: ekiben.Image) -> None:
    assert image.execute(["sh", "-c", "echo error >&2"]) == ekiben.Result(0, "", "error\n")
    with pytest.raises(ExecutionError, match=r"(?s)exit code 3: sh -c .*why") as caught:
        image.execute(["sh", "-c", "echo why >&2; exit 3"], check=True)
    assert caught.value.result.exit_code == 3


def test_empty_arguments_and_blanks_are_passed(image: ekiben.Image) -> None:
    stdout = image.execute(["python", "-c", "import sys; print(sys.argv[1:])", "", "a b", "$HOME"]).stdout
    assert stdout == "['', 'a b', '$HOME']\n"


def test_installed_runtime_is_used(sif: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no `singularity`, and where it has another name."""
    program = shutil.which("apptainer")
    assert program is not None
    bare = tmp_path / "bin"
    bare.mkdir()
    (bare / "apptainer").symlink_to(program)
    monkeypatch.setenv("PATH", f"{bare}:/usr/sbin:/sbin")
    assert shutil.which("singularity") is None
    assert Runtime().program == str(bare / "apptainer")
    monkeypatch.setenv("PATH", f"{bare}:/usr/sbin:/usr/bin:/sbin:/bin")
    assert ekiben.open(sif).execute(["echo", "here"]).stdout == "here\n"
    assert Runtime(program).command(sif, ["true"], gpu=True)[:4] == [program, "--quiet", "exec", "--nv"]


def test_a_missing_folder_is_an_error_and_not_the_end_of_the_process(image: ekiben.Image, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing"):
        image.execute(["true"], binds=[tmp_path / "missing"])
    with pytest.raises(UsageError, match="missing"):
        Runtime().command(image.path, ["true"], gpu=False, binds=[f"{tmp_path}/missing:/data"])
    with pytest.raises(UsageError, match="argv is empty"):
        image.execute([])


def test_opening_another_file_is_an_error(image: ekiben.Image, tmp_path: Path) -> None:
    assert image.inspect().labels["org.opencontainers.image.title"] == "hello"
    assert "Bootstrap: debootstrap" in image.inspect().definition
    (tmp_path / "text.sif").write_text("text\n")
    with pytest.raises(EngineError, match=r"text\.sif cannot be inspected"):
        Runtime().inspect(tmp_path / "text.sif")


def test_files_and_variables_of_the_host_are_as_for_a_job(
    image: ekiben.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/the/host")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    script = (
        "import os; print(os.environ.get('PYTHONPATH'), os.environ['NCCL_DEBUG'], os.environ['MINE']); open('made',"
        " 'w')"
    )
    assert image.execute(["python", "-c", script], environment={"MINE": "a b"}, check=True).stdout == "None INFO a b\n"
    assert (tmp_path / "made").is_file()


def test_an_instance_starts_every_time(image: ekiben.Image) -> None:
    """Apptainer's own start script loses one start in ten, and more on a busy machine."""
    for number in range(10):
        name = f"ekiben-alone-{number}"
        subprocess.run(["apptainer", "instance", "start", image.path, name], check=True)
        assert name in instances()
        subprocess.run(["apptainer", "instance", "stop", name], check=True)
    with image.instance() as running:
        assert running.name in instances()


def test_an_instance_keeps_its_processes_between_programs_and_is_stopped(image: ekiben.Image) -> None:
    with image.instance() as running:
        assert running.name in instances()
        assert running.pid > 0
        running.execute(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo started"])
        listed = running.execute(["sh", "-c", "cat /proc/[0-9]*/comm"], check=True).stdout.split()
        assert "sleep" in listed
        assert running.execute(["sh", "-c", "exit 5"]).exit_code == 5
        assert [type(text) for text in running.logs] == [str, str]
    assert running.name not in instances()


def test_an_instance_that_cannot_start_raises_with_the_runtime_s_words(image: ekiben.Image, tmp_path: Path) -> None:
    with (
        image.instance("ekiben-twice"),
        pytest.raises(EngineError, match="ekiben-twice"),
        image.instance("ekiben-twice"),
    ):
        pass
    assert "ekiben-twice" not in instances()
    (tmp_path / "text.sif").write_text("text\n")
    with pytest.raises(EngineError, match=r"text\.sif"):
        Runtime().start(tmp_path / "text.sif")


@pytest.mark.parametrize("name", ["--writable", "", "a b", "../up", "..", "a*", "a\n", "é", "x" * 129])
def test_an_instances_name_is_no_option_path_or_pattern(image: ekiben.Image, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be an instance's name: use letters"), image.instance(name):
        pass
    assert name not in instances()


# ------------------------------------------------------------------------------------------------------ spython alone

PLAIN = """
import json, sys, time
from spython.main import Client
assert "ekiben" not in sys.modules
sif = sys.argv[1]
Client.quiet = True
print(json.dumps({
    "version": Client.version(),
    "hello": Client.execute(sif, ["hello", "--json"], options=["--cleanenv"]),
    "labels": Client.inspect(sif)["attributes"]["labels"],
    "failed": Client.execute(sif, ["sh", "-c", "exit 3"], return_result=True)["return_code"],
}))
for attempt in range(16):  # Apptainer loses a start now and then: see ekiben/run/containers.py
    instance = Client.instance(sif, name="plain-spython")
    if getattr(instance, "pid", None):
        break
    time.sleep(0.1 * attempt)
print(json.dumps(Client.execute(instance, ["echo", "inside"])))
instance.stop()
"""


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, str]:
    """An environment in which Apptainer is also called `singularity`, the one name that spython knows."""
    program = shutil.which("apptainer")
    assert program is not None
    (tmp_path / "names").mkdir()
    (tmp_path / "names/singularity").symlink_to(program)
    return {**os.environ, "PATH": f"{tmp_path / 'names'}:{os.environ['PATH']}"}


@pytest.mark.guard
def test_a_sif_is_one_for_spython_without_ekiben(sif: Path, tmp_path: Path, plain: dict[str, str]) -> None:
    argv = [sys.executable, "-I", "-c", PLAIN, sif]
    done = subprocess.run(argv, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines() if line[:1] in '{"[')
    assert json.loads(first["hello"])["cpus"] > 0
    assert first["labels"]["org.opencontainers.image.title"] == "hello"
    assert first["failed"] == 3
    assert "inside" in second


def test_the_hang_of_spython_s_stream_is_real(sif: Path, tmp_path: Path, plain: dict[str, str]) -> None:
    """When this fails, spython was mended, and ekiben/run/containers.py can do with less."""
    script = (
        "import sys\nfrom spython.main import Client\n"
        "for line in Client.execute(sys.argv[1], ['python', '-c', sys.argv[2]], stream=True): pass\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", script, str(sif), NOISY],
        cwd=tmp_path,
        env=plain,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    began = time.monotonic()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=15)
    finally:
        os.killpg(child.pid, 9)
        child.wait()
    assert time.monotonic() - began < 60
