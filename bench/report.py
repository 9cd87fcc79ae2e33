"""Compare the timings with the goals, and write the tables for the README."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, TypedDict

from bench.clock import Timing

TITLES = {
    "nothing": "nothing changed",
    "sif": "entrypoint edited → new SIF",
    "tested": "entrypoint edited → new SIF, tested",
    "tested-cold": "the same, read from the disk",
    "rewritten": "entrypoint edited → SIF with --in-place, tested",
    "rewritten-cold": "the same, read from the disk",
    "docker": "entrypoint edited → new Docker image",
    "middle": "middle layer edited → new Docker image",
    "second": "second recipe on the same layers → SIF",
    "scratch": "from nothing, downloads cached → SIF",
    "help": "`build.py --help`",
    "publish": "published to a new folder",
    "publish-edit": "published with another entrypoint",
    "push": "SIF → registry",
    "pull": "SIF ← registry",
    "push-edit": "Docker image with another entrypoint → registry",
}


class LayerSize(TypedDict):
    """``size``: bytes, compressed."""

    name: str
    size: int


# What a case measured beside its seconds, under the names of results.json.
Facts = TypedDict(
    "Facts",
    {
        "layers": list[LayerSize],
        "seconds of each layer": dict[str, float],
        "unpacked bytes": int,
        "SIF bytes": dict[str, int],
        "built after an edited entrypoint": list[str],
        "built after an edited middle layer": list[str],
        "built for a second recipe": list[str],
        "bytes a second recipe adds to the store": int,
        "SIF bytes published": int,
        "bytes moved for an edited entrypoint": int,
        "SIF bytes sent": int,
        "bytes sent for an edited entrypoint": int,
    },
    total=False,
)

Machine = TypedDict(
    "Machine",
    {"system": str, "kernel": str, "processor": str, "cores": int, "memory bytes": int, "python": str},
)

Load = tuple[float, float, float]  # over 1, 5 and 15 minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """``ratio``: how many times as long the peer takes."""

    case: str
    ekiben: str
    peer: str
    ratio: float | None
    target: str
    reached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything that one run of the benchmark writes. ``date``: ISO 8601, when it began."""

    date: str
    recipe: str
    machine: Machine
    load_before: Load
    load_after: Load
    versions: dict[str, str]
    facts: Facts
    goals: list[Goal]
    failed: dict[str, str]
    timings: list[Timing]

    def as_json(self) -> dict[str, object]:
        """Return the content of results.json."""
        return {key.replace("load_", "load "): value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Return what ``as_json`` was made of."""
        fields = {key.replace("load ", "load_"): value for key, value in content.items()}
        timings = [Timing(**item) for item in content["timings"]]
        return cls(**{**fields, "timings": timings, "goals": [Goal(**item) for item in content["goals"]]})


def seconds(timing: Timing) -> float:
    """Return the median with the base, which Ekiben makes itself and the others are given."""
    return timing.median + timing.about.get("base", 0.0)


def format_seconds(count: float) -> str:
    return f"{count:.0f} s" if count >= 100 else f"{count:.1f} s" if count >= 10 else f"{count:.2f} s"


class _Measured:
    def __init__(self, timings: Sequence[Timing]) -> None:
        self.timings = timings

    def get(self, case: str, who: str) -> Timing | None:
        return next((item for item in self.timings if (item.case, item.who) == (case, who)), None)

    def peers(self, case: str) -> list[Timing]:
        return [
            item
            for item in self.timings
            if item.case == case and not item.who.startswith(("ekiben", "cp ", "the recipe"))
        ]


def goals(timings: Sequence[Timing], facts: Facts) -> list[Goal]:
    measured = _Measured(timings)
    all_goals = [
        _nothing(measured),
        *_sif(measured),
        *_tested(measured),
        _docker(measured),
        _middle(measured, facts),
        _second(measured, facts),
        _scratch(measured),
        _memory(measured),
        _help(measured),
        *_published(measured, facts),
        *_registry(measured, facts),
    ]
    return [goal for goal in all_goals if goal]


def _against(case: str, ours: Timing, peer: Timing, target: str, reached: bool) -> Goal:
    return Goal(
        case=TITLES[case],
        ekiben=format_seconds(seconds(ours)),
        peer=f"{format_seconds(seconds(peer))} ({peer.who})",
        ratio=round(seconds(peer) / seconds(ours), 2),
        target=target,
        reached=reached,
    )


def _nothing(measured: _Measured) -> Goal | None:
    ours, peer = measured.get("nothing", "ekiben"), measured.get("nothing", "docker build")
    if not (ours and peer):
        return None
    return _against("nothing", ours, peer, "≤ 0.3 s", ours.median <= 0.3)


def _sif(measured: _Measured) -> list[Goal]:
    ours, peers = measured.get("sif", "ekiben"), measured.peers("sif")
    compared: list[Goal] = []
    if ours and peers:
        fastest = min(peers, key=seconds)
        compared.append(
            _against("sif", ours, fastest, "≥ 10 × faster than the fastest peer", seconds(fastest) >= 10 * ours.median)
        )
    if ours and (gzip := measured.get("sif", "apptainer build gzip")):
        compared.append(
            _against(
                "sif", ours, gzip, "≥ 50 × faster than `apptainer build` as it comes", seconds(gzip) >= 50 * ours.median
            )
        )
    if ours and (copy := measured.get("sif", "cp of the file")):
        compared.append(
            _against("sif", ours, copy, "close to copying the file (≤ 2 ×)", ours.median <= 2 * copy.median)
        )
    return compared


def _tested(measured: _Measured) -> list[Goal]:
    compared: list[Goal] = []
    for case in ("tested", "tested-cold"):
        ours, copy = measured.get(case, "ekiben"), measured.get(case, "cp of the file")
        test = measured.get(case, "the recipe's test alone")
        if ours and copy and test:
            most = test.median + 1.5 * copy.median
            target = f"≤ the recipe's test ({format_seconds(test.median)}) + 1.5 × cp = {format_seconds(most)}"
            compared.append(_against(case, ours, copy, target, ours.median <= most))
        rewritten = case.replace("tested", "rewritten")
        if test and (ours := measured.get(rewritten, "ekiben")):
            target = f"≤ the recipe's test ({format_seconds(test.median)}) + 0.5 s"
            compared.append(_against(rewritten, ours, test, target, ours.median <= test.median + 0.5))
    return compared


def _docker(measured: _Measured) -> Goal | None:
    ours, peer = measured.get("docker", "ekiben"), measured.get("docker", "docker build")
    return _against("docker", ours, peer, "≤ 0.6 s", ours.median <= 0.6) if ours and peer else None


def _middle(measured: _Measured, facts: Facts) -> Goal | None:
    ours, peer = measured.get("middle", "ekiben"), measured.get("middle", "docker build")
    if not (ours and peer):
        return None
    built = facts["built after an edited middle layer"]
    return _against(
        "middle", ours, peer, f"that layer and those above, nothing below (ran: {', '.join(built)})", len(built) == 2
    )


def _second(measured: _Measured, facts: Facts) -> Goal | None:
    ours = measured.get("second", "ekiben")
    if not ours:
        return None
    added, built = facts["bytes a second recipe adds to the store"], facts["built for a second recipe"]
    return Goal(
        case=TITLES["second"],
        ekiben=f"{format_seconds(ours.median)}, {added / 1e3:.0f} kB more in the store",
        peer="",
        ratio=None,
        target="only its own layers; bytes counted once",
        reached=len(built) == 1 and added < 1e6,
    )


def _scratch(measured: _Measured) -> Goal | None:
    ours, peers = measured.get("scratch", "ekiben"), measured.peers("scratch")
    if not (ours and peers):
        return None
    fastest = min(peers, key=seconds)
    return _against(
        "scratch", ours, fastest, "≤ 1.1 × the fastest peer, SIF included", ours.median <= 1.1 * seconds(fastest)
    )


def _memory(measured: _Measured) -> Goal | None:
    peaks = [item.peak_kib for item in measured.timings if item.who.startswith("ekiben")]
    if not peaks:
        return None
    return Goal(
        case="the builder's own peak memory, in all of these",
        ekiben=f"{max(peaks) / 1024:.0f} MiB",
        peer="",
        ratio=None,
        target="< 300 MiB whatever the image size",
        reached=max(peaks) < 300 * 1024,
    )


def _help(measured: _Measured) -> Goal | None:
    ours = measured.get("help", "ekiben")
    if not ours:
        return None
    return Goal(
        case=TITLES["help"],
        ekiben=format_seconds(ours.median),
        peer="",
        ratio=None,
        target="< 0.2 s",
        reached=ours.median < 0.2,
    )


def _published(measured: _Measured, facts: Facts) -> list[Goal]:
    ours, copy, edit = (
        measured.get("publish", "ekiben"),
        measured.get("publish", "cp of the file"),
        measured.get("publish-edit", "ekiben"),
    )
    compared: list[Goal] = []
    if ours and copy:
        compared.append(_against("publish", ours, copy, "≤ 1.1 × cp", ours.median <= 1.1 * copy.median))
    if edit:
        compared.append(
            _moved("publish-edit", edit, facts["bytes moved for an edited entrypoint"], facts["SIF bytes published"])
        )
    return compared


def _registry(measured: _Measured, facts: Facts) -> list[Goal]:
    compared: list[Goal] = []
    for case, most in (("push", 0.6), ("pull", 1)):
        ours, peer = measured.get(case, "ekiben"), measured.get(case, "apptainer")
        if ours and peer:
            target = f"≤ {most} × `apptainer`" if most < 1 else "no slower than `apptainer`"
            compared.append(_against(case, ours, peer, target, ours.median <= most * peer.median))
    if edit := measured.get("push-edit", "ekiben"):
        compared.append(
            _moved("push-edit", edit, facts["bytes sent for an edited entrypoint"], facts["SIF bytes sent"])
        )
    return compared


def _moved(case: str, ours: Timing, moved: int, total: int) -> Goal:
    return Goal(
        case=TITLES[case],
        ekiben=f"{format_seconds(ours.median)}, {moved / 1e3:.0f} kB moved",
        peer="",
        ratio=None,
        target="< 1 % of the image moved",
        reached=moved < 0.01 * total,
    )


def table(result: Result) -> str:
    """Return two Markdown tables: the goals, and everything that was measured."""
    machine, facts = result.machine, result.facts
    size = f", {facts['unpacked bytes'] / 1e9:.1f} GB unpacked" if "unpacked bytes" in facts else ""
    lines = [
        (
            f"`{result.recipe}`{size}; {machine['cores']} cores of {machine['processor']}, "
            f"{machine['memory bytes'] / 2**30:.0f} GiB, {machine['system']}, {result.date[:10]}."
        ),
        "",
        "| case | Ekiben | peer | peer ÷ Ekiben | target | reached |",
        "|---|---|---|---|---|---|",
    ]
    for goal in result.goals:
        ratio = f"{goal.ratio:.3g} ×" if goal.ratio is not None else ""
        lines.append(
            f"| {goal.case} | {goal.ekiben} | {goal.peer} | {ratio} | {goal.target} | "
            f"{'yes' if goal.reached else '**no**'} |"
        )
    lines += ["", "| case | who | median | runs |", "|---|---|---|---|"]
    for timing in result.timings:
        note = timing.about.get("note", str(len(timing.seconds)))
        base = f" (with the base, {timing.about['base']:.0f} s)" if "base" in timing.about else ""
        lines.append(
            f"| {TITLES.get(timing.case, timing.case)} | {timing.who} | {format_seconds(seconds(timing))}{base} |"
            f" {note} |"
        )
    lines += [f"\nFailed: {name}" for name in result.failed]
    return "\n".join(lines) + "\n"
