"""Verify an image on a GPU machine: each case in a process with a time limit, the results in a file after every one.

Needs Apptainer, an NVIDIA GPU, this checkout, and Python's own library; root, for the case rootless. Cases, all by
default; a part of one is named as it is printed: kernels/apex, size/attention/calm-3b/cudnn. A copy of that file in
qa/gpu/results is shown in docs/gpu-results.md: python docs/generate.py.

without-nv  a task that needs the GPU ends without --nv with one sentence that says so
doctor      the image's torch sees the GPU and computes on it; an image without torch lists it
smoke       every task: TASK --smoke on the GPU; TASK --help where it has none
rootless    one of them as an ordinary user, whom --user names: useradd --create-home ekiben
kernels     kernels/*_checks.py for the packages that were compiled for the image
attention   bench_attention.py
size        tasks_at_size.py with the image's `train`
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from tasks_at_size import CASES as SIZE_CASES
from tasks_at_size import count_gpus, exec_argv

KERNELS = {
    "apex": "apex_checks.py",
    "deepspeed": "deepspeed_checks.py",
    "flash-attn": "flash_attn_checks.py",
    "flash-attn-4": "flash_attn_4_checks.py",
}
AT_RUN_TIME = ("flash-attn-4",)  # compiled when they are first called: nothing in image.json says so
NEED_DEEPSPEED = ("offload", "sharded/zero2", "sharded/zero3")  # of the cases size
NEED_TWO_GPUS = ("two-gpus", "sharded", "dialogues")
SCRIPTS = {
    "pretrain": ("pretrain", "pretrain.py"),
    "dialogues": ("merge-weights", "merge_weights.py"),
    "bench": ("train", "bench.py"),
    "align": ("dpo", "dpo.py"),
    "evaluate": ("evaluate", "harness.py"),
    "serve": ("batch", "serve_batch.py"),
}
TAIL = 30  # lines of output that are kept
TIMED_OUT = 124  # as timeout(1) has it
GRACE = 10  # seconds from SIGTERM to SIGKILL

# Prints image.json with which packages there are, and a line for each task: its name, its script, whether it has
# --smoke.
DESCRIBE = """
python -c 'import importlib.metadata as m, json, sys
image = json.load(open("/opt/ekiben/image.json"))
print(json.dumps({**image, "packages": [name for name in sys.argv[1:] if any(m.distributions(name=name))]}))' \\
    torch deepspeed flash-attn-4
for task; do
    script="$(sed -n 's|.*/entrypoints/\\([^"]*\\)".*|\\1|p' "$(command -v "$task")")"
    if "$task" --help 2>&1 | grep -q -e --smoke; then smoke=smoke; else smoke=help; fi
    echo "$task" "${script:--}" "$smoke"
done
"""
DOCTOR = """
import json, torch
a = torch.ones(64, 64, device="cuda")
assert int((a @ a).sum()) == 64**3
print(json.dumps({"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability(),
                  "gpus": torch.cuda.device_count(), "torch": torch.__version__, "cuda": torch.version.cuda,
                  "compiled_for": torch.cuda.get_arch_list()}))
"""
CHOOSE_DEVICE = """
import os, sys
sys.path.insert(0, os.environ["EKIBEN_RECIPE"] + "/entrypoints")
from ekiben_tasks.models.device import choose_device
from ekiben_tasks.task.command import run
run(lambda: choose_device("auto") and 0)
"""

Verdict = tuple[bool, Any]  # whether it passed, and what was parsed


@dataclass(frozen=True, slots=True)
class Image:
    """What an image says of itself: image.json, packages, tasks by name with their script, those that have --smoke."""

    sif: Path
    metadata: dict[str, Any]
    packages: tuple[str, ...]
    tasks: dict[str, str]
    smoke: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """One command of ``case``; ``judge`` gets its exit code and output.

    ``reason``: a sentence where it cannot be run here.
    """

    case: str
    argv: list[str] = field(default_factory=list)
    judge: Callable[[int, str], Verdict] = lambda code, _: (code == 0, None)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a check. ``passed`` is None where it was not run; ``results`` were parsed, ``output`` is its end."""

    case: str
    passed: bool | None
    command: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    results: Any = None
    output: tuple[str, ...] = ()


def read_image(sif: Path) -> Image:
    """Ask an image what is in it. Raises CalledProcessError, ValueError when it cannot be run or is not of Ekiben's."""
    text = subprocess.run(["apptainer", "run-help", sif], capture_output=True, text=True, check=True).stdout
    section = re.search(r"^Tasks .*:\n((?:  .+\n?)*)", text, re.MULTILINE)
    tasks = [line.split()[0] for line in section[1].splitlines()] if section else []
    argv = exec_argv(sif, "sh", "-c", DESCRIBE, "sh", *tasks, nv=False)
    first, *lines = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    metadata = json.loads(first)
    described = [line.split() for line in lines]
    smoke = tuple(task for task, *_, kind in described if kind == "smoke")
    return Image(sif, metadata, tuple(metadata.pop("packages")), {item[0]: item[1] for item in described}, smoke)


# ---------------------------------------------------------------------------------------------------------------- cases


def check_without_nv(image: Image) -> Iterator[Check]:
    if "torch" not in image.packages:
        argv = ["hello", "--json"]
    elif "chat" in image.tasks:
        argv = ["chat", "--set", "device=auto", "?"]
    elif "generate" in image.tasks:
        argv = ["generate", "--set", "device=auto", "--data", "sample"]
    else:  # its tasks want data first: what they all call
        argv = ["python", "-c", CHOOSE_DEVICE]

    def judge(code: int, output: str) -> Verdict:
        if argv[0] == "hello":
            reason = json_in(output)["gpus"]["reason"] or ""
            return code == 0 and "--nv" in reason, reason
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        passed = code == 1 and len(errors) == 1 and "--nv" in errors[0] and "Traceback" not in output
        return passed, errors[0] if errors else None

    yield Check(f"without-nv/{argv[0]}", exec_argv(image.sif, *argv, nv=False), judge)


def check_doctor(image: Image) -> Iterator[Check]:
    def judge_hello(code: int, output: str) -> Verdict:
        gpus = json_in(output)["gpus"] if code == 0 else None
        return gpus is not None and gpus["reason"] is None, gpus

    if "torch" in image.packages:
        argv = exec_argv(image.sif, "python", "-c", DOCTOR)
        yield Check("doctor/torch", argv, lambda code, output: (code == 0, json_in(output) if code == 0 else None))
    if "hello" in image.tasks:
        yield Check("doctor/hello", exec_argv(image.sif, "hello", "--json"), judge_hello)


def check_smoke(image: Image) -> Iterator[Check]:
    for task in image.tasks:
        yield smoke_check(image, f"smoke/{task}", task)


def smoke_check(image: Image, case: str, task: str, prefix: Sequence[str] = ()) -> Check:
    def judge(code: int, output: str) -> Verdict:
        ends = re.findall(r"^smoke +(all passed .*)$", output, re.MULTILINE)
        return code == 0 and not any(end.endswith("on CPU") for end in ends), ends[-1] if ends else None

    option = "--smoke" if task in image.smoke else "--help"
    return Check(case, [*prefix, *exec_argv(image.sif, task, option)], judge)


def check_rootless(image: Image, user: str) -> Iterator[Check]:
    task = next(iter([*image.smoke, *image.tasks]), "")
    case = f"rootless/{task}"
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        yield Check(case, reason=f"not run: no such user ({user})")
        return
    if os.geteuid() != 0:
        yield Check(case, reason="not run: it takes root to become another user")
        return
    prefix = ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups"]
    yield smoke_check(image, case, task, [*prefix, "env", f"HOME={entry.pw_dir}"])


def check_kernels(image: Image) -> Iterator[Check]:
    def judge(code: int, output: str) -> Verdict:
        count = re.search(r"^(\d+) of (\d+) passed", output, re.MULTILINE)
        failed = re.findall(r"^FAILED (\w+)", output, re.MULTILINE)
        results = {"passed": int(count[1]), "failed": int(count[2]) - int(count[1]), "names": failed} if count else None
        return code == 0 and bool(count), results

    compiled = [item["package"] for item in image.metadata.get("compiled", [])]
    for package, script in KERNELS.items():
        path = HERE / "kernels" / script
        if package in compiled or (package in AT_RUN_TIME and package in image.packages):
            yield Check(f"kernels/{package}", exec_argv(image.sif, "python", path, binds=[path.parent]), judge)
        else:
            yield Check(f"kernels/{package}", reason="not run: it is not in this image, or not compiled")


def check_attention(image: Image, work: Path) -> Iterator[Check]:
    if "torch" not in image.packages:
        yield Check("attention", reason="not run: no torch in this image")
        return
    out = work / "attention.json"
    argv = exec_argv(image.sif, "python", HERE / "bench_attention.py", "--json", out, binds=[HERE, work])

    def judge(code: int, output: str) -> Verdict:
        measured = [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
        return code == 0, json.loads(out.read_text()) if out.exists() else measured

    yield Check("attention", argv, judge)


def check_size(image: Image, work: Path, inputs: Path, gpus: int) -> Iterator[Check]:
    for case in SIZE_CASES:
        task, script = SCRIPTS.get(case, ("train", "train.py"))
        reason = "" if image.tasks.get(task) == script else f"not run: no task of this image is {script}"
        if case in NEED_DEEPSPEED and "deepspeed" not in image.packages:
            reason = reason or "not run: no deepspeed in this image"
        if case.split("/")[0] in NEED_TWO_GPUS and gpus < 2:
            reason = reason or "not run: it takes two GPUs"
        out = work / f"{case.replace('/', '-')}.json"
        options = ["--sif", image.sif, "--inputs", inputs, "--json", out]
        argv = [sys.executable, *map(str, [HERE / "tasks_at_size.py", *options, case])]
        yield Check(f"size/{case}", argv, judge_with_file(out), reason)


def json_in(output: str) -> Any:
    """Return the JSON object in an output that may begin with warnings."""
    return json.JSONDecoder().raw_decode(output, output.index("{"))[0]


def judge_with_file(path: Path) -> Callable[[int, str], Verdict]:
    """Return what judges by the exit code, with the JSON that the command wrote to ``path`` as results."""
    return lambda code, _: (code == 0, json.loads(path.read_text()) if path.exists() else None)


def all_checks(image: Image, user: str, work: Path, inputs: Path, gpus: int) -> list[Check]:
    return [
        *check_without_nv(image),
        *check_doctor(image),
        *check_smoke(image),
        *check_rootless(image, user),
        *check_kernels(image),
        *check_attention(image, work),
        *check_size(image, work, inputs, gpus),
    ]


# -------------------------------------------------------------------------------------------------------------- running


def run(check: Check, limit: float) -> Outcome:
    """Run a check's command for at most ``limit`` seconds. Never raises for what the command does."""
    if check.reason:
        return Outcome(check.case, None, results=check.reason)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as file:  # a pipe would stay open while a grandchild lives
        child = subprocess.Popen(
            check.argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/tmp",  # which every user may enter
        )
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
            stop(child)
        except BaseException:
            stop(child)
            raise
        seconds = round(time.monotonic() - started, 1)
        file.seek(0)
        output = file.read()
    try:
        passed, results = check.judge(code, output)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        passed, results = False, f"the output cannot be read: {error!r}"
    if passed and code != TIMED_OUT:
        return Outcome(check.case, True, shlex.join(check.argv), code, seconds, without_output(results))
    tail = tuple(output.splitlines()[-TAIL:])
    return Outcome(check.case, False, shlex.join(check.argv), code, seconds, results, tail)


def without_output(results: Any) -> Any:
    """Return the results of a check that passed, without what its commands printed: they are kept in qa/gpu/results."""
    if isinstance(results, dict):
        return {name: without_output(value) for name, value in results.items() if name != "output"}
    return results


def stop(child: subprocess.Popen[Any]) -> None:
    """End a command and all that it started."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # the rest of its group, too
    child.wait()


def write_json(path: Path, record: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    unfinished = path.with_name(f"{path.name}.new")
    checks = [dataclasses.asdict(outcome) for outcome in outcomes]
    unfinished.write_text(json.dumps({**record, "checks": checks}, indent=1, ensure_ascii=False) + "\n")
    unfinished.replace(path)


def describe_machine(sif: Path) -> dict[str, Any]:
    """Return what the results belong to: the day, the SIF, the GPUs, the driver, Apptainer."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answers = {}
    for name, argv in {"gpus": query, "apptainer": ["apptainer", "--version"]}.items():
        if shutil.which(argv[0]):
            answers[name] = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.splitlines()
    with sif.open("rb") as file:
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "sif": sif.name,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            **answers,
        }


def line_of(outcome: Outcome) -> str:
    state = {None: "not run", True: "passed", False: "FAILED"}[outcome.passed]
    state = "TIMED OUT" if outcome.exit_code == TIMED_OUT else state
    note = outcome.results if isinstance(outcome.results, str) else ""
    return f"{outcome.case:<38}{state:<10}{outcome.seconds:>8.1f} s  {note}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sif", type=Path, metavar="SIF")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="only these, or a part of one")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="write the results to this file")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="for each command (default: 600)")
    parser.add_argument("--user", default="ekiben", help="for the case rootless (default: ekiben)")
    parser.add_argument("--inputs", type=Path, metavar="DIR", help="keep the models of the case size for the next time")
    args = parser.parse_intermixed_args()
    if not shutil.which("apptainer"):
        parser.error("apptainer is not on PATH")
    sif = args.sif.resolve()
    if not sif.is_file():
        parser.error(f"there is no file {sif}")
    record, outcomes = describe_machine(sif), list[Outcome]()
    try:
        image = read_image(sif)
    except (subprocess.CalledProcessError, ValueError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        print(f"error: {sif} cannot be run, or was not built by Ekiben: {reason}", file=sys.stderr)
        return 1
    record["image"] = image.metadata
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        checks = all_checks(image, args.user, work, (args.inputs or work / "inputs").resolve(), count_gpus())
        selected = [
            check
            for check in checks
            if not args.cases or any(check.case == case or check.case.startswith(f"{case}/") for case in args.cases)
        ]
        if not selected:
            parser.error(f"no such case; there are {', '.join(check.case for check in checks)}")
        for check in selected:
            outcomes.append(run(check, args.limit))
            print(line_of(outcomes[-1]), flush=True)
            write_json(args.json, record, outcomes)
    failed = [outcome for outcome in outcomes if outcome.passed is False]
    passed = sum(outcome.passed is True for outcome in outcomes)
    print("", *map(line_of, outcomes), sep="\n")
    print(f"\n{passed} passed, {len(failed)} failed, {len(outcomes) - passed - len(failed)} not run: {args.json}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
