"""What the tests of the schedulers share: an image whose task is a drill, and how a user submits it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooms import Cli

RECIPE = {
    "name": "drill", "description": "a task for tests of jobs", "stack": "cu130", "layer": "python",
    "tasks": {
        "drill": {"entrypoint": "drill.py", "help": "save when told", "runs_on": "gpus"},
        "look": {"entrypoint": "drill.py", "help": "the same as one process"},
    },
}  # fmt: skip


def write_recipe(folder: Path) -> Path:
    (folder / "entrypoints").mkdir(parents=True)
    (folder / "entrypoints/drill.py").write_text(Path(__file__).with_name("drill.py").read_text())
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

    def submit(self, *words: str, code: int = 0, env: dict[str, str | None] | None = None) -> str:
        """The run's name; stderr when an error was expected."""
        done = self.cli.run("submit", self.recipe, "--scheduler", self.scheduler, "--sif", self.recipe.parent / "drill.sif",
                            *([] if code else ["--json"]), *words, cwd=self.folder, code=code, env=env)  # fmt: skip
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

    def log(self, run: str, job: str = "1-drill") -> str:
        return (self.folder / "ekiben-runs" / run / f"{job}.log").read_text()

    def begun(self, start: int, rank: int = 0, folder: str = "drill") -> dict[str, Any]:
        """What a process of the drill said about itself, once it has."""
        path = self.folder / folder / f"start-{start}-{rank}"
        text = wait_for(lambda: path.exists() and path.read_text(), f"{path.name} of {folder}")
        about = json.loads(text)
        assert isinstance(about, dict)
        return about


def of_run(folder: Path, word: str) -> list[int]:
    """Processes of the ordinary user whose command line holds ``folder`` and ``word``."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line and word in line and place.name != str(os.getpid()):
                found.append(int(place.name))
    return found
