"""Which nodes a step requests, and how much of each: by the site's profile, else by what the scheduler itself says of
its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ekiben.core.decisions import log_decision
from ekiben.core.errors import UsageError, nearest
from ekiben.run.jobs.request import JobRequest
from ekiben.run.schedulers import Limits, Scheduler, clock, load
from ekiben.run.site import Resource, Site

_UNKNOWN = Limits(where="")
# Options of schedulers' own by which the user has chosen CPUs and memory.
_CPUS = ("-c", "-n", "--cpus-per", "--ntasks", "--exclusive")
_MEMORY = ("--mem", "--exclusive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a step requests: ``gpus`` per node, the scheduler's options, and their known properties.

    ``known_gpus`` counts options of the scheduler's own, too; ``cpus`` per node. None: not known.
    """

    gpus: int
    args: tuple[str, ...]
    known_gpus: int | None = None
    cpus: int | None = None

    def warning(self, task: str) -> str | None:
        """Return a warning for a task that uses GPUs without requesting any, or None."""
        if self.known_gpus == 0:
            return (
                f"'{task}' uses GPUs, and its job requests none: --gpus-per-node N, or an option of the scheduler's own"
            )
        if self.cpus == 1 and self.known_gpus:
            return f"'{task}' gets one CPU for {self.known_gpus} GPUs per node: --cpus-per-node N"
        return None


def option_of(scheduler: Scheduler, name: str, value: object = "") -> str:
    """Return the scheduler's option ``name`` with its value. Raises UsageError when it has none."""
    if name not in scheduler.OPTIONS:
        shown = f"--{name} {value}".strip()
        raise UsageError(
            f"{shown}: {scheduler.TITLE} has no portable option for it",
            hint="--scheduler-arg, with the option as your site has it",
        )
    return f"{scheduler.OPTIONS[name]}{value}"


def choose_resources(
    request: JobRequest, scheduler_name: str, site: Site | None, nodes: int, gpus: int | None
) -> Resources:
    """Return what a step on ``nodes`` nodes requests; ``gpus`` None: not specified.

    Raises UsageError when it can never run.
    """
    scheduler = load(scheduler_name)
    exclusive = [option_of(scheduler, "exclusive")] if request.exclusive else []
    if site and site.file.scheduler and site.file.scheduler.resources:
        return _of_site(request, scheduler, site, nodes, gpus, exclusive)
    partition = [option_of(scheduler, "partition", request.partition)] if request.partition else []
    return _of_scheduler(request, scheduler, nodes, gpus or 0, [*partition, *exclusive])


def _of_scheduler(request: JobRequest, scheduler: Scheduler, nodes: int, gpus: int, further: list[str]) -> Resources:
    """Request CPUs and memory in proportion to the GPUs, where the scheduler reports its nodes' sizes."""
    named = [*further, *request.scheduler_args]
    known_gpus = gpus or scheduler.requested_gpus(named)
    limits = _UNKNOWN if scheduler.unavailable() else scheduler.limits(named)
    exclusive = bool(request.exclusive)
    cpus, memory = request.cpus_per_node, request.memory_mib
    if known_gpus and limits.gpus:
        if cpus is None and limits.cpus and (exclusive or not _are_named(named, _CPUS)):
            cpus = limits.cpus if exclusive else max(1, limits.cpus * min(known_gpus, limits.gpus) // limits.gpus)
        if memory is None and limits.memory_mib and not exclusive and not _are_named(named, _MEMORY):
            memory = limits.memory_mib * min(known_gpus, limits.gpus) // limits.gpus
    if scheduler.GPU_OPTION and request.scheduler_args:  # the site's options already determine it
        args: list[str] = []
    else:
        args = [*scheduler.resource_args(nodes, gpus, cpus, memory)]
    if exclusive and request.memory_mib is None and "memory" in scheduler.OPTIONS:
        args.append(option_of(scheduler, "memory", 0))  # all of the node's: --exclusive is of CPUs and GPUs
    _check_limits(limits, nodes, gpus, request)
    if cpus is None and "cpus" in scheduler.OPTIONS and not _are_named(named, _CPUS):
        cpus = 1
    return Resources(gpus=gpus, args=(*args, *further), known_gpus=known_gpus, cpus=cpus)


def _are_named(args: Sequence[str], options: tuple[str, ...]) -> bool:
    return any(arg.startswith(options) for arg in args)


def _check_limits(limits: Limits, nodes: int, gpus: int, request: JobRequest) -> None:
    """Raise UsageError for what exceeds the scheduler's limits."""
    problems = []
    if limits.gpus is not None and gpus > limits.gpus:
        problems.append(f"--gpus-per-node {gpus}: {limits.where} has nodes with at most {limits.gpus}")
    if limits.nodes is not None and nodes > limits.nodes:
        problems.append(f"--nodes {nodes}: {limits.where} has {limits.nodes}")
    if limits.seconds is not None and request.time_seconds is not None and request.time_seconds > limits.seconds:
        problems.append(f"--time {clock(request.time_seconds)}: {limits.where} allows {clock(limits.seconds)}")
    if problems:
        raise UsageError("\n".join(problems))


# ------------------------------------------------------------------------------------------------------ by a profile


def _of_site(
    request: JobRequest, scheduler: Scheduler, site: Site, nodes: int, gpus: int | None, exclusive: list[str]
) -> Resources:
    """Request what the profile's kind of node has; of a part of its GPUs, CPUs and memory in proportion."""
    name, resource = _resource(site, request, nodes, gpus)
    if gpus is None:
        gpus = resource.gpus
    is_exclusive = resource.exclusive or bool(exclusive)
    is_fraction = 0 < gpus < resource.gpus and not is_exclusive
    cores, memory_gib = resource.cores, resource.memory_gib
    if is_fraction:
        cores, memory_gib = (amount and max(1, amount * gpus // resource.gpus) for amount in (cores, memory_gib))
    amounts = {
        "nodes": nodes,
        "gpus": gpus,
        "cores": request.cpus_per_node or cores or 1,
        "memory_gib": -(-request.memory_mib // 1024) if request.memory_mib else memory_gib or 1,
    }
    args = [word.format(**amounts) for word in resource.request]
    if not gpus and resource.gpus:  # a node with GPUs for a task without: the scheduler's own defaults
        cores = memory_gib = None
    memory_mib = memory_gib * 1024 if memory_gib else None
    args += _amount(resource, name, scheduler, "cpus", request.cpus_per_node, cores)
    args += _amount(resource, name, scheduler, "memory", request.memory_mib, 0 if is_exclusive else memory_mib)
    known_gpus = gpus or (scheduler.requested_gpus([*args, *request.scheduler_args]) if resource.gpus else 0)
    return Resources(gpus=gpus, args=(*args, *exclusive), known_gpus=known_gpus, cpus=request.cpus_per_node or cores)


_FIELDS = {"cpus": "{cores}", "memory": "{memory_gib}"}  # of a profile's own request


def _amount(
    resource: Resource, name: str, scheduler: Scheduler, option: str, asked: int | None, default: int | None
) -> list[str]:
    """Return the option for an amount that the profile's own request does not fill in.

    Raises UsageError where it is fixed.
    """
    if any(_FIELDS[option] in word for word in resource.request):
        return []
    if option in scheduler.OPTIONS and not any(word.startswith(scheduler.OPTIONS[option]) for word in resource.request):
        amount = default if asked is None else asked
        return [] if amount is None else [option_of(scheduler, option, amount)]
    if asked is not None and asked != default:
        shown = f"--cpus-per-node {asked}" if option == "cpus" else f"--memory {asked}M"
        raise UsageError(f"{shown}: {name} has a fixed amount for each node")
    return []


def _resource(site: Site, request: JobRequest, nodes: int, gpus: int | None) -> tuple[str, Resource]:
    """Return the smallest of the site's resources that is enough, and its name. Raises UsageError when none is."""
    assert site.file.scheduler is not None
    known = site.file.scheduler.resources
    if request.partition is not None:
        if request.partition not in known:
            raise UsageError(
                f"--partition: {site.name} has no '{request.partition}'." + nearest(request.partition, known)
            )
        # A step without GPUs requests a resource without GPUs, where the site has one.
        candidates = {request.partition: known[request.partition]}
        if gpus == 0 and (without := {name: resource for name, resource in known.items() if not resource.gpus}):
            candidates = without
    else:
        candidates = dict(known)
        if gpus is None and (with_gpus := {name: resource for name, resource in known.items() if resource.gpus}):
            candidates = with_gpus
    problems = {name: _too_much(name, resource, request, nodes, gpus) for name, resource in candidates.items()}
    enough = {name: resource for name, resource in candidates.items() if not problems[name]}
    if not enough:
        raise UsageError(
            "\n".join(f"{site.name}: {problem}" for problem in dict.fromkeys(problems.values()) if problem)
        )
    chosen = min(enough.items(), key=lambda one: (one[1].gpus, one[1].cores or 0))
    alternatives = [f"{name}: {problem or 'not smaller'}" for name, problem in problems.items() if name != chosen[0]]
    reason = "requested" if request.partition == chosen[0] else "the smallest that is enough"
    log_decision(f"partition of {site.name}", chosen[0], "; ".join([reason, *alternatives]))
    return chosen


def _too_much(name: str, resource: Resource, request: JobRequest, nodes: int, gpus: int | None) -> str | None:
    """Return why ``resource`` is not enough for the request, or None."""
    if (gpus or 0) > resource.gpus:
        return f"--gpus-per-node {gpus}: a node of {name} has {resource.gpus}"
    if resource.max_nodes is not None and nodes > resource.max_nodes:
        return f"--nodes {nodes}: {name} allows {resource.max_nodes}"
    hours = resource.max_hours
    if hours is not None and request.time_seconds is not None and request.time_seconds > hours * 3600:
        return f"--time {clock(request.time_seconds)}: {name} allows {clock(hours * 3600)}"
    if resource.cores is not None and request.cpus_per_node is not None and request.cpus_per_node > resource.cores:
        return f"--cpus-per-node {request.cpus_per_node}: a node of {name} has {resource.cores}"
    if resource.memory_gib is not None and (request.memory_mib or 0) > resource.memory_gib * 1024:
        return f"--memory {request.memory_mib}M: a node of {name} has {resource.memory_gib} GiB"
    return None
