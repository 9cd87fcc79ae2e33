"""One run of the benchmark: its folders, its commands, its edits, and the measurements so far."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import yaml

from bench.clock import About, Command, Failed, Timing, measure
from bench.peers import Apptainer, Buildah, Docker, Recipe
from bench.report import Facts

HERE = Path(__file__).resolve().parent
PROJECT_ROOT = HERE.parent
PYTHON = PROJECT_ROOT / ".venv/bin/python"
NAME, SECOND = "ekiben-bench", "ekiben-bench-two"


class Bench:
    """The folders of one run, and the measurements so far. ``slow``: with the cases that take minutes."""

    def __init__(self, scratch: Path, recipe: str, runs: int, slow: bool) -> None:
        self.scratch, self.runs, self.slow = scratch, runs, slow
        self.several = min(runs, 3)  # of what takes minutes
        self.log, self.sif = scratch / "log.txt", scratch / "out" / f"{NAME}.sif"
        self.checkout, self.store = scratch / "checkout", scratch / "ekiben" / "store"
        self.timings: list[Timing] = []
        self.failed: dict[str, str] = {}
        self.facts = Facts()
        self.original = recipe
        self._edits = 0

    # -- preparing ----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the checkout's copy, the downloads, the base and the rendered folders.

        Of these, only the base counts as a peer's time.
        """
        (self.scratch / "out").mkdir(parents=True)
        self._copy_checkout()
        self.recipe = self._recipe()
        self.downloads = self.store.parent / ("cache" if os.geteuid() else "cache-root")
        self._copy_downloads()
        self.base = self.scratch / "root.tar"
        self.record("base", "mmdebstrap", [self._mmdebstrap()], runs=self.several)
        for name, target in (("docker", "dockerfile"), ("buildah", "dockerfile"), ("apptainer", "def")):
            self.run_untimed(self.ekiben("render", NAME, "--to", target, "-o", str(self.scratch / name)))
        self.run_untimed(self.ekiben("render", SECOND, "--to", "dockerfile", "-o", str(self.scratch / "docker-two")))
        self.docker = Docker(self.scratch / "docker", self.recipe, self.base)
        self.docker_two = Docker(self.scratch / "docker-two", replace(self.recipe, name=SECOND), self.base)
        self.buildah = Buildah(self.scratch / "buildah", self.recipe, self.base, self.downloads)
        self.apptainer = Apptainer(self.scratch / "apptainer", self.recipe, self.base)

    def own_downloads(self) -> None:
        """Copy the downloads for Apptainer's user, once: uv writes locks into its cache."""
        if not self.apptainer.downloads.exists():
            subprocess.run(["cp", "-a", "--reflink=auto", self.downloads, self.apptainer.downloads], check=True)
            for command in self.apptainer.prepare():
                self.run_untimed(command)

    def _copy_checkout(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=PROJECT_ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if (PROJECT_ROOT / name).is_file():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(PROJECT_ROOT / name, self.checkout / name)
        for name in (NAME, SECOND):
            folder = self.checkout / "recipes" / name
            shutil.copytree(self.checkout / "recipes" / self.original, folder)
            text = (folder / "recipe.yaml").read_text()
            lines = [f"name: {name}" if line.startswith("name:") else line for line in text.splitlines()]
            (folder / "recipe.yaml").write_text("\n".join(lines) + "\n")

    def _recipe(self) -> Recipe:
        out = self.run_untimed(self.ekiben("plan", NAME, "--json"))
        middle = [row["layer"] for row in json.loads(out) if row["kind"] == "post"][-1]
        tasks = yaml.safe_load((self.checkout / "recipes" / NAME / "recipe.yaml").read_text())["tasks"]
        return Recipe(name=NAME, middle=middle, entrypoint=next(iter(tasks.values()))["entrypoint"])

    def _copy_downloads(self) -> None:
        """Link the user's own downloads; where there are none, fetch them with a build that is not timed."""
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        own = Path(root).expanduser() / "ekiben" / self.downloads.name
        self.downloads.parent.mkdir(parents=True)
        if own.is_dir():
            subprocess.run(["cp", "-al", own, self.downloads], check=True)
            return
        self.run_untimed(self.image("--format", "oci", "-o", str(self.scratch / "out" / "warm.tar")))
        (self.scratch / "out" / "warm.tar").unlink()
        shutil.rmtree(self.store)

    def _mmdebstrap(self) -> Command:
        plan = json.loads(self.run_untimed(self.ekiben("plan", NAME, "--json")))[0]["inputs"]
        include = f"--include={','.join(plan['source']['include'].split())}"
        argv = ["mmdebstrap", "--variant=minbase", include, plan["source"]["osversion"], str(self.base)]
        return Command(argv=argv, cwd=self.scratch, env={"SOURCE_DATE_EPOCH": str(plan["epoch"])})

    # -- commands -----------------------------------------------------------------------------------------------

    def ekiben(self, *arguments: str) -> Command:
        return Command(
            argv=[str(PYTHON), "build.py", *arguments], cwd=self.checkout, env={"EKIBEN_STORE": str(self.store)}
        )

    def image(self, *arguments: str, name: str = NAME) -> Command:
        return self.ekiben("image", name, "--no-verify", "--json", *arguments)

    def make_tested(self, *arguments: str) -> Command:
        return self.ekiben("image", NAME, "--json", *arguments)

    def recipe_test(self) -> Command:
        """Return the command that runs the recipe's own test in the SIF, and none of its layers' tests."""
        script = f"exec /opt/ekiben/tests/*-{NAME}.sh"
        options = ["--quiet", "exec", "--cleanenv", "--contain", "--no-home", str(self.sif)]
        return Command(argv=["apptainer", *options, "/bin/sh", "-c", script], cwd=self.scratch)

    def remove_built(self) -> None:
        """Remove what was built: a few large files, so this does not slow what comes after as an unpacked image
        would.
        """
        shutil.rmtree(self.store, ignore_errors=True)
        self.sif.unlink(missing_ok=True)

    def make_sif(self) -> Command:
        return self.image("--format", "sif", "-o", str(self.sif))

    def run_untimed(self, command: Command) -> str:
        return measure("", "", [command], self.log)[1]

    def record(
        self,
        case: str,
        who: str,
        commands: list[Command],
        *,
        runs: int = 1,
        before: Callable[[], object] = lambda: None,
        base: float | None = None,
    ) -> str:
        """Time ``commands`` and keep the timing. ``base``: seconds of a base layer that they are given.

        Returns: the last stdout. Raises: Failed when Ekiben fails; a peer's failure goes into the results.
        """
        load = os.getloadavg()[0]
        try:
            timing, out = measure(case, who, commands, self.log, runs=runs, before=before)
        except Failed as error:
            if who.startswith("ekiben"):
                raise
            self.failed[f"{case}: {who}"] = self.cleaned(str(error))
            print(f"  {case:<10} {who:<34} failed: {str(error).splitlines()[0]}", flush=True)
            return ""
        about: About = {} if base is None else {"base": base}
        about["load"] = round(load, 2)
        self.timings.append(replace(timing, about=about, commands=[self.cleaned(line) for line in timing.commands]))
        free = shutil.disk_usage(self.scratch).free / 1e9
        print(f"  {case:<10} {who:<34} {timing.median:9.2f} s  {timing.seconds}  ({free:.0f} GB free)", flush=True)
        return out

    def cleaned(self, text: str) -> str:
        """Return ``text`` without this machine's paths."""
        cleaned = text.replace(str(self.scratch), "$SCRATCH").replace(str(PYTHON), ".venv/bin/python")
        return cleaned.replace(str(PROJECT_ROOT), ".")

    # -- edits --------------------------------------------------------------------------------------------------

    def edit_entrypoint(self) -> None:
        self._append(self.checkout / "entrypoints" / self.recipe.entrypoint, "# edit")

    def edit_middle(self) -> None:
        path = self.checkout / "images" / f"{self.recipe.middle}.def"
        self._edits += 1
        path.write_text(path.read_text().replace("%post\n", f"%post\n    true edit {self._edits}\n", 1))

    def _append(self, path: Path, comment: str) -> None:
        self._edits += 1
        with path.open("a") as stream:
            stream.write(f"\n{comment} {self._edits}\n")

    def blob_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.store / "blobs/sha256").iterdir())
