"""Flipped bits and foreign bytes in files that are there: SIFs, blobs, records of the store and of the shared
folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from chaos.lab import Case, Lab, digest
from ekiben.core.errors import EkibenError
from support.hostile import NO_RECORDS, VALUES, flip

HOSTILE = (
    *NO_RECORDS,
    b"{}",
    b'{"a":' * 5000,
    (
        b'{"digest": "sha256:../../../../victim", "name": "../../victim", "file": "../../victim", "cache_key": "../x",'
        b' "size": 7}'
    ),
)


def flip_any(path: Path, dice: random.Random) -> None:
    flip(path, dice.randrange(path.stat().st_size), dice.randrange(8))


def files_of(folder: Path, *patterns: str) -> list[Path]:
    return sorted(
        path
        for pattern in patterns
        for path in folder.glob(pattern)
        if path.is_file() and not path.is_symlink() and path.stat().st_size
    )


def created_by(case: Case, *patterns: str) -> list[Path]:
    """The files of a store without those of its base, which no command here could make again."""
    return [
        path for path in files_of(case.store, *patterns) if not (case.lab.store / path.relative_to(case.store)).exists()
    ]


def flip_store(lab: Lab) -> list[str]:
    """A flipped bit in the store or the output: the same command gives the same bytes again."""
    dice, version = lab.dice, lab.dice.randrange(len(lab.recipes))
    with lab.case() as case:
        case.run(case.build(version))
        path = dice.choice(
            [case.out, *created_by(case, "blobs/sha256/*", "keys/*", "refs/*", "last/*", "checks/*", "index.json")]
        )
        flip_any(path, dice)
        if path != case.out:
            if dice.random() < 0.5:  # the SIF is there, and no layer is read
                case.run(case.build(version))
                case.check_output(version)
            case.out.unlink()
        case.run(case.build(version))
        where = path.parent.name if path != case.out else "the SIF"
        if not case.problems:
            case.check_output(version)
            case.check_complete(versions=[version])
            case.check_tidy()
        case.problems[:] = [f"a bit of {where} flipped: {problem}" for problem in case.problems]
        return case.problems


def flip_shared(lab: Lab) -> list[str]:
    """A flipped bit in a shared folder: publishing again mends it, or says what is damaged; a build from it has the
    right bytes.
    """
    dice = lab.dice
    with lab.case() as case:
        images = case.shared / "images/own"
        path = dice.choice(
            files_of(images, "*.sif", "*.json", "*.sha256") + files_of(case.shared / "store", "keys/*", "last/*")
        )
        flip_any(path, dice)
        reader = case.folder / "reader"
        argv = case.build(0)
        argv[1] = str(case.lab.copy(lab.store, f"{reader.relative_to(lab.folder)}/store"))
        case.run(["--shared", str(case.shared), *argv])
        case.check_output(0)
        case.run(case.publish(0))
        if digest(images / "current") != lab.expected[0]:
            case.problem("the published SIF stays damaged when the version is published again")
        case.problems[:] = [
            f"a bit of {path.suffix or path.parent.name} flipped: {problem}" for problem in case.problems
        ]
        return case.problems


def hostile_records(lab: Lab) -> list[str]:
    """A record that somebody wrote with an editor: no traceback, nothing read or written outside, others' versions
    stay.
    """
    dice, version = lab.dice, lab.dice.randrange(1, len(lab.recipes))
    with lab.case() as case:
        case.run(case.build(version))
        victim = case.folder / "victim"
        victim.write_text("precious")
        paths = created_by(case, "keys/*", "refs/*", "last/*", "checks/*") + files_of(
            case.shared, "store/keys/*", "store/last/*", "images/own/*.json"
        )
        for path in dice.sample(paths, 2):
            path.chmod(0o600)
            path.write_bytes(_hostile(path.read_bytes(), dice))
        for argv in (
            ["prune", "--in", str(case.shared), "--unused-for", "0", "--grace", "0"],
            ["catalog", str(case.shared), "-o", str(case.folder / "pages")],
            ["list"],
            ["prune"],
        ):
            case.run(["--store", str(case.store), *argv], good=(0, 1, 2, 6))
        case.put_base()  # an image whose record is damaged is none, and prune removes its layers
        case.run(["--shared", str(case.shared), *case.build(version)])
        case.run(case.publish(version))
        case.check_output(version)
        if victim.read_text() != "precious":
            case.problem("a file outside was changed")
        return case.problems


def _hostile(data: bytes, dice: random.Random) -> bytes:
    """Other bytes, or the record with one value exchanged."""
    try:
        record = json.loads(data)
        assert isinstance(record, dict)
    except (ValueError, AssertionError):
        return dice.choice(HOSTILE)
    if dice.random() < 0.4 or not record:
        return dice.choice(HOSTILE)
    name = dice.choice(sorted(record))
    value: object = dice.choice((*VALUES, "../../../victim", "sha256:../../../victim", [[[]]]))
    return json.dumps({**record, name: value, "of a later version": {"a": 1}}).encode()


ARCHIVES = ("bundle", "sif", "sif_files", "squashfs", "changes", "registry_base", "registry_image", "registry_layer")
ARCHIVES_OF_A_CASE = 30


def hostile_archives(lab: Lab) -> list[str]:
    """Damaged SIFs, squashfs, tars, bundles and layers of a registry: a value or an error of Ekiben's, within qa/fuzz's
    limits.
    """
    seed, name = lab.dice.randrange(1 << 32), lab.dice.choice(ARCHIVES)
    with lab.case() as case:
        running = case.start([], lambda: _read_archives(name, case.folder / "fuzz", seed))
        if running.wait() != 0:
            case.problem(f"a damaged archive of {name}: {running.output[-1500:]}")
        return case.problems


def _read_archives(name: str, folder: Path, seed: int) -> None:
    """Give the parser of ``name`` damaged archives.

    In a process of its own: it has threads, and ends with SystemExit.
    """
    import hypothesis
    from hypothesis import HealthCheck, Verbosity, settings

    from ekiben.registry import session
    from fuzz.damage import damaged
    from fuzz.limits import limited
    from fuzz.parsers import CASES
    from fuzz.world import World, answering

    session.PAUSES = (0.0, 0.0, 0.0, 0.0)
    os.environ.update({"REGISTRY_AUTH_FILE": "", "DOCKER_AUTH_CONFIG": ""})
    folder.mkdir()
    tempfile.tempdir = str(folder)
    limits = settings(
        max_examples=ARCHIVES_OF_A_CASE,
        deadline=None,
        database=None,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with answering() as registry:
        archive = CASES[name](World(folder / "world", registry))

        @hypothesis.seed(seed)
        @limits
        @hypothesis.given(data=damaged(archive.samples))
        def check(data: bytes) -> None:
            with contextlib.suppress(EkibenError), limited(folder):
                archive.read(data)

        check()
    sys.exit(0)


KINDS: dict[str, Callable[[Lab], list[str]]] = {
    "flip store": flip_store,
    "flip shared": flip_shared,
    "hostile records": hostile_records,
    "hostile archives": hostile_archives,
}
