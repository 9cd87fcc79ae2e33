"""What `submit` writes and what it refuses, with no scheduler at hand; the job scripts are read by bash."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ekiben.cli import root
from ekiben.core.errors import SchedulerError, UsageError
from ekiben.core.settings import JobDefaults
from ekiben.run import schedulers
from ekiben.run.contract import passes
from ekiben.run.image import NamedImage, sif_state
from ekiben.run.jobs.images import read_tasks, split_reference
from ekiben.run.jobs.plan import plan
from ekiben.run.jobs.records import find_runs, jobs_named
from ekiben.run.jobs.request import JobRequest, memory_mib_of, with_defaults
from ekiben.run.jobs.script import job_program
from ekiben.run.jobs.states import job_status, status
from ekiben.run.schedulers import Job, clock, load, names, pbs, seconds_of, slurm
from ekiben.run.site import find_site
from ekiben.spec.recipe import LAUNCHER, TaskFile, find_recipe
from support.job_plans import RECIPE, SITES, image_of_recipe, made, plan_run, run_of_three_steps, scripts
from support.programs import write_program
from support.sample_recipe import RunCli
from support.small_sifs import small_sif

# Options that the real scheduler's tests have tried; of one without a row, whatever its module writes.
KNOWN = {
    "slurm": (
        r"--(job-name|nodes|gpus|gpus-per-node|cpus-per-task|mem|qos|ntasks-per-node|time|signal|array|requeue|output|open-mode|exclusive|account|partition)\b"
    ),
    "sge": r"-(N|l|S|cwd|j|r|notify|t|o|pe)\b",
    "pbs": r"-(N|l|S|j|o|J|q|P|r)\b",
}


def directives(text: str) -> list[str]:
    prefixes = tuple(load(name).PREFIX for name in names())
    return [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith(prefixes)]


# ------------------------------------------------------------------------------------------------------------ scripts


def test_job_program_passes_bash_syntax_check() -> None:
    subprocess.run(["bash", "-n"], input=job_program(), text=True, check=True)


@pytest.mark.parametrize("scheduler", schedulers.names())
def test_job_scripts_pass_bash_syntax_check(scheduler: str, tmp_path: Path) -> None:
    run = run_of_three_steps(scheduler)
    for text in scripts(run):
        path = tmp_path / "1-step.sh"
        path.write_text(text)
        subprocess.run(["bash", "-n", path], check=True)
        found = directives(text)
        assert len(found) >= 4
        assert [line for line in found if not re.match(KNOWN.get(scheduler, ""), line)] == []
        assert "task=(prepare --input 'it'\"'\"'s a file')" in scripts(run)[0]


def test_slurm_job_script() -> None:
    (text,) = scripts(
        made("train", nodes=2, gpus_per_node=4, cpus_per_node=8, memory_mib=4096, time_seconds=7200, grace_seconds=600)
    )
    assert directives(text)[:8] == [
        "--job-name=mine-train",
        "--nodes=2",
        "--gpus-per-node=4",
        "--cpus-per-task=8",
        "--mem=4096",
        "--ntasks-per-node=1",
        "--time=2:00:00",
        "--signal=B:USR1@600",
    ]
    assert {"processes=", "planned_gpus=4", "uses_gpus=yes"} <= set(text.splitlines())


def test_abci_2_job_script() -> None:
    run = made(
        "train", scheduler="sge", site="abci-2.0", nodes=2, account="gaa50000", partition="rt_F", time_seconds=3600
    )
    assert run.command_args == ("-g gaa50000",)  # the guide: not in the script
    (text,) = scripts(run)
    assert "-l rt_F=2" in directives(text)
    assert "-l h_rt=1:00:00" in directives(text)
    assert "warn_after=3300\n" in text
    assert "qrsh -inherit" in text
    assert "source /etc/profile.d/modules.sh\n    module load singularitypro" in text
    assert "planned_gpus=4\n" in text


def test_abci_2_a100_job_script() -> None:
    def requested(**wanted: Any) -> str:
        return made("train", scheduler="sge", site="abci-2.0-a", account="gaa50000", **wanted).steps[0].resource_args[0]

    assert requested() == "-l rt_AG.small=1"
    assert requested(nodes=2, gpus_per_node=8) == "-l rt_AF=2"


def test_abci_3_job_script() -> None:
    run = made(
        "train", scheduler="pbs", site="abci-3.0", nodes=2, account="gaa50000", partition="rt_HF", time_seconds=3600
    )
    (text,) = scripts(run)
    assert {"-P gaa50000", "-q rt_HF", "-l select=2", "-l walltime=1:00:00"} <= set(directives(text))
    assert run.command_args == ()
    assert "pbs_tmrsh" in text
    assert "warn_after=3300\n" in text
    assert "planned_gpus=8\n" in text


def test_smallest_sufficient_resource_is_chosen() -> None:
    def asked(*args: str, **wanted: Any) -> list[str]:
        run = made(*args, scheduler="pbs", site="abci-3.0", account="g", **wanted)
        return [next(line for line in directives(text) if line.startswith("-q")) for text in scripts(run)]

    assert asked("train") == ["-q rt_HG"]
    assert asked("prepare") == ["-q rt_HC"]
    assert asked("train", gpus_per_node=1) == ["-q rt_HG"]
    assert asked("train", gpus_per_node=8) == ["-q rt_HF"]
    assert asked("train", nodes=4, gpus_per_node=1) == ["-q rt_HF"]
    assert asked("prepare", "+", "train", "+", "merge", gpus_per_node=8, nodes=2) == [
        "-q rt_HC",
        "-q rt_HF",
        "-q rt_HF",
    ]


def test_site_default_walltime_is_left_to_the_scheduler() -> None:
    (text,) = scripts(made("train", scheduler="pbs", site="abci-3.0", account="g", gpus_per_node=1))
    assert "-l walltime=1:00:00" in directives(text)


def test_dependent_steps() -> None:
    run = made("prepare", "+", "train", "--epochs", "2", "+", "merge", nodes=2, gpus_per_node=2)
    assert [(step.name, step.nodes, step.gpus, step.processes) for step in run.steps] == [
        ("1-prepare", 1, 0, 1),
        ("2-train", 2, 2, None),
        ("3-merge", 1, 2, 1),
    ]
    first, second, third = scripts(run)
    assert "steps_before=()\n" in first
    assert "steps_before=(1-prepare)\n" in second
    assert "steps_before=(2-train)\n" in third
    assert ["uses_gpus=\n" in text for text in (first, second, third)] == [
        True,
        False,
        False,
    ]  # `prepare` runs on the CPU


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train", ("", "train")),
        ("evaluate:perplexity", ("evaluate", "perplexity")),
        ("./dir/x.sif:a.b", ("./dir/x.sif", "a.b")),
        ("evaluate:1.2:perplexity", ("evaluate:1.2", "perplexity")),
        ("oras://host:5000/lab/x:tag:upload", ("oras://host:5000/lab/x:tag", "upload")),
    ],
)
def test_the_task_of_an_image_is_read(word: str, expected: tuple[str, str]) -> None:
    assert split_reference(word) == expected


@pytest.mark.parametrize("scheduler", schedulers.names())
def test_each_step_has_its_image_in_its_script(scheduler: str, tmp_path: Path) -> None:
    """Found once for each reference, checked, and named in the script of the step alone."""
    small_sif(tmp_path / "other.sif")
    other = NamedImage(name="other", sif=tmp_path / "other.sif", tasks={"score": "per-gpu", "prepare": "cpu"})
    image, references = image_of_recipe(RECIPE, Path("/images/mine.sif")), list[str]()

    def find(reference: str) -> NamedImage:
        references.append(reference)
        return other

    argv = ["train", "+", "lab/other:score", "--adapter", "x", "+", "merge", "+", "lab/other:prepare"]
    site, asked = SITES.get(scheduler, (None, {"nodes": 2}))
    request = JobRequest(time_seconds=3600, copy_local=True, **asked)
    profile = find_site(site) if site else None
    run = plan(image, read_tasks(image, argv, find), request, scheduler=scheduler, site=profile, runs=tmp_path / "runs")
    assert references == ["lab/other"]
    assert [(step.name, step.image.named.name, step.nodes) for step in run.steps] == [
        ("1-train", "mine", 2),
        ("2-score", "other", 2),
        ("3-merge", "mine", 1),
        ("4-prepare", "other", 1),
    ]
    state = sif_state(tmp_path / "other.sif")
    for step, text in zip(run.steps, scripts(run), strict=True):
        lines = set(text.splitlines())
        is_other = step.image.named is other
        assert f"image={tmp_path / 'other.sif' if is_other else '/images/mine.sif'}" in lines
        assert f"image_header={state.header if is_other else ''}" in lines
        assert any(f"{step.image.named.name}-{step.argv[0]}" in line for line in directives(text))
    with pytest.raises(UsageError, match=r"other\.sif has no task 'scroe'\. Did you mean 'score'"):
        plan(image, read_tasks(image, ["o:scroe"], find), request, scheduler=scheduler, site=profile, runs=tmp_path)


def test_array_job_for_each_seed() -> None:
    run = made("train", "--data", "rows.jsonl", seeds=("5", "70"))
    (text,) = scripts(run)
    assert "--array=1-2" in directives(text)
    assert "seeds=(5 70)" in text
    assert 'task=(train --data rows.jsonl --set seed="$seed" --output result-"$seed")' in text
    assert run.steps[0].jobs == ("1-train.1", "1-train.2")
    both = made("train", "--output", "{seed}", "+", "merge", seeds=("5", "70"))
    assert [step.seeds for step in both.steps] == [("5", "70"), ()]
    assert "steps_before=(1-train.1 1-train.2)\n" in scripts(both)[1]


def test_job_environment_equals_that_of_run() -> None:
    pattern = re.search(r"variables_passed='([^']*)'", job_program())
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


# ----------------------------------------------------------------------------------------------------------- resources


def test_cpus_and_memory_of_a_profile_follow_the_gpus(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text("""\
name: lab
description: nodes to share
node: {}
scheduler:
  kind: slurm
  resources:
    part: {request: ["--gpus-per-node={gpus}"], gpus: 8, cores: 96, memory_gib: 800}
  defaults: {account: lab, memory: 10G, env: [NAME=site]}
""")

    def args(**wanted: Any) -> tuple[str, ...]:
        return made("train", site=str(tmp_path / "lab.yaml"), **wanted).steps[0].resource_args

    assert args(gpus_per_node=2) == ("--gpus-per-node=2", "--cpus-per-task=24", "--mem=204800")
    assert args(gpus_per_node=2, cpus_per_node=7, memory_mib=1000) == (
        "--gpus-per-node=2",
        "--cpus-per-task=7",
        "--mem=1000",
    )
    assert args(gpus_per_node=2, exclusive=True) == (
        "--gpus-per-node=2",
        "--cpus-per-task=96",
        "--mem=0",
        "--exclusive",
    )
    profile = find_site(str(tmp_path / "lab.yaml")).file.scheduler
    assert profile
    request = with_defaults(
        JobRequest(env=("NAME=own",), qos="high"), [JobDefaults(account="mine", qos="low"), profile.defaults]
    )
    assert (request.account, request.qos, request.memory_mib) == ("mine", "high", 10240)
    assert request.env == ("NAME=site", "NAME=own")


@pytest.mark.parametrize(
    ("scheduler", "wanted", "message"),
    [
        ("slurm", {}, "'train' uses GPUs, and its job requests none"),
        ("slurm", {"scheduler_args": ("--gres=gpu:h200:2",), "cpus_per_node": 4}, None),
        ("slurm", {"scheduler_args": ("--gres=gpu:2",), "cpus_per_node": 1}, "'train' gets one CPU for 2 GPUs"),
        ("slurm", {"scheduler_args": ("-G 2",), "cpus_per_node": 2}, None),
        ("slurm", {"scheduler_args": ("--exclusive",)}, None),
        ("pbs", {}, "'train' uses GPUs, and its job requests none"),
        ("pbs", {"scheduler_args": ("-l select=1:ncpus=4:ngpus=2",)}, None),
        ("pbs", {"scheduler_args": ("-q gpu",)}, None),
        ("sge", {}, "'train' uses GPUs, and its job requests none"),
        ("sge", {"scheduler_args": ("-l rt_F=1",)}, None),
        ("oar", {"scheduler_args": ("-l host=1/gpu=1",)}, None),
    ],
)
def test_a_gpu_task_without_gpus_is_a_warning(scheduler: str, wanted: dict[str, Any], message: str | None) -> None:
    warning = made("train", scheduler=scheduler, **wanted).steps[0].warning
    assert (warning or "").startswith(message or "")
    assert bool(warning) == bool(message)
    assert made("prepare", scheduler=scheduler, **wanted).steps[0].warning is None


def test_partition_account_and_qos_without_a_profile() -> None:
    run = made("train", gpus_per_node=1, cpus_per_node=1, memory_mib=1000, account="lab", qos="high")
    assert run.directives == ("--account=lab", "--qos=high")
    assert made("train", scheduler="pbs", partition="long", account="lab").steps[0].resource_args[-1] == "-q long"


@pytest.mark.parametrize("text", ["64", "0G", "many", "G"])
def test_invalid_memory_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a number with M, G or T"):
        memory_mib_of(text)
    assert (memory_mib_of("64G"), memory_mib_of("64GiB"), memory_mib_of("900m")) == (65536, 65536, 900)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("argv", "wanted", "message"),
    [
        (["trian"], {}, "recipe 'mine' has no task 'trian'. Did you mean 'train'?"),
        (["train", "+", "+", "merge"], {}, "a task is missing beside '+'"),
        (["train", "+", "other:"], {}, "other:: names no task"),
        (["train", "+", "docker://host/name"], {}, "docker://host/name: names no task"),
        (["train", "+", "./other.sif"], {}, "'./other.sif' is not a task's name"),
        (["merge"], {"nodes": 2}, "'merge' runs as one process on one node"),
        (["merge"], {"processes_per_node": 2}, "'merge' runs as one process on one node"),
        (["train", "{seed}"], {}, "{seed} is in the arguments, but --seeds is missing"),
        (["train", "--output", "x"], {"seeds": ("1", "2")}, "2 jobs would write into the same --output"),
        (["train", "+", "merge"], {"seeds": ("1", "2")}, "put {seed} into the arguments at the position of the seed"),
        (["train"], {"scheduler": "pbs", "qos": "high"}, "--qos high: PBS has no portable option for it"),
        (
            ["train"],
            {"site": "abci-3.0", "scheduler": "pbs", "account": "g", "gpus_per_node": 8, "cpus_per_node": 4},
            "--cpus-per-node 4: rt_HF has a fixed amount for each node",
        ),
        (
            ["train"],
            {"site": "abci-3.0", "scheduler": "pbs", "account": "g", "memory_mib": 2000 * 1024},
            "a node of rt_HG has 149 GiB",
        ),
        (
            ["train"],
            {"site": "abci-3.0", "scheduler": "pbs"},
            "abci-3.0 requires the account that pays: --account NAME (-P there)",
        ),
        (["train"], {"site": "abci-3.0"}, "--scheduler slurm: abci-3.0 has pbs"),
        (
            ["train"],
            {"site": "abci-3.0", "scheduler": "pbs", "account": "g", "gpus_per_node": 9},
            "--gpus-per-node 9: a node of rt_HF has 8",
        ),
        (
            ["train"],
            {"site": "abci-3.0", "scheduler": "pbs", "account": "g", "nodes": 129, "gpus_per_node": 8},
            "--nodes 129: rt_HF allows 128",
        ),
        (
            ["train"],
            {"site": "abci-3.0", "scheduler": "pbs", "account": "g", "time_seconds": 169 * 3600},
            "--time 169:00:00: rt_HF allows 168:00:00",
        ),
        (
            ["train"],
            {"site": "abci-3.0", "scheduler": "pbs", "account": "g", "partition": "rt_HE"},
            "abci-3.0 has no 'rt_HE'. Did you mean",
        ),
        (
            ["train"],
            {"scheduler": "sge", "gpus_per_node": 1},
            "each site has its own names for nodes, GPUs and cores",
        ),
    ],
)
def test_invalid_requests_fail_before_the_queue(argv: list[str], wanted: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        made(*argv, **wanted)
    assert message in str(error.value)


def test_grid_engine_with_scheduler_args() -> None:
    run = made("train", scheduler="sge", gpus_per_node=1, scheduler_args=("-l gpu=1", "-pe mpi 2"))
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
def test_walltimes_are_parsed_and_formatted(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds
    assert seconds_of(clock(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "5", "two hours", "1:70:00", "-5m"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected H:MM:SS"):
        seconds_of(text)


def test_time_of_two_parts_is_ambiguous() -> None:
    with pytest.raises(UsageError, match="Write 5:30:00, or 5m"):
        seconds_of("5:30")


def test_unknown_scheduler_is_refused() -> None:
    with pytest.raises(UsageError, match="no scheduler 'slrum'"):
        load("slrum")


def test_launch_is_one_of_three() -> None:
    assert TaskFile(entrypoint="a.py", help="").launch == "single"
    with pytest.raises(ValueError, match=r"should be per-gpu, single or cpu \(found: 'all'\)"):
        TaskFile(entrypoint="a.py", help="", launch="all")


@pytest.mark.parametrize(("former", "launch"), [("gpus", "per-gpu"), ("gpu", "single"), ("cpu", "cpu")])
def test_the_former_name_of_launch_is_read_with_a_warning(
    tmp_path: Path, former: str, launch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"entrypoint": "a.py", "help": "", "runs_on": former}
    recipe = {"name": "old", "description": "", "stack": "cu130", "layer": "python", "tasks": {"greet": task}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert find_recipe(str(tmp_path)).task("greet").launch == launch
    assert f"recipe.yaml: tasks.greet: write launch: {launch} for runs_on: {former}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="former name of launch"):
        TaskFile(entrypoint="a.py", help="", runs_on="all")


# -------------------------------------------------------------------------------------------------------- command line


def test_dry_run_writes_nothing(run_cli: RunCli, tmp_path: Path) -> None:
    done = run_cli(
        "submit",
        "lora-opencalm",
        "train",
        "--scheduler",
        "pbs",
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--time",
        "2h",
        "--dry-run",
        "--",
        "--data",
        "my rows.jsonl",
    )
    assert done.stdout.startswith("#!/bin/bash\n#PBS -N lora-opencalm-t\n#PBS -l select=2:ngpus=4\n")
    assert "task=(train --data 'my rows.jsonl')" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--gpu-per-node", "4"], 2, "No such option"),
        (["--scheduler", "slrum"], 2, "--scheduler: no scheduler 'slrum'. Did you mean 'slurm'?"),
        (["--site", "abci-4.0"], 2, "no site 'abci-4.0'. Did you mean"),
        (["--site", "workstation"], 2, "workstation names no scheduler; use --scheduler"),
        (["--scheduler", "pbs", "--time", "soon"], 2, "--time soon: expected"),
        (["--scheduler", "pbs"], 2, "lora-opencalm.sif is not there"),
    ],
)
def test_submit_refuses_bad_options(run_cli: RunCli, tmp_path: Path, argv: list[str], code: int, message: str) -> None:
    assert message in run_cli("submit", *argv, "lora-opencalm", "train", code=code).stderr
    assert not (tmp_path / "ekiben-runs").exists()


def test_pbs_is_not_the_qsub_of_grid_engine(run_cli: RunCli, tmp_path: Path) -> None:
    write_program(tmp_path / "bin/qsub", "#!/bin/sh\ntouch submitted\n")
    small_sif(tmp_path / "mine.sif")
    argv = ("submit", "--scheduler", "pbs", "--sif", "mine.sif", "lora-opencalm", "train")
    stderr = run_cli(*argv, code=4, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}).stderr
    assert "PBS cannot be used here: qsub and pbsnodes are not on PATH" in stderr
    assert not (tmp_path / "submitted").exists()


def test_without_a_scheduler_the_reasons_are_listed(run_cli: RunCli) -> None:
    stderr = run_cli("submit", "lora-opencalm", "train", code=4, env={"PATH": "/nowhere"}).stderr
    if not Path("/usr/bin/sbatch").exists():
        assert "no scheduler can be used here:\n  slurm: sbatch is not on PATH" in stderr


@pytest.mark.parametrize(
    ("scheduler", "programs"),
    [
        ("slurm", ("sbatch", "sinfo", "squeue", "sacct", "scancel")),
        ("sge", ("qsub", "qconf", "qstat", "qacct", "qdel")),
        ("pbs", ("qsub", "pbsnodes", "qstat", "qdel")),
        ("oar", ("oarsub", "oarstat", "oardel")),
    ],
)
def test_scheduler_that_does_not_answer_is_not_waited_for(
    scheduler: str, programs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its controller is down, and its programs retry."""
    for name in programs:
        write_program(tmp_path / name, f"#!/bin/sh\necho {name} >> {tmp_path}/asked\nexec sleep 30\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(schedulers, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(load(scheduler), "LIST_SECONDS", 0.5)
    monkeypatch.setattr(schedulers, "_silent", {})
    began = time.monotonic()
    for _ in range(3):
        reason = load(scheduler).unavailable()
        assert reason and re.search(r"does not answer: \w+: no answer within \d+ s", reason)
    load(scheduler).limits(["--partition=gpu", "-q gpu"])
    with pytest.raises(SchedulerError, match="no answer within"):
        load(scheduler).jobs(["7"])
    with pytest.raises(SchedulerError, match="no answer within"):
        load(scheduler).cancel(["7"])
    asked = (tmp_path / "asked").read_text().split()
    assert sorted(asked) == sorted(set(asked))
    assert time.monotonic() - began < 20  # one wait alone would take 30 s


def test_program_that_gives_up_late_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its controller's address refuses connections, and sinfo tries for 9 s."""
    for name in ("sbatch", "sinfo"):
        script = f"#!/bin/sh\necho {name} >> {tmp_path}/asked\nsleep 0.3\necho refused >&2\nexit 1\n"
        write_program(tmp_path / name, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(schedulers, "_GAVE_UP_SECONDS", 0.1)
    monkeypatch.setattr(schedulers, "_silent", {})
    for _ in range(3):
        assert load("slurm").unavailable() == "Slurm does not answer: refused"
    assert (tmp_path / "asked").read_text() == "sinfo\n"


def test_submit_names_a_scheduler_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "sinfo"):
        write_program(tmp_path / "bin" / name, "#!/bin/sh\nexec sleep 300\n")
    (tmp_path / "mine.sif").write_bytes(b"an image")
    argv = ("submit", "--scheduler", "slurm", "--force", "--sif", "mine.sif", "lora-opencalm", "train")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr(schedulers, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(schedulers, "_silent", {})
    done = CliRunner().invoke(root, argv)
    assert done.exit_code == 4
    assert "Slurm cannot be used here: Slurm does not answer: sinfo: no answer within 1 s" in done.stderr


def test_unknown_run_is_an_error(run_cli: RunCli) -> None:
    for argv in (["status", "1234"], ["cancel", "1234"], ["logs", "1234"]):
        assert "no run '1234' in ekiben-runs." in run_cli(*argv, code=2).stderr
    assert "there is no run in ekiben-runs" in run_cli("logs", code=2).stderr
    assert run_cli("status").stdout == ""


def test_runs_of_one_second_get_different_names(tmp_path: Path) -> None:
    image = image_of_recipe(RECIPE, tmp_path / "x.sif")
    first = plan_run(image, ["train"], JobRequest(), scheduler="slurm", site=None, runs=tmp_path).folder
    for number in range(3):
        (tmp_path / (first.name if number == 0 else f"{first.name}-{number + 1}")).mkdir()
    again = plan_run(image, ["train"], JobRequest(), scheduler="slurm", site=None, runs=tmp_path).folder
    assert not again.exists()
    assert again.name.startswith("mine-train-")


def test_status_of_finished_jobs(tmp_path: Path) -> None:
    folder = tmp_path / "runs/mine-train-1"
    folder.mkdir(parents=True)
    steps = [{"name": "1-train", "seeds": ["1", "2"]}, {"name": "2-merge", "seeds": []}]
    (folder / "run.json").write_text(json.dumps({"scheduler": "slurm", "steps": steps}))
    for name, code in {"1-train.1": 0, "1-train.2": 3, "2-merge": 1}.items():
        (folder / f"{name}.job").write_text("77\n")
        (folder / f"{name}.exit").write_text(f"{code}\n")
    rows = status(find_runs(["77"], tmp_path / "runs"))
    assert [(row.job, row.state, row.detail) for row in rows] == [
        ("1-train.1", "done", ""),
        ("1-train.2", "failed", "exit code 3"),
        ("2-merge", "failed", "exit code 1"),
    ]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"scheduler": "slurm", "steps": [{"name": "../x", "seeds": []}]}']
)
def test_status_skips_runs_it_cannot_read(tmp_path: Path, run_cli: RunCli, text: str) -> None:
    record = json.dumps({"scheduler": "slurm", "steps": [{"name": "1-train", "seeds": []}]})
    for name, content in {"broken": text, "sound": record}.items():
        (tmp_path / "ekiben-runs" / name).mkdir(parents=True)
        (tmp_path / "ekiben-runs" / name / "run.json").write_text(content)
    (tmp_path / "ekiben-runs/sound/1-train.exit").write_text("0\n")
    shown = run_cli("status")
    assert shown.stdout.startswith("sound  1-train")
    assert "skipped: ekiben-runs/broken/run.json: cannot be read" in shown.stderr
    assert "run.json: cannot be read" in run_cli("status", "broken", code=2).stderr


def test_slurm_job_without_a_reason_has_no_detail() -> None:
    squeue = (
        "149|N/A|PENDING||None|0:00|N/A\n"
        "150|2|PENDING||Resources|0:00|N/A\n"
        "151|N/A|RUNNING|c[1-2]|None|0:07|2026-11-23T09:10:00\n"
    )
    assert slurm._read_queue(squeue) == {
        ("149", 0): Job("queued"),
        ("150", 2): Job("queued", "Resources"),
        ("151", 0): Job("running", "c[1-2], 0:07", "2026-11-23T09:10:00"),
    }


def test_slurm_job_cancelled_before_its_start_has_no_start() -> None:
    began = "2026-11-23T09:10:00"
    squeue = f"149_N/A|CANCELLED||{began}|\n150_2|TIMEOUT|c1|{began}|\n"
    sacct = (
        f"151|CANCELLED by 1000|None assigned|Unknown|0:0|\n152|FAILED|c2|{began}|3:0|\n153|PENDING|None"
        " assigned|Unknown|0:0|\n"
    )
    assert slurm._read_ended(squeue + sacct) == {
        ("149", 0): Job("cancelled"),
        ("150", 2): Job("failed", "TIMEOUT, c1", began),
        ("151", 0): Job("cancelled"),
        ("152", 0): Job("failed", "exit code 3, c2", began),
    }


class Moving(dict[tuple[str, int], Job]):
    """A queue: while it is asked the job goes back into it, under another id."""

    def __init__(self, job_file: Path) -> None:
        super().__init__()
        self.job_file = job_file

    def get(self, key: Any, default: Any = None) -> Any:
        self.job_file.write_text("78\n")
        return default


def test_job_requeued_during_status_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "1-train.job").write_text("77\n")
    record = {"scheduler": "pbs", "steps": [{"name": "1-train", "seeds": []}]}
    (tmp_path / "run.json").write_text(json.dumps(record))
    (run,) = find_runs([str(tmp_path)], tmp_path)
    with run.files() as files:
        row = job_status(files, "1-train", "77", Moving(tmp_path / "1-train.job"))
    assert (row.state, row.detail) == ("queued", "as job 78")


@pytest.mark.parametrize(("scheduler", "job_id"), [("slurm", "77_2"), ("sge", "77.2"), ("oar", "77[2]")])
def test_array_jobs_have_their_own_ids(tmp_path: Path, scheduler: str, job_id: str) -> None:
    folder = tmp_path / "runs/mine-train-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(
        json.dumps({"scheduler": scheduler, "steps": [{"name": "1-train", "seeds": ["5", "6"]}]})
    )
    for name, text in {
        "1-train.array": "77",
        "1-train.1.job": "78",
        "1-train.2.job": "77",
        "1-train.1.exit": "75",
        "1-train.2.exit": "75",
    }.items():
        (folder / name).write_text(text + "\n")
    (folder / "1-train.2.cancelled").touch()
    (run,) = find_runs([job_id], tmp_path / "runs")
    assert jobs_named(run, job_id) == ["1-train.2"]
    assert jobs_named(run, "77") == []
    with run.files() as files:
        rows = [job_status(files, job, run.ids[job], {}) for job in run.jobs]
    assert [(row.id, row.state, row.exit_code) for row in rows] == [("78", "failed", 75), (job_id, "cancelled", 75)]


def test_logs_of_one_rank(tmp_path: Path, run_cli: RunCli) -> None:
    folder = tmp_path / "ekiben-runs/mine-train-1"
    (folder / "1-train.ranks").mkdir(parents=True)
    steps = [{"name": "1-train", "seeds": [], "nodes": 2}, {"name": "2-merge", "seeds": [], "nodes": 1}]
    (folder / "run.json").write_text(json.dumps({"scheduler": "slurm", "steps": steps}))
    for name, text in {
        "1-train.processes": "2",
        "1-train.log": "of the job\n",
        "1-train.ranks/3.log": "of rank 3\n",
        "1-train.exit": "0",
        "2-merge.processes": "1",
        "2-merge.log": "of a single process\n",
    }.items():
        (folder / name).write_text(text)
    assert run_cli("logs", folder.name, "1-train").stdout == "of the job\n"
    assert run_cli("logs", folder.name, "1-train", "--rank", "3").stdout == "of rank 3\n"
    assert run_cli("logs", folder.name, "2-merge", "--rank", "0").stdout == "of a single process\n"
    refusal = run_cli("logs", folder.name, "1-train", "--rank", "4", code=2).stderr
    assert "--rank 4: 1-train has 4 ranks, 0 to 3" in refusal
    assert (
        "--rank 1: 2-merge has one rank, 0\n" in run_cli("logs", folder.name, "2-merge", "--rank", "1", code=2).stderr
    )
    (folder / "1-train.processes").unlink()
    assert "has not started yet" in run_cli("logs", folder.name, "1-train", "--rank", "0", code=2).stderr


def test_the_launcher_is_of_the_standard_library_alone(tmp_path: Path) -> None:
    """Its files are copied into the run and started by whatever Python the image has; no bytecode is left there."""
    for name in LAUNCHER:
        shutil.copy(Path(__file__).resolve().parents[4] / "entrypoints" / name, tmp_path)
        assert not (tmp_path / name).stat().st_mode & stat.S_IXUSR
    argv = ["python3", "-I", tmp_path / "launch_node.py", "--help"]
    done = subprocess.run(argv, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(LAUNCHER)


def test_fields_that_pbs_does_not_know_yet_may_be_null() -> None:
    names = ("exec_host", "comment", "stime", "Exit_status")
    answer = json.dumps({"Jobs": {"1.srv": {"job_state": "Q", **dict.fromkeys(names)}, "2.srv": {"job_state": "F"}}})
    for record in pbs._records(answer).values():
        assert (record.nodes, record.comment, record.started, record.exit_status) == ("", "", "", 0)
