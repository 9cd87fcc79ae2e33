"""What tests share: a small recipe of one's own, the command line, and the rules of support/session.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.sample_recipe import GROUND, ROOF, WALLS, Done, RunCli, SampleRecipe
from support.session import (  # noqa: F401
    ROOT,
    out_of_reach,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_ignore_collect,
    pytest_make_collect_report,
    pytest_runtest_makereport,
)

# Files of tests/integration that one process runs, in turn. The first: `prune --engines` removes the layers that
# an engine keeps for other builds, and tests count an engine's containers. The second: Slurm's nodes are few.
_SERIAL = (
    {"test_awkward_paths", "test_build_stages", "test_busybox_base", "test_crash_recovery", "test_executor_parity",
     "test_host_limits", "test_layer_content", "test_podman", "test_random_layers", "test_render",
     "test_rootless_overlay", "test_user_recipes"},
    {"test_lora_opencalm", "test_recorded_site", "test_slurm"},
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run files that share a thing of the machine in one process, in turn.

    A marker xdist_group would say the same, and does nothing under pytest 9.2: pytest-xdist 3.8 writes to an attribute that
    is no longer read.
    """
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((str(sorted(files)) for files in _SERIAL if Path(file).stem in files), file)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


# -------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def run_cli(tmp_path: Path) -> RunCli:
    """build.py as a user starts it, in ``tmp_path``; stdout and stderr apart. ``code`` is the exit code expected."""

    def run(*args: str | Path, code: int = 0, env: Mapping[str, str] | None = None, root: Path = ROOT) -> Done:
        done = subprocess.run(
            [sys.executable, str(root / "build.py"), *map(str, args)],
            cwd=tmp_path, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{args}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    return run


# -------------------------------------------------------------------------------------------------------- a small recipe


@pytest.fixture
def sample(tmp_path: Path) -> SampleRecipe:
    made = SampleRecipe(tmp_path / "own")
    made.recipe()
    made.stack()
    made.write("images/ground.def", GROUND)
    made.write("images/walls.def", WALLS)
    made.write("images/roof.def", ROOF)
    made.write("files/tool.sh", "#!/bin/sh\necho tool\n", 0o755)
    made.write("files/data.txt", "data\n")
    made.write("files/tree/a.txt", "a\n")
    made.write("files/tree/sub/b.txt", "b\n")
    made.write("entrypoints/greet.py", "print('hello')\n")
    made.write("configs/greet.yaml", "name: you\n")
    return made


@pytest.fixture
def files_only(sample: SampleRecipe) -> SampleRecipe:
    """The same without a %post: what needs no engine. ground ← roof."""
    sample.replace("images/roof.def", "walls.sif", "ground.sif")
    (sample.path / "images/walls.def").unlink()
    sample.stack(arguments={})
    return sample
