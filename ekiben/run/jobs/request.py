"""The resources of a job, from the command line, config.yaml and a site's profile."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ekiben.core.errors import UsageError
from ekiben.core.paths import expand_home
from ekiben.core.settings import JobDefaults
from ekiben.run.schedulers import seconds_of

MAX_JOBS = 20_000  # jobs of a run: with more, `status` would take minutes
_UNITS = {"M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """The request of the command line.

    None: not given. ``memory_mib`` is per node; ``partition`` is a site's kind of node, or the scheduler's partition
    or queue; ``env``: NAME or NAME=VALUE; ``check_digest``: a job reads all of its image, whatever its times say;
    ``live``: with the recipe's scripts as they are here.
    """

    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    memory_mib: int | None = None
    processes_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    exclusive: bool | None = None
    env: tuple[str, ...] = ()
    binds: tuple[Path, ...] = ()
    time_seconds: int | None = None
    grace_seconds: int = 300
    max_resubmits: int = 20
    seeds: tuple[str, ...] = ()
    scheduler_args: tuple[str, ...] = ()
    copy_local: bool = False
    check_digest: bool = False
    live: bool = False


def memory_mib_of(text: str) -> int:
    """Return ``900M``, ``64G`` or ``1T`` (also ``64GiB``) in MiB. Raises UsageError for other texts."""
    match = re.fullmatch(r"(\d+)([MGT])(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or not int(match[1]):
        raise UsageError(f"--memory {text}: expected a number with M, G or T: 64G")
    return int(match[1]) * _UNITS[match[2].upper()]


def parse_seeds(text: str) -> tuple[str, ...]:
    """Return the seeds of ``1,2,3``. Raises UsageError for one that is missing or there twice."""
    seeds = tuple(text.split(","))
    if not all(seed.strip() for seed in seeds):
        raise UsageError(f"--seeds {text}: a seed is missing; as in --seeds 1,2,3")
    if odd := next((seed for seed in seeds if len(seed.splitlines()) > 1 or "\0" in seed), None):
        raise UsageError(f"--seeds: {odd!r} is more than one line")
    if len(seeds) > MAX_JOBS:
        raise UsageError(f"--seeds has {len(seeds)} seeds; a run has at most {MAX_JOBS} jobs")
    if twice := next((seed for seed, count in Counter(seeds).items() if count > 1), None):
        raise UsageError(f"--seeds {text}: {twice} is listed twice, and both jobs would write into the same output")
    return seeds


def with_defaults(request: JobRequest, defaults: Iterable[JobDefaults]) -> JobRequest:
    """Return ``request`` with missing fields from ``defaults``, of which the first with a value counts.

    Lists are joined, so that what ``request`` says comes last and wins. Raises UsageError for a time or an amount that
    is none.
    """
    for layer in defaults:
        known: dict[str, Any] = {
            "account": layer.account,
            "partition": layer.partition,
            "qos": layer.qos,
            "gpus_per_node": layer.gpus_per_node,
            "cpus_per_node": layer.cpus_per_node,
            "exclusive": layer.exclusive,
            "time_seconds": seconds_of(layer.time) if layer.time else None,
            "memory_mib": memory_mib_of(layer.memory) if layer.memory else None,
        }
        missing = {name: value for name, value in known.items() if getattr(request, name) is None}
        request = replace(
            request,
            **missing,
            env=(*layer.env, *request.env),
            scheduler_args=(*layer.scheduler_args, *request.scheduler_args),
            check_digest=request.check_digest or layer.check == "digest",
            binds=(*(expand_home(Path(folder), "jobs: bind") for folder in layer.bind), *request.binds),
        )
    return request
