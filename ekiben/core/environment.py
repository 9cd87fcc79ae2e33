"""The environment of a build's scripts: variables from the host, and constants."""

from __future__ import annotations

import os
from pathlib import Path

from ekiben.core.checked import read_regular
from ekiben.core.errors import UsageError

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def host_arch() -> str:
    """Return this host's architecture as Debian and OCI name it: ``amd64``, ``arm64``."""
    machine = os.uname().machine
    return ARCHITECTURES.get(machine, machine)


def platform() -> str:
    """Return the OCI platform of this host, as ``linux/amd64``."""
    return f"linux/{host_arch()}"


_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


def ca_bundle() -> Path | None:
    """Return the host's certificates: SSL_CERT_FILE, else those of the distribution.

    Raises UsageError where SSL_CERT_FILE has none.
    """
    asked = os.environ.get("SSL_CERT_FILE")
    if asked and os.path.lexists(asked):
        try:
            has_certificate = b"-----BEGIN" in read_regular(Path(asked), follow=True)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"SSL_CERT_FILE={asked}: cannot be read: {reason}") from error
        if not has_certificate:
            raise UsageError(
                f"SSL_CERT_FILE={asked} has no certificate in it",
                hint="name a bundle of certificates (PEM), or unset it",
            )
    return next((Path(path) for path in (asked, *_BUNDLES) if path and Path(path).is_file()), None)


def build_environment(epoch: int) -> dict[str, str]:
    """Return the environment of scripts, the same for every executor and host: layers may contain it."""
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
