"""What a build borrows from the host and never leaves in a layer: caches, CA bundle, mirrors, proxies, settings of pip
and uv. All of it appears below /run/ekiben or in the environment of the script."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from builder.chain import BUILD_MOUNT
from builder.debootstrap import apt_sources, preferences, snapshot_sources
from builder.stack import Stack

_PASSED = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "UV_DEFAULT_INDEX", "UV_INDEX",
           "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")  # fmt: skip
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


@dataclass(frozen=True, slots=True)
class Supply:
    """Where packages come from. ``sources``: sources.list lines, on the host and in a script (they differ for what lies
    in a folder); ``pins``: the Debian versions that are wanted; ``environment``: settings of pip and uv; ``debs``: a
    folder of Debian packages with their index, instead of ``sources``."""

    sources: str
    sources_inside: str
    pins: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    debs: Path | None = None


def site_supply(stack: Stack, mirror: str | None) -> Supply:
    """The site's own mirrors and indexes, then the snapshot archive for what the mirror no longer has."""
    lock = stack.apt_lock()
    if sources := apt_sources(stack.file.suite, mirror):
        sources += snapshot_sources(stack.file.suite, lock.snapshot)
    return Supply(sources, sources, lock.packages)


def build_environment(epoch: int) -> dict[str, str]:
    """The same for every executor and every host: what may show in a layer's bytes."""
    return {
        "HOME": "/root",
        "USER": "root",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "DEBIAN_FRONTEND": "noninteractive",
        "PYTHONHASHSEED": "0",
        "SOURCE_DATE_EPOCH": str(epoch),
        "TMPDIR": "/tmp",
    }


def write_host_files(mount: Path, supply: Supply) -> Mapping[str, str]:
    """Puts the host's settings into ``mount`` and returns the environment that points at them."""
    inside = f"/{BUILD_MOUNT}"
    environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
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
    if pip:
        shutil.copyfile(pip, mount / "pip.conf")
        environment["PIP_CONFIG_FILE"] = f"{inside}/pip.conf"
    uv = Path(os.environ.get("UV_CONFIG_FILE") or "~/.config/uv/uv.toml").expanduser()
    if uv.is_file():
        shutil.copyfile(uv, mount / "uv.toml")
        environment["UV_CONFIG_FILE"] = f"{inside}/uv.toml"
    _write_apt_files(mount, supply)
    return environment | {"APT_CONFIG": f"{inside}/apt.conf"} | dict(supply.environment)


def ca_bundle() -> Path | None:
    asked = os.environ.get("SSL_CERT_FILE")
    return next((Path(path) for path in (asked, *_BUNDLES) if path and Path(path).is_file()), None)


def _pip_settings() -> tuple[Path, ...]:
    named = os.environ.get("PIP_CONFIG_FILE", "")
    return (
        Path(named),
        Path("~/.config/pip/pip.conf").expanduser(),
        Path("~/.pip/pip.conf").expanduser(),
        Path("/etc/pip.conf"),
    )


def _write_apt_files(mount: Path, supply: Supply) -> None:
    inside = f"/{BUILD_MOUNT}"
    (mount / "preferences").write_text(preferences(supply.pins))
    lines = [
        'APT::Sandbox::User "root";',
        'APT::Install-Recommends "false";',
        f'Dir::Cache::archives "{inside}/apt";',
        f'Dir::Etc::preferences "{inside}/preferences";',
        'Acquire::Languages "none";',
        'Acquire::Retries "3";',
        'DPkg::Options { "--force-unsafe-io"; };',  # a layer that is not finished is thrown away, not recovered
        'Dpkg::Use-Pty "false";',
    ]
    if supply.sources_inside:
        (mount / "sources.list").write_text(supply.sources_inside)
        lines += [f'Dir::Etc::sourcelist "{inside}/sources.list";', 'Dir::Etc::sourceparts "-";']
    if (mount / "ca.pem").exists():
        lines.append(f'Acquire::https::CaInfo "{inside}/ca.pem";')
    (mount / "apt.conf").write_text("\n".join(lines) + "\n")
