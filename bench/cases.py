"""The cases of building: what is edited, what is timed, in which order.

A case's docstring is printed when it starts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench.clock import Command
from bench.peers import TAG, ZSTD, to_sif
from bench.session import SECOND, Bench

GZIP: tuple[str, ...] = ()  # what `apptainer build` does by default


def scratch(bench: Bench) -> None:
    """From nothing, downloads cached: to a SIF, and how a Docker image comes of it."""
    bench.own_downloads()  # and all of them in memory, for the first as for the last
    out = bench.record("scratch", "ekiben", [bench.make_sif()], runs=bench.several, before=bench.remove_built)
    bench.facts["layers"] = [{"name": row["name"], "size": row["size"]} for row in json.loads(out)["layers"]]
    bench.facts["seconds of each layer"] = {
        record["name"]: record["seconds"]
        for path in sorted((bench.store / "keys").glob("*.json"))
        for record in [json.loads(path.read_text())]
    }
    bench.facts["unpacked bytes"] = sum(
        json.loads(path.read_text())["tar_size"] for path in (bench.store / "keys").glob("*.json")
    )
    base, out_dir = bench.timings[0].median, bench.scratch / "out"
    zstd = bench.apptainer.out / "zstd.sif"
    bench.record(
        "scratch",
        "apptainer build zstd",
        [bench.apptainer.build(zstd.name, ZSTD)],
        runs=bench.several,
        before=lambda: zstd.unlink(missing_ok=True),
        base=base,
    )
    bench.record("load", "ekiben", [bench.image("--format", "docker")])
    bench.run_untimed(bench.docker.build())  # fills BuildKit's cache mount
    through = to_sif(f"docker-daemon:{TAG}:latest", out_dir / "docker.sif", ZSTD, out_dir)
    bench.docker.remove()  # 5 GB, which would stay without a name
    bench.record("scratch", "docker build + apptainer zstd", [bench.docker.build("--no-cache"), through], base=base)
    files = [*out_dir.glob("*.sif"), *bench.apptainer.out.glob("*.sif")]
    bench.facts["SIF bytes"] = {path.stem: path.stat().st_size for path in files}
    for path in files:
        if path != bench.sif:
            path.unlink()


def nothing(bench: Bench) -> None:
    """Everything is there already."""
    bench.run_untimed(bench.docker.build())
    bench.record("nothing", "docker build", [bench.docker.build()], runs=max(9, bench.runs))
    for both in ([], ["--format", "docker"]):
        words = ["--format", "sif", "-o", str(bench.sif), *both]
        bench.run_untimed(bench.image(*words))
        time.sleep(2)  # where nothing has changed, nothing is a moment old
        bench.run_untimed(bench.image(*words))
        who = "ekiben" if both else "ekiben, the SIF alone"
        bench.record("nothing", who, [bench.image(*words)], runs=max(9, bench.runs))


def sif(bench: Bench) -> None:
    """The entrypoint was edited: a new SIF."""
    bench.edit_entrypoint()
    bench.run_untimed(bench.make_sif())  # not counted: it has the layers in memory, as cp has its file
    out = bench.record("sif", "ekiben", [bench.make_sif()], runs=max(5, bench.runs), before=bench.edit_entrypoint)
    bench.facts["built after an edited entrypoint"] = json.loads(out)["built"]
    copy = bench.scratch / "out" / "copy.sif"
    cp = Command(argv=["cp", str(bench.sif), str(copy)], cwd=bench.scratch)
    bench.run_untimed(cp)
    bench.record("sif", "cp of the file", [cp], runs=max(5, bench.runs))
    copy.unlink()
    made = bench.scratch / "out" / "docker.sif"
    source = f"docker-daemon:{TAG}:latest"
    bench.run_untimed(bench.docker.build())
    zstd = [bench.docker.build(), to_sif(source, made, ZSTD, made.parent)]
    bench.record("sif", "docker build + apptainer zstd", zstd, before=bench.docker.edit_entrypoint)
    child = bench.apptainer.on_parent(made, bench.scratch / "out" / "child.sif", ZSTD)
    bench.record("sif", "apptainer on its last SIF, zstd", [child], before=bench.apptainer.edit_entrypoint)
    (bench.scratch / "out" / "child.sif").unlink(missing_ok=True)
    count_for_edit_too(bench, "apptainer build zstd")
    made.unlink(missing_ok=True)


def tested(bench: Bench) -> None:
    """The entrypoint was edited: a new SIF and a new Docker image, tested as by default; the SIF also from the disk."""
    make, in_docker = (
        bench.make_tested("--format", "sif", "-o", str(bench.sif)),
        bench.make_tested("--format", "docker"),
    )
    in_file = bench.make_tested("--format", "sif", "-o", str(bench.sif), "--in-place")
    for command in (make, in_docker):
        bench.run_untimed(command)
    copy = bench.scratch / "out" / "copy.sif"
    cp = Command(argv=["cp", str(bench.sif), str(copy)], cwd=bench.scratch)
    bench.run_untimed(cp)
    runs = max(5, bench.runs)
    for case, empty in (("tested", lambda: None), ("tested-cold", drop_page_cache)):

        def edit(empty: Callable[[], None] = empty) -> None:
            bench.edit_entrypoint()
            empty()

        bench.record(case, "ekiben", [make], runs=runs, before=edit)
        bench.record(case.replace("tested", "rewritten"), "ekiben", [in_file], runs=runs, before=edit)
        bench.record(case, "the recipe's test alone", [bench.recipe_test()], runs=runs, before=empty)
        bench.record(case, "cp of the file", [cp], runs=runs, before=empty)
    bench.record("tested", "ekiben, in Docker", [in_docker], runs=runs, before=bench.edit_entrypoint)
    copy.unlink()


def drop_page_cache() -> None:
    """Let the next command read everything from the disk."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def docker(bench: Bench) -> None:
    """The entrypoint was edited: a new image in the Docker daemon."""
    make = bench.image("--format", "docker")
    bench.run_untimed(make)
    bench.record("docker", "ekiben", [make], runs=max(5, bench.runs), before=bench.edit_entrypoint)
    bench.run_untimed(bench.docker.build())
    bench.record(
        "docker", "docker build", [bench.docker.build()], runs=max(5, bench.runs), before=bench.docker.edit_entrypoint
    )


def middle(bench: Bench) -> None:
    """The %post of the last layer that has one was edited: a new image in the Docker daemon."""
    make = bench.image("--format", "docker")
    bench.run_untimed(make)
    out = bench.record("middle", "ekiben", [make], before=bench.edit_middle)
    bench.facts["built after an edited middle layer"] = json.loads(out)["built"]
    bench.run_untimed(bench.docker.build())
    bench.record("middle", "docker build", [bench.docker.build()], before=bench.docker.edit_middle)


def second(bench: Bench) -> None:
    """Another recipe on the same layers: a SIF, and what it adds to the store; in Docker, an image."""
    bench.run_untimed(bench.make_sif())
    before = bench.blob_bytes()
    other = bench.scratch / "out" / f"{SECOND}.sif"
    out = bench.record("second", "ekiben", [bench.image("--format", "sif", "-o", str(other), name=SECOND)])
    bench.facts["built for a second recipe"] = json.loads(out)["built"]
    bench.facts["bytes a second recipe adds to the store"] = bench.blob_bytes() - before
    other.unlink()
    bench.run_untimed(bench.docker.build())
    bench.record("second", "docker build, no SIF", [bench.docker_two.build()])


def help_(bench: Bench) -> None:
    """What answers without doing anything."""
    bench.run_untimed(bench.ekiben("--help"))
    bench.record("help", "ekiben", [bench.ekiben("--help")], runs=max(9, bench.runs))


def gzip(bench: Bench) -> None:
    """`apptainer build` as it comes."""
    bench.own_downloads()
    command = bench.apptainer.build("gzip.sif", GZIP)
    bench.record("scratch", "apptainer build gzip", [command], base=bench.timings[0].median)
    count_for_edit_too(bench, "apptainer build gzip")


def buildah(bench: Bench) -> None:
    """From nothing and with everything there, through buildah."""
    made = bench.scratch / "out" / "buildah.sif"
    steps = [bench.buildah.build(), bench.buildah.container(), bench.buildah.to_sif(made)]
    bench.record("scratch", "buildah + apptainer zstd", steps, base=bench.timings[0].median)
    made.unlink(missing_ok=True)
    bench.record("nothing", "buildah", [bench.buildah.build()])


def count_for_edit_too(bench: Bench, who: str) -> None:
    for timing in [item for item in bench.timings if (item.case, item.who) == ("scratch", who)]:
        bench.timings.append(replace(timing, case="sif", about={"note": "it has no cache: its time from nothing"}))
