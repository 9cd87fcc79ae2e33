"""One file is enough: modules are found in their folder or as entry points, and each fits its Protocol."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast, get_type_hints

import pytest

from ekiben import executors
from ekiben.core import plugins
from ekiben.core.errors import UsageError
from ekiben.run import schedulers
from ekiben.run.contract import passes
from ekiben.run.site import Scheduler as SiteScheduler
from support.programs import write_program
from support.sample_recipe import RunCli

EXECUTOR = """\
PREFERENCE = 99
def unavailable(): return "it is a test"
def execute(job): raise NotImplementedError
def try_run(job): raise NotImplementedError
def remove_cached_images(): return 0
def remove_abandoned(*, dry_run=False): return []
"""
RUNTIME = """\
def load(config, layers, name, scratch): raise NotImplementedError
def image_id(name): return ""
def try_image(image_id, command, log): return 0
def run_argv(gpu): return ["tester", "run"]
"""
SCHEDULER = """\
from ekiben.run.schedulers import Limits
from ekiben.run.schedulers import JobScriptHooks
from support.programs import write_program
TITLE, PREFERENCE, PREFIX, VARIABLES = "Tester", 99, "#TEST ", ("TESTER_", "TESTID")
LOCAL_FOLDER, GPU_OPTION = "TESTER_TMP", None
JOB_ID = r"[0-9]+"
HOOKS = JobScriptHooks(job='"$TESTID"', index='"0"', nodes="hostname", requeue="false", start_remote="false")
def unavailable(): return "it is a test"
OPTIONS = {}
def requested_gpus(args): return 0
def resource_args(nodes, gpus, cpus, memory_mib): return [f"--nodes={nodes}"]
def example(line, gpu): return f"tsub {line}"
def queue(environment, gpus): return None
def directives(request): return list(request.args)
def limits(args): return Limits(where="here")
def submit(script, args, after): return "1"
def jobs(ids): return {}
def ended(ids): return {}
def element_id(id, index): return f"{id}.{index}"
def cancel(ids): return None
"""


def members(protocol: type[Any]) -> tuple[set[str], dict[str, Callable[..., Any]]]:
    """Attributes and functions that a Protocol asks for."""
    functions = {
        name: cast(Callable[..., Any], found)
        for base in reversed(protocol.__mro__[:-1])
        for name, found in vars(base).items()
        if inspect.isfunction(found) and not name.startswith("_")
    }
    return set(get_type_hints(protocol)) - set(functions), functions


def assert_fits(module: Any, protocol: type[Any]) -> None:
    attributes, functions = members(protocol)
    assert sorted(name for name in (*attributes, *functions) if not hasattr(module, name)) == []
    for name, wanted in functions.items():
        expected = [word for word in inspect.signature(wanted).parameters if word != "self"]
        assert list(inspect.signature(getattr(module, name)).parameters) == expected, name


@pytest.mark.parametrize("name", executors.names())
def test_every_executor_fits_the_protocol(name: str) -> None:
    module = executors.load(name)
    assert_fits(module, executors.Executor)
    assert isinstance(module.PREFERENCE, int)
    if name in executors.runtimes():
        assert_fits(module, executors.Runtime)


@pytest.mark.parametrize("name", schedulers.names())
def test_every_scheduler_fits_the_protocol(name: str) -> None:
    module = schedulers.load(name)
    assert_fits(module, schedulers.Scheduler)
    assert isinstance(module.HOOKS, schedulers.JobScriptHooks)
    assert bool(module.HOOKS.start_all) != bool(module.HOOKS.start_remote)
    assert module.PREFIX.startswith("#")


def test_checker_finds_a_module_that_lacks_the_protocol() -> None:
    module = ModuleType("half")
    vars(module).update(PREFERENCE=1, unavailable=lambda: None, execute=lambda job: None, try_run=lambda wrong: None)
    with pytest.raises(AssertionError, match="remove_abandoned"):
        assert_fits(module, executors.Executor)
    vars(module).update(remove_cached_images=lambda: 0, remove_abandoned=lambda *, dry_run=False: [])
    with pytest.raises(AssertionError, match="try_run"):
        assert_fits(module, executors.Executor)


def test_preference_order_of_executors() -> None:
    preferred = [name for name, _ in executors.by_preference()]
    assert preferred == ["apptainer", "buildah", "podman", "docker"]
    numbers = [module.PREFERENCE for _, module in executors.by_preference()]
    assert numbers == sorted(set(numbers))


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules are executors and schedulers, too."""
    for package, text in ((executors, EXECUTOR + RUNTIME), (schedulers, SCHEDULER)):
        folder = tmp_path / package.__name__.rpartition(".")[2]
        folder.mkdir()
        (folder / "tester.py").write_text(text)
        (folder / "_helper.py").write_text("raise AssertionError\n")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    yield tmp_path
    for package in (executors, schedulers):
        sys.modules.pop(f"{package.__name__}.tester", None)
        vars(package).pop("tester", None)


@pytest.mark.usefixtures("offered")
def test_a_file_in_the_folder_is_an_executor() -> None:
    assert "tester" in executors.names()
    assert "_helper" not in executors.names()
    assert executors.by_preference()[-1][0] == "tester"
    assert "tester" in executors.runtimes()
    executors.check_name("tester")
    with pytest.raises(Exception, match="engine tester cannot be used here: it is a test"):
        executors.choose("tester")


@pytest.mark.usefixtures("offered")
def test_a_file_in_the_folder_is_a_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tester" in schedulers.names()
    assert schedulers.load("tester").TITLE == "Tester"
    assert SiteScheduler(kind="tester").kind == "tester"
    assert "TESTER_.*" in passes().split("|")
    assert "TESTID" in passes().split("|")
    assert schedulers.local_folders()[-2:] == ("TESTER_TMP", "TMPDIR")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Exception, match="tester: it is a test"):
        schedulers.choose()


@pytest.mark.usefixtures("offered")
def test_added_executor_is_a_choice_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from ekiben.cli import root

    assert "|tester" in CliRunner().invoke(root, ["image", "--help"]).output
    assert "|tester" in CliRunner().invoke(root, ["submit", "--help"]).output
    wrong = CliRunner().invoke(root, ["image", "hello", "--engine", "tseter"]).output
    assert "'tester'" in wrong


def test_unknown_plugin_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"--engine: no engine 'podmen'\. Did you mean 'podman'\?"):
        executors.load("podmen")
    with pytest.raises(UsageError, match=r"--scheduler: no scheduler 'slrum'\. Did you mean 'slurm'\?"):
        schedulers.load("slrum")


def distribution(folder: Path, entry: str) -> None:
    """A distribution of one's own, as an installer leaves it."""
    about = folder / "lab_engines-1.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-engines\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text(f"[ekiben.executors]\n{entry}\n")
    (folder / "lab_engine.py").write_text(EXECUTOR)


def test_an_entry_point_offers_an_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "lab = lab_engine")
    monkeypatch.syspath_prepend(tmp_path)
    assert "lab" in executors.names()
    assert_fits(executors.load("lab"), executors.Executor)
    assert [name for name, _ in executors.by_preference()][-1] == "lab"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("lab = lab_engine.nothing", "lab, which lab-engines 1.2 offers as ekiben.executors, cannot be imported: "),
        ("lab = lab_engine:PREFERENCE", "lab, offered as ekiben.executors, is 99; it should be a module"),
    ],
)
def test_entry_point_without_module_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, message: str
) -> None:
    distribution(tmp_path, entry)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as error:
        executors.load("lab")
    assert message in str(error.value)


def test_entry_point_does_not_replace_a_module_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "buildah = lab_engine")
    monkeypatch.syspath_prepend(tmp_path)
    assert executors.load("buildah").PREFERENCE != 99
    assert executors.names().count("buildah") == 1


def test_names_are_found_without_an_import() -> None:
    assert "abc" in plugins.names("collections", "no.such.group")


def test_run_accepts_the_runtimes_of_the_folder(run_cli: RunCli, tmp_path: Path) -> None:
    stderr = run_cli("run", "hello", "--runtime", "podmen", code=2).stderr
    assert "--runtime: no runtime 'podmen'. Did you mean 'podman'?" in stderr
    program = write_program(tmp_path / "bin" / "podman", "#!/bin/sh\necho an-id\n")
    shown = run_cli(
        "run",
        "hello",
        "--cpu",
        "--dry-run",
        "--runtime",
        "podman",
        "hello",
        env={"PATH": f"{program.parent}:{os.environ['PATH']}"},
    ).stdout
    assert shown.startswith("+ podman --log-level error ")
    assert " run --rm " in shown
    assert shown.endswith(" sha256:an-id hello\n")


class Fits(Protocol):
    """What ``members`` is tried with."""

    NAME: str

    def do(self, this: str) -> None: ...


def test_members_are_attributes_and_functions() -> None:
    attributes, functions = members(Fits)
    assert attributes == {"NAME"}
    assert set(functions) == {"do"}


def test_entry_points_are_read_once_for_each_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reads: list[str] = []
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: reads.append(group) or ())
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(3):
        schedulers.by_preference()
    assert reads == [schedulers.GROUP]
    monkeypatch.syspath_prepend(tmp_path / "more")
    schedulers.names()
    assert reads == [schedulers.GROUP] * 2
