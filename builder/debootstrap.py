"""A base without a registry: ``Bootstrap: debootstrap`` made with mmdebstrap, which needs no root and gives the same
bytes each time. The mirror is the host's own, and leaves no trace in the layer."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from builder.capture import Lower, unordered_members
from builder.chain import Layer
from builder.errors import EngineError, FetchError
from builder.layer import Member
from builder.process import MARK, ProcessError, piped, run, which

_PINS = Path("/etc/apt/preferences.d/ekiben")
_TRUSTED = Path("/etc/apt/trusted.gpg.d")
_KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")  # in an image, too
_FIELDS = "$(CREATED_BY) $(SITE) $(RELEASE) $(COMPONENT) $(REPO_URI)"


def apt_sources(suite: str, mirror: str | None) -> str:
    """sources.list lines for ``suite``: from ``mirror``, else as the host's own apt has them, else mmdebstrap's own; "" without.

    ``mirror``: the URI of a Debian archive, or whole sources.list lines.
    """
    if mirror:
        return mirror if mirror.startswith("deb ") else f"deb {_signed()}{mirror} {suite} main\n"
    lines: dict[str, None] = {}
    told = run(["apt-get", "indextargets", "--format", _FIELDS], check=False).stdout if which("apt-get") else ""
    for line in told.splitlines():
        kind, _, release, component, uri = (line.split(" ") + [""] * 5)[:5]
        if kind == "Packages" and component == "main" and release in (suite, f"{suite}-updates", f"{suite}-security"):
            lines[f"deb {_signed()}{uri.rstrip('/')} {release} main"] = None
    ordered = sorted(lines, key=lambda line: f" {suite} " not in line)
    if not ordered or f" {suite} " not in ordered[0]:  # Ubuntu, or no apt at all
        ordered = _default_sources(suite)
    return "".join(f"{line}\n" for line in ordered)


def _default_sources(suite: str) -> list[str]:
    """What mmdebstrap would take the suite from: it has written that down when its first hook runs."""
    if unavailable():
        return []
    ask = ["mmdebstrap", "--quiet", "--variant=custom", '--setup-hook=cat "$1/etc/apt/sources.list" >&2; exit 1']
    told = run([*ask, suite, "/dev/null"], check=False).stderr
    return [line for line in told.splitlines() if line.startswith("deb ")]


def _signed(*options: str) -> str:
    """Options of a sources.list line. Where the host's apt trusts no Debian archive, on Ubuntu say, whose keys count."""
    if not any(_TRUSTED.glob("debian-archive-*")) and _KEYS.exists():
        options = (*options, f"signed-by={_KEYS}")
    return f"[{' '.join(options)}] " if options else ""


SNAPSHOT = "https://snapshot.debian.org/archive"  # EKIBEN_SNAPSHOT names another one; "" none


def snapshot_sources(suite: str, moment: str, *, patience: float = 8.0) -> str:
    """sources.list lines of the snapshot archive as of ``moment`` (20261121T120000Z); "" when it does not answer.

    They come after the mirror's own lines: what the mirror still has is fetched there, for it is the same package.
    """
    place = os.environ.get("EKIBEN_SNAPSHOT", SNAPSHOT).rstrip("/")
    if not moment or not place:
        return ""
    import ssl  # late: a build that finds all its layers asks nobody
    import urllib.request

    answers: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError):
            bundle = os.environ.get("SSL_CERT_FILE")
            context = ssl.create_default_context(cafile=bundle if bundle and Path(bundle).is_file() else None)
            request = urllib.request.Request(f"{place}/debian/{moment}/dists/{suite}/Release", method="HEAD")
            with urllib.request.urlopen(request, timeout=patience, context=context) as answer:
                answers.append(answer.status == 200)

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name has no time limit of its own
    asking.start()
    asking.join(patience)
    if not any(answers):
        return ""
    places = {suite: "debian", f"{suite}-updates": "debian", f"{suite}-security": "debian-security"}
    return "".join(
        f"deb {_signed('check-valid-until=no')}{place}/{archive}/{moment} {name} main\n"
        for name, archive in places.items()
    )


def preferences(pins: Mapping[str, str]) -> str:
    """apt preferences by which the locked version is taken from whichever archive has it. See apt_preferences(5)."""
    # Above every ordinary version, and below what would replace an installed one by an older one.
    return "".join(
        f"Package: {name}\nPin: version {version}\nPin-Priority: 995\n\n" for name, version in sorted(pins.items())
    )


@contextlib.contextmanager
def lent_debs(folder: Path) -> Iterator[str]:
    """sources.list lines for a folder of packages, copied to where the subordinate id that reads it may go."""
    with tempfile.TemporaryDirectory(prefix="ekiben-debs-") as place:
        os.chmod(place, 0o755)
        for path in folder.iterdir():
            shutil.copyfile(path, Path(place) / path.name)
            (Path(place) / path.name).chmod(0o644)
        yield f"deb [trusted=yes] copy:{place} ./\n"


# dpkg waits for the disk after each package. Here it need not, where the kernel can (5.10): what a power failure ends is made anew.
_IN_VOLATILE = """
cd "$TMPDIR/.." && mount -t overlay overlay root -o lowerdir=empty,upperdir=upper,workdir=work,volatile 2>/dev/null
exec "$@"
"""


def unavailable() -> str | None:
    return None if which("mmdebstrap") else "mmdebstrap is not installed (package mmdebstrap)"


def debootstrap_members(
    layer: Layer, spool: Path, *, sources: str, pins: Mapping[str, str], log: Callable[[str], None]
) -> Iterator[Member]:
    """The members of the root file system the layer's header asks for. Errors: EngineError, FetchError."""
    if reason := unavailable():
        raise EngineError(f"{layer.name}: {reason}", hint="sh builder/bootstrap.sh --engine")
    assert layer.stage is not None
    suite = layer.stage.header["osversion"]
    include = ",".join(layer.stage.header.get("include", "").replace(",", " ").split())
    argv = [
        "mmdebstrap",
        "--variant=minbase",
        "--format=tar",
        *([f"--include={include}"] if include else []),
        # In the script itself: without root, who runs it can't read a file in somebody's closed home.
        f'--setup-hook=mkdir -p "$1"{_PINS.parent} && printf %s {shlex.quote(preferences(pins))} >"$1"{_PINS}',
        f'--customize-hook=rm "$1"{_PINS}',
        suite,
        "-",
    ]
    argv += ["-"] if sources else []
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(layer.epoch), MARK: spool.parent.name}
    if os.geteuid() == 0:
        # It mounts /proc, /sys and device nodes below its folder: where nobody else who tidies up can meet them.
        # (Without root it works under a subordinate id, to which a folder in somebody's home is closed.)
        argv = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _IN_VOLATILE, "sh", *argv]
        environment["TMPDIR"] = str(spool.parent / "root")
        for name in ("root", "empty", "upper", "work"):
            (spool.parent / name).mkdir()
    log(f"{suite}, by mmdebstrap")
    source_file = spool.with_suffix(".list")
    source_file.write_text(sources)
    try:
        with (
            source_file.open("rb") as stdin,
            spool.open("w+b") as stream,
            piped(argv, stdin=stdin if sources else None, env=environment) as archive,
            # An archive that ends early is the lesser news: the program's exit code and words come first.
            contextlib.suppress(tarfile.ReadError),
        ):
            yield from unordered_members(archive, stream, Lower([]), epoch=layer.epoch, placeholders=True)
            return
        raise FetchError(f"{layer.name}: mmdebstrap ended well, but what it wrote is no archive")
    except ProcessError as error:
        for line in error.stderr.splitlines():
            log(line)
        hint = "is the mirror reachable? another one is given with --arg mirror=URI"
        if "NO_PUBKEY" in error.stderr:
            hint = "the keys of that archive are not here; Debian's own are the package debian-archive-keyring"
        raise FetchError(f"{layer.name}: mmdebstrap failed with exit code {error.returncode}:\n"
                         + "\n".join(error.stderr.strip().splitlines()[-8:]), hint=hint) from error  # fmt: skip
