"""Settings of apt: the sources of Debian packages, and their pinned versions."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from ekiben.core.environment import ca_bundle
from ekiben.core.paths import BUILD_MOUNT
from ekiben.core.process import run, which

_TRUSTED = Path("/etc/apt/trusted.gpg.d")
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")  # images have it, too
_FIELDS = "$(CREATED_BY) $(SITE) $(RELEASE) $(COMPONENT) $(REPO_URI)"


def apt_sources(suite: str, mirror: str | None) -> str:
    """Return sources.list lines for ``suite``: from ``mirror``, else as the host's own apt has them, else mmdebstrap's
    own; "" without.

    ``mirror``: the URI of a Debian archive, or whole sources.list lines.
    """
    if mirror:
        return mirror if mirror.startswith("deb ") else f"deb {_signed()}{mirror} {suite} main\n"
    lines: dict[str, None] = {}
    stdout = run(["apt-get", "indextargets", "--format", _FIELDS], check=False).stdout if which("apt-get") else ""
    for line in stdout.splitlines():
        kind, _, release, component, uri = (line.split(" ") + [""] * 5)[:5]
        if kind == "Packages" and component == "main" and release in (suite, f"{suite}-updates", f"{suite}-security"):
            lines[f"deb {_signed()}{uri.rstrip('/')} {release} main"] = None
    ordered = sorted(lines, key=lambda line: f" {suite} " not in line)
    if not ordered or f" {suite} " not in ordered[0]:  # Ubuntu, or no apt at all
        ordered = _default_sources(suite)
    return "".join(f"{line}\n" for line in ordered)


def _default_sources(suite: str) -> list[str]:
    """Return mmdebstrap's default sources, which it has written when its first hook runs."""
    if unavailable():
        return []
    ask = ["mmdebstrap", "--quiet", "--variant=custom", '--setup-hook=cat "$1/etc/apt/sources.list" >&2; exit 1']
    stderr = run([*ask, suite, "/dev/null"], check=False).stderr
    return [line for line in stderr.splitlines() if line.startswith("deb ")]


def _signed(*options: str) -> str:
    """Options of a sources.list line.

    Where the host's apt trusts no Debian archive, on Ubuntu say, whose keys count.
    """
    if not any(_TRUSTED.glob("debian-archive-*")) and _KEYS.exists():
        options = (*options, f"signed-by={_KEYS}")
    return f"[{' '.join(options)}] " if options else ""


SNAPSHOT = "https://snapshot.debian.org/archive"  # EKIBEN_SNAPSHOT replaces it; "" disables it


def snapshot_sources(suite: str, moment: str, *, patience: float = 8.0) -> str:
    """Return sources.list lines of the snapshot archive as of ``moment`` (20261121T120000Z); "" when it does not
    answer.

    They come after the mirror's own lines: what the mirror still has is fetched there, for it is the same package.
    """
    archive_url = os.environ.get("EKIBEN_SNAPSHOT", SNAPSHOT).rstrip("/")
    if not moment or not archive_url:
        return ""
    import ssl  # imported here: a build whose layers are all stored needs no network
    import urllib.request

    answers: list[bool] = []
    bundle = ca_bundle()  # else OpenSSL opens SSL_CERT_FILE itself, and waits for a pipe

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError):
            context = ssl.create_default_context(cafile=bundle)
            request = urllib.request.Request(f"{archive_url}/debian/{moment}/dists/{suite}/Release", method="HEAD")
            with urllib.request.urlopen(request, timeout=patience, context=context) as answer:
                answers.append(answer.status == 200)

    asking = threading.Thread(target=ask, daemon=True)  # a DNS lookup has no timeout of its own
    asking.start()
    asking.join(patience)
    if not any(answers):
        return ""
    archives = {suite: "debian", f"{suite}-updates": "debian", f"{suite}-security": "debian-security"}
    return "".join(
        f"deb {_signed('check-valid-until=no')}{archive_url}/{archive}/{moment} {name} main\n"
        for name, archive in archives.items()
    )


def preferences(pins: Mapping[str, str]) -> str:
    """Return apt preferences by which the locked version is taken from whichever archive has it.

    See apt_preferences(5).
    """
    # Priority above every ordinary version, and below 1000, which allows downgrades.
    return "".join(
        f"Package: {name}\nPin: version {version}\nPin-Priority: 995\n\n" for name, version in sorted(pins.items())
    )


def write_apt_files(mount: Path, sources: str, pins: Mapping[str, str]) -> None:
    """Write apt's settings into ``mount``: ``sources``, lines of sources.list (none: the image's), and ``pins``."""
    inside = f"/{BUILD_MOUNT}"
    (mount / "preferences").write_text(preferences(pins), encoding="utf-8")
    lines = [
        'APT::Sandbox::User "root";',
        'APT::Install-Recommends "false";',
        f'Dir::Cache::archives "{inside}/apt";',
        f'Dir::Etc::preferences "{inside}/preferences";',
        'Acquire::Languages "none";',
        'Acquire::Retries "3";',
        'DPkg::Options { "--force-unsafe-io"; };',  # an unfinished layer is discarded, not recovered
        'Dpkg::Use-Pty "false";',
    ]
    if sources:
        (mount / "sources.list").write_text(sources, encoding="utf-8")
        lines += [f'Dir::Etc::sourcelist "{inside}/sources.list";', 'Dir::Etc::sourceparts "-";']
    if (mount / "ca.pem").exists():
        lines.append(f'Acquire::https::CaInfo "{inside}/ca.pem";')
    (mount / "apt.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextlib.contextmanager
def mount_debs(folder: Path) -> Iterator[str]:
    """Yield sources.list lines for a folder of packages, copied to where the subordinate id that reads it may go."""
    with tempfile.TemporaryDirectory(prefix="ekiben-debs-") as destination:
        os.chmod(destination, 0o755)
        for path in folder.iterdir():
            shutil.copyfile(path, Path(destination) / path.name)
            (Path(destination) / path.name).chmod(0o644)
        yield f"deb [trusted=yes] copy:{destination} ./\n"


def unavailable() -> str | None:
    """Return why mmdebstrap cannot be used here, or None."""
    return None if which("mmdebstrap") else "mmdebstrap is not installed (package mmdebstrap)"
