"""job.sh, run by bash with a runtime and schedulers' programs that only note how they were called."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ekiben.core.errors import UsageError
from ekiben.core.mounts import bind_args
from ekiben.run.jobs import runs
from ekiben.run.jobs.images import read_tasks
from ekiben.run.jobs.plan import JobPlan, plan
from ekiben.run.jobs.records import find_runs
from ekiben.run.jobs.request import JobRequest
from ekiben.run.jobs.runs import cancel, request_again
from ekiben.run.jobs.script import environment_text, script
from ekiben.run.jobs.states import status
from ekiben.spec.recipe import find_recipe
from support.job_nodes import RECIPE, Node, assert_local_folder_is_unused, make_node, write_run
from support.job_plans import image_of_recipe, plan_run
from support.programs import write_program
from support.sample_recipe import RunCli
from support.small_sifs import make, small_sif, squashfs

HOSTILE = "one\n#SBATCH --time=1\n#$ -l h_rt=1\n$(touch pwned) `touch pwned` 'a' \"b\" \\ ; touch pwned\n"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = make_node(tmp_path)
    monkeypatch.chdir(node.work)
    return node


def test_a_task_gets_the_grace_period_of_its_job(node: Node) -> None:
    node.run(node.plan("train", time_seconds=3600))
    assert node.environment["APPTAINERENV_EKIBEN_GRACE_SECONDS"] == "300"
    node.run(node.plan("train"))
    assert "APPTAINERENV_EKIBEN_GRACE_SECONDS" not in node.environment


def test_values_reach_a_task_as_they_are(node: Node) -> None:
    value = "$(touch pwned) `touch pwned` $HOME \"'\\ line\nend\\"
    node.run(node.plan("train", env=(f"WANDB_NAME={value}", f"MINE={value}")), APPTAINERENV_WANDB_NAME="a site's")
    assert [node.environment[f"APPTAINERENV_{name}"] for name in ("WANDB_NAME", "MINE")] == [value, value]
    assert node.environment["APPTAINER_NO_EVAL"] == node.environment["SINGULARITY_NO_EVAL"] == "1"


def test_what_breaks_an_image_stays_outside(node: Node) -> None:
    output = node.run(node.plan("train"), APPTAINERENV_PYTHONPATH="/site", SINGULARITYENV_LD_PRELOAD="/site.so")
    assert "APPTAINERENV_PYTHONPATH is not passed on: the image has its own" in output
    assert not {"APPTAINERENV_PYTHONPATH", "SINGULARITYENV_LD_PRELOAD"} & node.environment.keys()


def test_a_variable_of_the_request_is_passed_whatever_it_is(node: Node) -> None:
    env = ("PYTHONPATH=/me/code", "MINE=1", "NCCL_DEBUG=INFO")
    node.run(node.plan("train", env=env), APPTAINERENV_PYTHONPATH="/site", APPTAINERENV_NCCL_DEBUG="WARN")
    values = {name: node.environment[f"APPTAINERENV_{name}"] for name in ("PYTHONPATH", "MINE", "NCCL_DEBUG")}
    assert values == {"PYTHONPATH": "/me/code", "MINE": "1", "NCCL_DEBUG": "INFO"}
    assert "PYTHONPATH" not in node.environment


def test_an_unsafe_cache_of_the_request_is_replaced(node: Node) -> None:
    shared = node.folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    output = node.run(node.plan("train", env=(f"TRITON_CACHE_DIR={shared}",)))
    assert "can be written by others" in output
    assert node.environment["APPTAINERENV_TRITON_CACHE_DIR"] != str(shared)
    assert "/ekiben-cache-" in node.environment["APPTAINERENV_TRITON_CACHE_DIR"]


def test_a_login_node_without_gpus_leaves_the_job_its_gpus(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    device = node.folder / "nvidiactl"
    device.touch()
    monkeypatch.setattr("ekiben.run.contract.GPU_DEVICE", str(device))
    monkeypatch.setenv("EKIBEN_CPU", "1")
    node.run(node.write(node.plan("train", gpus_per_node=1)))
    assert b"--nv" in node.argv
    node.run(node.write(node.plan("train", gpus_per_node=1, env=("EKIBEN_CPU=1",))))
    assert b"--nv" not in node.argv


def test_a_program_with_a_folder_in_its_name_is_no_task(node: Node) -> None:
    foreign = replace(image_of_recipe(RECIPE, node.sif), tasks=None, recipe=None)
    for word in ("./train.py", "../../x", "a b"):
        with pytest.raises(UsageError, match="is not a task's name"):
            plan_run(foreign, [word], JobRequest(), scheduler="slurm", site=None, runs=node.work / "runs")


# ------------------------------------------------------------------------------------------------------ arguments

WORD = st.binary(max_size=40).map(lambda data: data.replace(b"\0", b"")) | st.text(
    st.sampled_from("\n\r\t '\"\\$`!#;&|{}()*?~%=-<>あ\u2028"), max_size=12
).map(str.encode)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(argv=st.lists(WORD, max_size=30))
def test_any_arguments_arrive_as_they_are(node: Node, argv: list[bytes]) -> None:
    job = node.plan("train")
    step = replace(job.steps[0], argv=("train", *map(os.fsdecode, argv)))
    job = node.write(replace(job, steps=(step,)))
    node.run(job)
    assert node.task == [b"train", *argv]
    assert not list(node.folder.rglob("pwned"))
    record = json.loads((job.folder / "run.json").read_text())
    assert [os.fsencode(word) for word in record["steps"][0]["argv"]] == [b"train", *argv]


@pytest.mark.parametrize("scheduler", ["slurm", "sge", "pbs"])
def test_no_argument_begins_a_line_of_the_script(node: Node, scheduler: str) -> None:
    job = replace(node.plan("train"), scheduler=scheduler)
    plain = script(job, job.steps[0])
    hostile = script(
        replace(job, steps=(replace(job.steps[0], argv=("train", HOSTILE)),)),
        replace(job.steps[0], argv=("train", HOSTILE)),
    )
    assert len(hostile.splitlines()) == len(plain.splitlines())
    assert [line for line in hostile.splitlines() if line.startswith("#")] == [
        line for line in plain.splitlines() if line.startswith("#")
    ]


def test_seeds_and_arguments_are_quoted(node: Node) -> None:
    job = node.write(node.plan("train", "--name={seed}" + HOSTILE, "{seed}", seeds=("5", "$(touch pwned)\n7")))
    node.run(job, SLURM_ARRAY_TASK_ID="2")
    assert node.task == [b"train", b"--name=$(touch pwned)\n7" + HOSTILE.encode(), b"$(touch pwned)\n7"]
    assert (job.folder / "1-train.2.exit").read_text() == "0\n"
    assert not list(node.folder.rglob("pwned"))


def test_an_option_of_the_scheduler_with_a_line_break_is_refused(node: Node) -> None:
    job = node.plan("train", scheduler_args=("--comment=x\n#SBATCH --time=1",))
    with pytest.raises(UsageError, match="an option of slurm has a line break in it"):
        script(job, job.steps[0])


def test_variables_are_quoted(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", HOSTILE)
    monkeypatch.setenv("NCCL_X", os.fsdecode(b"\xff'\n"))
    job = node.write(node.plan("train"))
    node.run(job)
    assert node.environment["APPTAINERENV_HF_TOKEN"] == HOSTILE
    assert os.fsencode(node.environment["APPTAINERENV_NCCL_X"]) == b"\xff'\n"
    assert environment_text({"NCCL_$(touch pwned)": "1", "NCCL_A": "1"}) == "export NCCL_A=1\n"


def test_requested_variables_and_folders_are_passed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.folder / "more").mkdir()
    monkeypatch.setenv("MINE", HOSTILE)
    job = node.write(
        node.plan("train", env=("MINE", "PATH=/nowhere", "NCCL_DEBUG=INFO"), binds=(node.folder / "more",))
    )
    node.run(job, NCCL_DEBUG="WARN")
    assert node.environment["APPTAINERENV_MINE"] == HOSTILE
    assert node.environment["APPTAINERENV_PATH"] == "/nowhere"
    assert node.environment["APPTAINERENV_NCCL_DEBUG"] == "INFO"
    assert str(node.folder / "more") in node.binds
    with pytest.raises(UsageError, match="--env NOT_SET_HERE: is not set here"):
        write_run(node.plan("train", env=("NOT_SET_HERE",)))


def test_srun_gets_the_cpus_of_the_job(node: Node) -> None:
    (node.folder / "bin/srun").write_text('#!/bin/bash\necho "cpus $SRUN_CPUS_PER_TASK"\n')
    assert "cpus 12\n" in node.run(node.write(node.plan("train")), SLURM_CPUS_PER_TASK="12")


@pytest.mark.parametrize("name", ["a b", "100%j", "it's", 'say "x"', "$(touch pwned)", "a;b", "a:b,c"])
def test_a_working_folder_of_any_name(node: Node, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = node.work / name
    work.mkdir()
    monkeypatch.chdir(work)
    job = node.write(
        plan_run(
            image_of_recipe(RECIPE, node.sif), ["train"], JobRequest(), scheduler="slurm", site=None, runs=work / "runs"
        )
    )
    node.run(job)
    assert node.argv[node.argv.index(b"--pwd") + 1].decode() == str(work)
    assert bind_args(work)[1] in node.binds
    assert (job.folder / "1-train.exit").read_text() == "0\n"


# ---------------------------------------------------------------------------------------------------------- image


def test_the_image_is_the_file_that_a_link_named_at_submission(node: Node) -> None:
    current = node.folder / "current"
    current.symlink_to(node.sif.name)
    job = node.write(
        plan_run(
            image_of_recipe(RECIPE, current),
            ["train"],
            JobRequest(),
            scheduler="slurm",
            site=None,
            runs=node.work / "runs",
        )
    )
    (node.folder / "newer.sif").write_bytes(b"another image")
    current.unlink()
    current.symlink_to("newer.sif")
    node.run(job)
    assert str(node.sif).encode() in node.argv
    record = json.loads((job.folder / "run.json").read_text())
    assert record["sif"] == str(node.sif)
    assert record["sif_state"]["stat"] == _stat(node.sif)


@pytest.mark.parametrize(
    ("content", "message"), [(b"An image", "is not what it was when the job was submitted"), (None, "is gone")]
)
def test_a_job_whose_image_changed_ends_with_one_sentence(node: Node, content: bytes | None, message: str) -> None:
    job = node.write(node.plan("train"))
    node.sif.unlink() if content is None else node.sif.write_bytes(content)
    lines = node.run(job, code=1).splitlines()
    assert [line for line in lines if line.startswith("error: ")] == [
        f"error: {node.sif} {message}: {lines[0].split(': ')[-1]}"
    ]
    assert (job.folder / "1-train.exit").read_text() == "1\n"
    assert not (node.folder / "argv").exists()


def _stat(path: Path) -> str:
    return subprocess.check_output(["stat", "--format", "%s %.9Y %.9Z %i", path], text=True).strip()


def _reading(node: Node, job: JobPlan, code: int = 0) -> str:
    """Run the job with a sha256sum that notes how much it reads."""
    write_program(
        node.folder / "bin/sha256sum",
        '#!/bin/sh\nread=$(mktemp)\ncat >"$read"\nwc -c <"$read" >>"$NOTES/hashed"\nexec /usr/bin/sha256sum <"$read"\n',
    )
    (node.folder / "hashed").unlink(missing_ok=True)
    node.run(job, code=code)
    return (node.folder / "hashed").read_text()


def test_the_start_of_a_job_reads_the_header_of_its_image(node: Node) -> None:
    with node.sif.open("ab") as file:
        file.truncate(1 << 20)
    assert _reading(node, node.write(node.plan("train"))) == "32768\n"


def test_an_image_with_other_times_is_read_where_its_checksum_is_known(node: Node) -> None:
    image = node.sif.read_bytes()
    sha256 = hashlib.sha256(image).hexdigest()
    known = replace(image_of_recipe(RECIPE, node.sif), sha256=sha256)
    job = node.write(plan_run(known, ["train"], JobRequest(), scheduler="slurm", site=None, runs=node.work / "runs"))
    os.utime(node.sif, (0, 0))
    assert str(len(image)) in _reading(node, job).split()
    node.sif.write_bytes(bytes([image[0] ^ 1]) + image[1:])
    node.run(node.write(job), code=1)
    unknown = node.write(node.plan("train"))
    os.utime(node.sif, (0, 0))
    assert "is not what it was when the job was submitted" in node.run(unknown, code=1)


def test_a_site_may_have_every_byte_compared(node: Node) -> None:
    with node.sif.open("ab") as file:
        file.truncate(1 << 20)
    job = node.write(node.plan("train", check_digest=True))
    assert (1 << 20) in map(int, _reading(node, job).split())


def staged(node: Node) -> list[Path]:
    folder = node.folder / f"local/ekiben-{os.getuid()}"
    return [path for path in folder.iterdir() if path.suffix == ".sif"]


def test_a_copy_on_the_local_disk_is_private_and_made_once(node: Node) -> None:
    job = node.write(node.plan("train", copy_local=True))
    node.run(job)
    [copy] = staged(node)
    assert os.fsencode(copy) in node.argv
    assert copy.read_bytes() == node.sif.read_bytes()
    assert copy.parent.stat().st_mode & 0o777 == 0o700
    before = copy.stat().st_ino
    node.run(job)
    assert staged(node)[0].stat().st_ino == before


def test_replaced_local_copy_is_not_run(node: Node) -> None:
    job = node.write(node.plan("train", copy_local=True))
    node.run(job)
    [copy] = staged(node)
    copy.write_bytes(b"another image of the same name")
    node.run(job)
    assert copy.read_bytes() == node.sif.read_bytes()
    copy.unlink()
    copy.symlink_to("/bin/true")
    node.run(job)
    assert copy.read_bytes() == node.sif.read_bytes()
    assert not copy.is_symlink()


@pytest.mark.parametrize("how", ["link", "writable"])
def test_a_folder_of_others_on_the_local_disk_is_not_used(node: Node, how: str) -> None:
    folder = node.folder / f"local/ekiben-{os.getuid()}"
    if how == "link":
        (node.folder / "elsewhere").mkdir()
        folder.symlink_to(node.folder / "elsewhere")
    else:
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
    assert_local_folder_is_unused(node, folder)


def test_cache_writable_by_others_is_replaced_a_private_one_kept(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    private, shared = node.folder / "triton", node.folder / "cuda"
    private.mkdir(mode=0o755)
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(private))
    monkeypatch.setenv("CUDA_CACHE_PATH", str(shared))
    node.run(node.write(node.plan("train")))
    assert node.environment["APPTAINERENV_TRITON_CACHE_DIR"] == str(private)
    assert node.environment["APPTAINERENV_CUDA_CACHE_PATH"].startswith(f"{node.folder}/local/ekiben-cache-")
    assert "APPTAINERENV_TORCHINDUCTOR_CACHE_DIR" not in node.environment


# ------------------------------------------------------------------------------------------------------------ GPUs


@pytest.mark.parametrize(
    ("task", "request_", "environment", "nv", "processes"),
    [
        ("train", {"scheduler_args": ("--gres=gpu:2",)}, {"CUDA_VISIBLE_DEVICES": "4,5"}, True, b"2"),
        ("train", {"scheduler_args": ("--gpus=3",)}, {"SLURM_GPUS_ON_NODE": "3"}, True, b"3"),
        ("train", {"gpus_per_node": 4}, {}, True, b"4"),
        ("train", {"gpus_per_node": 4, "processes_per_node": 1}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, True, b"1"),
        ("train", {}, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, True, b"1"),
        ("prepare", {}, {"CUDA_VISIBLE_DEVICES": "0,1"}, False, b"1"),
    ],
)
def test_gpus_are_those_of_the_job(
    node: Node,
    task: str,
    request_: dict[str, Any],
    environment: dict[str, str],
    nv: bool,
    processes: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = node.folder / "nvidiactl"
    device.touch()
    monkeypatch.setattr("ekiben.run.contract.GPU_DEVICE", str(device))
    job = node.write(node.plan(task, **request_))
    node.run(job, **environment)
    assert (b"--nv" in node.argv) == nv
    assert node.argv[node.argv.index(b"--processes") + 1] == processes
    device.unlink()
    node.run(job, **environment)
    assert b"--nv" not in node.argv


# ------------------------------------------------------------------------------------------------------- requeueing


def requeueing(node: Node, writes: str = ":") -> None:
    """Have the task end with 75 after ``writes``, and the scheduler take the job back."""
    (node.folder / "bin/apptainer").write_text(f"#!/bin/bash\n{writes}\nexit 75\n")
    (node.folder / "bin/scontrol").write_text(
        "#!/bin/bash\ncase $2 in hostnames) echo c1 ;; show) echo JobState=RUNNING ;; esac\n"
    )


@pytest.mark.parametrize(
    "writes",
    [
        ":",
        "echo 1 >>result/metrics.jsonl; date >result/run.json; date >result/loss.png",
        "mkdir -p .cache; date >.cache/x",
        "mkdir -p result/ekiben-trackers; date >result/ekiben-trackers/x; date >result/events.out.tfevents.1",
    ],
)
@pytest.mark.parametrize("output", [(), ("--output", "result"), ("--set", "output=result"), ("--output=result",)])
def test_a_job_that_saves_nothing_is_started_twice_only(node: Node, writes: str, output: tuple[str, ...]) -> None:
    (node.work / "result/checkpoints").mkdir(parents=True)
    (node.work / "result/checkpoints/old").touch()
    requeueing(node, writes)
    job = node.write(node.plan("train", *output))
    assert "nothing was saved, not finished: back into the queue, 1 of at most 20 times" in node.run(job, code=75)
    assert "error: 2 starts in a row saved nothing: not back into the queue" in node.run(job, code=75)
    assert (job.folder / "1-train.exit").read_text() == "75\n"
    assert (job.folder / "1-train.times").read_text() == "1\n"


@pytest.mark.parametrize("output", [(), ("--output", "answers/mine.jsonl"), ("--set", "output=answers/mine.jsonl")])
def test_a_job_that_answers_piece_by_piece_goes_back_into_the_queue(node: Node, output: tuple[str, ...]) -> None:
    """Until all answers are there, each process of `generate` has a hidden file beside the output."""
    (node.work / "answers").mkdir()
    requeueing(node, "echo '{}' >>answers/.mine.jsonl.part-0")
    job = node.write(node.plan("train", *output))
    for start in (1, 2, 3):
        assert f"saved, not finished: back into the queue, {start} of" in node.run(job, code=75)


@pytest.mark.parametrize("output", [(), ("--output", "result-{seed}")])
def test_a_job_that_saves_goes_back_into_the_queue(node: Node, output: tuple[str, ...]) -> None:
    requeueing(node, "mkdir -p result-5/checkpoints; date +%N >result-5/checkpoints/step-$RANDOM")
    job = node.write(node.plan("train", *output, seeds=("5",)))
    for start in (1, 2, 3):
        assert f"saved, not finished: back into the queue, {start} of" in node.run(
            job, code=75, SLURM_ARRAY_TASK_ID="1"
        )


def test_a_job_of_several_hosts_goes_back_with_the_account_on_the_command_line(node: Node) -> None:
    requeueing(node, "date >result")
    write_program(node.folder / "bin/qsub", '#!/bin/bash\nprintf "%s|" "$@" >"$NOTES/qsub"\necho 8\n')
    write_program(node.folder / "bin/qrsh", "#!/bin/bash\nexit 75\n")
    (node.folder / "hosts").write_text("h1 1\nh2 1\n")
    job = replace(node.plan("train"), scheduler="sge", command_args=("-g lab",))
    node.run(node.write(job), code=75, JOB_ID="7", PE_HOSTFILE=str(node.folder / "hosts"))
    assert (node.folder / "qsub").read_text().startswith("-terse|-g|lab|-v|")
    assert (job.folder / "1-train.job").read_text() == "8\n"


def runtime_that_ends_with(node: Node, code: int) -> None:
    (node.folder / "bin/apptainer").write_text(f"#!/bin/bash\nexit {code}\n")


@pytest.mark.parametrize("code", [0, 1, 75, 137, 255])
def test_exit_code_of_a_container_that_ends_at_once(node: Node, code: int) -> None:
    """It is gone before the job waits for it, which is made certain here: the job is held up after it started it."""
    runtime_that_ends_with(node, code)
    (node.folder / "slow.sh").write_text('trap() { builtin trap "$@"; sleep 0.2; }\n')
    node.run(node.plan("train"), code=code, BASH_ENV=str(node.folder / "slow.sh"))


@pytest.mark.parametrize(("codes", "is_kept"), [([0], True), ([0, 0], False), ([1], False), ([0, 75], True)])
def test_variables_are_removed_when_no_job_can_start_any_more(node: Node, codes: list[int], is_kept: bool) -> None:
    job = node.write(node.plan("prepare", "+", "train"))
    for step, code in zip(job.steps, codes, strict=False):
        runtime_that_ends_with(node, code)
        node.run(replace(job, steps=(step,)), code=code)
    assert [(job.folder / name).exists() for name in ("environment", "key")] == [is_kept, is_kept]


def test_variables_stay_while_another_job_of_an_array_has_not_ended(node: Node) -> None:
    job = node.write(node.plan("train", "--seed", "{seed}", seeds=("5", "6")))
    runtime_that_ends_with(node, 1)
    for index, is_kept in (("2", True), ("1", False)):
        node.run(job, code=1, SLURM_ARRAY_TASK_ID=index)
        assert (job.folder / "environment").exists() == is_kept


def test_variables_are_removed_by_cancel(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("squeue", "scancel", "sacct"):
        write_program(node.folder / "bin" / program, "#!/bin/bash\n")
    monkeypatch.setenv("PATH", f"{node.folder}/bin:{os.environ['PATH']}")
    job = node.write(node.plan("train"))
    (run,) = find_runs([str(job.folder)], node.work)
    cancel(run)
    assert not (job.folder / "environment").exists()


# ---------------------------------------------------------------------------------------------------------- records


def test_a_run_is_submitted_again_from_its_record(node: Node, run_cli: RunCli) -> None:
    asked = JobRequest(
        gpus_per_node=2,
        cpus_per_node=3,
        memory_mib=900,
        time_seconds=3600,
        seeds=("5", "7"),
        scheduler_args=("--comment=x y",),
        binds=(node.folder,),
    )
    argv = ["hello", "--name={seed}", "+", "hello", HOSTILE]
    image = image_of_recipe(find_recipe("hello"), node.sif)
    job = plan_run(image, argv, asked, scheduler="slurm", site=None, runs=node.work / "ekiben-runs")
    write_run(job)
    (run,) = find_runs([str(job.folder)], node.work)
    assert run.record.format == 3
    assert run.record.image.recipe_path == find_recipe("hello").folder
    assert request_again(run) == (argv, asked)
    printed = run_cli("submit", "--again", job.folder, "--dry-run").stdout
    for step in job.steps:
        lines = [line for line in script(job, step).splitlines() if str(job.folder) not in line]
        assert [line for line in lines if line not in printed.splitlines()] == []
    for extra, named in {
        ("hello", "hello"): "the image, the task",
        ("--nodes", "2", "--time", "1h"): "--nodes, --time",
    }.items():
        assert f"leave out {named}" in run_cli("submit", "--again", job.folder, *extra, code=2).stderr


def test_a_run_of_two_images_is_submitted_again_with_both(node: Node, run_cli: RunCli) -> None:
    """The record has each step's image; the same names may mean others by then."""
    small_sif(node.folder / "other.sif")
    argv = ["hello", "+", "./other.sif:hello", "Ada"]
    image, other = image_of_recipe(find_recipe("hello"), node.sif), image_of_recipe(RECIPE, node.folder / "other.sif")
    other = replace(other, name="other", recipe=None, tasks=None)
    tasks = read_tasks(image, argv, lambda reference: other)
    job = plan(image, tasks, JobRequest(), scheduler="slurm", site=None, runs=node.work / "ekiben-runs")
    write_run(job)
    recorded = json.loads((job.folder / "run.json").read_text())
    assert [step.get("image", {}).get("sif") for step in recorded["steps"]] == [None, str(other.sif)]
    (run,) = find_runs([str(job.folder)], node.work)
    assert [(state.job, state.image, state.names_image) for state in status([run])] == [
        ("1-hello", "hello", False),
        ("2-hello", "other", True),
    ]
    assert run_cli("status", job.folder).stdout.splitlines()[1].endswith("  image other")
    printed = run_cli("submit", "--again", job.folder, "--dry-run").stdout
    assert printed.count(f"image={node.sif}\n") == printed.count(f"image={other.sif}\n") == 1
    make(other.sif, squashfs(node.folder / "layer", "other"))
    refusal = run_cli("submit", "--again", job.folder, "--dry-run", code=2).stderr
    assert f"{other.sif} was changed since {job.folder.name} was submitted" in refusal
    (job.folder / "run.json").write_text(json.dumps({**recorded, "steps": [{**recorded["steps"][1], "image": None}]}))
    assert "has too little in it" in run_cli("submit", "--again", job.folder, "--dry-run", code=2).stderr


def test_run_folder_that_cannot_be_written_is_removed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ekiben.run.jobs.runs._write_file", fail)
    job = node.plan("train")
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        write_run(job)
    assert not job.folder.exists()


def test_a_folder_that_is_exchanged_while_a_run_is_written_is_left_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs in a folder that colleagues may write."""
    victim = node.folder / "victim"
    victim.mkdir()
    (victim / "job.sh").write_text("precious")
    job = node.plan("train")

    def exchange(*arguments: Any) -> None:
        monkeypatch.undo()
        job.folder.rename(node.folder / "aside")
        job.folder.symlink_to(victim)
        runs._write_file(*arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "_write_file", exchange)
    with pytest.raises(UsageError, match="cannot be written"):
        write_run(job)
    assert [(path.name, path.read_text()) for path in victim.iterdir()] == [("job.sh", "precious")]


def test_a_folder_of_runs_that_cannot_be_made_is_named(node: Node) -> None:
    job = plan_run(
        image_of_recipe(find_recipe("hello"), node.sif),
        ["hello"],
        JobRequest(),
        scheduler="slurm",
        site=None,
        runs=Path("/proc/none"),
    )
    for by_hand, option in ((False, "--runs DIR"), (True, "--output DIR")):
        with pytest.raises(UsageError, match=r"/proc/none/.* cannot be made: No such file or directory") as caught:
            write_run(replace(job, by_hand=by_hand))
        assert caught.value.hint == option


def test_submit_again_with_another_image_is_refused(node: Node, run_cli: RunCli) -> None:
    job = plan_run(
        image_of_recipe(find_recipe("hello"), node.sif),
        ["hello"],
        JobRequest(),
        scheduler="slurm",
        site=None,
        runs=node.work / "ekiben-runs",
    )
    write_run(job)
    make(node.sif, squashfs(node.folder / "layer", "other"))
    refusal = run_cli("submit", "--again", job.folder, "--dry-run", code=2).stderr
    assert f"{node.sif} was changed since {job.folder.name} was submitted" in refusal
    assert "task=(hello)" in run_cli("submit", "--again", job.folder, "--dry-run", "--force").stdout


def test_submit_again_takes_unrecorded_variables(node: Node, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    request = JobRequest(env=("TOKEN=secret", "WANDB_MODE=offline"))
    job = plan_run(
        image_of_recipe(find_recipe("hello"), node.sif),
        ["hello"],
        request,
        scheduler="slurm",
        site=None,
        runs=node.work / "ekiben-runs",
    )
    write_run(job)
    assert "secret" not in (job.folder / "run.json").read_text()
    (run,) = find_runs([str(job.folder)], node.work)
    with pytest.raises(UsageError, match="--env TOKEN: is not set here"):
        environment_text({}, request_again(run, ["WANDB_MODE=online"])[1].env)
    kept = environment_text({}, request_again(run, ["WANDB_MODE=online", "TOKEN=other"])[1].env)
    assert "TOKEN=other" in kept
    assert "WANDB_MODE=online" in kept


def test_a_record_of_an_earlier_version_is_read_but_not_submitted_again(node: Node) -> None:
    steps = [{"name": "1-train", "words": ["train"], "asks": [], "seeds": []}]
    (node.work / "run.json").write_text(json.dumps({"scheduler": "slurm", "steps": steps}))
    (run,) = find_runs([str(node.work)], node.work)
    assert run.jobs == ["1-train"]
    with pytest.raises(UsageError, match="by an earlier version"):
        request_again(run)
    (node.work / "run.json").write_text(json.dumps({"format": 4, "steps": steps}))
    with pytest.raises(UsageError, match="by a later version"):
        find_runs([str(node.work)], node.work)
