"""What the tests of the schedulers share: an image whose task is fake_task.py, and how a user submits it."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import ANY

from ekiben.run.schedulers import load
from workspaces import Cli, run_as

RECIPE = {
    "name": "fake",
    "description": "a task for tests of jobs",
    "stack": "cu130",
    "layer": "python",
    "tasks": {
        "fake": {"entrypoint": "fake_task.py", "help": "save when told", "launch": "per-gpu"},
        "look": {"entrypoint": "fake_task.py", "help": "the same as one process"},
    },
}


def write_recipe(folder: Path) -> Path:
    (folder / "entrypoints").mkdir(parents=True)
    (folder / "entrypoints/fake_task.py").write_text(Path(__file__).with_name("fake_task.py").read_text())
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    return folder


def wait_for(true: Callable[[], Any], what: str, seconds: float = 180) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"waited for too long: {what}"
        time.sleep(0.3)
    return found


@dataclass(frozen=True)
class Submitter:
    """An ordinary user in a folder of his own, with an image to submit."""

    cli: Cli
    folder: Path
    recipe: Path
    scheduler: str
    sif: Path | None = None  # by default the one beside the recipe

    def submit(self, *args: str, code: int = 0, env: dict[str, str | None] | None = None) -> str:
        """The run's name; stderr when an error was expected."""
        done = self.cli.run(
            "submit",
            self.recipe,
            "--scheduler",
            self.scheduler,
            "--sif",
            self.sif or self.recipe.parent / "fake.sif",
            *([] if code else ["--json"]),
            *args,
            *(() if "--" in args else ("--",)),
            cwd=self.folder,
            code=code,
            env=env,
        )
        return done.stderr if code else Path(json.loads(done.stdout)["run"]).name

    def status(self, run: str) -> dict[str, dict[str, Any]]:
        rows = json.loads(self.cli.run("status", run, "--json", cwd=self.folder).stdout)
        return {row["job"]: row for row in rows}

    def wait(self, run: str) -> dict[str, dict[str, Any]]:
        """Until all jobs are over."""
        over = ("done", "failed", "skipped", "cancelled", "lost")

        def look() -> dict[str, dict[str, Any]] | None:
            rows = self.status(run)
            return rows if all(row["state"] in over for row in rows.values()) else None

        rows = wait_for(look, f"the end of {run}")
        assert isinstance(rows, dict)
        return rows

    def log(self, run: str, job: str = "1-fake") -> str:
        return (self.folder / "ekiben-runs" / run / f"{job}.log").read_text()

    def wait_for_start(self, start: int, rank: int = 0, folder: str = "fake") -> dict[str, Any]:
        """Return what a process of the fake task wrote about itself, once it is there."""
        path = self.folder / folder / f"start-{start}-{rank}"
        text = wait_for(lambda: path.exists() and path.read_text(), f"{path.name} of {folder}")
        about = json.loads(text)
        assert isinstance(about, dict)
        return about


def check_scripts_by_hand(submitter: Submitter) -> None:
    """Write a run's folder, submit its script as people do, and once more after its end: two attempts of one run."""
    options = ("--scheduler", submitter.scheduler, "--sif", submitter.recipe.parent / "fake.sif", "--time", "10m")
    written = ("--dry-run", "--output", "kept", "--json")
    argv = ("submit", *options, *written, submitter.recipe, "fake", "--folder", "by-hand")
    done = submitter.cli.run(*argv, cwd=submitter.folder, env={"HF_TOKEN": "hf_secret"})
    [line] = json.loads(done.stdout)["submit"].values()
    run = str(submitter.folder / "kept")
    assert submitter.status(run)["1-fake"]["state"] == "queued"
    for attempt in (1, 2):
        run_as(
            submitter.cli.user,
            *shlex.split(line),
            cwd=submitter.folder,
            env=submitter.cli.settings({"PWD": str(submitter.folder)}),
        )
        process = submitter.wait_for_start(attempt, folder="by-hand")
        status = submitter.wait(run)["1-fake"]
        assert (status["state"], status["attempt"], process["HF_TOKEN"]) == (
            "done",
            attempt,
            ["hf_secret", None][attempt - 1],
        )
    log = (submitter.folder / "kept/1-fake.log").read_text()
    assert "attempt     2, after one that ended with exit code 0" in log
    assert not {"environment", "key"} & {path.name for path in (submitter.folder / "kept").iterdir()}


def check_no_second_start(submitter: Submitter) -> None:
    """Submit the script of a running job by hand: that ends with one sentence, and the run continues as it was."""
    run = submitter.submit("fake", "--time", "10m", "--", "--until", "2")
    submitter.wait_for_start(1)
    folder = submitter.folder / "ekiben-runs" / run
    before = submitter.status(run)["1-fake"]
    scheduler = load(submitter.scheduler)
    settings = submitter.cli.settings({"PWD": str(submitter.folder)})
    run_as(submitter.cli.user, *scheduler.SUBMIT, str(folder / "1-fake.sh"), cwd=submitter.folder, env=settings)
    refusal = f"error: 1-fake is not started, for job {before['id']} of this run has not ended: "
    wait_for(lambda: refusal in submitter.log(run), "the refusal")
    assert submitter.status(run)["1-fake"] == {**before, "detail": ANY}
    assert "attempt" not in submitter.log(run)
    assert not (submitter.folder / "fake/start-2-0").exists()
    submitter.cli.run("cancel", run, cwd=submitter.folder)


def check_shell_on_a_node(submitter: Submitter, *options: str) -> None:
    """`shell` with options of a node runs there, in the same folder, and its own variables stay out of the image."""
    sif = submitter.recipe.parent / "fake.sif"
    script = "echo ${SLURM_JOB_ID:-${JOB_ID:-none}} $PWD ${EKIBEN_LOGIN_HOST-none}; exit 7"
    argv: list[str | Path] = [*options, "--time", "10m", "--sif", sif, submitter.recipe, "sh", "-c", script]
    done = submitter.cli.run("shell", *argv, cwd=submitter.folder, code=7)
    job, folder, login_host = done.stdout.split()
    assert (job.isdigit(), folder, login_host) == (True, str(submitter.folder), "none"), done.stderr
    shown = submitter.cli.run("shell", "--dry-run", *argv, cwd=submitter.folder).stdout
    assert shown.startswith(("+ srun ", "+ qrsh "))


def of_run(folder: Path, word: str) -> list[int]:
    """Processes of the ordinary user whose command line holds ``folder`` and ``word``."""
    found = []
    for process_dir in Path("/proc").iterdir():
        if process_dir.name.isdigit():
            try:
                line = (process_dir / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line and word in line and process_dir.name != str(os.getpid()):
                found.append(int(process_dir.name))
    return found
