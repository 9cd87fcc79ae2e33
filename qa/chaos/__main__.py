"""Repeat faults and races, and count them: python -m chaos [--minutes N | --count N] [--seed N] [--json FILE] [KIND…]

Each kind of fault is a function; it makes one fault, checks what has to hold, and returns what did not. A case has a
seed of its own, which is printed with a problem: `--workers 1 --kills 0 --count 1 --seed SEED KIND` repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from chaos import damage, engines, exchange, foreign, kills, network, races, special
from chaos.lab import Lab, load_commands
from fuzz.parsers import CASES

KILLING = {**kills.KINDS, **engines.KINDS}
_MODULES = (races, network, damage, foreign, exchange, special)
KINDS = {**KILLING, **{name: kind for module in _MODULES for name, kind in module.KINDS.items()}}


@dataclass
class Tally:
    """Of one kind. ``seeds``: of the cases with a problem."""

    cases: int = 0
    failed: int = 0
    kills: int = 0
    exchanges: int = 0
    seconds: float = 0
    problems: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)


def campaign(
    folder: Path, kinds: Sequence[str], *, seed: int, seconds: float, count: int, killed: int
) -> dict[str, Tally]:
    """Go through ``kinds`` in turn, until there were ``count`` cases of each and ``killed`` kills, or the time is over.

    Cases that kill go on until there were so many kills, and end with them.
    """
    load_commands()
    tallies = {kind: Tally() for kind in kinds}
    lab = Lab(folder, random.Random(seed))
    assert lab.shared and lab.expected
    end, turn = time.monotonic() + seconds, 0
    with network.registry(lab):
        while open_kinds := [kind for kind in kinds if _is_open(kind, turn, tallies, count, killed)]:
            for kind in open_kinds:
                if time.monotonic() >= end:
                    return tallies
                case_seed = seed if count == 1 and len(kinds) == 1 else zlib.crc32(f"{seed} {kind} {turn}".encode())
                _run_case(lab, kind, case_seed, tallies[kind])
            turn += 1
    return tallies


def _is_open(kind: str, turn: int, tallies: Mapping[str, Tally], count: int, killed: int) -> bool:
    kills_sent = sum(tally.kills for tally in tallies.values())
    if kind in KILLING and killed:
        return kills_sent < killed
    return turn < count


def _run_case(lab: Lab, kind: str, seed: int, tally: Tally) -> None:
    lab.dice.seed(seed)
    began, kills.sent, exchange.sent = time.monotonic(), 0, 0
    problems = KINDS[kind](lab)
    tally.cases, tally.kills, tally.exchanges = (
        tally.cases + 1,
        tally.kills + kills.sent,
        tally.exchanges + exchange.sent,
    )
    tally.seconds += time.monotonic() - began
    if problems:
        tally.failed += 1
        tally.seeds.append(seed)
        tally.problems += problems
        print(f"{kind}, seed {seed}:", *problems, sep="\n  ", file=sys.stderr, flush=True)


def share_out(args: argparse.Namespace, folder: Path, seconds: float) -> dict[str, Tally]:
    """Run the campaign in ``args.workers`` processes, each with its own lab, seed and share, and add up what they
    counted.
    """
    started = []
    for number in range(args.workers):
        counts = folder / f"{number}.json"
        argv = [
            sys.executable,
            "-m",
            "chaos",
            *args.kinds,
            "--workers",
            "1",
            "--seed",
            str(args.seed * 100 + number),
            "--minutes",
            str(seconds / 60),
            "--json",
            str(counts),
            "--quiet",
            "--count",
            str(-(-args.count // args.workers)),
            "--kills",
            str(-(-args.kills // args.workers)),
        ]
        started.append((subprocess.Popen(argv), counts))
    tallies: dict[str, Tally] = {kind: Tally() for kind in args.kinds}
    try:
        for process, counts in started:
            if process.wait() not in (0, 1) or not counts.exists():
                raise SystemExit(f"a worker ended with exit code {process.returncode}")
            for kind, counted in json.loads(counts.read_text())["kinds"].items():
                for name, value in counted.items():
                    setattr(tallies[kind], name, getattr(tallies[kind], name) + value)
    finally:
        for process, _ in started:
            process.kill()
    return tallies


def table(tallies: dict[str, Tally]) -> str:
    """The counts as a Markdown table."""
    names = ("cases", "kills", "exchanges", "failed", "seconds")
    counts = {kind: [round(getattr(tally, name)) for name in names] for kind, tally in tallies.items()}
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    lines = [f"| {kind} | {' | '.join(map(str, numbers))} |" for kind, numbers in counts.items()]
    return "\n".join(
        ["| kind | cases | kills | exchanges | with a problem | seconds |", "|---|---:|---:|---:|---:|---:|", *lines]
    )


def fuzz(seed: int, seconds: float) -> Tally:
    """Give each parser more damaged bytes, and not those of the test, in the time that is left."""
    tally, began, examples = Tally(), time.monotonic(), 200
    while (left := seconds - (time.monotonic() - began)) > 60:
        seed += 1
        pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short")
        argv = [*pytest, f"--hypothesis-seed={seed}", "qa/fuzz"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                argv,
                env={**os.environ, "EKIBEN_FUZZ_EXAMPLES": str(examples)},
                capture_output=True,
                text=True,
                timeout=left,
                check=False,
            )
            tally.cases += examples * len(CASES)
            if done.returncode:
                tally.failed, tally.seeds, tally.problems = (
                    tally.failed + 1,
                    [*tally.seeds, seed],
                    [*tally.problems, done.stdout[-3000:]],
                )
                print(done.stdout, file=sys.stderr)
    tally.seconds = time.monotonic() - began
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description="Repeat faults and races, and count them.")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        "--minutes", type=float, default=30, help="at most, fuzzing included, which takes what is left (30)"
    )
    parser.add_argument("--count", type=int, default=100, help="cases of each kind that does not kill (100)")
    parser.add_argument("--kills", type=int, default=1000, help="kills in all; 0: COUNT cases of each kind (1000)")
    parser.add_argument("--workers", type=int, default=2, help="processes, each with its own store (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quiet", action="store_true", help="print problems only")
    args = parser.parse_args()
    is_partial = bool(args.kinds)
    for kind in args.kinds:
        if kind not in KINDS:
            parser.error(f"no kind {kind!r}; known: {', '.join(KINDS)}")
    left_out = {kind: reason for kind in args.kinds or KINDS if (reason := engines.unavailable(kind))}
    for kind, reason in left_out.items():
        print(f"left out: {kind}: {reason}", file=sys.stderr)
    args.kinds = [kind for kind in args.kinds or KINDS if kind not in left_out]
    folder = Path(tempfile.mkdtemp(prefix="ekiben-chaos-"))
    began = time.monotonic()
    seconds = args.minutes * (60 if is_partial else 54)
    try:
        if args.workers > 1:
            tallies = share_out(args, folder, seconds)
        else:
            tallies = campaign(folder, args.kinds, seed=args.seed, seconds=seconds, count=args.count, killed=args.kills)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if args.workers > 1 or not args.quiet:
            for kind in engines.KINDS.keys() & set(args.kinds):
                engines.remove_images(kind.removeprefix("kill "))
    if not is_partial:
        tallies["fuzz"] = fuzz(args.seed, began + args.minutes * 60 - time.monotonic())
    if not args.quiet:
        print(f"seed {args.seed}, {args.workers} workers, {time.monotonic() - began:.0f} s\n")
        print(table(tallies))
    if args.json:
        args.json.write_text(
            json.dumps({"seed": args.seed, "kinds": {kind: asdict(tally) for kind, tally in tallies.items()}}, indent=1)
            + "\n"
        )
    return 1 if any(tally.failed for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
