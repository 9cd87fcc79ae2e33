"""The cases of sharing: an image published to a folder, and sent to and taken from a registry.

The registry is a docker-registry of the case's own, on this machine, plain http: what is measured is the two clients.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.clock import Command
from bench.session import Bench


def publish(bench: Bench) -> None:
    """Into a new folder, after `image` has made and tested it, and without; and a version with another entrypoint.
    Beside them, cp of the SIF."""
    bench.run_untimed(bench.ekiben("image", bench.recipe.name, "--format", "sif", "-o", str(bench.sif), "--json"))
    place, copy = bench.scratch / "place", bench.scratch / "out" / "copy.sif"
    put = replace(bench.ekiben("publish", bench.recipe.name, "--to", str(place), "--no-verify", "--json"), synced=True)
    cp = Command(argv=["cp", str(bench.sif), str(copy)], cwd=bench.scratch, synced=True)

    def no_place() -> None:
        shutil.rmtree(place, ignore_errors=True)

    def no_sum() -> None:
        no_place()
        for known in (bench.store / "checks").glob("sif-*.json"):
            known.unlink()

    for who, command, before in (
        ("cp of the file", cp, lambda: copy.unlink(missing_ok=True)),
        ("ekiben", put, no_place),
        ("ekiben, its checksum not known", put, no_sum),
    ):
        bench.record("publish", who, [command], runs=bench.runs, before=before)
    copy.unlink()
    bench.record("publish-edit", "ekiben", [put], runs=bench.runs, before=bench.edit_entrypoint)
    bench.edit_entrypoint()
    record = json.loads(bench.run_untimed(put))
    bench.facts["SIF bytes published"] = record["size"]
    bench.facts["bytes moved for an edited entrypoint"] = record["bytes_copied"]
    shutil.rmtree(place)


def registry(bench: Bench) -> None:
    """The SIF to a registry and back, ours and Apptainer's; then the Docker image with another entrypoint."""
    bench.run_untimed(bench.make_sif())
    bench.facts["SIF bytes sent"] = bench.sif.stat().st_size
    out = bench.scratch / "out" / "pulled.sif"
    for who in ("apptainer", "ekiben"):
        with started_registry(bench.scratch / "registry") as host:  # each sends to an empty one
            place = f"{host}/bench/sif:1"
            to, back = (
                bench.ekiben("push", bench.recipe.name, place, "--format", "sif"),
                bench.ekiben("pull", place, "-o", str(out)),
            )
            if who == "apptainer":
                to = Command(argv=["apptainer", "push", str(bench.sif), f"oras://{place}"], cwd=bench.scratch)
                # Its cache would make every pull but the first a copy of a file here.
                back = Command(
                    argv=["apptainer", "pull", "--disable-cache", str(out), f"oras://{place}"], cwd=bench.scratch
                )
            bench.record("push", who, [to])
            bench.record("pull", who, [back], runs=bench.runs, before=lambda: out.unlink(missing_ok=True))
            out.unlink()
            if who == "ekiben":
                image = bench.ekiben("push", bench.recipe.name, f"{host}/bench/image:1", "--json")
                bench.run_untimed(image)
                bench.edit_entrypoint()
                sent = json.loads(bench.record("push-edit", "ekiben", [image]))
                bench.facts["bytes sent for an edited entrypoint"] = sent["sent"]


@contextlib.contextmanager
def started_registry(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    (folder / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f'http: {{addr: "127.0.0.1:{port}"}}\n'
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(folder / "config.yml")], stdout=log, stderr=log)
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(folder)
