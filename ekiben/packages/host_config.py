"""The host's settings that a build uses and never leaves in a layer: caches, CA bundle, mirrors, proxies, pip and uv.

All of it is mounted below /run/ekiben or is in the environment of the script.
"""

from __future__ import annotations

import netrc
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ekiben.core.decisions import log_decision
from ekiben.core.environment import ca_bundle
from ekiben.core.files import read_source
from ekiben.core.paths import BUILD_MOUNT, expand_home
from ekiben.formats.layer import File
from ekiben.packages.apt import apt_sources, snapshot_sources, write_apt_files
from ekiben.packages.requirements import INDEXES
from ekiben.spec.stack import Stack

_HOST = re.compile(r"https?://(?:[^@/\s]*@)?([\w.-]+)")
_PASSED = (
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    *INDEXES,
)


@dataclass(frozen=True, slots=True)
class PackageSources:
    """Sources of packages. ``sources``: sources.list lines, on the host and in a script (they differ for what lies
    in a folder); ``pins``: the Debian versions to install; ``environment``: settings of pip and uv; ``debs``: a
    folder of Debian packages with their index, instead of ``sources``."""

    sources: str
    sources_inside: str
    pins: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    debs: Path | None = None


def site_sources(stack: Stack, mirror: str | None) -> PackageSources:
    """Return the site's mirrors and indexes, then the snapshot archive for versions that the mirror no longer has."""
    lock = stack.apt_lock()
    if not stack.file.suite:  # of a base of others, which has sources of its own
        return PackageSources("", "", lock.packages)
    if sources := apt_sources(stack.file.suite, mirror):
        log_decision(
            "Debian mirror", sources.splitlines()[0], "requested" if mirror else "of this machine's apt or mmdebstrap"
        )
        snapshot = snapshot_sources(stack.file.suite, lock.snapshot)
        absent = "it does not answer, EKIBEN_SNAPSHOT is empty, or the stack locks no time"
        log_decision(
            "Debian snapshot archive",
            "used" if snapshot else "not used",
            f"as of {lock.snapshot}" if snapshot else absent,
        )
        sources += snapshot
    return PackageSources(sources, sources, lock.packages)


def write_host_files(mount: Path, sources: PackageSources) -> Mapping[str, str]:
    """Put the host's settings into ``mount``; return the environment that points at them."""
    inside = f"/{BUILD_MOUNT}"
    environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
    log_decision("indexes and proxies", ", ".join(environment) or "the defaults", "variables of the environment")
    environment |= {
        "UV_CACHE_DIR": f"{inside}/cache/uv",
        "PIP_CACHE_DIR": f"{inside}/cache/pip",
        "UV_LINK_MODE": "copy",
    }
    if bundle := ca_bundle():
        shutil.copyfile(bundle, mount / "ca.pem")
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO"):
            environment[name] = f"{inside}/ca.pem"
    pip = next((path for path in _pip_settings() if path.is_file()), None)
    log_decision("settings of pip", pip or "none", "the first of PIP_CONFIG_FILE, your pip.conf and /etc/pip.conf")
    if pip:
        shutil.copyfile(pip, mount / "pip.conf")
        environment["PIP_CONFIG_FILE"] = f"{inside}/pip.conf"
    uv = expand_home(Path(os.environ.get("UV_CONFIG_FILE") or "~/.config/uv/uv.toml"), "UV_CONFIG_FILE")
    log_decision("settings of uv", uv if uv.is_file() else "none", "UV_CONFIG_FILE, else ~/.config/uv/uv.toml")
    if uv.is_file():
        shutil.copyfile(uv, mount / "uv.toml")
        environment["UV_CONFIG_FILE"] = f"{inside}/uv.toml"
    texts = [
        *environment.values(),
        *(read_source(path, errors="replace") for path in (pip, uv) if path and path.is_file()),
    ]
    if logins := _logins(texts):
        with open(os.open(mount / "netrc", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.write(logins)
        environment["NETRC"] = f"{inside}/netrc"
    write_apt_files(mount, sources.sources_inside, sources.pins)
    return environment | {"APT_CONFIG": f"{inside}/apt.conf"} | dict(sources.environment)


def _logins(texts: Iterable[str]) -> str:
    """Return the lines of ~/.netrc, or of $NETRC, for hosts that these texts name in URLs, and no others': a script of
    another's recipe can read them.
    """
    path = expand_home(Path(os.environ.get("NETRC") or "~/.netrc"), "NETRC")
    hosts = {host for text in texts for host in _HOST.findall(text)}
    lines = []
    if path.is_file():
        try:
            known = netrc.netrc(path).hosts
        except (netrc.NetrcParseError, OSError, ValueError) as error:
            log_decision("passwords of indexes", "none", f"{path} cannot be read: {type(error).__name__}")
            return ""
        for host in sorted(hosts & known.keys()):
            login, _, password = known[host]
            if not re.search(r"[\s\"]", f"{login}{password}"):
                lines.append(f"machine {host} login {login} password {password}\n")
    log_decision("passwords of indexes", f"{len(lines)} of {path}", "hosts that the settings of indexes name")
    return "".join(lines)


def mount_wheels(wheels: Sequence[File], mount: Path, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Put wheels that were built here into the job's folder; return the environment that points uv at them."""
    if not wheels:
        return environment
    for wheel in wheels:
        target = mount / wheel.destination.removeprefix(f"/{BUILD_MOUNT}/")
        target.parent.mkdir(exist_ok=True)
        with wheel.open() as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    links = [*filter(None, [environment.get("UV_FIND_LINKS")]), f"/{BUILD_MOUNT}/wheels"]
    return {**environment, "UV_FIND_LINKS": ",".join(links)}


def _pip_settings() -> tuple[Path, ...]:
    named = os.environ.get("PIP_CONFIG_FILE", "")
    return (
        Path(named),
        expand_home(Path("~/.config/pip/pip.conf"), "settings of pip"),
        expand_home(Path("~/.pip/pip.conf"), "settings of pip"),
        Path("/etc/pip.conf"),
    )
