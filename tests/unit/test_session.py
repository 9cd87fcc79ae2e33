"""That the tests' own safeguards hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ekiben.core.errors import StoreError
from ekiben.store import Store, default_root
from support import session
from support.sample_recipe import RunCli, SampleRecipe


def test_the_default_store_cannot_be_touched(out_of_reach: Path, sample: SampleRecipe, run_cli: RunCli) -> None:
    assert default_root() == out_of_reach
    with pytest.raises(StoreError, match="cannot be written"):
        Store(default_root()).open_for_writing()
    stderr = run_cli("image", sample.path, "--format", "sif", "--no-verify", code=6).stderr
    assert str(out_of_reach) in stderr
    assert "--store" in stderr


ROOT = Path(__file__).resolve().parents[2]
TESTS = """\
import pytest

def test_skips():
    pytest.skip("no moon tonight")

@pytest.mark.gpu
def test_gpu():
    pytest.skip("no GPU")

@pytest.mark.xfail(reason="known")
def test_xfail():
    assert False
"""
MODULE = "import pytest\npytest.skip('no sun', allow_module_level=True)\n"


def inner(tmp_path: Path, *args: str, ci: str) -> tuple[int, str]:
    for name in ("support/session.py", "support/selection.py"):
        source = ROOT / "tests" / name
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source.read_text())
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "test_b.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\npythonpath = .\naddopts = -p support.session\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", *args],
        cwd=tmp_path,
        # Without the plugins of this environment, which take a second to import.
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_skip_is_allowed_at_home_and_gpu_tests_wait_to_be_asked_for(tmp_path: Path) -> None:
    code, output = inner(tmp_path, ci="")
    assert code == 0
    assert "2 skipped, 1 deselected, 1 xfailed" in output


def test_a_skip_is_a_failure_in_ci_with_its_reason(tmp_path: Path) -> None:
    code, output = inner(tmp_path, "test_a.py", ci="true")
    assert code == 1
    assert "1 failed, 1 deselected, 1 xfailed" in output
    assert "no moon tonight" in output
    code, output = inner(tmp_path, "test_b.py", ci="true")
    assert code != 0
    assert "no sun" in output


def test_a_gpu_test_may_skip_in_ci_too(tmp_path: Path) -> None:
    code, output = inner(tmp_path, "-m", "gpu", "test_a.py", ci="true")
    assert code == 0
    assert "1 skipped" in output


def test_the_files_that_share_an_engine_exist() -> None:
    names = {name for files in session._SERIAL for name in files}
    files = [*(ROOT / "tests/integration").glob("test_*.py"), *(ROOT / "qa").rglob("test_*.py")]
    assert {path.stem for path in files} >= names


def test_files_that_share_an_engine_run_in_one_process(tmp_path: Path) -> None:
    for name in ("test_podman", "test_render", "test_crash_recovery"):
        (tmp_path / f"{name}.py").write_text("import os\n\ndef test_process():\n    print(f'process {os.getpid()}')\n")
    _, output = inner(tmp_path, "-rP", "-p", "xdist", "-n", "2", "--dist", "loadfile", ci="")
    processes = [line for line in output.splitlines() if line.startswith("process ")]
    assert len(processes) == 3
    assert len(set(processes)) == 1


def test_pytest_in_a_test_leaves_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setenv("EKIBEN_TEST_RUN", str(folder))
    inner(tmp_path, "test_a.py", ci="")
    assert folder.is_dir()
