"""Pipes, devices, folders, circles of links and 40 GB of nothing instead of a file; hostile folders of runs.

Every command ends in 20 s and 3 GB, without a traceback, and prints nothing that a link leads to.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos.lab import Case, Lab
from support.hostile_runs import COMMANDS, SECRET, SPECIAL, hostile_runs, make_special, put_run, record
from support.programs import write_program

SECONDS, BYTES = 20.0, 3_000_000 << 10
NOWHERE = "127.0.0.1:1/x:1"


@dataclass(frozen=True)
class Target:
    """A file, and the commands that read it."""

    path: Path
    commands: Sequence[Sequence[str | Path]]
    environment: Mapping[str, str] = field(default_factory=dict)
    of_user: bool = False  # of the user alone: a link there is the user's, and what it points to may be shown


def special_file(lab: Lab) -> list[str]:
    """A file of a shared folder, a recipe or a user's exchanged for what is none: a command ends with a sentence."""
    dice = lab.dice
    with lab.case() as case:
        target = dice.choice(targets(case))
        try_target(case, target, dice.choice(SPECIAL), [dice.choice(target.commands)])
        return case.problems


def try_target(case: Case, target: Target, kind: str, commands: Sequence[Sequence[str | Path]]) -> None:
    """Exchange the file, and run ``commands``."""
    secret = case.folder / "secret"
    secret.write_text(SECRET)
    if target.path.is_dir() and not target.path.is_symlink():
        target.path.rename(case.folder / "former")
    target.path.parent.mkdir(parents=True, exist_ok=True)
    make_special(kind, target.path, secret)
    shown = "" if target.of_user else SECRET
    for argv in commands:
        name = f"{kind} {target.path.relative_to(case.folder)}"
        _try(case, [str(word) for word in argv], target.environment, name, secret=shown)
    if secret.read_text() != SECRET:
        case.problem(f"{kind} {target.path}: a file outside was changed")


def targets(case: Case) -> list[Target]:
    """Return every target that is tried, with files of its own in the folder of the case."""
    every = [*_shared_targets(case), *_recipe_targets(case), *_file_targets(case)]
    return sorted(every, key=lambda target: str(target.path.relative_to(case.folder)))


def _shared_targets(case: Case) -> list[Target]:
    recipe, store, shared = case.lab.recipes[0].path, ("--store", case.store), case.shared
    commands = (
        (*store, "--shared", shared, "plan", recipe),
        (*store, "--shared", shared, "list"),
        (*store, "publish", recipe, "--to", shared, "--no-verify", "--modulefile"),
        (*store, "prune", "--in", shared, "--dry-run"),
        (*store, "catalog", shared, "-o", case.folder / "pages"),
    )
    return [Target(path, commands) for path in sorted(shared.rglob("*"))]


def _recipe_targets(case: Case) -> list[Target]:
    recipe = case.lab.copy(case.lab.recipes[1].path, f"{case.folder.relative_to(case.lab.folder)}/own")
    store = ("--store", case.store)
    commands = (
        (*store, "plan", recipe),
        (*store, "image", recipe, "--format", "sif", "--no-verify", "-o", case.out),
        (*store, "render", recipe, "--to", "compose", "-o", case.folder / "rendered"),
        (*store, "list"),
        ("inspect", recipe),
        ("lock", recipe, "--advisories", case.folder / "none"),
        ("submit", "--scheduler", "slurm", "--dry-run", recipe, "greet"),
    )
    return [Target(path, commands) for path in sorted(recipe.rglob("*")) if path.is_file()]


def _file_targets(case: Case) -> list[Target]:
    recipe, folder = case.lab.recipes[0].path, case.folder / "files"
    sif, bundle, advisories = folder / "x.sif", folder / "x.bundle", folder / "advisories.zip"
    site, key, settings = folder / "site.yaml", folder / "key.asc", folder / "config/ekiben/config.yaml"
    submit = ("submit", "--dry-run", "--scheduler", "slurm")
    return [
        Target(
            sif,
            (
                ("inspect", sif),
                ("verify", sif),
                ("verify", recipe, "--sif", sif),
                ("sbom", sif),
                ("doctor", sif),
                ("diff", sif, sif),
                ("run", "--sif", sif, recipe, "greet"),
                (*submit, "--sif", sif, recipe, "greet"),
                ("verify", sif, "--key", "A" * 40),
            ),
        ),
        Target(bundle, (("--store", case.store, "image", recipe, "--bundle", bundle, "-o", case.out, "--no-verify"),)),
        Target(advisories, (("lock", "cu130", "--advisories", advisories),)),
        Target(site, ((*submit, "--site", site, recipe, "greet"), ("doctor", "--site", site)), of_user=True),
        Target(key, (("verify", case.shared / "images/own/current", "--key", key),)),
        Target(settings, (("plan", recipe), ("list",)), {"XDG_CONFIG_HOME": str(folder / "config")}, of_user=True),
        Target(folder / "record.json", (("sbom", folder / "record.json"), ("inspect", folder / "record.json"))),
        Target(folder / "included", (("plan", recipe, "--include", folder / "included"),)),
        Target(
            folder / "results/run.json",
            (("catalog", case.shared, "-o", case.folder / "pages", "--runs", folder / "results"),),
        ),
        Target(
            folder / "auth.json",
            (("pull", NOWHERE, "-o", case.out),),
            {"REGISTRY_AUTH_FILE": str(folder / "auth.json")},
        ),
        Target(folder / "ca.pem", (("pull", NOWHERE, "-o", case.out),), {"SSL_CERT_FILE": str(folder / "ca.pem")}),
    ]


def run_folder(lab: Lab) -> list[str]:
    """A folder of runs of somebody else: status, logs, cancel and submit --again end; the other run is shown."""
    programs = lab.path("programs")
    for program in ("squeue", "sacct", "scancel"):
        write_program(programs / program, "#!/bin/sh\n")
    recipe = lab.recipes[0].path
    hostile = list(hostile_runs(recipe, lab.dice))
    name, put = lab.dice.choice(hostile)
    with lab.case() as case:
        secret, runs = case.folder / "secret", case.out.parent / "ekiben-runs"
        secret.write_text(SECRET)
        put_run(runs / "sound", json.dumps(record(recipe)).encode())
        (runs / "sound/1-hello.exit").write_text("0\n")
        (runs / "sound/1-hello.job").write_text("12\n")
        put(runs / "r", secret)
        for argv in COMMANDS:
            output = _try(case, argv, {"PATH": f"{programs}:{os.environ['PATH']}"}, name)
            if argv[0] == "status" and "r" not in argv and '"run": "sound"' not in output:
                case.problem(f"{name}: the other run is not shown: {output[-300:]}")
        if secret.read_text() != SECRET:
            case.problem(f"{name}: a file outside was changed")
        return case.problems


def _try(case: Case, argv: Sequence[str], environment: Mapping[str, str], name: str, secret: str = SECRET) -> str:
    """Run a command within the limits, and return its output."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        os.environ.update({"EKIBEN_STORE": str(case.store), **environment})

    running = case.start(argv, limit)
    code = running.wait(SECONDS)
    output = running.output
    faults = {
        "it hangs": code == -99,
        "a traceback": "Traceback" in output or code in (70, 134, -11),
        "a file of the user's is shown": bool(secret) and secret in output,
    }
    for fault in (fault for fault, is_seen in faults.items() if is_seen):
        case.problem(f"{name}: `{' '.join(map(str, argv))}`: {fault}: {output.strip()[-600:]!r}")
    return output


KINDS: dict[str, Callable[[Lab], list[str]]] = {"special file": special_file, "run folder": run_folder}
