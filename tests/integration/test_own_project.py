"""From nothing to a result, by the commands that `init` names: init, lock, plan, build, run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workspaces import ME, USER, Cli, NewStore, Workspace

pytestmark = pytest.mark.covers("ekiben/project", "ekiben/cli")


@pytest.mark.parametrize("user", [ME, USER])
def test_init_lock_plan_build_and_run_of_a_new_recipe(user: str, workspace: Workspace, new_store: NewStore) -> None:
    store, home, cli = new_store(user, "base", "python"), workspace.folder("project", user), Cli(workspace, user)

    def ekiben(*args: str | Path, code: int = 0) -> str:
        env = None if user == ME else {"UV_CACHE_DIR": None}  # of whoever runs the tests
        done = cli.run("--store", store, *args, cwd=home, code=code, env=env)
        return done.stdout if code == 0 else done.stderr

    ekiben("init", "mine")
    assert "requirements.txt: is not locked" in ekiben("build", "mine", code=3)
    assert "tabulate (new) → " in ekiben("lock", "mine")
    planned = [line.split()[:2] for line in ekiben("plan", "mine").splitlines()]
    assert planned == [["CACHED", "base"], ["CACHED", "python"], ["BUILD", "mine-packages"], ["BUILD", "mine"]]
    stdout = ekiben("build", "mine", "--engine", "apptainer", "--format", "sif")
    assert "tested  under apptainer" in stdout
    ran = ekiben("run", "mine", "train", "--", "--steps", "50")
    assert ran.splitlines()[-1].startswith("y = ")
    assert len((home / "results/metrics.jsonl").read_text().splitlines()) == 50
    assert (home / "results/model.json").owner() == user

    # Another package costs its own layer, and says so.
    (home / "mine/requirements.txt").write_text("tabulate\nhumanize\n")
    ekiben("lock", "mine", "--keep")
    rows = json.loads(ekiben("plan", "mine", "--json"))
    assert [(row["layer"], row["stored"]) for row in rows][1:3] == [("python", True), ("mine-packages", False)]
    assert rows[2]["reason"] == "file changed: /opt/ekiben/locks/mine-packages.lock"
