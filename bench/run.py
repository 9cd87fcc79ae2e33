"""Ekiben beside its peers, on the same content, in one run: make bench, or .venv/bin/python bench/run.py --help

Writes results.json (every single timing and command), results.svg (the picture) and results.md (the table) beside this
file. Needs root, a Docker daemon, Apptainer and buildah: tests/services.sh install docker apptainer buildah.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import yaml

from clock import Command, Failed, Timing, measure
from peers import TAG, ZSTD, Apptainer, Buildah, Docker, Recipe, docker_client, has, to_sif, versions
from picture import draw
from report import Goal, goals, table
from share import publish, registry

HERE = Path(__file__).resolve().parent
HOUSE = HERE.parent
PYTHON = HOUSE / ".venv/bin/python"
NAME, SECOND = "ekiben-bench", "ekiben-bench-two"
ROOM = (30e9, 8e9)  # bytes
GZIP: tuple[str, ...] = ()  # what `apptainer build` does by default


class Bench:
    """The folders of one run, and what was measured so far."""

    def __init__(self, scratch: Path, recipe: str, runs: int, slow: bool) -> None:
        self.scratch, self.runs, self.slow = scratch, runs, slow
        self.several = min(runs, 3)  # of what takes minutes
        self.log, self.sif = scratch / "log.txt", scratch / "out" / f"{NAME}.sif"
        self.checkout, self.store = scratch / "checkout", scratch / "ekiben" / "store"
        self.timings: list[Timing] = []
        self.failed: dict[str, str] = {}
        self.facts: dict[str, object] = {}
        self.original = recipe
        self._edits = 0

    # -- preparing ----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """The checkout's copy, the downloads, the base and the rendered folders. None of it is in a peer's time but the base."""
        (self.scratch / "out").mkdir(parents=True)
        self._copy_checkout()
        self.recipe = self._recipe()
        self.downloads = self.store.parent / ("cache" if os.geteuid() else "cache-root")
        self._copy_downloads()
        self.base = self.scratch / "root.tar"
        self.record("base", "mmdebstrap", [self._mmdebstrap()], runs=self.several)
        for name, target in (("docker", "dockerfile"), ("buildah", "dockerfile"), ("apptainer", "def")):
            self.plain(self.ekiben("render", NAME, "--to", target, "-o", str(self.scratch / name)))
        self.plain(self.ekiben("render", SECOND, "--to", "dockerfile", "-o", str(self.scratch / "docker-two")))
        self.docker = Docker(self.scratch / "docker", self.recipe, self.base)
        self.docker_two = Docker(self.scratch / "docker-two", replace(self.recipe, name=SECOND), self.base)
        self.buildah = Buildah(self.scratch / "buildah", self.recipe, self.base, self.downloads)
        self.apptainer = Apptainer(self.scratch / "apptainer", self.recipe, self.base)

    def own_downloads(self) -> None:
        """A user's own copy, once: uv writes locks into its cache."""
        if not self.apptainer.downloads.exists():
            subprocess.run(["cp", "-a", "--reflink=auto", self.downloads, self.apptainer.downloads], check=True)
            for command in self.apptainer.prepare():
                self.plain(command)

    def _copy_checkout(self) -> None:
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=HOUSE,
                                capture_output=True, check=True).stdout.decode()  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (HOUSE / name).is_file():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(HOUSE / name, self.checkout / name)
        for name in (NAME, SECOND):
            folder = self.checkout / "recipes" / name
            shutil.copytree(self.checkout / "recipes" / self.original, folder)
            told = (folder / "recipe.yaml").read_text()
            lines = [f"name: {name}" if line.startswith("name:") else line for line in told.splitlines()]
            (folder / "recipe.yaml").write_text("\n".join(lines) + "\n")

    def _recipe(self) -> Recipe:
        out = self.plain(self.ekiben("plan", NAME, "--json"))
        middle = [row["layer"] for row in json.loads(out) if row["kind"] == "post"][-1]
        tasks = yaml.safe_load((self.checkout / "recipes" / NAME / "recipe.yaml").read_text())["tasks"]
        return Recipe(name=NAME, middle=middle, entrypoint=next(iter(tasks.values()))["entrypoint"])

    def _copy_downloads(self) -> None:
        """The user's own downloads, as hard links; where there are none, one build that is not timed brings them."""
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        own = Path(root).expanduser() / "ekiben" / self.downloads.name
        self.downloads.parent.mkdir(parents=True)
        if own.is_dir():
            subprocess.run(["cp", "-al", own, self.downloads], check=True)
            return
        self.plain(self.image("--format", "oci", "-o", str(self.scratch / "out" / "warm.tar")))
        (self.scratch / "out" / "warm.tar").unlink()
        shutil.rmtree(self.store)

    def _mmdebstrap(self) -> Command:
        plan = json.loads(self.plain(self.ekiben("plan", NAME, "--json")))[0]["inputs"]
        include = f"--include={','.join(plan['source']['include'].split())}"
        argv = ["mmdebstrap", "--variant=minbase", include, plan["source"]["osversion"], str(self.base)]
        return Command(argv=argv, cwd=self.scratch, env={"SOURCE_DATE_EPOCH": str(plan["epoch"])})

    # -- commands -----------------------------------------------------------------------------------------------

    def ekiben(self, *words: str) -> Command:
        return Command(argv=[str(PYTHON), "build.py", *words], cwd=self.checkout, env={"EKIBEN_STORE": str(self.store)})

    def image(self, *words: str, name: str = NAME) -> Command:
        return self.ekiben("image", name, "--no-verify", "--json", *words)

    def forget(self) -> None:
        """What was built: a few large files, unlike an unpacked image, whose removal would slow what comes after."""
        shutil.rmtree(self.store, ignore_errors=True)
        self.sif.unlink(missing_ok=True)

    def make_sif(self) -> Command:
        return self.image("--format", "sif", "-o", str(self.sif))

    def plain(self, command: Command) -> str:
        return measure("", "", [command], self.log)[1]

    def record(
        self, case: str, who: str, commands: list[Command], *, runs: int = 1,
        before: Callable[[], object] = lambda: None, **about: object,
    ) -> str:  # fmt: skip
        """Measure and keep. A peer that fails is said so in the results; Ekiben's own failure ends the run."""
        load = os.getloadavg()[0]
        try:
            timing, out = measure(case, who, commands, self.log, runs=runs, before=before)
        except Failed as error:
            if who.startswith("ekiben"):
                raise
            self.failed[f"{case}: {who}"] = self.cleaned(str(error))
            print(f"  {case:<10} {who:<34} failed: {str(error).splitlines()[0]}", flush=True)
            return ""
        about["load"] = round(load, 2)
        self.timings.append(replace(timing, about=about, commands=[self.cleaned(line) for line in timing.commands]))
        free = shutil.disk_usage(self.scratch).free / 1e9
        print(f"  {case:<10} {who:<34} {timing.median:9.2f} s  {timing.seconds}  ({free:.0f} GB free)", flush=True)
        return out

    def cleaned(self, text: str) -> str:
        """Without this machine's paths."""
        named = text.replace(str(self.scratch), "$SCRATCH").replace(str(PYTHON), ".venv/bin/python")
        return named.replace(str(HOUSE), ".")

    # -- edits --------------------------------------------------------------------------------------------------

    def edit_entrypoint(self) -> None:
        self._append(self.checkout / "entrypoints" / self.recipe.entrypoint, "# edit")

    def edit_middle(self) -> None:
        path = self.checkout / "images" / f"{self.recipe.middle}.def"
        self._edits += 1
        path.write_text(path.read_text().replace("%post\n", f"%post\n    true edit {self._edits}\n", 1))

    def _append(self, path: Path, word: str) -> None:
        self._edits += 1
        with path.open("a") as stream:
            stream.write(f"\n{word} {self._edits}\n")

    def blob_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.store / "blobs/sha256").iterdir())


# ------------------------------------------------------------------------------------------------------------- the cases


def scratch(bench: Bench) -> None:
    """From nothing, downloads cached: to a SIF, and how a Docker image comes of it."""
    bench.own_downloads()  # and all of them in memory, for the first as for the last
    out = bench.record("scratch", "ekiben", [bench.make_sif()], runs=bench.several, before=bench.forget)
    bench.facts["layers"] = [{"name": row["name"], "size": row["size"]} for row in json.loads(out)["layers"]]
    bench.facts["seconds of each layer"] = {
        record["name"]: record["seconds"]
        for path in sorted((bench.store / "keys").glob("*.json"))
        for record in [json.loads(path.read_text())]
    }
    bench.facts["unpacked bytes"] = sum(
        json.loads(path.read_text())["tar_size"] for path in (bench.store / "keys").glob("*.json")
    )
    base, made = bench.timings[0].median, bench.scratch / "out"
    zstd = bench.apptainer.out / "zstd.sif"
    bench.record(
        "scratch", "apptainer build zstd", [bench.apptainer.build(zstd.name, ZSTD)], runs=bench.several,
        before=lambda: zstd.unlink(missing_ok=True), base=base,
    )  # fmt: skip
    bench.record("load", "ekiben", [bench.image("--format", "docker")])
    bench.plain(bench.docker.build())  # fills BuildKit's cache mount
    through = to_sif(f"docker-daemon:{TAG}:latest", made / "docker.sif", ZSTD, made)
    bench.record("scratch", "docker build + apptainer zstd", [bench.docker.build("--no-cache"), through], base=base)
    files = [*made.glob("*.sif"), *bench.apptainer.out.glob("*.sif")]
    bench.facts["SIF bytes"] = {path.stem: path.stat().st_size for path in files}
    for path in files:
        if path != bench.sif:
            path.unlink()


def nothing(bench: Bench) -> None:
    """Everything is there already."""
    bench.plain(bench.docker.build())
    bench.record("nothing", "docker build", [bench.docker.build()], runs=max(9, bench.runs))
    for both in ([], ["--format", "docker"]):
        words = ["--format", "sif", "-o", str(bench.sif), *both]
        bench.plain(bench.image(*words))
        time.sleep(2)  # where nothing has changed, nothing is a moment old
        bench.plain(bench.image(*words))
        who = "ekiben" if both else "ekiben, the SIF alone"
        bench.record("nothing", who, [bench.image(*words)], runs=max(9, bench.runs))


def sif(bench: Bench) -> None:
    """The entrypoint was edited: a new SIF."""
    bench.edit_entrypoint()
    bench.plain(bench.make_sif())  # not counted: it has the layers in memory, as cp has its file
    out = bench.record("sif", "ekiben", [bench.make_sif()], runs=max(5, bench.runs), before=bench.edit_entrypoint)
    bench.facts["built after an edited entrypoint"] = json.loads(out)["built"]
    copy = bench.scratch / "out" / "copy.sif"
    cp = Command(argv=["cp", str(bench.sif), str(copy)], cwd=bench.scratch)
    bench.plain(cp)
    bench.record("sif", "cp of the file", [cp], runs=max(5, bench.runs))
    copy.unlink()
    made = bench.scratch / "out" / "docker.sif"
    source = f"docker-daemon:{TAG}:latest"
    bench.plain(bench.docker.build())
    zstd = [bench.docker.build(), to_sif(source, made, ZSTD, made.parent)]
    bench.record("sif", "docker build + apptainer zstd", zstd, before=bench.docker.edit_entrypoint)
    child = bench.apptainer.on_parent(made, bench.scratch / "out" / "child.sif", ZSTD)
    bench.record("sif", "apptainer on its last SIF, zstd", [child], before=bench.apptainer.edit_entrypoint)
    (bench.scratch / "out" / "child.sif").unlink(missing_ok=True)
    for_an_edit_too(bench, "apptainer build zstd")
    made.unlink(missing_ok=True)


def docker(bench: Bench) -> None:
    """The entrypoint was edited: a new image in the Docker daemon."""
    make = bench.image("--format", "docker")
    bench.plain(make)
    bench.record("docker", "ekiben", [make], runs=max(5, bench.runs), before=bench.edit_entrypoint)
    bench.plain(bench.docker.build())
    bench.record("docker", "docker build", [bench.docker.build()], runs=max(5, bench.runs),
                 before=bench.docker.edit_entrypoint)  # fmt: skip


def middle(bench: Bench) -> None:
    """The %post of the last layer that has one was edited: a new image in the Docker daemon."""
    make = bench.image("--format", "docker")
    bench.plain(make)
    out = bench.record("middle", "ekiben", [make], before=bench.edit_middle)
    bench.facts["built after an edited middle layer"] = json.loads(out)["built"]
    bench.plain(bench.docker.build())
    bench.record("middle", "docker build", [bench.docker.build()], before=bench.docker.edit_middle)


def second(bench: Bench) -> None:
    """Another recipe on the same layers: a SIF, and what it adds to the store; in Docker, an image."""
    bench.plain(bench.make_sif())
    before = bench.blob_bytes()
    other = bench.scratch / "out" / f"{SECOND}.sif"
    out = bench.record("second", "ekiben", [bench.image("--format", "sif", "-o", str(other), name=SECOND)])
    bench.facts["built for a second recipe"] = json.loads(out)["built"]
    bench.facts["bytes a second recipe adds to the store"] = bench.blob_bytes() - before
    other.unlink()
    bench.plain(bench.docker.build())
    bench.record("second", "docker build, no SIF", [bench.docker_two.build()])


def help_(bench: Bench) -> None:
    """What answers without doing anything."""
    bench.plain(bench.ekiben("--help"))
    bench.record("help", "ekiben", [bench.ekiben("--help")], runs=max(9, bench.runs))


def gzip(bench: Bench) -> None:
    """`apptainer build` as it comes."""
    bench.own_downloads()
    command = bench.apptainer.build("gzip.sif", GZIP)
    bench.record("scratch", "apptainer build gzip", [command], base=bench.timings[0].median)
    for_an_edit_too(bench, "apptainer build gzip")


def buildah(bench: Bench) -> None:
    """From nothing and with everything there, through buildah."""
    made = bench.scratch / "out" / "buildah.sif"
    steps = [bench.buildah.build(), bench.buildah.container(), bench.buildah.to_sif(made)]
    bench.record("scratch", "buildah + apptainer zstd", steps, base=bench.timings[0].median)
    made.unlink(missing_ok=True)
    bench.record("nothing", "buildah", [bench.buildah.build()])


def for_an_edit_too(bench: Bench, who: str) -> None:
    for timing in [item for item in bench.timings if (item.case, item.who) == ("scratch", who)]:
        bench.timings.append(replace(timing, case="sif", about={"note": "it has no cache: its time from nothing"}))


CASES = {"scratch": scratch, "nothing": nothing, "sif": sif, "docker": docker, "middle": middle, "second": second,
         "help": help_, "publish": publish, "registry": registry, "gzip": gzip, "buildah": buildah}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ the run


def machine() -> dict[str, object]:
    models = [
        line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return {"system": release.get("PRETTY_NAME", "").strip('"'), "kernel": platform.release(),
            "processor": models[0] if models else platform.machine(), "cores": len(os.sched_getaffinity(0)),
            "memory bytes": memory, "python": platform.python_version()}  # fmt: skip


def write(bench: Bench, began: str, load: tuple[float, float, float], out: Path) -> list[Goal]:
    reached = goals(bench.timings, bench.facts)
    result = {"date": began, "recipe": bench.original, "machine": machine(), "load before": load,
              "load after": os.getloadavg(), "versions": versions(), "facts": bench.facts,
              "goals": [asdict(goal) for goal in reached], "failed": bench.failed,
              "timings": [asdict(timing) for timing in bench.timings]}  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "results.md").write_text(table(result))
    (out / "results.svg").write_text(draw(result))
    return reached


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="lora-opencalm", help="what to build (hello for a quick try)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--runs", type=int, default=3, help="runs of what is quick; the median counts")
    parser.add_argument("--skip-slow", action="store_true", help="without the gzip builds, minutes each")
    parser.add_argument("--scratch", type=Path, default=HERE / "scratch", help="a folder that is made and removed")
    parser.add_argument("--out", type=Path, default=HERE, help="where the results go")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    wanted = options.cases.split(",")
    if unknown := set(wanted) - set(CASES):
        sys.exit(f"no case {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    if options.runs < 1:
        sys.exit(f"--runs {options.runs}: at least 1 is needed")
    if not (HOUSE / "recipes" / options.recipe / "recipe.yaml").is_file():
        known = ", ".join(sorted(path.parent.name for path in (HOUSE / "recipes").glob("*/recipe.yaml")))
        sys.exit(f"no recipe {options.recipe}; known: {known}")
    if not has("apptainer", "buildah", "mmdebstrap", docker_client()) or os.geteuid():
        sys.exit("bench/run.py needs root and its peers: bash tests/services.sh install docker apptainer buildah peers")
    if shutil.disk_usage(options.scratch.parent).free < ROOM[options.recipe == "hello"]:
        sys.exit(
            f"{options.scratch.parent} has too little room: {ROOM[options.recipe == 'hello'] / 1e9:.0f} GB are needed"
        )
    if options.scratch.exists():
        sys.exit(f"{options.scratch} is there already; remove it, or give another folder with --scratch")
    bench = Bench(options.scratch.resolve(), options.recipe, options.runs, not options.skip_slow)
    began, load = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), os.getloadavg()
    try:
        print(f"preparing {bench.scratch} (nothing of this counts but the base)", flush=True)
        bench.prepare()
        slow = () if bench.slow else ("gzip",)
        for case in (name for name in CASES if name in wanted and name not in slow):
            print(f"{case}: {(CASES[case].__doc__ or '').strip()}", flush=True)
            CASES[case](bench)
            write(bench, began, load, options.out)
        reached = write(bench, began, load, options.out)
    except Failed as error:
        sys.exit(f"error: {error}")
    remove(bench)
    print((options.out / "results.md").read_text())
    return 0 if all(goal.reached for goal in reached) and not bench.failed else 1


def remove(bench: Bench) -> None:
    bench.docker.remove()
    subprocess.run([docker_client(), "rmi", "--force", f"ekiben/{NAME}:latest", f"ekiben/{SECOND}:latest"],
                   capture_output=True, check=False)  # fmt: skip
    remove_tree(bench.scratch)


def remove_tree(folder: Path) -> None:
    """Never through a mount: what is mounted below is the host's own."""
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [place for place in places if place.startswith(f"{folder}/")]
    for place in sorted(inside, reverse=True):
        if subprocess.run(["umount", place], check=False).returncode:
            sys.exit(f"{place} is still mounted; {folder} is left as it is")
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
