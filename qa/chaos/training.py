"""Make faults in the parallel tasks, and count what they come to: python -m chaos.training [--minutes N] [--seed N]
[TASK…]

Each case starts a task in 2 or 4 processes on the CPU, makes one fault at a random moment, checks how the run ends,
starts the same command again, and compares what it leaves with an undisturbed run. It takes a Python that has the
tasks' packages, an image's for example. A case has a seed, which is printed with a problem: --seed SEED --count 1
--processes N --kinds KIND -- TASK repeats it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from chaos import task_faults
from chaos.task_faults import NOTHING, Fault
from chaos.task_lab import TASKS, Case, Ended, Lab, Task, load_tasks

REQUEUE = 75
BOUNDS = {
    "signal": 60.0,
    "kill": 20.0,
    "stop": 40.0,
    "hang": 50.0,
}  # seconds from the fault to the end, on a busy machine
# What an end by a fault has to say of the run's state, one of them.
LOST = (
    "continues from",
    "is the newest checkpoint",
    "no checkpoint was saved",
    "nothing is saved",
    "there is nothing to save yet",
    "saved step",
    "continues",
    "nothing has to be trained a second time",
    "earlier answers are kept",
)


# The short cut, which CI runs: each kind of fault in another task of one family.
CUT = {
    "kill": "train fsdp",
    "stop": "train ddp",
    "hang": "generate",
    "pause": "generate",
    "signal": "train deepspeed",
    "clock": "sft",
    "disk": "train fsdp",
    "gradient": "train deepspeed",
    "memory": "train fsdp",
    "out of memory": "train ddp",
}


@dataclass
class Tally:
    """Of one task and kind of fault. seeds: of the cases with a problem."""

    cases: int = 0
    late: int = 0  # the run was done before
    endured: int = 0  # it went on to the same end
    resumed: int = 0  # from a checkpoint, to the same bits
    restarted: int = 0  # from its start, to the same bits
    explained: int = 0  # the end said what is left of the run
    failed: int = 0
    slowest: float = 0.0  # seconds from the fault to the end
    problems: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)


def kinds_of(task: Task) -> list[str]:
    """The kinds of faults that mean something to a task."""
    without = set() if task.has_steps else {"gradient", "memory"}
    return [kind for kind in task_faults.KINDS if kind not in without]


def run_case(lab: Lab, task: Task, kind: str, processes: int, dice: random.Random, tally: Tally) -> list[str]:
    """Make one fault, count it, and return what did not hold."""
    reference = lab.reference(task, processes)
    fault = task_faults.draw(
        kind, processes, has_steps=task.has_steps, saves=task.resumes, memory=reference.memory, dice=dice
    )
    tally.cases += 1
    with lab.case(task, processes, small_disk=kind == "disk") as case:
        ended = case.run(fault)
        problems = [*_check_end(fault, ended, case), *_check_text(ended)]
        tally.slowest = max(tally.slowest, ended.after or 0.0)
        tally.explained += any(text in ended.output for text in LOST)
        (case.folder / "disk" / "filler").unlink(missing_ok=True)
        if ended.code == 0:
            tally.late += ended.after is None
            tally.endured += ended.after is not None
        elif not (task.module == "generate" and _is_complete(case)):
            again = case.run(NOTHING)
            resumed = "resumed  " in again.output
            if again.code:
                problems.append(f"the same command again ended with {again.code}: {again.output[-1500:]}")
            problems += _check_text(again)
            tally.resumed += resumed and not again.code
            tally.restarted += not resumed and not again.code
        if not problems:
            result = case.result()
            is_equal = result.is_near(reference) if kind in ("memory", "out of memory") else True
            difference = result.differs(reference) if kind not in ("memory", "out of memory") else None
            if difference or not is_equal:
                problems.append(difference or "the losses differ from those without a fault")
            problems += [f"left over beside the results: {name}" for name in case.temporary_files()]
    return [f"{problem}\n    ({fault}; {processes} processes)" for problem in problems]


def _is_complete(case: Case) -> bool:
    """Whether the answers are all there, and nothing but them."""
    return case.output.is_file() and not list(case.output.parent.glob(".*.part-*"))


def _check_end(fault: Fault, ended: Ended, case: Case) -> Iterator[str]:
    """What does not hold of the end of a run with a fault: its exit code, its time, its message, what it leaves."""
    text = ended.output[-2500:]
    if ended.code == -99:
        yield f"it did not end: {text}"
    bound = BOUNDS.get(fault.kind, 60.0)
    if ended.after is not None and ended.after > bound:
        yield f"it ended {ended.after:.0f} s after the fault: {text}"
    was_here = ended.after is not None
    if not was_here and ended.code:
        yield f"without its fault it ended with {ended.code}: {text}"
    if ended.code not in _allowed_codes(fault):
        yield f"exit code {ended.code}: {text}"
    expected = 0 if ended.code in (0, REQUEUE, 130, -99) or fault.rank < 0 else 1
    if len(ended.errors) != expected:
        yield f"{len(ended.errors)} errors at exit code {ended.code}: {text}"
    for left in case.left_over():
        # A launcher that was killed removes nothing; its folder holds no more than a sentence.
        if not (fault.kind == "kill" and fault.rank < 0 and left.startswith("in TMPDIR: ekiben-failures-")):
            yield f"left over: {left}"


def _allowed_codes(fault: Fault) -> tuple[int, ...]:
    match fault.kind:
        case "kill":
            return (0, -9) if fault.rank < 0 else (0, 137)
        case "stop" | "hang":
            return (0, 1)
        case "signal":
            return (0, 130 if fault.number == 2 else REQUEUE)
        case "memory":
            return (0, 3)
        case "disk" | "gradient" | "out of memory":
            return (0, 1)
    return (0,)


def _check_text(ended: Ended) -> Iterator[str]:
    """What a user should not have to read."""
    for sign in ("Traceback", "frame #", "terminate called", "Exception ignored", "Warning: "):
        if sign in ended.output:
            at = ended.output.index(sign)
            yield f"it printed {sign!r}: …{ended.output[max(at - 200, 0) : at + 1800]}"
            return


# ---------------------------------------------------------------------- many cases


def campaign(
    folder: Path, pairs: Sequence[tuple[Task, str]], sizes: Sequence[int], *, seed: int, seconds: float, count: int
) -> dict[str, Tally]:
    """Go through ``pairs`` of a task and a kind of fault, until there were ``count`` of each or the time is over.

    The tasks are of one family.
    """
    load_tasks(pairs[0][0].family)
    lab, end, tallies = Lab(folder), time.monotonic() + seconds, dict[str, Tally]()
    pairs = random.Random(seed).sample(pairs, len(pairs))
    for turn in range(count):
        for number, (task, kind) in enumerate(pairs):
            if time.monotonic() > end:
                return tallies
            single = count == len(pairs) == 1
            case_seed = seed if single else zlib.crc32(f"{seed} {task.name} {kind} {turn}".encode())
            processes = sizes[(turn + number) % len(sizes)]
            tally = tallies.setdefault(f"{task.name}: {kind}", Tally())
            problems = run_case(lab, task, kind, processes, random.Random(case_seed), tally)
            if problems:
                tally.failed += 1
                tally.seeds.append(case_seed)
                tally.problems += problems
                print(f"{task.name}: {kind}, seed {case_seed}:", *problems, sep="\n  ", file=sys.stderr, flush=True)
    return tallies


def share_out(args: argparse.Namespace, tasks: Sequence[Task], seconds: float) -> dict[str, Tally]:
    """Run a campaign in a process of its own for each family, one after the other, and return what they counted."""
    tallies: dict[str, Tally] = {}
    families = list(dict.fromkeys(task.family for task in tasks))
    for family in families:
        names = [task.name for task in tasks if task.family == family]
        share = seconds * len(names) / len(tasks)
        with tempfile.NamedTemporaryFile(suffix=".json") as counts:
            argv = [
                sys.executable,
                "-m",
                "chaos.training",
                *names,
                "--family",
                "--seed",
                str(args.seed),
                "--count",
                str(args.count),
                "--minutes",
                str(share / 60),
                "--processes",
                *map(str, args.processes),
                "--kinds",
                *args.kinds,
                "--json",
                counts.name,
            ]
            code = subprocess.run(argv, check=False).returncode
            if code not in (0, 1):
                raise SystemExit(f"the campaign of {family} ended with exit code {code}")
            tallies |= {
                name: Tally(**counted) for name, counted in json.loads(Path(counts.name).read_text())["cases"].items()
            }
    return tallies


COLUMNS = ("cases", "late", "endured", "resumed", "restarted", "explained", "failed")


def table(tallies: dict[str, Tally], by: int) -> str:
    """The counts as a Markdown table. by: 0: the tasks, 1: the kinds of faults."""
    names = list(dict.fromkeys(name.split(": ")[by] for name in tallies))
    head = ("task", "fault")[by]
    lines = [
        (
            f"| {head} | cases | came too late | went on | resumed, bit-equal | started again, bit-equal | said what is"
            " left | with a problem | longest end, s |"
        ),
        "|---|" + "---:|" * 8,
    ]
    for name in [*names, "all"]:
        counted = [tally for key, tally in tallies.items() if name in (key.split(": ")[by], "all")]
        counts = [str(sum(getattr(tally, column) for tally in counted)) for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(counts)} | {max(tally.slowest for tally in counted):.0f} |")
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos.training", description="Make faults in the parallel tasks.")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--minutes", type=float, default=10, help="at most (10)")
    parser.add_argument("--count", type=int, default=1000, help="cases of each kind in each task, at most (1000)")
    parser.add_argument(
        "--kinds", nargs="+", metavar="KIND", default=list(task_faults.KINDS), help=", ".join(task_faults.KINDS)
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4], help="of a run, in turn (2 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--family", action="store_true", help=argparse.SUPPRESS)  # one, in this process
    parser.add_argument("--cut", action="store_true", help="one case of each kind, each in a task of one family")
    args = parser.parse_args()
    for name, known in [*((name, TASKS) for name in args.tasks), *((kind, task_faults.KINDS) for kind in args.kinds)]:
        if name not in known:
            parser.error(f"no task or kind {name!r}; known: {', '.join(known)}")
    return args


def main() -> int:
    """Run the campaign, and return 1 if something did not hold."""
    args = _parse()
    tasks = []
    for task in [TASKS[name] for name in args.tasks or TASKS]:
        if missing := task.missing():
            print(f"left out: {task.name}, for this Python has no {missing}", flush=True)
        else:
            tasks.append(task)
    began = time.monotonic()
    if args.family or args.cut:
        pairs = [(task, kind) for task in tasks for kind in args.kinds if kind in kinds_of(task)]
        if args.cut:
            pairs = [(task, kind) for task, kind in pairs if CUT[kind] == task.name]
        folder = Path(tempfile.mkdtemp(prefix="ekiben-chaos-"))
        try:
            count = 1 if args.cut else args.count
            tallies = campaign(folder, pairs, args.processes, seed=args.seed, seconds=60 * args.minutes, count=count)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    else:
        tallies = share_out(args, tasks, 60 * args.minutes)
    if not args.family:
        print(f"seed {args.seed}, {time.monotonic() - began:.0f} s\n", table(tallies, 1), "", sep="\n")
        print(table(tallies, 0))
    if args.json:
        counted = {name: asdict(tally) for name, tally in tallies.items()}
        args.json.write_text(json.dumps({"seed": args.seed, "cases": counted}, indent=1) + "\n")
    return 1 if any(tally.failed for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
