"""A short cut of `make chaos`: a few faults of each kind, with the invariants after each."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import engines, exchange, foreign, special
from chaos.__main__ import KILLING, KINDS
from chaos.cut import campaign
from support.architecture import ROOT

pytestmark = pytest.mark.covers(
    "qa/chaos",
    "ekiben/store",
    "ekiben/publish",
    "ekiben/registry",
    "ekiben/bundle",
    "ekiben/executors",
    "ekiben/spec",
    "ekiben/run/jobs",
)

NAMESPACES = "race namespaces"
APART = {NAMESPACES, *exchange.KINDS, *foreign.KINDS, *engines.KINDS, *special.KINDS}
CUT = {"kills": 200, "count": 12, "minutes": 8}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the table of system calls is of x86-64")
def test_nothing_of_the_users_is_touched_through_a_link_put_in_a_shared_folder(tmp_path: Path) -> None:
    """Each folder of each path at each system call, then some entries."""
    counts = campaign([*exchange.KINDS], tmp_path, workers=1, kills=0, count=2, minutes=8)
    assert {tally["cases"] for tally in counts.values()} == {2}
    assert sum(tally["exchanges"] for tally in counts.values()) >= 1000


def test_special_files_and_hostile_runs_end_with_a_sentence(tmp_path: Path) -> None:
    counts = campaign([*special.KINDS], tmp_path, workers=2, kills=0, count=24, minutes=8)
    assert {tally["cases"] for tally in counts.values()} == {24}


@pytest.mark.parametrize(
    "kinds",
    [[kind for kind in KINDS if kind not in APART], [NAMESPACES]],
    ids=["all that need no engine", "namespaces"],
)
def test_faults_lose_nothing_and_leave_nothing(kinds: list[str], tmp_path: Path) -> None:
    if kinds == [NAMESPACES] and os.geteuid():
        pytest.skip("unshare --pid needs root")
    counts = campaign(kinds, tmp_path, **CUT)
    assert {kind: counts[kind]["cases"] for kind in kinds if kind not in KILLING} == {
        kind: CUT["count"] for kind in kinds if kind not in KILLING
    }
    if kinds != [NAMESPACES]:
        assert sum(tally["kills"] for tally in counts.values()) >= CUT["kills"]


@pytest.mark.parametrize(("kind", "count"), [("registry mode", 8), ("hostile bundle", 24), ("foreign recipe", 12)])
def test_what_comes_from_elsewhere_does_no_harm(kind: str, count: int, tmp_path: Path) -> None:
    """In the campaign each answer of a registry, and each shape of a bundle, has its turn."""
    assert campaign([kind], tmp_path, workers=1, kills=0, count=count, minutes=3)[kind]["cases"] == count


def test_a_problem_is_counted_and_its_seed_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of an output that somebody damaged between the runs."""
    script = (
        "import random, sys; from pathlib import Path; from chaos.lab import Lab\nlab = Lab(Path(sys.argv[1]),"
        " random.Random(1))\nwith lab.case() as case:\n    case.run(case.build(1)); case.out.write_bytes(b'x');"
        " (case.folder / 'tmp/left').touch()\n    case.check_output(1); case.check_complete(versions=[1]);"
        " case.check_tidy(); print(*case.problems, sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "lab"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'qa'}"},
    )
    assert done.stdout.splitlines() == [
        "the output has other bytes than an undisturbed build gives",
        "own.sif is none of the versions that were built",
        "left over: TMPDIR: left",
    ]
