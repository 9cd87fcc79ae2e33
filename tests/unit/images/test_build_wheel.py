"""images/scripts/build_wheel.py: the memory that one compile job needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.image_scripts import load


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_largest_job_is_the_largest_of_ninja_s_children(tmp_path: Path) -> None:
    shutil.copy(Path("/bin/sh").resolve(), tmp_path / "ninja")
    (tmp_path / "job.py").write_text(
        "import sys, time\ndata = bytearray(int(sys.argv[1]) << 20)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    for size in (30, 90):
        (tmp_path / f"job{size}.sh").write_text(f"'{sys.executable}' '{tmp_path}/job.py' {size}\ntrue\n")
    (tmp_path / "build.sh").write_text("".join(f"sh '{tmp_path}/job{size}.sh' &\n" for size in (30, 90)) + "wait\n")
    outer = subprocess.Popen(
        [tmp_path / "ninja", tmp_path / "build.sh"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert outer.stdout is not None
        assert [outer.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
        deadline = time.monotonic() + 60
        while not (found := load("build_wheel").largest_job(os.getpid())) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert 90 << 20 <= found < 119 << 20
    finally:
        os.killpg(outer.pid, 9)
        outer.communicate()
