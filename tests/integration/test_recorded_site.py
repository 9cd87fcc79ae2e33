"""A site profile recorded inside a batch job of a real Slurm (tests/services.sh), and asked from outside."""

from __future__ import annotations

import json
import os
import shlex
import subprocess

import pytest
import yaml

from workspaces import USER, Cli, Workspace, as_user, need

pytestmark = pytest.mark.covers("ekiben/run", "ekiben/doctor", "sites")


def test_site_profile_recorded_in_a_slurm_job(workspace: Workspace) -> None:
    need("sbatch")
    assert subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0, "tests/services.sh start slurm"
    here, cli = workspace.folder("record", USER), Cli(workspace, USER)
    (here / "job.sh").write_text(f"#!/bin/sh\nexec {shlex.join(cli.argv('doctor', '--record', '-o', 'there.yaml'))}\n")
    argv = ["sbatch", "--wait", "--time=5", "--mem=1000", "--output=job.log", "job.sh"]
    done = subprocess.run(
        argv, cwd=here, capture_output=True, text=True, check=False, timeout=240, env=cli.settings(), **as_user(USER)
    )
    assert done.returncode == 0, done.stderr + (here / "job.log").read_text()
    about = yaml.safe_load((here / "there.yaml").read_text())
    assert about["scheduler"]["kind"] == "slurm"
    [(partition, resource)] = about["scheduler"]["resources"].items()
    assert resource["request"] == [f"--partition={partition}", "--nodes={nodes}"]
    assert resource["cores"] <= (os.cpu_count() or 1)
    assert about["runtimes"][0]["kind"] == "apptainer"
    [asked] = json.loads(
        cli.run("--store", here / "store", "doctor", "--site", here / "there.yaml", "hello", "--json").stdout
    )
    assert asked["verdict"].startswith("will run")
