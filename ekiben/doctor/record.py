"""This machine as a site profile, for `doctor --record`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ekiben.doctor.machine import GIB, filesystem_of, gpus_here, node_here, read_flag, runtimes_here
from ekiben.run import schedulers
from ekiben.run.site import Network, Resource, Scheduler, SiteFile, Storage


def record_site(name: str, environment: Mapping[str, str]) -> SiteFile:
    """Return this machine as a profile; in a batch job, with its scheduler, resource and local folder."""
    return SiteFile(
        name=name,
        description=f"recorded on {socket.gethostname()}",
        node=replace(node_here(), internet=_reaches_hub(environment)),
        runtimes=runtimes_here(),
        storage=_storage(environment),
        network=_network(),
        scheduler=_scheduler(environment),
    )


def _reaches_hub(environment: Mapping[str, str]) -> bool:
    if environment.get("https_proxy") or environment.get("HTTPS_PROXY"):
        return True
    with contextlib.suppress(OSError), socket.create_connection(("huggingface.co", 443), timeout=3):
        return True
    return False


def _storage(environment: Mapping[str, str]) -> dict[str, Storage]:
    local = next(
        (name for name in schedulers.local_folders() if Path(environment.get(name) or "/nonexistent").is_dir()), None
    )
    candidates = {"home": ("~", str(Path.home())), "tmp": ("/tmp", "/tmp")}
    if local:
        candidates["local"] = (f"${local}", environment[local])
    storage = {}
    for name, (shown, path) in candidates.items():
        with contextlib.suppress(OSError):
            filesystem = filesystem_of(Path(path))
            storage[name] = Storage(
                path=shown, type=filesystem.type, size_gib=shutil.disk_usage(path).total // GIB or None
            )
    return storage


def _network() -> Network | None:
    """Read the network devices that NCCL would use from /sys/class/infiniband."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    if not ports:
        return None
    if any((port.parent.parent / "device/driver").resolve().name == "efa" for port in ports):
        return Network(kind="efa", ports=len(ports))
    kind = "roce" if read_flag(f"{ports[0]}/link_layer") == "Ethernet" else "infiniband"
    rate = re.match(r"\d+", read_flag(f"{ports[0]}/rate"))
    return Network(kind=kind, ports=len(ports), gbit=int(rate[0]) if rate else None)


def _scheduler(environment: Mapping[str, str]) -> Scheduler | None:
    gpus, _ = gpus_here()
    got: dict[str, Any] = {"gpus": sum(gpu.count for gpu in gpus), "cores": len(os.sched_getaffinity(0))}
    for kind, scheduler in schedulers.by_preference().items():
        if queue := scheduler.queue(environment, bool(gpus)):
            resources = {queue.name: Resource(request=queue.request, **got)} if queue.name else {}
            return Scheduler(kind=kind, group_option=queue.group_option, resources=resources)
    return None


def profile_text(site: SiteFile, comment: str) -> str:
    """Return the profile as YAML that ``find_site`` reads; ``comment`` is its first line."""
    import yaml

    body = yaml.safe_dump(_plain(site), sort_keys=False, allow_unicode=True, width=120)
    return "".join(f"# {line}\n" for line in comment.splitlines()) + body


def _plain(value: Any) -> Any:
    """Return dataclasses as mappings, without values that are the default: unknown, mostly."""
    if is_dataclass(value) and not isinstance(value, type):
        kept = {
            field.name: getattr(value, field.name)
            for field in fields(value)
            if getattr(value, field.name) not in (field.default, {}, ())
        }
        return {name: _plain(item) for name, item in kept.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
