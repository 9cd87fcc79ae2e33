"""What `submit` writes and what it refuses, with no scheduler at hand; the job scripts are read by bash and shellcheck."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from builder.errors import UsageError
from builder.launch import passes
from builder.recipe import Recipe, RecipeFile, TaskFile
from builder.schedulers import SCHEDULERS, Job, clock, load, seconds_of
from builder.site import find_site
from builder.submit import Plan, Run, Wanted, _row, find_runs, plan, quote_seed, script, status
from own_recipe import RunCli

TASKS = {
    "prepare": TaskFile(entrypoint="a.py", help="", runs_on="cpu"),
    "train": TaskFile(entrypoint="a.py", help="", runs_on="gpus"),
    "merge": TaskFile(entrypoint="a.py", help=""),
}
RECIPE = Recipe(Path(), RecipeFile(name="mine", description="", stack="cu130", layer="x", tasks=TASKS))
KNOWN = {
    "slurm": r"--(job-name|nodes|gpus|gpus-per-node|cpus-per-task|ntasks-per-node|time|signal|array|requeue|output|open-mode|exclusive|account|partition)\b",
    "sge": r"-(N|l|S|cwd|j|r|notify|t|o|pe)\b",
    "pbs": r"-(N|l|S|j|o|J|q|P|r)\b",
}


def made(*words: str, scheduler: str = "slurm", site: str | None = None, **wanted: Any) -> Plan:
    return plan(RECIPE, words, Wanted(**wanted), scheduler=scheduler, site=find_site(site) if site else None,
                sif=Path("/images/mine.sif"), runs=Path("/shared/runs"))  # fmt: skip


def scripts(run: Plan) -> list[str]:
    return [script(run, step) for step in run.steps]


def directives(text: str) -> list[str]:
    return [line.split(" ", 1)[1] for line in text.splitlines() if re.match(r"#(SBATCH|\$|PBS) ", line)]


# ------------------------------------------------------------------------------------------------------------ scripts

SITES = {
    "slurm": ("slurm-a100", {"nodes": 2, "group": "lab"}),
    "sge": ("abci-2.0", {"nodes": 2, "group": "gaa", "resource": "rt_F"}),
    "pbs": ("abci-3.0", {"nodes": 2, "group": "gaa", "resource": "rt_HF"}),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_script_is_sound_bash(scheduler: str, tmp_path: Path) -> None:
    site, asked = SITES[scheduler]
    words = ["prepare", "--input", "it's a file", "+", "train", "--output", "out-{seed}", "+", "merge"]
    run = made(*words, scheduler=scheduler, site=site, seconds=7200, seeds=("1", "2"), stage=True, **asked)
    for text in scripts(run):
        path = tmp_path / "job.sh"
        path.write_text(text)
        subprocess.run(["bash", "-n", path], check=True)
        if shutil.which("shellcheck"):
            # Files that only a compute node has; one form for one and for several; what a trap reads later.
            said = subprocess.run(["shellcheck", "-e", "SC1090,SC1091,SC2002,SC2016,SC2034,SC2043,SC2154", path], capture_output=True, text=True, check=False)  # fmt: skip
            assert said.returncode == 0, said.stdout
        elif os.environ.get("CI") == "true":
            pytest.fail("shellcheck is not installed")
        found = directives(text)
        assert len(found) >= 4
        assert [line for line in found if not re.match(KNOWN[scheduler], line)] == []
        assert "task=(prepare --input 'it'\"'\"'s a file')" in scripts(run)[0]


def test_slurm() -> None:
    (text,) = scripts(made("train", nodes=2, gpus=4, cpus=8, seconds=7200, notice=600))
    assert directives(text)[:7] == [
        "--job-name=mine-train", "--nodes=2", "--gpus-per-node=4", "--cpus-per-task=8", "--ntasks-per-node=1", "--time=2:00:00",
        "--signal=B:USR1@600",
    ]  # fmt: skip
    assert "--processes 4 " in text
    assert " exec --cleanenv --nv " in text


def test_abci_2() -> None:
    run = made("train", scheduler="sge", site="abci-2.0", nodes=2, group="gaa50000", resource="rt_F", seconds=3600)
    assert run.command_words == ("-g gaa50000",)  # the guide: not in the script
    (text,) = scripts(run)
    assert "-l rt_F=2" in directives(text)
    assert "-l h_rt=1:00:00" in directives(text)
    assert "sleep 3300" in text
    assert "qrsh -inherit" in text
    assert "source /etc/profile.d/modules.sh\n    module load singularitypro" in text
    assert "--processes 4 " in text


def test_abci_3() -> None:
    run = made("train", scheduler="pbs", site="abci-3.0", nodes=2, group="gaa50000", resource="rt_HF", seconds=3600)
    (text,) = scripts(run)
    assert {"-P gaa50000", "-q rt_HF", "-l select=2", "-l walltime=1:00:00"} <= set(directives(text))
    assert run.command_words == ()
    assert "pbs_tmrsh" in text
    assert "sleep 3300" in text
    assert "--processes 8 " in text


def test_the_smallest_kind_of_node_that_does() -> None:
    def asked(*words: str, **wanted: Any) -> list[str]:
        run = made(*words, scheduler="pbs", site="abci-3.0", group="g", **wanted)
        return [next(line for line in directives(text) if line.startswith("-q")) for text in scripts(run)]

    assert asked("train") == ["-q rt_HG"]
    assert asked("prepare") == ["-q rt_HC"]
    assert asked("train", gpus=1) == ["-q rt_HG"]
    assert asked("train", gpus=8) == ["-q rt_HF"]
    assert asked("train", nodes=4, gpus=1) == ["-q rt_HF"]
    assert asked("prepare", "+", "train", "+", "merge", gpus=8, nodes=2) == ["-q rt_HC", "-q rt_HF", "-q rt_HF"]


def test_a_site_without_a_walltime_of_ours_has_its_own() -> None:
    (text,) = scripts(made("train", scheduler="pbs", site="abci-3.0", group="g", gpus=1))
    assert "-l walltime=1:00:00" in directives(text)


def test_one_after_the_other() -> None:
    run = made("prepare", "+", "train", "--epochs", "2", "+", "merge", nodes=2, gpus=2)
    assert [(step.name, step.nodes, step.gpus, step.processes) for step in run.steps] == [
        ("1-prepare", 1, 0, 1), ("2-train", 2, 2, 2), ("3-merge", 1, 2, 1),
    ]  # fmt: skip
    first, second, third = scripts(run)
    assert "not before the step before" not in first
    assert "for before in 1-prepare; do" in second
    assert "for before in 2-train; do" in third
    assert "--nv" not in first


def test_seeds() -> None:
    run = made("train", "--data", "rows.jsonl", seeds=("5", "70"))
    (text,) = scripts(run)
    assert "--array=1-2" in directives(text)
    assert "seeds=(5 70)" in text
    assert 'task=(train --data rows.jsonl --set seed="$seed" --output result-"$seed")' in text
    assert run.steps[0].jobs == ("1-train.1", "1-train.2")
    both = made("train", "--output", "{seed}", "+", "merge", seeds=("5", "70"))
    assert [step.seeds for step in both.steps] == [("5", "70"), ()]
    assert "for before in 1-train.1 1-train.2; do" in scripts(both)[1]


@pytest.mark.parametrize("word", ["{seed}", "out/{seed}/x y", "it's {seed}", "plain", "$(rm -rf ~) {seed}"])
def test_a_seed_in_a_word(word: str) -> None:
    said = subprocess.check_output(["bash", "-c", f"seed='7 8'; printf %s {quote_seed(word)}"], text=True)
    assert said == word.replace("{seed}", "7 8")


def test_the_launcher_in_the_script_gets_what_run_lets_in() -> None:
    (text,) = scripts(made("train"))
    pattern = re.search(r"grep -Ex '([^']*)'", text)
    assert pattern
    assert pattern[1] == passes()
    for name, gets_in in {
        "NCCL_DEBUG": True,
        "HF_TOKEN": True,
        "LD_LIBRARY_PATH": False,
        "PYTHONPATH": False,
        "AHF_HOME": False,
    }.items():
        assert bool(re.fullmatch(pattern[1], name)) == gets_in, name


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("words", "wanted", "said"),
    [
        (["trian"], {}, "recipe 'mine' has no task 'trian'. Did you mean 'train'?"),
        (["train", "+", "+", "merge"], {}, "a task is missing beside '+'"),
        (["merge"], {"nodes": 2}, "'merge' runs as one process on one node"),
        (["merge"], {"processes": 2}, "'merge' runs as one process on one node"),
        (["train", "{seed}"], {}, "{seed} stands in the arguments, and there is no --seeds"),
        (["train", "--output", "x"], {"seeds": ("1", "2")}, "2 jobs would write into the same --output"),
        (["train", "+", "merge"], {"seeds": ("1", "2")}, "say with {seed} in the arguments where the seed goes"),
        (["train"], {"group": "lab"}, "--group lab: without --site no option for it is known"),
        (["train"], {"site": "abci-3.0", "scheduler": "pbs"}, "abci-3.0 wants to know which group pays: --group NAME (-P there)"),
        (["train"], {"site": "abci-3.0"}, "--scheduler slurm: abci-3.0 has pbs"),
        (["train"], {"site": "abci-3.0", "scheduler": "pbs", "group": "g", "gpus": 9}, "--gpus-per-node 9: a node of rt_HF has 8"),
        (["train"], {"site": "abci-3.0", "scheduler": "pbs", "group": "g", "nodes": 129, "gpus": 8}, "--nodes 129: rt_HF allows 128"),
        (["train"], {"site": "abci-3.0", "scheduler": "pbs", "group": "g", "seconds": 169 * 3600}, "--time 169:00:00: rt_HF allows 168:00:00"),
        (["train"], {"site": "abci-3.0", "scheduler": "pbs", "group": "g", "resource": "rt_HE"}, "abci-3.0 has no 'rt_HE'. Did you mean"),
        (["train"], {"scheduler": "sge", "gpus": 1}, "how a Grid Engine names nodes, GPUs and cores is each site's own affair"),
    ],
)  # fmt: skip
def test_refused_before_the_queue(words: list[str], wanted: Mapping[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        made(*words, **wanted)
    assert said in str(error.value)


def test_grid_engine_with_words_of_ones_own() -> None:
    run = made("train", scheduler="sge", gpus=1, options=("-l gpu=1", "-pe mpi 2"))
    assert {"-l gpu=1", "-pe mpi 2"} <= set(directives(scripts(run)[0]))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1:30:00", 5400),
        ("90m", 5400),
        ("2h", 7200),
        ("1-12:00:00", 129_600),
        ("45s", 45),
        ("1-12:00", 129_600),
        ("3d", 259_200),
    ],
)
def test_times(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds
    assert seconds_of(clock(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "5", "two hours", "1:70:00", "-5m"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError, match="expected H:MM:SS"):
        seconds_of(text)


def test_a_time_of_two_parts_could_be_either() -> None:
    with pytest.raises(UsageError, match="Write 5:30:00, or 5m"):
        seconds_of("5:30")


def test_no_such_scheduler() -> None:
    with pytest.raises(UsageError, match="no scheduler 'slrum'"):
        load("slrum")


def test_runs_on_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="not 'all'"):
        TaskFile(entrypoint="a.py", help="", runs_on="all")


# -------------------------------------------------------------------------------------------------------- command line


def test_dry_run_writes_nothing(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli("submit", "lora-opencalm", "train", "--scheduler", "pbs", "--nodes", "2", "--gpus-per-node", "4", "--time", "2h", "--dry-run",
                   "--", "--data", "my rows.jsonl")  # fmt: skip
    assert done.stdout.startswith("#!/bin/bash\n#PBS -N lora-opencalm-t\n#PBS -l select=2:ngpus=4\n")
    assert "task=(train --data 'my rows.jsonl')" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--gpu-per-node", "4"], 2, "No such option"),
        (["--scheduler", "slrum"], 2, "--scheduler: no scheduler 'slrum'. Did you mean 'slurm'?"),
        (["--site", "abci-4.0"], 2, "no site 'abci-4.0'. Did you mean"),
        (["--site", "workstation"], 2, "workstation names no scheduler; say --scheduler"),
        (["--scheduler", "pbs", "--time", "soon"], 2, "--time soon: expected"),
        (["--scheduler", "pbs"], 2, "lora-opencalm.sif is not there"),
    ],
)
def test_wrong_words(run_cli: RunCli, tmp_path: Path, words: list[str], code: int, said: str) -> None:
    assert said in run_cli("submit", "lora-opencalm", "train", *words, code=code).stderr
    assert not (tmp_path / "ekiben-runs").exists()


def test_no_scheduler_here(run_cli: RunCli) -> None:
    said = run_cli("submit", "lora-opencalm", "train", code=4, env={"PATH": "/nowhere"}).stderr
    if not Path("/usr/bin/sbatch").exists():
        assert "no scheduler can be used here:\n  slurm: sbatch is not on PATH" in said


def test_a_run_that_is_not_there(run_cli: RunCli) -> None:
    for words in (["status", "1234"], ["cancel", "1234"], ["logs", "1234"]):
        assert "no run '1234' in ekiben-runs." in run_cli(*words, code=2).stderr
    assert "there is no run in ekiben-runs" in run_cli("logs", code=2).stderr
    assert run_cli("status").stdout == ""


def test_two_runs_in_one_second(tmp_path: Path) -> None:
    first = plan(
        RECIPE, ["train"], Wanted(), scheduler="slurm", site=None, sif=tmp_path / "x.sif", runs=tmp_path
    ).folder
    for number in range(3):
        (tmp_path / (first.name if number == 0 else f"{first.name}-{number + 1}")).mkdir()
    again = plan(
        RECIPE, ["train"], Wanted(), scheduler="slurm", site=None, sif=tmp_path / "x.sif", runs=tmp_path
    ).folder
    assert not again.exists()
    assert again.name.startswith("mine-train-")


def test_status_of_what_is_over(tmp_path: Path) -> None:
    folder = tmp_path / "runs/mine-train-1"
    folder.mkdir(parents=True)
    steps = [{"name": "1-train", "seeds": ["1", "2"]}, {"name": "2-merge", "seeds": []}]
    (folder / "run.json").write_text(json.dumps({"scheduler": "slurm", "steps": steps}))
    for name, code in {"1-train.1": 0, "1-train.2": 3, "2-merge": 1}.items():
        (folder / f"{name}.job").write_text("77\n")
        (folder / f"{name}.exit").write_text(f"{code}\n")
    rows = status(find_runs(["77"], tmp_path / "runs"))
    assert [(row.job, row.state, row.detail) for row in rows] == [
        ("1-train.1", "done", ""), ("1-train.2", "failed", "exit code 3"), ("2-merge", "failed", "exit code 1"),
    ]  # fmt: skip


class Moving(dict[tuple[str, int], Job]):
    """A queue: while it is asked the job goes back into it, under another id."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place

    def get(self, key: Any, default: Any = None) -> Any:
        self.place.write_text("78\n")
        return default


def test_a_job_that_gets_another_id_while_it_is_looked_for_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "1-train.job").write_text("77\n")
    run = Run(tmp_path, {"scheduler": "pbs", "steps": [{"name": "1-train", "seeds": []}]})
    row = _row(run, "1-train", "77", Moving(tmp_path / "1-train.job"))
    assert (row.state, row.detail) == ("queued", "as job 78")


def test_the_launcher_is_one_file_of_the_standard_library() -> None:
    """It is copied into the run and started by whatever Python the image has."""
    path = Path(__file__).resolve().parent.parent / "entrypoints/launch_node.py"
    done = subprocess.run(["python3", "-I", path, "--help"], cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not path.stat().st_mode & stat.S_IXUSR
