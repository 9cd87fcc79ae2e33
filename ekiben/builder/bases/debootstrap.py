"""A base without a registry: ``Bootstrap: debootstrap`` made with mmdebstrap, which needs no root and gives the same
bytes each time. The mirror is the machine's, else that of ``MirrorURL:``, and leaves no trace in the layer."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ekiben.core.environment import host_arch
from ekiben.core.errors import EngineError, FetchError
from ekiben.core.paths import ENGINE_SETUP

if TYPE_CHECKING:
    from ekiben.formats.layer import LayerEntry
    from ekiben.packages.host_config import PackageSources
    from ekiben.resolve.graph import Layer

_PLAIN = "ekiben-mmdebstrap-"
_PINS = Path("/etc/apt/preferences.d/ekiben")
_SUITE = re.compile(r"[a-z0-9][a-z0-9._/-]*")
_MIRROR = re.compile(r"[a-z][a-z+]*:/[!-~]+")
# Debian's policy for names, with apt's NAME:ARCHITECTURE and NAME=VERSION.
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]*(:[a-z0-9-]+)?(=[A-Za-z0-9.+:~-]+)?")


# dpkg waits for the disk after each package. Here it need not, where the kernel can (5.10): a build that a
# power failure interrupts starts again.
_IN_VOLATILE = """
cd "$TMPDIR/.." && mount -t overlay overlay root -o lowerdir=empty,upperdir=upper,workdir=work,volatile 2>/dev/null
plain=$1
shift
if [ -n "$plain" ]; then
    mount --rbind . "$plain" || exit
    export TMPDIR="$plain/root"
fi
exec "$@"
"""


def header_problems(header: Mapping[str, str]) -> list[str]:
    """Return missing fields, and values that mmdebstrap would read as options: its hooks are commands."""
    if not (suite := header.get("osversion")):
        return ["Bootstrap: debootstrap needs 'OSVersion: <suite>'"]
    problems = (
        [] if _SUITE.fullmatch(suite) else [f"OSVersion: {suite!r:.100} is not the name of a suite, as bookworm is"]
    )
    mirror = header.get("mirrorurl", "")
    if mirror and not mirror.startswith("deb ") and not _MIRROR.fullmatch(mirror):
        problems.append(
            f"MirrorURL: {mirror!r:.100} is not the URI of an archive, as http://mirror.example.org/debian is"
        )
    wrong = [name for name in _package_names(header.get("include", "")) if not _PACKAGE.fullmatch(name)]
    return problems + [f"Include: {name!r:.100} is not the name of a package" for name in wrong]


def source_lines(header: Mapping[str, str], machine: str) -> str:
    """Return sources.list lines for the header: the machine's where they have its suite, else those of MirrorURL:."""
    suite, mirror = header["osversion"], header.get("mirrorurl", "")
    if not mirror or mirror.startswith("deb ") or any(suite in line.split() for line in machine.splitlines()):
        return machine
    return f"deb {mirror} {suite} main\n"


def key_inputs(header: Mapping[str, str]) -> dict[str, str]:
    """Return the header without the mirror, the packages in order."""
    inputs = {name: value for name, value in header.items() if value and name not in ("mirrorurl", "stage")}
    return {**inputs, "include": " ".join(sorted(set(_package_names(header.get("include", "")))))}


def entries(
    layer: Layer, staging: Path, notes: dict[str, Any], sources: PackageSources, log: Callable[[str], None]
) -> Iterator[LayerEntry]:
    """Yield the root file system that the layer's header asks for. Raises EngineError, FetchError."""
    from ekiben.packages.apt import mount_debs

    notes["executor"] = "mmdebstrap"
    with contextlib.ExitStack() as stack:
        assert layer.stage is not None
        machine = source_lines(layer.stage.header, sources.sources)
        lines = stack.enter_context(mount_debs(sources.debs)) if sources.debs else machine
        yield from _bootstrapped(layer, staging / "root.tar", lines, sources.pins, log, stack)


def _in_namespace(argv: list[str], staging: Path, stack: contextlib.ExitStack) -> list[str]:
    """Return the command that root runs, and make its folders.

    It mounts /proc, /sys and device nodes below its folder: where no other clean-up finds them.
    (Without root it works under a subordinate id, to which a folder in somebody's home is closed.)
    """
    for name in ("root", "empty", "upper", "work"):
        (staging / name).mkdir()
    # apt takes no path with quotes, and finds no keys below one with others of these characters: there the folder has a
    # second name.
    plain = ""
    if not re.fullmatch(r"[\w@%+=./-]+", str(staging), re.ASCII):
        plain = stack.enter_context(tempfile.TemporaryDirectory(prefix=_PLAIN))
    return ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _IN_VOLATILE, "sh", plain, *argv]


def _package_names(include: str) -> list[str]:
    return include.replace(",", " ").split()


def _bootstrapped(
    layer: Layer,
    spool: Path,
    sources: str,
    pins: Mapping[str, str],
    log: Callable[[str], None],
    stack: contextlib.ExitStack,
) -> Iterator[LayerEntry]:
    from ekiben.core.process import MARK, ProcessError, piped
    from ekiben.formats.changeset import Lower, unordered_entries
    from ekiben.packages.apt import preferences, unavailable

    if reason := unavailable():
        raise EngineError(f"{layer.name}: {reason}", hint=ENGINE_SETUP)
    assert layer.stage is not None
    suite = layer.stage.header["osversion"]
    include = ",".join(_package_names(layer.stage.header.get("include", "")))
    arch = str(layer.inputs["platform"]).partition("/")[2]
    argv = [
        "mmdebstrap",
        "--variant=minbase",
        "--format=tar",
        # Emulation was checked before: mmdebstrap's own check wants one package
        # more.
        *([f"--architectures={arch}", "--skip=check/qemu"] if arch != host_arch() else []),
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
        argv = _in_namespace(argv, spool.parent, stack)
        environment["TMPDIR"] = str(spool.parent / "root")
    log(f"{suite}, by mmdebstrap")
    source_file = spool.with_suffix(".list")
    source_file.write_text(sources, encoding="utf-8")
    try:
        with (
            source_file.open("rb") as stdin,
            spool.open("w+b") as stream,
            piped(argv, stdin=stdin if sources else None, env=environment) as archive,
            # The program's exit code and messages are reported before an archive that ends early.
            contextlib.suppress(tarfile.ReadError),
        ):
            yield from unordered_entries(archive, stream, Lower([]), epoch=layer.epoch, placeholders=True)
            return
        raise FetchError(f"{layer.name}: mmdebstrap succeeded, but its output is not an archive")
    except ProcessError as error:
        for line in error.stderr.splitlines():
            log(line)
        hint = "is the mirror reachable? another one is given with --build-arg mirror=URI"
        if "NO_PUBKEY" in error.stderr:
            hint = "the keys of that archive are not here; Debian's own are the package debian-archive-keyring"
        raise FetchError(
            f"{layer.name}: mmdebstrap failed with exit code {error.returncode}:\n"
            + "\n".join(error.stderr.strip().splitlines()[-8:]),
            hint=hint,
        ) from error
