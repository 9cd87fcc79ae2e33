"""A run's folder of somebody else: nothing of it is followed, waited for, believed, or sent to the terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from ekiben.cli import root
from ekiben.core.errors import UsageError
from ekiben.run.jobs.logs import log_content
from ekiben.run.jobs.records import find_runs
from ekiben.run.jobs.request import MAX_JOBS, parse_seeds
from support.hostile_runs import JOB_FILES, make_lab, put_run, record
from support.programs import write_program
from support.sample_recipe import RunCli


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_lab(tmp_path, monkeypatch)


def test_a_link_to_a_run_is_named_and_not_followed(lab: Path, run_cli: RunCli) -> None:
    (lab / "ekiben-runs/r").symlink_to(lab / "ekiben-runs/sound")
    done = run_cli("status")
    assert done.stdout.startswith("sound  1-hello")
    assert len(done.stdout.splitlines()) == 1
    assert "skipped: 'r' in ekiben-runs is a link; name its target" in done.stderr
    assert run_cli("status", "ekiben-runs/r").stdout.startswith("r  1-hello")
    (lab / "scratch").mkdir()
    (lab / "ekiben-runs").rename(lab / "scratch/runs")
    (lab / "ekiben-runs").symlink_to("scratch/runs")  # the user's own folder
    assert run_cli("status", "sound").stdout.startswith("sound  1-hello")


def test_cancel_makes_no_file_elsewhere(lab: Path, run_cli: RunCli) -> None:
    (lab / "ekiben-runs/sound/cancelled").symlink_to(lab / "victim")
    run_cli("cancel", "sound")
    assert not (lab / "victim").exists()


def test_one_scheduler_that_fails_hides_no_other_run(lab: Path, run_cli: RunCli) -> None:
    write_program(lab / "bin/qstat", "#!/bin/sh\necho no XML\n")
    put_run(lab / "ekiben-runs/r", json.dumps({**record(Path("/x")), "scheduler": "sge"}).encode())
    done = run_cli("status")
    assert done.stdout.startswith("sound  1-hello")
    assert "skipped: the runs of sge: qstat's answer is not XML" in done.stderr
    assert "qstat's answer is not XML" in run_cli("status", "r", code=11).stderr


def test_control_characters_of_a_log_are_escaped_but_in_a_file(lab: Path, run_cli: RunCli) -> None:
    data = "a\x1b]0;pwned\x07\r\nb\rc\tあ\n".encode()
    log = lab / "ekiben-runs/sound/1-hello.log"
    log.write_bytes(data + b"\xff\xe3\x81")
    done = CliRunner().invoke(root, ["logs", "sound"])
    assert done.stdout == "a\\x1b]0;pwned\\x07\nb\nc\tあ\n\ufffd\ufffd"
    assert "a\x1b]0;pwned\x07" in run_cli("logs", "sound").stdout  # a file takes its output
    (run,) = find_runs(["sound"], lab / "ekiben-runs")
    assert b"".join(log_content(run, None, follow=False)) == log.read_bytes()


def test_a_log_is_read_in_pieces(lab: Path) -> None:
    with (lab / "ekiben-runs/sound/1-hello.log").open("wb") as log:
        log.truncate(40 << 30)
    (run,) = find_runs(["sound"], lab / "ekiben-runs")
    assert len(next(log_content(run, None, follow=False))) <= 1 << 20


def test_twenty_thousand_jobs_are_shown_in_seconds(lab: Path, run_cli: RunCli) -> None:
    step = {"name": "1-hello", "argv": ["hello"], "nodes": 1, "seeds": [str(seed) for seed in range(MAX_JOBS)]}
    put_run(lab / "ekiben-runs/r", json.dumps({**record(Path("/x")), "steps": [step]}).encode())
    for number in range(1, 2001):
        (lab / f"ekiben-runs/r/1-hello.{number}.job").write_text(f"{number}\n")
    began = time.monotonic()
    assert len(run_cli("status", "r").stdout.splitlines()) == MAX_JOBS
    assert time.monotonic() - began < 20
    with pytest.raises(UsageError, match="a run has at most 20000 jobs"):
        parse_seeds(",".join(map(str, range(MAX_JOBS + 1))))
    with pytest.raises(UsageError, match="7 is listed twice"):
        parse_seeds(",".join(map(str, [*range(MAX_JOBS - 1), 7])))


def test_the_sound_run_has_every_file_that_is_exchanged(lab: Path) -> None:
    assert {*JOB_FILES} - {"cancelled"} < {path.name for path in (lab / "ekiben-runs/sound").iterdir()}
