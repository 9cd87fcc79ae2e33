"""What is found before a job is submitted: in images made here, with a runtime that only runs the task's script."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ekiben.cli.commands.submit import _gpus_of, _preflight
from ekiben.core.errors import UsageError, VerifyError
from ekiben.doctor.preflight import JobTask, PlannedGpus, check_image_of, outputs_of, try_arguments, untried_reason
from ekiben.formats.changeset import Lower, normalize
from ekiben.formats.layer import write_entries
from ekiben.formats.partition import Partition
from ekiben.formats.sif import SifHeader, sif_id, write_sif
from ekiben.formats.squashfs.writer import SquashfsWriter
from ekiben.formats.upper import Changes
from ekiben.run.image import NamedImage, RequiredSignature, SifState
from ekiben.run.jobs.request import JobRequest
from ekiben.run.site import find_site
from ekiben.spec.recipe import find_recipe
from support.job_plans import RECIPE, image_of_recipe, plan_run
from support.sample_recipe import RunCli

TRAIN = """\
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--dry-run", action="store_true")
parser.add_argument("--data")
args = parser.parse_args()
if args.data and not pathlib.Path(args.data).exists():
    raise SystemExit(f"error: {args.data}: no such file")
"""


def image(folder: Path, *, name: str = "mine", script: str = TRAIN, recipe: str | None = None) -> Path:
    shipped = folder / "image/opt/ekiben/recipe"
    (shipped / "entrypoints").mkdir(parents=True)
    written = json.dumps({"name": name, "tasks": {"train": {"entrypoint": "train.py"}}})
    (shipped / "recipe.yaml").write_text(written if recipe is None else recipe)
    (shipped / "entrypoints/train.py").write_text(script)
    with (folder / "layer").open("w+b") as out:
        write_entries(normalize(Changes(folder / "image"), Lower([]), epoch=1), SquashfsWriter(out))
    data = (folder / "layer").read_bytes()
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    sif = folder / "mine.sif"
    write_sif(sif, [Partition(folder / "layer", 0, len(data), digest)], SifHeader(sif_id([digest], ""), "", "amd64", 1))
    return sif


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime that starts the task's script with the arguments behind the SIF."""
    path = tmp_path / "bin/apptainer"
    path.parent.mkdir()
    path.write_text(
        "#!/bin/bash\nwhile [[ $1 != *.sif ]]; do shift; done\n"
        f'shift 2\nexec python3 {tmp_path}/image/opt/ekiben/recipe/entrypoints/train.py "$@"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return path


def _of(recipe: str) -> NamedImage:
    return image_of_recipe(replace(RECIPE, file=replace(RECIPE.file, name=recipe)), Path("x.sif"))


def test_an_image_of_another_recipe_or_without_the_task_is_refused(tmp_path: Path) -> None:
    sif = image(tmp_path)
    assert check_image_of(sif, _of("mine"), ["train"]) == {"train": TRAIN.encode()}
    with pytest.raises(UsageError, match="is an image of the recipe 'mine', not of 'other'"):
        check_image_of(sif, _of("other"), ["train"])
    with pytest.raises(UsageError, match="has no task 'merge'"):
        check_image_of(sif, _of("mine"), ["train", "merge"])
    (tmp_path / "foreign.sif").write_bytes(b"an image of another make")
    assert check_image_of(tmp_path / "foreign.sif", _of("mine"), ["train"]) == {}


def test_image_without_its_signature_is_not_tried(tmp_path: Path, runtime: Path) -> None:
    sif = image(tmp_path)

    def refuse(path: Path) -> SifState:
        raise VerifyError(f"{path} is not signed")

    task, signature = JobTask(["train", "--frob"], TRAIN.encode()), RequiredSignature("config.yaml", refuse)
    with pytest.raises(VerifyError, match="is not signed"):
        try_arguments(sif, task, dict(os.environ), lambda line: None, signature)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [(["--data", "gone.jsonl"], "gone.jsonl: no such file"), (["--frob"], "unrecognized arguments: --frob")],
)
def test_arguments_refused_by_the_task_fail(tmp_path: Path, runtime: Path, arguments: list[str], wrong: str) -> None:
    sif = image(tmp_path)
    with pytest.raises(UsageError, match=wrong):
        try_arguments(sif, JobTask(["train", *arguments], TRAIN.encode()), dict(os.environ), lambda line: None)
    task = JobTask(["train", "--data", "mine.sif"], TRAIN.encode())
    try_arguments(sif, task, dict(os.environ), lambda line: None)
    # A task without the option is not started.
    try_arguments(sif, JobTask(["train", *arguments], b"print()"), dict(os.environ), lambda line: None)


PLANS = """import argparse, sys
parser = argparse.ArgumentParser()
for name in ("--data", "--gpus", "--on"):  # add_on_option(
    parser.add_argument(name)
parser.add_argument("--dry-run", action="store_true")
args = parser.parse_args()
if args.on == "Unknown X1":
    sys.exit(f"error: --on {args.on}: no GPU is known by that name.")
if args.on == "NVIDIA L4":
    print(f"error: it will not fit on {args.gpus} {args.on}", file=sys.stderr)
    sys.exit(3)
open("tried", "a").write(f"{args.gpus} {args.on}\\n")
"""


def test_dry_run_plans_for_gpus_of_job(tmp_path: Path, runtime: Path) -> None:
    sif = image(tmp_path)
    (tmp_path / "image/opt/ekiben/recipe/entrypoints/train.py").write_text(PLANS)
    messages: list[str] = []

    def attempt(gpus: PlannedGpus, *arguments: str) -> None:
        try_arguments(sif, JobTask(["train", *arguments], PLANS.encode(), gpus), dict(os.environ), messages.append)

    with pytest.raises(UsageError, match="it will not fit on 4 NVIDIA L4"):
        attempt(PlannedGpus(4, "NVIDIA L4"))
    for gpus in (PlannedGpus(8, "NVIDIA H200"), PlannedGpus(2), PlannedGpus(4, "Unknown X1"), PlannedGpus(0)):
        attempt(gpus)
    attempt(PlannedGpus(4, "NVIDIA L4"), "--gpus=1")
    assert (tmp_path / "tried").read_text() == "8 NVIDIA H200\n2 None\n4 None\nNone None\n1 None\n"
    assert "train knows no memory size of Unknown X1: whether it fits is not checked" in messages


def test_planned_gpus_come_from_site_profile() -> None:
    recipe = find_recipe("lora-opencalm")
    for site, gpus, nodes, known in (("abci-3.0", 8, 2, (16, "NVIDIA H200")), ("slurm-l4", None, 1, (1, "NVIDIA L4"))):
        request = JobRequest(nodes=nodes, gpus_per_node=gpus, account="lab", time_seconds=3600)
        profile = find_site(site)
        assert profile.file.scheduler
        job = plan_run(
            image_of_recipe(recipe, Path("/x.sif")),
            ["train"],
            request,
            scheduler=profile.file.scheduler.kind,
            site=profile,
            runs=Path("/runs"),
        )
        assert _gpus_of(job, job.steps[0]) == known


def test_a_runtime_that_cannot_run_here_refuses_nothing(tmp_path: Path, runtime: Path) -> None:
    runtime.write_text("#!/bin/sh\necho no user namespaces >&2\nexit 255\n")
    messages: list[str] = []
    task = JobTask(["train"], TRAIN.encode())
    try_arguments(tmp_path / "mine.sif", task, dict(os.environ), messages.append)
    assert messages[-1] == "train --dry-run could not be tried here: no user namespaces"


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["train", "--data", "mine.sif"], None),
        (["train", "--data", "gone.jsonl"], None),  # nothing names it as an output: the task itself is asked
        (["train", "--set", "model=result/model"], "it reads result/model, which sft writes"),
        (["train", "--data=result"], "it reads result, which sft writes"),
        (["train", "--data", "sub/../rows.jsonl"], "it reads sub/../rows.jsonl, which prepare writes"),
        (["train", "--data", "result-2/x"], None),
        (["train", "--data", "kept/rows"], None),  # exists already
    ],
)
def test_task_that_reads_what_one_before_it_writes_is_not_tried(
    tmp_path: Path, runtime: Path, argv: list[str], reason: str | None
) -> None:
    image(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/rows").touch()
    earlier = [["prepare", "--output", "rows.jsonl"], ["sft", "--set", "output=result"], ["sft", "--output=kept"]]
    assert untried_reason(JobTask(argv, TRAIN.encode(), earlier=earlier)) == reason
    assert untried_reason(JobTask(argv, b"print()", earlier=earlier)) == "it has no --dry-run"


def test_outputs_of_a_task() -> None:
    argv = ["x", "--output", "a", "--output=b", "--set", "output=c", "--set=output=d", "--set", "form=e", "--output"]
    assert outputs_of(argv) == ["a", "b", "c", "d"]


def test_nothing_is_tried_without_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert untried_reason(JobTask(["train"], TRAIN.encode())) == "there is neither apptainer nor singularity here"


def test_later_task_is_refused_for_its_options_and_warned_of_for_its_files(tmp_path: Path, runtime: Path) -> None:
    """A task before it may write a file that nothing names: each has outputs by default."""
    sif, messages = image(tmp_path), list[str]()
    environment, earlier = dict(os.environ), [["prepare"]]
    with pytest.raises(UsageError, match="unrecognized arguments: --frob"):
        task = JobTask(["train", "--frob"], TRAIN.encode(), earlier=earlier)
        try_arguments(sif, task, environment, messages.append)
    task = JobTask(["train", "--data", "gone"], TRAIN.encode(), earlier=earlier)
    try_arguments(sif, task, environment, messages.append)
    assert (
        messages[-1]
        == "warning: train --dry-run ended with exit code 1, and may need the output of an earlier task: error: gone:"
        " no such file"
    )


def test_submit_tries_each_task_whose_inputs_exist(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sif = image(tmp_path, name="finetune")
    argv = ["train", "--output", "a", "+", "train", "--data", "a/x", "+", "train", "--frob"]
    profile = find_site("slurm-l4")
    assert profile.file.scheduler
    job = plan_run(
        image_of_recipe(find_recipe("finetune"), sif),
        argv,
        JobRequest(nodes=1, gpus_per_node=None, account="lab", time_seconds=3600),
        scheduler=profile.file.scheduler.kind,
        site=None,
        runs=tmp_path,
    )
    messages: list[str] = []
    context = SimpleNamespace(environment=dict(os.environ), log=messages.append)
    (tmp_path / "image/opt/ekiben/recipe/entrypoints/train.py").write_text(
        TRAIN.replace('"--data")', '"--data"); parser.add_argument("--output")')
    )
    with pytest.raises(UsageError, match="unrecognized arguments: --frob"):
        _preflight(context, job)  # type: ignore[arg-type]
    assert messages == [
        "running train --dry-run with these arguments",
        "2-train is not tried: it reads a/x, which train writes",
        "running train --dry-run with these arguments",
    ]


def test_submit_refuses_before_the_queue(tmp_path: Path, run_cli: RunCli) -> None:
    sif = image(tmp_path)
    submit = ("submit", "--scheduler", "pbs", "--sif", str(sif), "hello", "hello")
    assert "is an image of the recipe 'mine', not of 'hello'" in run_cli(*submit, code=2).stderr
    assert not (tmp_path / "ekiben-runs").exists()


@pytest.mark.parametrize(
    "recipe",
    ["[]", "name: [", "name: mine", "name: mine\ntasks: {train: 3}", "name: mine\ntasks: {train: {}}", "[" * 9999],
)
def test_invalid_published_recipe_is_an_error(tmp_path: Path, recipe: str) -> None:
    sif = image(tmp_path, recipe=recipe)
    with pytest.raises(UsageError, match=r"recipe/recipe\.yaml") as caught:
        check_image_of(sif, _of("mine"), ["train"])
    assert str(sif) in str(caught.value)
