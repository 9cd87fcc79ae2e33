"""Commands at the same time on the same store, output and shared folder, in one PID namespace or in several."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from chaos.kills import check_published
from chaos.lab import Case, Lab, Running, digest
from ekiben.core.paths import PROJECT_ROOT


def race_builds(lab: Lab) -> list[str]:
    """The same version to the same file, and rest beside it, in one store."""
    dice = lab.dice
    version, rest = dice.randrange(len(lab.recipes)), dice.sample(range(len(lab.recipes)), 2)
    with lab.case() as case:
        running = [case.start(case.build(version)) for _ in range(3)]
        for other in rest:
            argv = case.build(other)
            argv[-1] = str(case.folder / f"other-{other}.sif")
            running.append(case.start(argv))
        _all_well(case, running)
        case.check_output(version)
        for other in rest:
            if digest(case.folder / f"other-{other}.sif") != lab.expected[other]:
                case.problem(f"version {other} has other bytes")
        case.check_complete(versions=[version])
        case.check_tidy()
        return case.problems


def race_publishes(lab: Lab) -> list[str]:
    """Publishers, a prune, and readers who see only what is whole."""
    dice = lab.dice
    versions = dice.sample(range(1, len(lab.recipes)), 3)
    with lab.case() as case:
        for version in versions:
            case.run(case.build(version))
        running = [case.start(case.publish(version)) for version in (*versions, versions[0])]
        prune = ["--store", str(case.store), "prune", "--in", str(case.shared), "--unused-for", "0", "--grace", "1"]
        running.insert(dice.randrange(len(running) + 1), case.start(prune))
        while any(one.code is None for one in running):
            case.check_complete(versions=range(len(lab.recipes)))
            for one in running:
                one.poll()
        _all_well(case, running)
        case.run(case.publish(versions[0]))
        case.run(case.build(versions[0]))
        check_published(case, versions[0])
        case.check_tidy()
        return case.problems


def race_namespaces(lab: Lab) -> list[str]:
    """Containers with one host name and one store: a process number of one means nothing in another."""
    dice = lab.dice
    versions = dice.sample(range(len(lab.recipes)), 3)
    with lab.case() as case:
        started = []
        for version in versions:
            argv = case.build(version)
            argv[-1] = str(case.folder / f"{version}.sif")
            apart = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
            argv = [*apart, sys.executable, str(PROJECT_ROOT / "build.py"), *argv]
            started.append(
                subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={
                        "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
                        "HOME": str(case.folder / "home"),
                        "TMPDIR": str(case.folder / "tmp"),
                    },
                )
            )
        for process, version in zip(started, versions, strict=True):
            output, _ = process.communicate(timeout=300)
            if process.returncode:
                case.problem(f"a build in another PID namespace ended with {process.returncode}: {output[-600:]}")
            elif digest(case.folder / f"{version}.sif") != lab.expected[version]:
                case.problem(f"version {version} has other bytes")
        case.run(case.build(versions[0]))
        case.check_output(versions[0])
        case.check_complete(versions=versions)
        case.check_tidy()
        return case.problems


def _all_well(case: Case, running: list[Running]) -> None:
    for one in running:
        if one.wait() or "Traceback" in one.output:
            case.problem(f"one of several at once ended with {one.code}: {one.output[-600:]}")
    case.check_quiet()


KINDS: dict[str, Callable[[Lab], list[str]]] = {
    "race builds": race_builds,
    "race publishes": race_publishes,
    "race namespaces": race_namespaces,
}
