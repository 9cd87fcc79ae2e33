"""Commands that are killed at any moment of their work, then run again."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from chaos import network
from chaos.lab import Case, Lab, digest
from ekiben.core.inner_path import InnerPath
from ekiben.images.published import read_records, unrecorded_versions
from ekiben.store import Store, check_sif
from support.sample_recipe import AS_SIF, full_sample, image_of, seeded, without_post

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
KILLS = 8  # signals of one case, at most: preparing a store takes as long as some of them
_durations: dict[str, float] = {}
sent = 0  # signals that met a running command, since the campaign last looked


def kill_command(
    case: Case,
    name: str,
    prepare: Callable[[], list[str]],
    before: Callable[[], None] = lambda: None,
    good: Sequence[int] = (),
    is_quiet: bool = True,
    times: int = KILLS,
) -> list[str]:
    """Kill what ``prepare`` returns so many ``times`` at random moments, and check after each; return the last
    arguments.

    The next one continues from what a killed one left. After one that ended in time, ``prepare`` makes the situation
    again. Unless ``is_quiet``, processes may be left, for the next command to end.
    """
    global sent
    dice, argv = case.lab.dice, prepare()
    for _ in range(times):
        running, sign = case.start(argv, before), dice.choice(SIGNALS)
        time.sleep(dice.random() * 1.05 * _durations[name])
        if running.poll() is None:
            os.kill(running.pid, sign)
            sent += 1
        _durations[name] *= 0.85 if running.code is not None else 1.05  # the machine may be busier, or less, by now
        code = running.wait()
        allowed = (-sign,) if sign == signal.SIGKILL else (128 + sign, -sign)  # the latter before its handler is set
        if running.output.strip() == "Aborted!":  # click's answer to Ctrl-C before a command has begun
            allowed = (1,)
        if code not in (0, *allowed, *good):
            case.problem(f"{name}: exit code {code} after {sign.name}: {running.output[-600:]}")
        if "Traceback" in running.output:
            case.problem(f"{name}: a traceback after {sign.name}: {running.output[-600:]}")
        if is_quiet:
            case.check_quiet()
        case.check_complete(versions=range(len(case.lab.expected)))
        if case.problems:
            break
        if code in (0, *good):
            argv = prepare()
    return argv


def measured(lab: Lab, name: str, prepare: Callable[[Case], list[str]]) -> None:
    """How long the command takes undisturbed: the kills are spread over that."""
    if name not in _durations:
        times = []
        for _ in range(3):
            with lab.case() as case:
                argv, began = prepare(case), time.monotonic()
                case.run(argv)
                times.append(time.monotonic() - began)
                assert not case.problems, case.problems
        _durations[name] = statistics.median(times)


def _finish(case: Case, argv: list[str]) -> None:
    case.run(argv)
    case.check_quiet()
    case.check_tidy()


def kill_build(lab: Lab) -> list[str]:
    """Nothing is stored but the base: the layer is built and the SIF written."""
    version = lab.dice.randrange(1, len(lab.recipes))
    measured(lab, "build", lambda case: case.build(version))

    with lab.case() as case:

        def prepare() -> list[str]:
            case.reset_store()
            return case.build(version)

        kill_command(case, "build", prepare)
        _finish(case, case.build(version))
        case.check_output(version)
        case.check_complete(versions=[version])
        return case.problems


def kill_export(lab: Lab) -> list[str]:
    """All layers are stored; the SIF of another version is in the way."""
    versions = lab.dice.sample(range(len(lab.recipes)), 2)

    def prepare(case: Case) -> list[str]:
        case.run(case.build(versions[1]))
        case.run(case.build(versions[0]))
        return case.build(versions[1])

    measured(lab, "export", prepare)
    with lab.case() as case:
        _finish(case, kill_command(case, "export", lambda: prepare(case)))
        case.check_output(versions[1])
        return case.problems


def kill_rewrite(lab: Lab) -> list[str]:
    """The output has another edit of the recipe, and its last layer is rewritten.

    The output is one of the two, or gone.
    """
    first, second = lab.dice.sample(range(len(lab.edits)), 2)
    known = {lab.expected[len(lab.recipes) + number] for number in (first, second)}

    def prepare(case: Case) -> list[str]:
        for number in (second, first):
            case.run(case.edit(number))
        inode = case.out.stat().st_ino
        case.run(case.edit(second))
        if case.out.stat().st_ino != inode:
            case.problem("the output was written anew, not rewritten")
        return case.edit(first)

    measured(lab, "rewrite", prepare)
    with lab.case() as case:
        argv = kill_command(case, "rewrite", lambda: prepare(case))
        if case.out.exists() and digest(case.out) not in known:
            case.problem("the output is neither edit")
        _finish(case, argv)
        case.check_output(len(lab.recipes) + first)
        return case.problems


def kill_publish(lab: Lab) -> list[str]:
    """The layer is stored and not published.

    What was published by a command that ended in time is not published again.
    """
    versions = lab.dice.sample(range(1, len(lab.recipes)), len(lab.recipes) - 1)
    measured(lab, "publish", lambda case: _publish(case, versions[0]))
    with lab.case() as case:
        left = list(versions)

        def prepare() -> list[str]:
            if not left:
                case.reset_shared()
                left.extend(versions)
            return _publish(case, left.pop())

        argv = kill_command(case, "publish", prepare)
        _finish(case, argv)
        version = next(number for number in versions if case.publish(number) == argv)
        check_published(case, version)
        return case.problems


def _publish(case: Case, version: int) -> list[str]:
    case.run(case.build(version))
    return case.publish(version)


def check_published(case: Case, version: int) -> None:
    """Current names the version, and what killed publishers left goes with a prune once it is old."""
    images, old = case.shared / "images/own", time.time() - 3 * 86400
    if digest(images / "current") != case.lab.expected[version]:
        case.problem("current is not what was published last")
    for path in images.iterdir():
        if not path.is_symlink():
            os.utime(path, (old, old))
    case.run(["--store", str(case.store), "prune", "--in", str(case.shared), "--unused-for", "99", "--grace", "0"])
    folder = InnerPath.below(images)  # a SIF whose publisher was killed before its record is a version all the same
    known = {version.stem for version in read_records(folder)[0]}
    known |= {version.stem for version in unrecorded_versions(folder)}
    for path in images.iterdir():
        if not path.is_symlink() and not any(path.name.startswith(f"{stem}.") for stem in known):
            case.problem(f"left over in the shared folder: {path.name}")
    case.check_complete(versions=[version])


def kill_prune(lab: Lab) -> list[str]:
    """Of the own store, or of the shared folder: what is kept stays whole, and the next prune ends it."""
    version, in_shared = lab.dice.randrange(1, len(lab.recipes)), lab.dice.random() < 0.5

    def prepare(case: Case) -> list[str]:
        case.put_base()
        case.run(case.build(version))
        if in_shared:
            case.run(case.publish(version))
            return ["--store", str(case.store), "prune", "--in", str(case.shared), case.lab.name, "--grace", "0"]
        return ["--store", str(case.store), "prune", case.lab.name]

    name = "prune --in" if in_shared else "prune"
    measured(lab, name, prepare)
    with lab.case() as case:
        # 2: no image of this name is left
        case.run(kill_command(case, name, lambda: prepare(case), good=(2,)), good=(0, 2))
        case.put_base()
        _finish(case, case.build(version))
        case.check_output(version)
        if in_shared:
            _finish(case, case.publish(version))
            case.check_complete(versions=[version])
        return case.problems


def kill_pull(lab: Lab) -> list[str]:
    version = lab.dice.randrange(len(lab.recipes))
    reference = network.pushed(lab, version)

    def prepare(case: Case) -> list[str]:
        case.out.unlink(missing_ok=True)
        return ["--store", str(case.store), "pull", reference, "-o", str(case.out)]

    measured(lab, "pull", prepare)
    with lab.case() as case:
        _finish(case, kill_command(case, "pull", lambda: prepare(case)))
        case.check_output(version)
        return case.problems


def kill_verify(lab: Lab) -> list[str]:
    """The part of verify that reads: every blob, and all of the SIF. (Its other part needs a runtime and a real
    base.)
    """
    version = lab.dice.randrange(len(lab.recipes))

    def check(case: Case) -> None:
        store = Store(case.store)
        image = image_of(lab.recipes[version], store)
        for layer in image.layers:
            store.check_blob(layer.digest, again=True)
        check_sif(image, case.out, store, again=True)
        sys.exit(0)

    with lab.case() as case:
        case.run(case.build(version))
        _durations.setdefault("verify", 0.1)
        kill_command(case, "verify", list, lambda: check(case))
        if case.start([], lambda: check(case)).wait() != 0:
            case.problem("verify fails after it was killed")
        _finish(case, case.build(version))
        case.check_output(version)
        return case.problems


def kill_push(lab: Lab) -> list[str]:
    """Each time to a repository that has nothing of it; what arrived is what was built, and no half of it has a tag."""
    version = lab.dice.randrange(len(lab.recipes))
    kind = lab.dice.choice(("sif", "docker"))

    def prepare(case: Case) -> list[str]:
        target = f"{network.host_of(lab)}/lab/killed-{lab.dice.randrange(10**9)}:1"
        return ["--store", str(case.store), "push", str(lab.recipes[version].path), target, "--format", kind]

    measured(lab, f"push {kind}", prepare)
    with lab.case() as case:
        argv = kill_command(case, f"push {kind}", lambda: prepare(case))
        _finish(case, argv)
        case.run(["--store", str(case.store), "pull", argv[4], "-o", str(case.out)])
        case.check_output(version)
        return case.problems


SBATCH = """\
#!/bin/sh
[ "$1" = --parsable ] || exit 1
mkdir -p "$JOBS" && touch "$JOBS/$$" && echo $$
"""


def kill_submit(lab: Lab) -> list[str]:
    """To a Slurm that takes each job: a run is recorded as a whole or not at all, and the next command and `status`
    work.
    """
    with lab.case() as case:
        sif, jobs, sample = (
            case.folder / "job.sif",
            case.folder / "jobs",
            without_post(full_sample(case.folder / "job/own")),
        )
        store = seeded(sample, case.folder / "job/store", "ground").root
        case.run(["--store", str(store), "image", str(sample.path), *AS_SIF, "-o", str(sif)])
        bin = case.folder / "bin"
        bin.mkdir()
        for name, text in {
            "sbatch": SBATCH,
            "sinfo": "#!/bin/sh\n",
            "squeue": "#!/bin/sh\n",
            "sacct": "#!/bin/sh\n",
        }.items():
            (bin / name).write_text(text)
            (bin / name).chmod(0o755)

        def settings() -> None:
            os.environ.update(PATH=f"{bin}:{os.environ['PATH']}", JOBS=str(jobs))

        number = iter(range(1000))

        def prepare() -> list[str]:
            folder = case.folder / f"submitted/{next(number)}"  # two submissions of one second would have one name
            return [
                "--store",
                str(store),
                "submit",
                "--sif",
                str(sif),
                "--scheduler",
                "slurm",
                "--runs",
                str(folder),
                str(sample.path),
                "greet",
            ]

        _durations.setdefault("submit", 0.3)
        kill_command(case, "submit", prepare, settings)
        if (last := case.start(prepare(), settings)).wait() != 0:
            case.problem(f"submit fails after it was killed: {last.output[-600:]}")
        for folder in (case.folder / "submitted").iterdir():
            status = case.start(["status", "--runs", str(folder)], settings)
            if status.wait() != 0 or "Traceback" in status.output:
                case.problem(f"status of a killed submission: {status.output[-600:]}")
            for run in (path for path in folder.iterdir() if (path / "run.json").exists()):
                if missing := {"key", "environment", "job.sh", "1-greet.sh"} - {path.name for path in run.iterdir()}:
                    case.problem(
                        f"a recorded run lacks {sorted(missing)}: {sorted(path.name for path in run.iterdir())}"
                    )
        case.check_quiet()
        return case.problems


KINDS: dict[str, Callable[[Lab], list[str]]] = {
    "kill push": kill_push,
    "kill submit": kill_submit,
    "kill build": kill_build,
    "kill export": kill_export,
    "kill rewrite": kill_rewrite,
    "kill publish": kill_publish,
    "kill prune": kill_prune,
    "kill pull": kill_pull,
    "kill verify": kill_verify,
}
